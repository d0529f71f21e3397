"""Hostile clients from the job file, and the rules that withstand them."""

from __future__ import annotations

import pytest
import torch

from roundtable.aggregation import attacks
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.simulation.world.attackers import Attackers
from roundtable.simulation.world.config import AttackTable

TEN = {"simulation__clients": 10, "cohort__size": 10, "rounds": 5}


def attackers(**table):
    return Attackers(AttackTable.model_validate({"count": 3, **table}), 10, 7)


def corrupted(columns=5, **table):
    """Rows 0 to 9 of clients 0 to 9, in shuffled places, after the attack."""
    hostile = attackers(**table)
    rows = torch.randn(12, columns, generator=torch.Generator().manual_seed(1))
    places = [11, 3, 5, 7, 0, 1, 2, 9, 8, 4]
    before = rows.clone()
    present = hostile.corrupt(2, range(10), rows, places)
    assert len(present) == 3
    bad = [places[client] for client in present]
    good = [place for client, place in enumerate(places) if client not in present]
    others = [place for place in range(12) if place not in bad]
    assert torch.equal(rows[others], before[others])
    return rows[bad], before[good]


def test_sign_flipping():
    bad, good = corrupted(name="sign_flip", scale=2.0)
    assert torch.allclose(bad, (-2.0 * good.mean(0)).expand(3, -1))


def test_a_little_is_enough():
    bad, good = corrupted(name="alie", z=1.5)
    assert torch.allclose(bad, (good.mean(0) - 1.5 * good.std(0)).expand(3, -1))


def test_inner_product_manipulation():
    bad, good = corrupted(name="ipm", tau=0.5)
    assert torch.allclose(bad, (-0.5 * good.mean(0)).expand(3, -1))


def test_a_free_rider_sends_nothing_or_a_little_noise():
    assert corrupted(name="free_rider")[0].abs().max() == 0
    noise, _ = corrupted(name="free_rider", scale=0.1, columns=40000)
    assert abs(noise.std() - 0.1) < 0.002
    assert not torch.equal(noise[0], noise[1])


def test_wide_updates_are_attacked_in_blocks_with_the_same_result():
    bad, good = corrupted(name="alie", z=1.0, columns=600_000)
    assert torch.allclose(bad, (good.mean(0) - good.std(0)).expand(3, -1), atol=1e-6)


@pytest.mark.parametrize(
    "attack", [{"name": "sign_flip", "scale": 4.0}, {"name": "nan"}, {"name": "infinities"}]
)
def test_a_robust_rule_withstands_what_the_mean_does_not(run, attack):
    hostile = {"simulation__attack": {**attack, "count": 3}}
    honest = run(**TEN).history["accuracy"][-1]
    robust = run(**TEN, **hostile, aggregation__rule="trimmed_mean", aggregation__parameters={"f": 3})
    assert robust.history["accuracy"][-1] > honest - 0.1
    if attack["name"] == "sign_flip":
        assert run(**TEN, **hostile).history["accuracy"][-1] < honest - 0.2
    else:
        assert robust.history["excluded"][-1] == 3


def test_label_flipping_changes_what_hostile_clients_train_on(run):
    flipped = {"simulation__attack": {"name": "label_flip", "classes": 3, "fraction": 0.3}}
    attacked, honest = run(**TEN, **flipped), run(**TEN)
    assert not torch.equal(attacked.model.vector, honest.model.vector)
    assert attacked.history["train_loss"][-1] > honest.history["train_loss"][-1]


def test_labels_beyond_the_classes_are_refused(run):
    with pytest.raises(ConfigError, match="label_flip with classes = 2 needs whole labels below it"):
        run(**TEN, simulation__attack={"name": "label_flip", "classes": 2, "fraction": 0.9})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "sign_flop", "count": 1}, "did you mean 'sign_flip'"),
        ({"name": "sign_flip"}, "either count or fraction"),
        ({"name": "sign_flip", "count": 1, "z": 1.0}, "z belongs to alie, not to sign_flip"),
        ({"name": "label_flip", "count": 1}, "classes belongs to"),
        ({"name": "sign_flip", "count": 8}, "leaves nobody honest"),
    ],
)
def test_mistakes_in_the_table_are_named(run, table, message):
    with pytest.raises(ConfigError, match=message):
        run(simulation__attack=table)


def test_an_attack_that_needs_honest_updates_says_so(run):
    result = run(
        simulation__clients=3,
        cohort__size=3,
        cohort__retries=0,
        simulation__attack={"name": "alie", "count": 2},
    )
    assert result.status == "paused"
    assert "needs 2 of them; this round has 1" in result.reason


@pytest.mark.parametrize("kind", ["alie", "ipm"])
def test_a_tuned_attacker_does_at_least_the_damage_of_each_strength(kind):
    """The rows tried in place end as those of the worst strength, against the rule that is asked."""
    good = torch.randn(7, 5, generator=torch.Generator().manual_seed(2)) + 1
    hostile = attackers(name=f"tuned_{kind}")
    bad = [client for client in range(10) if client in hostile]
    places = {client: place for place, client in enumerate(c for c in range(10) if c not in bad)}
    rows = torch.zeros(10, 5)
    rows[:7] = good
    order = [places.get(client, 7 + bad.index(client) if client in bad else -1) for client in range(10)]

    def damage(rows):
        return float((rows.median(dim=0).values - good.mean(dim=0)).norm())

    assert hostile.corrupt(1, range(10), rows, order, lambda: rows.median(dim=0).values) == bad
    assert torch.equal(rows[:7], good)
    attack = attacks.a_little_is_enough if kind == "alie" else attacks.inner_product_manipulation
    tried = [damage(torch.cat([good, attack(good, 3, strength)])) for strength in attacks.STRENGTHS[kind]]
    assert damage(rows) == pytest.approx(max(tried), rel=1e-5)


def test_strengths_that_leave_no_answer_are_not_sent():
    hostile, rows = attackers(name="tuned_ipm"), torch.ones(10, 4)

    def defence():
        if float(rows.min()) < -0.2:
            raise AggregationError("too far out")
        return rows.mean(dim=0)

    hostile.corrupt(1, range(10), rows, range(10), defence)
    assert float(rows.min()) == pytest.approx(-0.1)


@pytest.mark.parametrize("rule", ["fltrust", "foolsgold", "centred_clipping", "krum"])
def test_tuned_attackers_try_the_job_s_own_rule(run, rule):
    parameters = {"centred_clipping": {"tau": 1.0}, "krum": {"f": 3}}.get(rule, {})
    tuned = {"simulation__attack": {"name": "tuned_ipm", "count": 3}, "aggregation__rule": rule}
    settings = {**TEN, "rounds": 2, "aggregation__parameters": parameters}
    honest, attacked = run(**settings, aggregation__rule=rule), run(**settings, **tuned)
    assert not torch.equal(honest.model.vector, attacked.model.vector)
    assert torch.isfinite(attacked.model.vector).all()


def test_a_tuned_attacker_needs_a_rule_to_try(run):
    with pytest.raises(ConfigError, match="tuned_ipm tries the job's rule"):
        run(
            **TEN,
            simulation__attack={"name": "tuned_ipm", "count": 3},
            aggregation__weighting="uniform",
            evaluation__every=0,
            privacy={"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        )
