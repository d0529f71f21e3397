"""The plan of a job: ε over its rounds, the noise its budget buys, and warnings before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import NoPrivacy, Private, privacy_from
from roundtable.privacy import (
    PrivacyPlan,
    accountant_for,
    charges,
    compose,
    noise_for,
    plot,
    privacy_plan,
    render,
)


def config(level: str = "client", **changes: object) -> Private:
    fields = {"epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0, "accountant": "rdp"}
    if level == "example":
        fields |= {"population": 2000, "batch_size": 50, "local_steps": 4}
    privacy = privacy_from({"level": level, **fields, **changes})
    assert not isinstance(privacy, NoPrivacy)
    return privacy


def plan(
    job: NoPrivacy | Private, strategy: str = "poisson", cohort: int = 100, dimension: int = 10_000
) -> PrivacyPlan:
    return privacy_plan(
        job, strategy=strategy, population=1000, cohort=cohort, rounds=30, dimension=dimension
    )


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


@pytest.mark.parametrize("strategy", ["round_robin", "reliability", "online"])
def test_a_strategy_without_amplification_gets_none_and_is_told(strategy: str) -> None:
    found = plan(config(), strategy)
    assert found.noise_multiplier > 4 * plan(config()).noise_multiplier
    assert any(strategy in warning and "amplifies nothing" in warning for warning in found.warnings)


def test_fixed_size_sampling_is_charged_as_such() -> None:
    """Charging a fixed cohort as if it were a Poisson sample would claim too little."""
    sampling = accountant_for("uniform", 1000, 100)
    noise = noise_for(config(), sampling, 10, 30)
    assert 3.9 < compose(charges(config(), noise, sampling, 10, 30, 30), 1e-5, "rdp") <= 4.0
    as_poisson = charges(config(), noise, accountant_for("poisson", 1000, 100), 10, 30, 30)
    assert compose(as_poisson, 1e-5, "rdp") < 2.0


def test_an_expected_cohort_need_not_be_whole() -> None:
    assert accountant_for("poisson", 1000, 1.4).fields()["rate"] == 0.0014


def test_a_cohort_too_small_for_any_signal_is_warned_of_with_the_ratio() -> None:
    small = plan(config(), cohort=2, dimension=1_000_000)
    assert small.rows[-1].signal_to_noise < 1
    assert any(
        "drowns" in warning and f"{small.rows[-1].signal_to_noise:.2g}" in warning
        for warning in small.warnings
    )
    large = plan(config(), cohort=500, dimension=100)
    assert large.rows[-1].signal_to_noise > 50
    assert not any("drowns" in warning or "Little signal" in warning for warning in large.warnings)


def test_amplified_sampling_and_correlated_noise_are_compared() -> None:
    found = {each.name: each for each in plan(config(), cohort=10).alternatives}
    poisson, plain, ftrl = (
        found[name] for name in sorted(found, key=lambda n: ("Poisson" not in n, "FTRL" in n))
    )
    assert ftrl.name.startswith("DP-FTRL")
    assert poisson.prefix_error < plain.prefix_error
    assert ftrl.prefix_error < plain.prefix_error
    assert "MiB" in ftrl.remark


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
    with pytest.raises(PrivacyError, match="no privacy to plan"):
        plan(NoPrivacy())
    with pytest.raises(PrivacyError, match="batch_size"):
        plan(config("example", batch_size=None))


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(plan(config("client_local")), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
