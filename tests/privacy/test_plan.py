"""The plan of a job: ε over its rounds, the noise its budget buys, and warnings before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundtable.core.config import JobConfig, parse_job
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.engine import make_plan
from roundtable.privacy import (
    PrivacyPlan,
    Spent,
    charges,
    compose,
    example_charge,
    noise_for,
    plot,
    privacy_plan,
    render,
    statement,
)
from roundtable.privacy.accounting.accountants import gaussian_epsilon
from roundtable.privacy.accounting.sampling import cyclic_poisson
from roundtable.privacy.protection import hidden
from roundtable.server.jobs.privacy_budget import silo_statement

POPULATION = 1000


def config(
    level: str = "client",
    strategy: str = "poisson",
    cohort: float = 100,
    rounds: int = 30,
    algorithm: dict[str, object] | None = None,
    **changes: object,
) -> JobConfig:
    """A job over 1,000 silos, `cohort` of them expected in a round."""
    privacy = {"level": level, "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0, "accountant": "rdp"}
    if level == "example":
        privacy |= {"population": 2000, "batch_size": 50, "local_steps": 4}
    how = {"probability": cohort / POPULATION} if strategy == "poisson" else {"size": cohort}
    if level in ("distributed", "dp_ftrl"):
        strategy, how = "uniform", {"size": cohort}
    tables = {"cohort": {"strategy": strategy, **how}, "aggregation": {"weighting": "uniform"}}
    tables |= {"evaluation": {"every": 0}, "algorithm": algorithm or {}}
    return JobConfig.model_validate(
        {"task": "t", "rounds": rounds, "privacy": {**privacy, **changes}, **tables}
    )


def plan(job: JobConfig, dimension: int = 10_000) -> PrivacyPlan:
    return privacy_plan(job, POPULATION, dimension)


@pytest.mark.parametrize(
    ("level", "changes"),
    [
        ("client", {"strategy": "poisson", "cohort": 1.4}),
        ("client", {"strategy": "poisson", "cohort": 2.6, "epsilon": None, "noise_multiplier": 0.9}),
        ("client", {"strategy": "uniform", "cohort": 30}),
        ("client", {"strategy": "uniform", "cohort": 1000}),
        ("client", {"strategy": "round_robin", "clipping": "adaptive", "quantile": 0.7}),
        ("client", {"strategy": "poisson", "cohort": 12.5, "clipping": "adaptive"}),
        ("client_local", {}),
        ("distributed", {"cohort": 40, "corruption": 0.25}),
        ("dp_ftrl", {"cohort": 300, "bands": 64}),
        ("dp_ftrl", {"cohort": 30, "separation": 7, "epsilon": None, "noise_multiplier": 2.0}),
    ],
)
def test_the_forecast_is_what_the_ledger_charges(level: str, changes: dict[str, object]) -> None:
    """At every round that it shows: with a cohort that is no whole number, and whatever the clipping."""
    job = config(level, rounds=12, **changes)  # type: ignore[arg-type]
    forecast = plan(job, dimension=64)
    ledger = make_plan(job, POPULATION, (slice(0, 64),))
    for row in forecast.rows:
        rounds = range(1, row.round + 1)
        charged = [
            charge for number in rounds if (charge := ledger.charge_of(number) or ledger.silo_charge(number))
        ]
        assert len(charged) == row.round
        assert row.epsilon == pytest.approx(compose(charged, 1e-5, "rdp"), rel=1e-9)


@pytest.mark.parametrize("given", [{}, {"epsilon": None, "noise_multiplier": 0.9}])
@pytest.mark.parametrize("steps", [{"local_steps": 4}, {"local_steps": None}])
def test_the_forecast_of_an_example_level_job_is_what_a_silo_charges(
    given: dict[str, object], steps: dict[str, object]
) -> None:
    job = config("example", rounds=3, algorithm={"epochs": 2}, **given, **steps)
    forecast = plan(job)
    charged = example_charge(job, 2000)
    assert charged.steps == (4 if steps["local_steps"] else 80)
    for row in forecast.rows:
        assert row.epsilon == pytest.approx(compose([charged.repeated_by(row.round)], 1e-5, "rdp"), rel=1e-9)


@pytest.mark.parametrize("level", ["client", "client_local", "distributed", "example", "dp_ftrl"])
def test_the_budget_is_used_by_the_last_round_and_not_before(level: str) -> None:
    found = plan(config(level))
    assert 3.95 <= found.rows[-1].epsilon <= 4.0
    assert found.rows[-1].round == 30
    epsilons = [row.epsilon for row in found.rows]
    assert epsilons == sorted(epsilons)
    assert found.rows[0].epsilon < 2.5
    assert "epsilon" in render(found)


def test_a_given_noise_is_costed_and_a_budget_that_it_breaks_is_named() -> None:
    found = plan(config(noise_multiplier=0.8))
    assert found.noise_multiplier == 0.8
    assert found.noise_std == pytest.approx(0.008)
    assert any("the job will stop early" in warning for warning in found.warnings)


@pytest.mark.parametrize("strategy", ["round_robin", "reliability"])
def test_a_strategy_without_amplification_gets_none_and_is_told(strategy: str) -> None:
    found = plan(config(strategy=strategy))
    assert found.noise_multiplier > 4 * plan(config()).noise_multiplier
    assert any(strategy in warning and "amplifies nothing" in warning for warning in found.warnings)


def test_fixed_size_sampling_is_charged_as_such() -> None:
    """Charging a fixed cohort as if it were a Poisson sample would claim too little."""
    noise = noise_for(config(strategy="uniform"), POPULATION, 10)
    as_drawn = charges(config(strategy="uniform"), noise, POPULATION, 10, 30)
    assert 3.9 < compose(as_drawn, 1e-5, "rdp") <= 4.0
    as_poisson = charges(config(), noise, POPULATION, 10, 30)
    assert compose(as_poisson, 1e-5, "rdp") < 2.0


@pytest.mark.parametrize(("silos", "groups", "told"), [(100, 16, "0.37"), (100, 4, "0.017"), (400, 4, "")])
def test_the_chance_of_a_round_of_nobody_is_told(silos: int, groups: int, told: str) -> None:
    """Its end at once tells that no silo of the group took part, which no amplification allows for."""
    sampling = cyclic_poisson(silos, groups, 0.16)
    drawn = np.random.default_rng(1).random((4000, silos)) < 0.16 / groups
    assert float((~drawn.any(axis=1)).mean()) == pytest.approx(sampling.nobody, abs=0.03)
    assert ("ends at once" in sampling.sentence) == bool(told)
    assert f"probability {told}" in sampling.sentence


def test_a_cohort_too_small_for_any_signal_is_warned_of_with_the_ratio() -> None:
    small = plan(config(cohort=2), dimension=1_000_000)
    assert small.rows[-1].signal_to_noise < 1
    assert any(
        "drowns" in warning and f"{small.rows[-1].signal_to_noise:.2g}" in warning
        for warning in small.warnings
    )
    large = plan(config(cohort=500), dimension=100)
    assert large.rows[-1].signal_to_noise > 50
    assert not any("drowns" in warning or "Little signal" in warning for warning in large.warnings)


def test_amplified_sampling_and_correlated_noise_are_compared() -> None:
    found = {each.name: each for each in plan(config(cohort=10)).alternatives}
    poisson, plain, ftrl, _, amplified = found.values()
    assert amplified.prefix_error < min(poisson.prefix_error, ftrl.prefix_error)
    assert [each.sampled for each in found.values()] == [True, False, False, False, True]
    assert ftrl.name.startswith("DP-FTRL")
    assert poisson.prefix_error < plain.prefix_error
    assert ftrl.prefix_error < plain.prefix_error
    assert "MiB" in ftrl.remark


@pytest.mark.parametrize(
    ("changes", "server", "said"),
    [
        ({}, {}, ["which keeps the least of those with little noise; optimised for prefix sums"]),
        ({"bands": 3}, {}, ["banded, 3 bands, as the job says", "independent"]),
        ({"buffers": 2}, {"name": "fedavgm"}, ["BLT, 2 buffers", "the server's momentum 0.9"]),
        (
            {"coefficients": [1.0, 0.5]},
            {"schedule": {"name": "step", "every": 3}},
            ["with the job's own coefficients", "optimised for the learning-rate schedule"],
        ),
        ({"bands": 2}, {"name": "fedadam"}, ["prefix sums, as for steps of fedadam nothing better"]),
    ],
)
def test_the_plan_says_how_noise_is_correlated_and_why(
    changes: dict[str, Any], server: dict[str, Any], said: list[str]
) -> None:
    job = config("dp_ftrl", **changes)
    table = job.aggregation.model_dump() | {"server_optimizer": server}
    job = JobConfig.model_validate({**job.model_dump(), "aggregation": table})
    found = plan(job)
    assert [part for part in said if part not in found.correlation] == []
    assert found.correlation in render(found)
    assert plan(config("client")).correlation == ""


def test_a_meaningless_epsilon_is_called_so() -> None:
    found = plan(config(epsilon=None, noise_multiplier=0.2))
    assert any("number without a meaning" in warning for warning in found.warnings)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_noise_under_which_nothing_is_left_is_still_costed(accountant: str) -> None:
    found = plan(config(epsilon=None, noise_multiplier=1e6, accountant=accountant))
    assert 0.0 <= found.epsilon < 0.01
    assert found.alternatives == ()
    assert any("drowns everything" in said for said in found.warnings)


def test_jobs_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(PrivacyError, match="no differential privacy"):
        plan(JobConfig(task="t"))
    with pytest.raises(PrivacyError, match=r"needs privacy\.population"):
        plan(config("example", population=None))


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(plan(config("client_local")), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("cohort", ["size = 10", 'strategy = "poisson"\nprobability = 0.1'])
def test_a_draw_that_is_known_amplifies_nothing(cohort: str) -> None:
    text = (
        f'task = "t"\nrounds = 20\n[cohort]\n{cohort}\n[aggregation]\nweighting = "uniform"\n'
        '[evaluation]\nevery = 0\n[privacy]\nlevel = "client"\nclip_norm = 1.0\ndelta = 1e-5\n'
        "noise_multiplier = 4.0\n"
    )
    hidden, known = (
        privacy_plan(parse_job(text + more), population=100, dimension=10)
        for more in ("", 'cohorts = "known"')
    )
    assert hidden.epsilon < known.epsilon == pytest.approx(gaussian_epsilon(4.0 / 20**0.5, 1e-5))
    assert "is known (privacy.cohorts)" in known.sampling


RECORDS = """
task = "t"
rounds = 10
[algorithm]
epochs = 1
batch_size = 96
[privacy]
level = "example"
clip_norm = 1.0
delta = 1e-5
epsilon = 4.0
"""


def test_what_shows_how_many_records_a_silo_has_is_not_said_to_be_hidden() -> None:
    """Noise and steps follow from their number: one more shows in whatever has that noise."""
    job = parse_job(RECORDS)
    fewer, more = (example_charge(job, records) for records in (192, 193))
    assert (fewer.steps, more.steps) == (2, 3)
    assert more.noise_multiplier > 1.1 * fewer.noise_multiplier
    privacy = job.privacy
    assert isinstance(privacy, ExampleLevel)
    assert hidden(job).endswith("nor how many records it has")
    spent = Spent("t", 4.0, 1e-5, "add_remove", 10, ("t",))
    for words in (statement(privacy, spent), silo_statement(privacy)):
        assert "how many records it has" in words


@pytest.mark.parametrize(
    ("strategy", "hides"), [("poisson", True), ("uniform", True), ("round_robin", False)]
)
def test_that_a_silo_takes_part_is_said_to_be_hidden_where_chance_alone_draws(
    strategy: str, hides: bool
) -> None:
    job = config("client", strategy=strategy)
    assert hidden(job).endswith("; not that it takes part") is not hides
