"""What the theory promises of the rules, on drawn data."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import AggregationConfig, ClientRow, RuleContext, TensorMatrix, aggregate
from roundtable.aggregation.registry import RULES

Pre = tuple[tuple[str, dict[str, Any]], ...]
WITH_F = {"trimmed_mean", "mean_around_median", "krum", "multi_krum", "bulyan", "caf", "smea", "monna"}
EQUIVARIANT = sorted({"mean", "median", "geometric_median", "minimum_diameter_averaging"} | WITH_F)
FIXED = {"centred_clipping": {"tau": 1.0, "iterations": 2}, "monna": {"pivot": "silo-00"}}


def parameters(rule: str, f: int) -> dict[str, Any]:
    return {**({"f": f} if RULES[rule].takes("f") else {}), **FIXED.get(rule, {})}


def run(rule: str, values: torch.Tensor, f: int, pre: Pre = ()) -> torch.Tensor:
    names = [f"silo-{index:02}" for index in range(len(values))]
    config = AggregationConfig(rule, parameters(rule, f), pre, weighting="uniform")
    context = RuleContext(root_update=torch.ones(values.shape[1], dtype=values.dtype))
    clients = [ClientRow(name) for name in names]
    return aggregate(TensorMatrix(values), clients, config, seed=5, context=context).vector


def largest_f(rule: str, n: int) -> int:
    """The largest f that a rule accepts for n updates."""
    return {"bulyan": (n - 3) // 4, "krum": (n - 3) // 2, "multi_krum": (n - 3) // 2}.get(rule, (n - 1) // 2)


@st.composite
def draws(draw: st.DrawFn, least: int = 7) -> tuple[torch.Tensor, int]:
    n, d = draw(st.integers(least, 13)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return values * draw(st.sampled_from([1e-3, 1.0, 50.0])), draw(st.integers(0, 3))


# Bulyan and minimum-diameter averaging have ties on any data, which go to the silo whose name comes first.
@pytest.mark.parametrize(
    "rule", sorted(set(RULES) - {"monna", "dnc", "bulyan", "minimum_diameter_averaging"})
)
@settings(max_examples=25, deadline=None)
@given(drawn=draws(), data=st.data())
def test_renaming_the_silos_changes_nothing(
    rule: str, drawn: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    values, f = drawn
    f = min(f, largest_f(rule, len(values)))
    order = data.draw(st.permutations(range(len(values))))
    if rule == "geometric_median" and values.shape[1] == 1:
        return  # Of an even number of values everything between the two middle ones is a median.
    if (rule == "fltrust" and not (values.sum(dim=1) > 0).any()) or (
        rule == "foolsgold" and values.shape[1] < 4
    ):
        return
    atol = 1e-9 * float(values.abs().max())
    torch.testing.assert_close(run(rule, values[order], f), run(rule, values, f), rtol=1e-9, atol=atol)


@settings(max_examples=25, deadline=None)
@given(drawn=draws(), data=st.data())
def test_the_smallest_diameter_is_the_same_in_any_order(
    drawn: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    values, f = drawn
    f = min(f, (len(values) - 1) // 2)
    order = data.draw(st.permutations(range(len(values))))
    rule = RULES["minimum_diameter_averaging"].function
    found = [rule(TensorMatrix(rows), None, f=f).details["diameter"] for rows in (values, values[order])]
    distances = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist")
    exact = min(
        float(distances[list(subset)][:, list(subset)].max())
        for subset in itertools.combinations(range(len(values)), len(values) - f)
    )
    assert found == pytest.approx([exact, exact], rel=1e-9)


@pytest.mark.parametrize("pre", [(), (("nnm", {"f": 1}),), (("bucketing", {"size": 1}),)], ids=str)
@pytest.mark.parametrize("rule", EQUIVARIANT)
@settings(max_examples=15, deadline=None)
@given(drawn=draws(), shift=st.floats(-100, 100))
def test_moving_all_updates_moves_the_result(
    rule: str, pre: Pre, drawn: tuple[torch.Tensor, int], shift: float
) -> None:
    values, f = drawn
    # Mixed rows are few different ones: they lie at equal distances from a median between two of them, and
    # make subsets of equal spread.
    if pre and rule in ("monna", "bulyan", "mean_around_median", "smea", "geometric_median"):
        pre = ()
    if rule == "geometric_median" and values.shape[1] == 1:
        return
    f = min(f, largest_f(rule, len(values)))
    moved = run(rule, values + shift, f, pre) - shift
    scale = float(values.abs().max()) + abs(shift)
    torch.testing.assert_close(moved, run(rule, values, f, pre), rtol=1e-6, atol=1e-6 * scale)


def resilience(rule: str, n: int, f: int) -> float:
    """κ of (f, κ)-robustness (Allouah et al. 2023, table 1): the result is no farther from the honest mean
    than √κ standard deviations of the honest updates."""
    ratio = 1 + f / (n - 2 * f)
    return {
        "trimmed_mean": 6 * f / (n - 2 * f) * ratio,
        "krum": 6 * ratio,
        "geometric_median": 4 * ratio**2,
        "median": 4 * ratio**2,
    }[rule]


@pytest.mark.parametrize("mixing", [False, True], ids=["alone", "nnm"])
@pytest.mark.parametrize("rule", ["trimmed_mean", "krum", "geometric_median", "median"])
@settings(max_examples=40, deadline=None)
@given(drawn=draws(), size=st.sampled_from([1.0, 10.0, 1e6, 1e30]), seed=st.integers(0, 1000))
def test_hostile_updates_move_the_result_no_farther_than_the_theory_says(
    rule: str, mixing: bool, drawn: tuple[torch.Tensor, int], size: float, seed: int
) -> None:
    values, f = drawn
    f = min(f, largest_f(rule, len(values)))
    n = len(values)
    honest = values[: n - f]
    generator = torch.Generator().manual_seed(seed)
    hostile = torch.randn(f, values.shape[1], generator=generator, dtype=torch.float64) * size
    kappa = resilience(rule, n, f)
    if mixing:
        kappa = 8 * f / (n - f) * (1 + kappa)
    pre: Pre = (("nnm", {"f": f}),) if mixing else ()
    result = run(rule, torch.cat([honest, hostile]), f, pre)
    centre = honest.mean(dim=0)
    spread = float((honest - centre).square().sum(dim=1).mean())
    assert float((result - centre).norm()) <= math.sqrt(kappa * spread) + 1e-9 * float(honest.abs().max())


REJECTING = ["krum", "multi_krum", "bulyan", "minimum_diameter_averaging", "monna", "caf", "smea"]


@pytest.mark.parametrize("rule", REJECTING)
@settings(max_examples=25, deadline=None)
@given(drawn=draws(), seed=st.integers(0, 1000))
def test_updates_at_infinity_are_rejected(rule: str, drawn: tuple[torch.Tensor, int], seed: int) -> None:
    values, f = drawn
    f = min(f, largest_f(rule, len(values)))
    honest = values[: len(values) - f]
    directions = (
        torch.randn(f, values.shape[1], generator=torch.Generator().manual_seed(seed)).sign().double()
    )
    near, far = (run(rule, torch.cat([honest, directions * size]), f) for size in (1e9, 1e12))
    centre = honest.mean(dim=0)
    radius = float((honest - centre).norm(dim=1).max())
    assert float((near - centre).norm()) <= 1.001 * radius
    assert float((far - centre).norm()) <= 1.001 * radius


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "mean_around_median"])
@settings(max_examples=25, deadline=None)
@given(drawn=draws(), seed=st.integers(0, 1000), size=st.sampled_from([1e6, 1e12, 1e300]))
def test_every_coordinate_stays_among_the_honest_ones(
    rule: str, drawn: tuple[torch.Tensor, int], seed: int, size: float
) -> None:
    values, f = drawn
    f = min(f, largest_f(rule, len(values)))
    honest = values[: len(values) - f]
    generator = torch.Generator().manual_seed(seed)
    hostile = torch.randn(f, values.shape[1], generator=generator).sign().double() * size
    result = run(rule, torch.cat([honest, hostile]), f)
    slack = 1e-12 * honest.abs().amax(dim=0)
    assert (result >= honest.amin(dim=0) - slack).all()
    assert (result <= honest.amax(dim=0) + slack).all()


@settings(max_examples=50, deadline=None)
@given(drawn=draws(), tau=st.floats(0.01, 10), iterations=st.integers(1, 4), size=st.floats(1, 1e12))
def test_centred_clipping_moves_at_most_tau_a_step(
    drawn: tuple[torch.Tensor, int], tau: float, iterations: int, size: float
) -> None:
    values = drawn[0] * size
    previous = torch.full((values.shape[1],), 3.0, dtype=torch.float64)
    config = AggregationConfig("centred_clipping", {"tau": tau, "iterations": iterations})
    clients = [ClientRow(f"{index:02}") for index in range(len(values))]
    result = aggregate(TensorMatrix(values), clients, config, context=RuleContext(previous=previous)).vector
    assert float((result - previous).norm()) <= iterations * tau * (1 + 1e-6) + 1e-9
    expected = previous.clone()
    for _ in range(iterations):
        away = values - expected
        expected = expected + (away * (tau / away.norm(dim=1, keepdim=True)).clamp(max=1)).mean(dim=0)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5 * (tau + 3))


@settings(max_examples=50, deadline=None)
@given(drawn=draws(), size=st.floats(1, 1e12))
def test_fltrust_is_never_longer_than_the_root_update(drawn: tuple[torch.Tensor, int], size: float) -> None:
    values = drawn[0] * size
    if not (values.sum(dim=1) > 0).any():
        return
    assert float(run("fltrust", values, 0).norm()) <= math.sqrt(values.shape[1]) * (1 + 1e-9)


def test_dnc_leaves_out_colluding_attackers() -> None:
    generator = torch.Generator().manual_seed(1)
    honest = torch.randn(16, 5000, generator=generator)
    hostile = honest.mean(dim=0) - 1.5 * honest.std(dim=0)
    values = torch.cat([honest, hostile.expand(4, -1)])
    clients = [ClientRow(f"silo-{index:02}") for index in range(20)]
    config = AggregationConfig("dnc", {"f": 4, "coordinates": 1000, "iterations": 3})
    result = aggregate(TensorMatrix(values), clients, config, seed=2)
    assert all(result.weights[f"silo-{index}"] == 0 for index in range(16, 20))
    assert torch.equal(result.vector, aggregate(TensorMatrix(values), clients, config, seed=2).vector)


def test_foolsgold_weighs_sybils_down() -> None:
    generator = torch.Generator().manual_seed(1)
    honest = torch.randn(6, 1000, generator=generator)
    sybils = torch.randn(1, 1000, generator=generator) + 0.05 * torch.randn(4, 1000, generator=generator)
    clients = [ClientRow(f"silo-{index:02}") for index in range(10)]
    values = torch.cat([honest, sybils])
    result = aggregate(TensorMatrix(values), clients, AggregationConfig("foolsgold"))
    shares = np.array([result.weights[client.name] for client in clients])
    assert shares[6:].max() < 1e-9
    assert shares[:6].min() > 0.1
    history = TensorMatrix(torch.cat([sybils, honest]))
    result = aggregate(
        TensorMatrix(values), clients, AggregationConfig("foolsgold"), context=RuleContext(history=history)
    )
    assert max(result.weights[f"silo-{index:02}"] for index in range(4)) < 1e-9
    assert min(result.weights[f"silo-{index:02}"] for index in range(4, 10)) > 0.1


def test_near_equal_updates_keep_their_distances() -> None:
    """Updates that differ by one part in 10⁴ beside a hostile row of norm 10⁶: Krum finds the nearest."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(200_000, generator=generator) * 10
    noise = torch.randn(9, 200_000, generator=generator) * 1e-3
    noise[4] *= 0.5
    values = torch.cat([common + noise, torch.full((1, 200_000), 1e6 / math.sqrt(200_000))])
    clients = [ClientRow(f"silo-{index}") for index in range(10)]
    result = aggregate(TensorMatrix(values), clients, AggregationConfig("krum", {"f": 1}))
    assert result.weights["silo-4"] == 1.0
    first = (values[0].double() - values[1].double()).norm()
    assert result.diagnosis.distance is not None
    assert result.diagnosis.distance[0, 1] == pytest.approx(float(first), rel=1e-6)
