"""ε agrees with numbers computed elsewhere, and composes as it must."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from roundtable.core.errors import PrivacyError
from roundtable.privacy import (
    Charge,
    accountant_for,
    compose,
    gaussian_charge,
    group_epsilon,
    local_gaussian_charge,
    solve_noise,
    solve_steps,
)
from roundtable.privacy.accounting.accountants import _loss_distribution, gaussian_epsilon
from roundtable.privacy.accounting.fixed_size import hockey_stick
from roundtable.privacy.mechanisms.distributed import DistributedDP

NONE = {"sampling": "none"}
SLOW = pytest.mark.slow


def poisson(rate: float, z: float, steps: int = 1) -> Charge:
    return gaussian_charge("client", {"sampling": "poisson", "rate": rate}, z, steps=steps)


def cases(folder: Path, kind: str) -> list[dict[str, Any]]:
    return list(json.loads((folder / "accountant_cases.json").read_text())[kind])


def test_renyi_agrees_with_the_reference(reference_dir: Path) -> None:
    for case in cases(reference_dir, "poisson"):
        epsilon = compose([poisson(case["q"], case["sigma"], case["steps"])], case["delta"], "rdp")
        assert epsilon == pytest.approx(case["dpa_rdp"], rel=1e-3), case


@pytest.mark.parametrize(
    ("accountant", "every"),
    [("pld", 8), ("prv", 8), pytest.param("pld", 1, marks=SLOW), pytest.param("prv", 1, marks=SLOW)],
)
def test_loss_distributions_agree_with_the_reference(
    reference_dir: Path, accountant: str, every: int
) -> None:
    for case in cases(reference_dir, "poisson")[::every]:
        epsilon = compose([poisson(case["q"], case["sigma"], case["steps"])], case["delta"], accountant)
        assert case["pld_lower_1e-4"] <= epsilon <= case["opacus_prv"] * 1.01, case


def test_fixed_size_sampling_agrees_with_the_reference(reference_dir: Path) -> None:
    """The reference takes σ over 2C, we take it over C: passed raw it would claim 5.38 for 14.05."""
    for case in cases(reference_dir, "fixed_size"):
        sampling = accountant_for("uniform", case["n"], case["m"]).fields()
        charge = gaussian_charge("client", sampling, 2 * case["sigma"], steps=case["steps"])
        expected = case["fixedsize_WOR_replaceone_rdp(sigma wrt clip C)"]
        assert compose([charge], case["delta"], "rdp") == pytest.approx(expected, rel=1e-3)
        none = gaussian_charge("client", NONE, case["sigma"], steps=case["steps"])
        assert compose([none], case["delta"], "rdp") == pytest.approx(case["no_amplification_rdp"], rel=1e-3)
        assert compose([none], case["delta"]) == pytest.approx(case["no_amplification_pld"], rel=1e-3)


@pytest.mark.parametrize(("multiplier", "rate"), [(0.5, 0.01), (1.0, 0.3), (2.0, 0.95), (4.0, 1.0)])
def test_a_sample_of_a_fixed_size_has_the_divergence_of_the_mixture(multiplier: float, rate: float) -> None:
    """H_α, integrated, of the two Gaussians mixed: for α >= 1 the one way round, below it the other."""
    x = np.linspace(-60.0, 60.0, 1_200_001)
    far, near = stats.norm.pdf(x, 1 / multiplier), stats.norm.pdf(x)
    mixed = rate * far + (1 - rate) * near
    epsilons = np.array([-3.0, -0.2, 0.0, 0.01, 0.7, 2.5])
    found = hockey_stick(epsilons, multiplier, rate)
    for epsilon, value in zip(epsilons, found, strict=True):
        pair = (mixed, near) if epsilon >= 0 else (near, mixed)
        expected = np.maximum(pair[0] - math.exp(epsilon) * pair[1], 0.0).sum() * 1e-4
        assert value == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_little_noise_is_charged_as_without_sampling_and_in_no_time(size: int) -> None:
    """Its loss distribution would take hours. Beside other noise too, drawn or not."""
    drawn = Charge("gaussian", "client", "poisson", (("update", 1e-3),), rate=0.1)
    certain = replace(drawn, sampling="none", rate=1.0)
    usual = Charge("gaussian", "client", "poisson", (("update", 1.0),), rate=0.1, steps=3)
    alone, beside = group_epsilon([drawn], size, 1e-5), group_epsilon([drawn, usual], size, 1e-5)
    assert alone == group_epsilon([certain], size, 1e-5) > 5e5
    assert alone < beside < alone + group_epsilon([usual], size, 1e-6) + 0.01 * alone


@pytest.mark.parametrize(
    ("population", "sample", "noise", "steps"),
    [(1000, 50, 2.0, 100), (100, 50, 4.0, 50), (20, 19, 8.0, 50), (1000, 10, 1.0, 300)],
)
def test_a_sample_of_a_fixed_size_costs_no_less_than_an_attack_shows(
    population: int, sample: int, noise: float, steps: int
) -> None:
    """The attack: everybody else sends nothing, and one silo sends C in the one case, -C in the other."""
    sampling = accountant_for("uniform", population, sample).fields()
    charge = gaussian_charge("client", sampling, noise, steps=steps)
    shown = _loss_distribution(noise, sample / population, "replace_one", 1e-3).self_compose(steps)
    tight = compose([charge], 1e-5)
    assert shown.get_epsilon_for_delta(1e-5) <= tight < 0.85 * compose([charge], 1e-5, "rdp")
    assert tight < compose([local_gaussian_charge(noise, steps)], 1e-5), "a sample costs less than everybody"


def test_a_round_with_everybody_is_charged_exactly() -> None:
    sampling = accountant_for("uniform", 20, 20)
    charge = gaussian_charge("client", sampling.fields(), 4.0, more={"clip_bit": 10.0}, steps=30)
    exact = gaussian_charge("client", NONE, 4.0, more={"clip_bit": 10.0}, steps=30)
    assert charge == exact
    assert "no sampling to amplify it" in sampling.sentence
    kept = Charge("gaussian", "client", "fixed_size", (("update", 4.0),), 30, "replace_one", 1.0, 20, 20)
    for accountant in ("pld", "rdp"):
        alike = local_gaussian_charge(8.0, 30)
        assert compose([kept], 1e-5, accountant) == pytest.approx(compose([alike], 1e-5, accountant))


def test_replace_one_of_a_poisson_sample_agrees_with_the_reference(reference_dir: Path) -> None:
    """A negligible charge under replace-one turns the whole account to that relation."""
    faint = Charge("gaussian", "client", "none", (("update", 1e6),), relation="replace_one")
    for case in cases(reference_dir, "fixed_size")[:2]:
        charge = poisson(case["m"] / case["n"], case["sigma"], case["steps"])
        epsilon = compose([charge, faint], case["delta"])
        assert epsilon == pytest.approx(case["poisson_replaceone_pld"], rel=2e-3)


def test_one_replacement_doubles_how_far_all_else_may_move() -> None:
    faint = Charge("gaussian", "client", "none", (("update", 1e6),), relation="replace_one")
    rounds = gaussian_charge("client", NONE, 8.0, steps=4)
    assert compose([rounds], 1e-5) == pytest.approx(gaussian_epsilon(4.0, 1e-5), rel=1e-3)
    assert compose([rounds, faint], 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1e-5), rel=1e-3)


def test_order_and_grouping_do_not_matter() -> None:
    a, b, c = poisson(0.1, 2.0, 10), poisson(0.05, 1.5, 7), gaussian_charge("client", NONE, 8.0, steps=3)
    whole = compose([a, b, c], 1e-5)
    apart = [a.repeated(4), c.repeated(1), b.repeated(7), a.repeated(6), c.repeated(2)]
    assert compose(apart, 1e-5) == whole
    assert max(compose([x], 1e-5) for x in (a, b, c)) < whole < sum(compose([x], 1e-5) for x in (a, b, c))


def test_epsilon_is_cumulative() -> None:
    values = [compose([poisson(0.1, 2.0, n)], 1e-5) for n in (1, 10, 100)]
    assert values == sorted(values)
    assert values[0] < values[2] / 2
    assert compose([], 1e-5) == 0.0
    assert compose([poisson(0.1, 2.0, 0)], 1e-5) == 0.0


def test_two_queries_of_one_sample_cost_more_than_two_samples() -> None:
    """They are one joint release: amplified once, not each apart."""
    joint = gaussian_charge(
        "client", {"sampling": "poisson", "rate": 0.05}, 1.0, more={"clip_bit": 1.0}, steps=50
    )
    apart = poisson(0.05, 1.0, 100)
    assert joint.noise_multiplier == pytest.approx(0.5**0.5)
    assert dict(joint.parts) == {"update": 1.0, "clip_bit": 1.0}
    assert compose([joint], 1e-5) > compose([apart], 1e-5)


def test_mixed_kinds_give_a_valid_bound() -> None:
    fixed = gaussian_charge("client", accountant_for("uniform", 1000, 50).fields(), 4.0, steps=20)
    plain = gaussian_charge("client", NONE, 20.0, steps=5)
    sampled = poisson(0.05, 2.0, 20)
    for others in ([plain], [sampled], [plain, sampled]):
        both = compose([fixed, *others], 1e-5)
        assert both > compose([fixed], 1e-5)
        assert both > compose(others, 1e-5)


def test_bounds_of_two_kinds_share_delta() -> None:
    """Each holds but for a chance of its own: at the whole δ both together would fail twice as often."""
    shares = DistributedDP(1.0, 1e4, 4, 3, 3, 0, 32).charge
    plain = gaussian_charge("client", NONE, 2.0)
    assert compose([shares, plain], 1e-5) > gaussian_epsilon(2.0, 0.5e-5)


def test_local_noise_hides_a_silo_against_any_other_update() -> None:
    """A sensitivity of C instead of 2C would claim half of the truth."""
    assert compose([local_gaussian_charge(2.0)], 1e-5) == compose(
        [gaussian_charge("client", NONE, 1.0)], 1e-5
    )


def test_charges_survive_json() -> None:
    charge = Charge(
        "skellam", "client", "none", (("update", 3.0),), 4, grid_std=100.0, dimension=64, shares=7
    )
    for each in (charge, poisson(0.1, 1.1, 3), local_gaussian_charge(1.0)):
        assert Charge.from_json(each.to_json()) == each
    for text in ("", "[]", "{}", '{"parts": {"a": 1.0}, "colour": 1}'):
        with pytest.raises(PrivacyError):
            Charge.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": ()},
        {"parts": (("update", 0.0),)},
        {"parts": (("update", float("nan")),)},
        {"sampling": "poisson", "rate": 0.0},
        {"sampling": "poisson", "rate": 1.1},
        {"sampling": "fixed_size", "sample": 5, "population": 10},
        {"sampling": "fixed_size", "sample": 11, "population": 10, "relation": "replace_one"},
        {"mechanism": "skellam"},
        {"mechanism": "skellam", "sampling": "poisson", "grid_std": 1.0, "dimension": 1},
        {"mechanism": "laplace"},
        {"unit": "household"},
        {"steps": -1},
    ],
)
def test_impossible_charges_are_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "mechanism": "gaussian",
        "unit": "client",
        "sampling": "none",
        "parts": (("update", 1.0),),
    }
    with pytest.raises(PrivacyError):
        Charge(**good | fields)


def test_clients_and_examples_are_never_added_up() -> None:
    with pytest.raises(PrivacyError, match="different units"):
        compose([gaussian_charge("client", NONE, 1.0), gaussian_charge("example", NONE, 1.0)], 1e-5)


def test_gdp_is_not_offered() -> None:
    """It is a central-limit approximation, and below the truth where it matters."""
    with pytest.raises(PrivacyError, match="unknown"):
        compose([poisson(0.001, 0.5, 1000)], 1e-5, "gdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_noise_for_a_budget_uses_it_and_no_more(accountant: str, epsilon: float) -> None:
    charge = solve_noise(poisson(0.05, 1.0, 200), epsilon, 1e-5, accountant)
    cost = compose([charge], 1e-5, accountant)
    assert 0.995 * epsilon <= cost <= epsilon


def test_noise_is_solved_on_top_of_what_is_spent() -> None:
    before = gaussian_charge("client", NONE, 10.0, steps=5)
    charge = solve_noise(gaussian_charge("client", NONE, 1.0, steps=10), 3.0, 1e-5, spent=[before])
    assert 2.98 <= compose([before, charge], 1e-5) <= 3.0
    with pytest.raises(PrivacyError, match="no noise keeps this"):
        solve_noise(charge, 0.5, 1e-5, spent=[before])


def test_steps_for_a_budget() -> None:
    charge = gaussian_charge("client", NONE, 20.0)
    steps = solve_steps(charge, 2.0, 1e-5)
    assert compose([charge.repeated(steps)], 1e-5) <= 2.0 < compose([charge.repeated(steps + 1)], 1e-5)
    assert solve_steps(gaussian_charge("client", NONE, 0.1), 2.0, 1e-5) == 0


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("poisson", "poisson"), ("uniform", "fixed_size")]
    + [
        (other, "none")
        for other in ("by_data_size", "reliability", "diversity", "round_robin", "online", "new one")
    ],
)
def test_only_secret_chance_amplifies(strategy: str, kind: str) -> None:
    model = accountant_for(strategy, 100, 10)
    assert model.kind == kind
    charge = gaussian_charge("client", model.fields(), 1.0, steps=10)
    unamplified = compose([gaussian_charge("client", NONE, 1.0, steps=10)], 1e-5)
    if kind == "none":
        assert compose([charge], 1e-5) == unamplified
        assert strategy in model.sentence
        assert "amplifies nothing" in model.sentence


def test_a_cohort_beyond_the_population_is_refused() -> None:
    with pytest.raises(PrivacyError, match="cannot be drawn"):
        accountant_for("poisson", 10, 11)


def test_importing_the_package_loads_no_accountant() -> None:
    heavy = ["opacus", "dp_accounting", "matplotlib", "scipy"]
    code = f"import sys, roundtable.privacy; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("noise", [1e-5, 0.3, 1e6])
def test_any_noise_on_a_sample_has_a_cost(noise: float) -> None:
    charge = gaussian_charge("client", accountant_for("uniform", 50, 5).fields(), noise, steps=3)
    everybody = compose([local_gaussian_charge(noise, 3)], 1e-5)
    assert 0.0 <= compose([charge], 1e-5) <= everybody + 1e-3
