"""Rounds under differential privacy: correlated noise, separation of participations, what is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, job
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import TensorMatrix
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError
from roundtable.core.models import open_model
from roundtable.core.privacy_table import privacy_from
from roundtable.engine import Plan, Rows, ServerState, combine, initial_server_state, make_plan
from roundtable.engine import messages as m
from roundtable.engine.selection import in_turn
from roundtable.engine.state import EngineState
from roundtable.engine.validation.round_noise import CorrelatedRounds
from roundtable.privacy import SeededNoise, compose, levels

FTRL = """
[cohort]
size = 2
strategy = "{strategy}"
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "dp_ftrl"
clip_norm = 1.0
delta = 1e-3
{keys}
{more}
"""


def plan_of(
    more: str = "noise_multiplier = 1.0", keys: str = "bands = 3", rounds: int = 6, population: int = 6
) -> Plan:
    return make_plan(job(FTRL.format(strategy="uniform", keys=keys, more=more), rounds), population)


def noise_of(plan: Plan, state: ServerState, round: int) -> tuple[torch.Tensor, ServerState]:
    """What a round without updates adds to the model, and the state after it."""
    result = combine(
        plan,
        Rows(TensorMatrix(torch.empty(0, 50)), []),
        torch.zeros(50),
        state,
        round=round,
        seed=0,
        noise=SeededNoise(round),
    )
    return result.vector, result.state


@pytest.mark.parametrize("keys", ["bands = 1", "bands = 3", "buffers = 2", ""])
def test_correlated_noise_goes_on_from_what_was_stored(tmp_path: Path, keys: str) -> None:
    plan = plan_of(keys=keys)
    state = stored = initial_server_state(plan, 50)
    for round in range(1, 7):
        noise, state = noise_of(plan, state, round)
        (tmp_path / "state").write_bytes(b"".join(stored.blocks()))
        stored = ServerState.from_model(open_model(tmp_path / "state"))
        again, stored = noise_of(plan, stored, round)
        assert torch.equal(noise, again)
    assert state.draws == stored.draws == 6


KINDS = {
    "banded": FTRL.format(strategy="uniform", keys="bands = 3", more="epsilon = 3.0"),
    "more bands than rounds apart": FTRL.format(
        strategy="uniform", keys="bands = 5\nseparation = 2", more="epsilon = 3.0"
    ),
    "BLT": FTRL.format(strategy="uniform", keys="buffers = 2", more="epsilon = 3.0"),
    "amplified": FTRL.format(
        strategy="poisson", keys='cohorts = "hidden"\nseparation = 2', more="epsilon = 3.0"
    ).replace("size = 2", "probability = 0.5"),
}


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    happened=st.lists(st.sampled_from(["", "restart", "attempt", "both"]), min_size=6, max_size=6),
)
def test_whatever_happens_in_between_noise_and_account_are_those_of_a_run_without(
    kind: str, happened: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A restart takes the state and the job as they were stored; an attempt that fails published nothing."""
    whole = job(KINDS[kind], 6)
    plan = make_plan(whole, 6)
    assert isinstance(plan.noise, CorrelatedRounds)
    kept = json.dumps({**whole.privacy.model_dump(), **plan.noise.settled})
    alone = disturbed = initial_server_state(plan, 50)
    same = plan
    for round, event in enumerate(happened, 1):
        noise, alone = noise_of(plan, alone, round)
        if event in ("attempt", "both"):
            noise_of(same, disturbed, round)
        if event in ("restart", "both"):
            file = tmp_path_factory.mktemp("restart") / "state"
            file.write_bytes(b"".join(disturbed.blocks()))
            disturbed = ServerState.from_model(open_model(file))
            settled = whole.model_copy(update={"privacy": privacy_from(json.loads(kept))})
            same = make_plan(settled, 6, spent=[plan.noise.ftrl.charge(1)])
        again, disturbed = noise_of(same, disturbed, round)
        assert torch.equal(noise, again)
        assert same.charge_of(round) == plan.charge_of(round)


def test_later_noise_takes_earlier_noise_back() -> None:
    plan = plan_of(rounds=2)
    first, state = noise_of(plan, initial_server_state(plan, 50), 1)
    second, _ = noise_of(plan, state, 2)
    alone, _ = noise_of(plan, ServerState(state.optimizer, drawn=torch.zeros(1, 50), draws=1), 2)
    assert isinstance(plan.noise, CorrelatedRounds)
    taken = plan.noise.ftrl.factorisation.column(2)[1]
    assert 0.3 < taken < 0.7
    assert torch.allclose(second - alone, -taken * first, atol=1e-5)


def test_the_state_of_other_noise_is_not_gone_on_from() -> None:
    _, state = noise_of(plan_of(keys="bands = 3"), initial_server_state(plan_of(), 50), 1)
    with pytest.raises(AggregationError, match=r"has 2 vectors, .* \(BLT, 3 buffers\) goes on"):
        noise_of(plan_of(keys="buffers = 3"), state, 2)


def test_a_job_with_its_noise_settled_never_has_another() -> None:
    """Optimisers end elsewhere in other versions: the coefficients themselves are what a job goes on with."""
    for keys in ("bands = 3", "buffers = 2", ""):
        made = plan_of("epsilon = 3.0", keys)
        assert isinstance(made.noise, CorrelatedRounds)
        settled = json.loads(json.dumps(made.noise.settled))
        table = job(FTRL.format(strategy="uniform", keys=keys, more="epsilon = 3.0"), 6).privacy.model_dump()
        again = job(FTRL.format(strategy="uniform", keys=keys, more="epsilon = 3.0"), 6)
        again = again.model_copy(update={"privacy": privacy_from({**table, **settled})})
        with pytest.MonkeyPatch.context() as nothing:
            nothing.delattr(levels, "best_factorisation")
            found = make_plan(again, 40, spent=[made.noise.ftrl.charge(1)])
        assert found.noise == made.noise


def test_an_attempt_that_fails_leaves_the_noise_as_it_was() -> None:
    plan = plan_of()
    _, state = noise_of(plan, initial_server_state(plan, 50), 1)
    _, state = noise_of(plan, state, 2)
    before, _ = noise_of(plan, state, 3)
    again, _ = noise_of(plan, state, 3)
    assert torch.equal(before, again)


def test_noise_that_is_lost_ends_the_run() -> None:
    plan = plan_of()
    with pytest.raises(AggregationError, match="noise of 0 rounds is stored, and round 2 needs"):
        noise_of(plan, initial_server_state(plan, 50), 2)


def test_all_rounds_together_spend_the_budget() -> None:
    noise = plan_of("epsilon = 3.0", rounds=6).noise
    assert isinstance(noise, CorrelatedRounds)
    spent = compose([noise.ftrl.charge(round) for round in range(1, 7)], 1e-3)
    assert 2.98 < spent <= 3.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("noise_multiplier = 1.0\nseparation = 4", "8 are needed before the first may come again"),
        ("noise_multiplier = 1.0\npopulation = 2000", "not below 1 / 2000"),
    ],
)
def test_what_separation_cannot_give_is_refused(more: str, message: str) -> None:
    with pytest.raises((ConfigError, PrivacyError), match=message):
        plan_of(more)


@pytest.mark.parametrize("strategy", ["uniform", "round_robin", "reliability"])
def test_nobody_contributes_twice_within_the_separation(strategy: str) -> None:
    driver = Driver(
        job(FTRL.format(strategy=strategy, keys="bands = 3", more="noise_multiplier = 1.0"), 9), separation=3
    )
    driver.join(*"abcdef")
    driver.send(m.Start())
    for number in range(1, 10):
        if number == 4:
            driver.fail(driver.cohort()[0])
            assert driver.step().attempt == 2
            recent = {name for record in driver.records[-2:] for name in record.contributors}
            assert not recent & set(driver.cohort()), "a retry is held to the separation as well"
        if number == 6:
            driver.restart()
        for client in driver.cohort():
            driver.update(client)
    contributions = [record.contributors for record in driver.records]
    assert len(contributions) == 9
    for first in range(9):
        for second in range(first + 1, min(first + 3, 9)):
            assert not set(contributions[first]) & set(contributions[second])


def test_it_says_who_rests() -> None:
    driver = Driver(
        job(FTRL.format(strategy="uniform", keys="bands = 1", more="noise_multiplier = 1.0"), 9), separation=3
    )
    driver.join(*"abcd")
    driver.send(m.Start())
    for _ in range(2):
        for client in driver.cohort():
            driver.update(client)
    waiting = driver.engine.view().waiting_for
    assert waiting.startswith("0 of 2 clients may take part; 4 others did within the last 2 rounds")
    driver.join("e", "f")
    assert set(driver.cohort()) == {"e", "f"}


def test_training_metrics_are_not_passed_on() -> None:
    driver = Driver(job(FTRL.format(strategy="uniform", keys="bands = 1", more="noise_multiplier = 1.0"), 1))
    driver.join(*"ab")
    driver.send(m.Start())
    for client in "ab":
        driver.update(client)
    assert driver.records[0].training == {}
    assert driver.records[0].client_metrics == {}


@pytest.mark.parametrize("level", ["client", "dp_ftrl", "client_local"])
def test_pauses_in_evaluation_release_one_model_a_round(level: str) -> None:
    """Each model made anew from a round would have noise of its own: their mean has less than was charged."""
    text = FTRL.format(
        strategy="uniform", keys="bands = 1", more="noise_multiplier = 1.0\npublic_evaluation = true"
    )
    text = text.replace("every = 0", "every = 1").replace("dp_ftrl", level)
    driver = Driver(job(text if level == "dp_ftrl" else text.replace("bands = 1", ""), rounds=2))
    driver.join("a", "b")
    driver.send(m.Start())
    for _ in range(6):
        for client in driver.cohort():
            driver.update(client)
        driver.send(m.Pause("lunch"), m.Resume())
        if driver.engine.state.attempt is None:
            break
    shown = {(i.step.round, i.step.attempt) for i in driver.instructions if i.step.phase == m.EVALUATE}
    assert sorted(shown) == [(1, 1), (2, 1)]
    assert [(record.round, record.attempt) for record in driver.records] == sorted(shown)


SAMPLED = """
[cohort]
{cohort}
retries = 50
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
clip_norm = 1.0
delta = 1e-3
noise_multiplier = 1.0
"""


@pytest.mark.parametrize(
    "cohort", ["size = 4", 'strategy = "poisson"\nprobability = 0.25', "size = 4\nminimum = 3"]
)
def test_who_fails_makes_nobody_likelier_to_be_in_a_model(cohort: str) -> None:
    """Of 16 silos only 6 ever answer: a round that waits for more takes each more often than 1 in 4."""
    rounds, answering = 160, "abcdef"
    driver = Driver(job(SAMPLED.format(cohort=cohort), rounds))
    driver.join(*"abcdefghijklmnop")
    driver.send(m.Start())
    while driver.engine.state.status == "running":
        for client in driver.cohort():
            if client in answering:
                driver.update(client)
            else:
                driver.fail(client)
    assert driver.engine.state.status == "finished"
    assert {record.attempt for record in driver.records} == {1}
    share = sum(len(record.contributors) for record in driver.records) / (rounds * len(answering))
    assert share == pytest.approx(0.25, abs=4 * 0.25 * (0.75 / (rounds * len(answering) / 4)) ** 0.5)


def test_nobody_is_drawn_before_as_many_are_online_as_the_job_says() -> None:
    coin = 'strategy = "poisson"\nprobability = 1.0\nminimum = 3'
    driver = Driver(job(SAMPLED.format(cohort=coin), 1))
    driver.join("a", "b")
    driver.send(m.Start())
    assert driver.kinds()[-1] == "waiting_for_clients"
    assert not driver.instructions
    driver.join("c")
    assert {each.client for each in driver.instructions} == {"a", "b", "c"}


CYCLIC = SAMPLED.replace('level = "client"', 'level = "dp_ftrl"\ncohorts = "hidden"\nseparation = 3')
COINS = 'strategy = "poisson"\nprobability = 0.5'


def cyclic_driver(rounds: int, **how: bool) -> Driver:
    driver = Driver(job(CYCLIC.format(cohort=COINS), rounds), **how)
    driver.join(*"abcdefghijklmnop")
    driver.send(m.Start())
    return driver


def test_groups_take_turns_and_each_silo_is_drawn_by_its_own_coin() -> None:
    driver = cyclic_driver(180)
    drawn = []
    while driver.engine.state.status == "running":
        if driver.step().round == 90:
            driver.restart()
        drawn.append(set(driver.cohort()))
        for client in driver.cohort():
            driver.update(client)
    assert driver.engine.state.status == "finished"
    assert {record.attempt for record in driver.records} == {1}
    assert len(drawn) == 180 - sum(not record.contributors for record in driver.records)
    groups = [{name for record in driver.records[g::3] for name in record.contributors} for g in range(3)]
    assert set().union(*groups) == set("abcdefghijklmnop")
    assert sum(map(len, groups)) == 16, "a silo was drawn in the turn of two groups"
    chances = sum(60 * len(group) for group in groups)
    share = sum(len(record.contributors) for record in driver.records) / chances
    assert share == pytest.approx(0.5, abs=4 * 0.5 / chances**0.5)


def test_a_silos_group_does_not_depend_on_who_else_is_there() -> None:
    """Otherwise a silo that is there or not would change what others contribute to."""
    table = job(CYCLIC.format(cohort=COINS), 9)
    state, names = EngineState("0" * 64, 7), [f"silo-{number}" for number in range(300)]
    groups = [in_turn(names, table, state, round) for round in (1, 2, 3)]
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert all(60 < len(group) < 140 for group in groups)
    for round, group in enumerate(groups, 1):
        assert in_turn(names, table, state, round + 3) == group
        assert in_turn(names[:50], table, state, round) == tuple(name for name in group if name in names[:50])
    assert in_turn(names, table, EngineState("0" * 64, 8), 1) != groups[0]


def test_a_group_without_silos_publishes_noise() -> None:
    driver = Driver(job(CYCLIC.format(cohort=COINS), 6))
    driver.join("a")
    driver.send(m.Start())
    while driver.engine.state.status == "running":
        for client in driver.cohort():
            driver.update(client)
    assert len(driver.records) == 6
    assert sum(not record.contributors for record in driver.records) >= 4


def test_amplified_rounds_spend_the_budget() -> None:
    table = job(CYCLIC.format(cohort=COINS).replace("noise_multiplier = 1.0", "epsilon = 3.0"), 8)
    plan = make_plan(table, 16)
    assert isinstance(plan.noise, CorrelatedRounds)
    assert plan.noise.mechanism.expected_cohort == pytest.approx(16 * 0.5 / 3)
    assert plan.separation == 1
    assert "divided by secret chance into 3 groups" in plan.sampling
    charges = [plan.charge_of(round) for round in range(1, 9)]
    assert [charge.steps for charge in charges if charge is not None] == [1, 0, 0, 1, 0, 0, 1, 0]
    assert 2.98 < compose([charge for charge in charges if charge is not None], 1e-3) <= 3.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (COINS, "size = 4", "amplified by Poisson sampling within groups, and by nothing else"),
        ("separation = 3", "", "separation is missing"),
        ("separation = 3", "separation = 3\nbands = 4", "4 bands reach over more than separation = 3"),
        ("separation = 3", "separation = 3\nbuffers = 2", "only proven to amplify banded noise"),
        ("separation = 3", "separation = 17", "so many groups cannot be made of 16 silos"),
        ('cohorts = "hidden"', "", "relies on how far apart"),
    ],
)
def test_what_is_not_proven_to_amplify_correlated_noise_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises((ConfigError, PrivacyError), match=message):
        make_plan(job(CYCLIC.format(cohort=COINS).replace(old, new), 6), 16)


@pytest.mark.parametrize("table", [SAMPLED.format(cohort="size = 4"), CYCLIC.format(cohort=COINS)])
def test_an_attempt_that_is_made_again_asks_the_same_cohort(table: str) -> None:
    driver = Driver(job(table, 3), automatic=False)
    driver.join(*"abcdefghijklmnop")
    driver.send(m.Start())
    driver.finish_pending()
    first = driver.cohort()
    for client in first:
        driver.update(client)
    driver.pending.clear()
    driver.send(m.AggregationFailed(driver.step(), "no room"))
    driver.finish_pending()
    driver.send(m.Pause("lunch"), m.Resume())
    driver.finish_pending()
    assert driver.step() == m.Step(1, 3, m.TRAIN)
    assert driver.cohort() == first


def test_metrics_of_a_secret_cohorts_own_data_are_refused() -> None:
    table = SAMPLED.format(cohort="size = 4").replace("every = 0", 'every = 1\nclients = "cohort"')
    table += "public_evaluation = true\n"
    with pytest.raises(PrivacyError, match="would tell who was drawn"):
        make_plan(job(table), 16)
    make_plan(job(table + 'cohorts = "known"'), 16)
