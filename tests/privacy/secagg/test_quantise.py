"""Quantisation: never beyond the ring, unbiased, and as exact as its bound says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import AggregationError, InvalidUpdate, PrivacyError
from roundtable.privacy.mechanisms.rotation import Rotation
from roundtable.privacy.secagg import (
    Metric,
    QuantisedUpdate,
    Quantiser,
    Tally,
    choose_parameters,
    plain_sum,
    run_in_memory,
)
from roundtable.privacy.secagg.masks import RING_BITS


def ring_of(update: np.ndarray, weight: int, quantiser: Quantiser) -> np.ndarray:
    source = QuantisedUpdate(update, weight, quantiser)
    return source.block(0, len(source))


def turn(vector: np.ndarray) -> None:
    Rotation(b"public", len(vector)).forward(torch.from_numpy(vector))


@given(
    n=st.integers(1, 300),
    weight=st.integers(1, 40),
    ring_bits=st.sampled_from(RING_BITS),
    rotated=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=150, deadline=None)
def test_everybody_at_the_bound_does_not_overflow(
    n: int, weight: int, ring_bits: int, rotated: bool, seed: int
) -> None:
    """All n silos of the largest weight at the clip norm, in one coordinate or spread, rounded however it
    may be."""
    if ((1 << ring_bits) - 1) // (2 * n) < 1:
        with pytest.raises(PrivacyError, match="no room for a sum"):
            Quantiser(ring_bits, n, weight, 0.7)
        return
    length = 1 + seed % 60
    quantiser = Quantiser(ring_bits, n, weight, 0.7, length if rotated else 0)
    update = np.random.default_rng(seed).normal(size=length).astype(np.float32) * np.float32(seed % 3 * 1e30)
    update[seed % length] = [3e38, -3e38, 0.7][seed % 3]
    source = QuantisedUpdate(update, weight, quantiser, rotate=turn if rotated else None)
    integers = quantiser.signed(source.block(0, length))
    assert np.abs(integers).max() <= quantiser.top
    total = (n * integers.astype(object)) % (1 << ring_bits)
    np.testing.assert_array_equal(quantiser.signed(total.astype(np.uint64)), n * integers)


@pytest.mark.parametrize(("ring_bits", "silos"), [(8, 10), (8, 100), (12, 10)])
def test_rotated_rings_are_as_exact_as_stated_and_others_are_not(ring_bits: int, silos: int) -> None:
    """Updates as training makes them: heavy tails. Unrotated, the same ring rounds them to noise."""
    random, length = np.random.default_rng(3), 20_000
    rows = random.standard_t(2.1, size=(silos, length)) + random.standard_t(2.1, size=length)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    exact = rows.mean(0, dtype=np.float64)
    found = {}
    for spread in (0, length):
        quantiser = Quantiser(ring_bits, silos, 1, 1.0, spread)
        total = np.zeros(length, dtype=np.uint64)
        for row in rows:
            total += QuantisedUpdate(row, 1, quantiser, rotate=turn if spread else None).block(0, length)
        mean = quantiser.decode_mean(total, silos)
        if spread:
            Rotation(b"public", length).back(torch.from_numpy(mean))
        found[spread] = float(np.linalg.norm(mean - exact))
    stated = Quantiser(ring_bits, silos, 1, 1.0, length).expected_error(length, silos)
    assert 0.4 * stated < found[length] < stated
    assert found[0] > 4 * found[length]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_error_of_a_weighted_mean_is_below_its_bound(data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 12))
    ring_bits = data.draw(st.sampled_from(RING_BITS))
    quantiser = Quantiser(ring_bits, 12, 9, 1.5)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weights = random.integers(1, 10, m)
    updates = random.normal(size=(m, 50)) * random.choice([1e-3, 0.1, 5.0], size=(m, 1))
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    clipped = updates * np.minimum(1.0, 1.5 / norms)
    total = np.zeros(50, dtype=np.uint32)
    for update, weight in zip(updates, weights, strict=True):
        total = total + ring_of(update, int(weight), quantiser)
    total %= np.uint64(1 << ring_bits)
    mean = quantiser.decode_sum(total) / weights.sum()
    exact = weights @ clipped / weights.sum()
    bound = m * quantiser.unit / weights.sum()
    assert np.abs(mean - exact).max() < bound * (1 + 1e-6)
    assert bound <= quantiser.unit


def test_rounding_is_unbiased_and_its_variance_is_as_stated() -> None:
    """100,000 roundings of one value: the mean within six standard errors, the variance below a quarter."""
    quantiser = Quantiser(24, 4, 1, 1.0)
    value = 1.37 * quantiser.unit
    update = np.full(100_000, value / 1.0)
    quantiser_wide = Quantiser(24, 4, 1, float(np.linalg.norm(update)) + 1)
    steps = update / quantiser_wide.unit
    decoded = quantiser_wide.decode_sum(ring_of(update, 1, quantiser_wide)) / quantiser_wide.unit
    error = decoded - steps
    assert abs(error.mean()) < 6 * 0.5 / np.sqrt(100_000)
    assert error.var() <= 0.25 + 0.01
    assert set(np.unique(decoded)) <= {np.floor(steps[0]), np.ceil(steps[0])}


def test_rounding_is_new_each_time_unless_a_simulation_seeds_it() -> None:
    quantiser = Quantiser(16, 4, 1, 1.0)
    update = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 0.01
    assert not np.array_equal(ring_of(update, 1, quantiser), ring_of(update, 1, quantiser))
    seeded = [
        QuantisedUpdate(update, 1, quantiser, rounding=np.random.default_rng(5)).block(0, 1000)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(seeded[0], seeded[1])


@given(seed=st.integers(0, 1000), length=st.integers(1, 400), ring_bits=st.sampled_from(RING_BITS))
@settings(max_examples=40, deadline=None)
def test_rounding_lengthens_an_update_no_further_than_stated(seed: int, length: int, ring_bits: int) -> None:
    quantiser = Quantiser(ring_bits, 10, 2, 1.0)
    update = np.random.default_rng(seed).normal(size=length) * 10
    decoded = quantiser.decode_sum(ring_of(update, 2, quantiser)) / 2
    assert np.linalg.norm(decoded) < quantiser.norm_bound(length)


def test_the_norm_is_clipped_and_said_so() -> None:
    quantiser = Quantiser(32, 4, 1, 1.0)
    long, short = (
        QuantisedUpdate(np.full(4, 3.0), 1, quantiser),
        QuantisedUpdate(np.full(4, 0.4), 1, quantiser),
    )
    assert (long.clipped, short.clipped) == (True, False)
    np.testing.assert_allclose(quantiser.decode_sum(long.block(0, 4)), 0.5, atol=quantiser.unit)
    np.testing.assert_allclose(quantiser.decode_sum(short.block(0, 4)), 0.4, atol=quantiser.unit)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_updates_that_are_not_finite_are_not_masked(bad: float) -> None:
    with pytest.raises(InvalidUpdate, match="not finite") as caught:
        QuantisedUpdate(np.array([0.1, bad]), 1, Quantiser(32, 4, 1, 1.0))
    assert caught.value.reason == "non_finite"


def test_weights_beyond_the_bound_are_refused() -> None:
    quantiser = Quantiser(32, 4, 5, 1.0)
    for weight in (0, 6, -1):
        with pytest.raises(PrivacyError, match="between 1 and 5"):
            QuantisedUpdate(np.zeros(2), weight, quantiser)
    with pytest.raises(InvalidUpdate, match="total weight of 0"):
        quantiser.decode_mean(np.zeros(2, dtype=np.uint32), 0)


@given(start=st.integers(0, 130), length=st.integers(0, 130))
@settings(max_examples=40, deadline=None)
def test_blocks_are_windows_of_update_and_tail(start: int, length: int) -> None:
    quantiser = Quantiser(32, 4, 1, 1e9)
    update = np.arange(100.0)
    tail = np.arange(7, 38, dtype=np.uint32)
    source = QuantisedUpdate(update, 1, quantiser, tail, np.random.default_rng(0))
    stop = min(start + length, len(source))
    start = min(start, stop)
    block = source.block(start, stop)
    wanted = np.concatenate([np.rint(update / quantiser.unit), tail]).astype(np.int64)[start:stop]
    assert np.abs(block.astype(np.int64) - wanted).max(initial=0) <= 1
    np.testing.assert_array_equal(
        block[max(0, 100 - start) :], tail[max(0, start - 100) : max(0, stop - 100)]
    )


def test_memory_maps_are_read_in_blocks(tmp_path: object) -> None:
    np.save(f"{tmp_path}/update.npy", np.linspace(-1, 1, 200_000, dtype=np.float32))
    mapped = np.load(f"{tmp_path}/update.npy", mmap_mode="r")
    quantiser = Quantiser(32, 4, 1, 1e3)
    source = QuantisedUpdate(mapped, 1, quantiser)
    decoded = np.concatenate(
        [quantiser.decode_sum(source.block(at, min(at + 65536, 200_000))) for at in range(0, 200_000, 65536)]
    )
    np.testing.assert_allclose(decoded, mapped, atol=quantiser.unit)


@given(
    capacity=st.integers(1, 500),
    ring_bits=st.sampled_from(RING_BITS),
    counts=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20),
    values=st.lists(st.floats(-3, 3), min_size=20, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_tallies_add_up_exactly(
    capacity: int, ring_bits: int, counts: list[int], values: list[float]
) -> None:
    capacity = min(capacity, (1 << ring_bits - 1) - 1)
    counts = counts[:capacity]
    most = 1 << 20
    tally = Tally(
        ring_bits, capacity, (Metric("loss", 2.0), Metric("correct", 3.0, most), Metric("none", 1.0))
    )
    total = np.zeros(len(tally), dtype=np.uint64)
    for count, value in zip(counts, values, strict=False):
        measured = {"loss": (value, 1), "correct": (-value, count)}
        row = tally.encode({"weight": 3, "examples": count - 1, "clipped": 1}, measured)
        total = (total + row) % np.uint64(1 << ring_bits)
    counters, metrics = tally.decode(total, len(counts))
    m, weights = len(counts), np.minimum(counts, most)
    assert counters == {"weight": 3 * m, "examples": sum(counts) - m, "clipped": m}
    assert metrics.keys() == {"loss", "correct"}
    assert metrics["loss"] == (pytest.approx(np.clip(values[:m], -2, 2).sum(), abs=2 * m * 2.0**-39), m)
    expected = -(np.array(values[:m]) * weights).sum()
    assert metrics["correct"] == (pytest.approx(expected, abs=3 * most * m * 2.0**-39), weights.sum())


def test_the_tally_at_its_limit_does_not_overflow() -> None:
    for capacity, ring_bits in ((127, 8), (2047, 12), (255, 16), (256, 16), (4095, 24), (65535, 32)):
        tally = Tally(ring_bits, capacity)
        row = tally.encode(dict.fromkeys(("weight", "examples", "clipped"), (1 << 40) - 1))
        assert int(row.max()) * capacity < 1 << ring_bits
        counters, _ = tally.decode(row.astype(np.uint64) * np.uint64(capacity), capacity)
        assert counters["examples"] == capacity * ((1 << 40) - 1)
    with pytest.raises(PrivacyError, match="cannot hold a sum of 128"):
        Tally(8, 128)


@pytest.mark.parametrize(
    ("counters", "metrics", "words"),
    [
        ({"weight": 1, "examples": 1}, {}, "needs"),
        ({"weight": 1, "examples": -1, "clipped": 0}, {}, "examples = -1"),
        ({"weight": 1, "examples": 1 << 40, "clipped": 0}, {}, "40 bits"),
        ({"weight": 1, "examples": 1, "clipped": 0}, {"recall": (0.5, 1)}, "no place for .*recall"),
        ({"weight": 1, "examples": 1, "clipped": 0}, {"loss": (0.5, -1)}, "-1 examples"),
        ({"weight": 1, "examples": 1, "clipped": 0}, {"loss": (float("nan"), 1)}, "finite"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    counters: dict[str, int], metrics: dict[str, tuple[float, int]], words: str
) -> None:
    with pytest.raises(PrivacyError, match=words):
        Tally(32, 4, (Metric("loss", 1.0),)).encode(counters, metrics)


@pytest.mark.parametrize(
    "metrics",
    [
        (Metric("a", 1.0), Metric("a", 2.0)),
        (Metric("a", 0.0),),
        (Metric("a", np.inf),),
        (Metric("a", 1.0, 0),),
        (Metric("a", 1.0, 1 << 40),),
    ],
)
def test_metrics_need_names_and_bounds(metrics: tuple[Metric, ...]) -> None:
    with pytest.raises(PrivacyError, match="metric"):
        Tally(32, 4, metrics)


@given(element=st.integers(0, (1 << 32) - 1), place=st.integers(0, 3), silos=st.integers(3, 50))
@settings(max_examples=200, deadline=None)
def test_a_hostile_tail_moves_a_mean_within_its_bound_or_is_found(
    element: int, place: int, silos: int
) -> None:
    """It may put anything into an element, also what wraps around: no mean beyond the bound comes out."""
    tally = Tally(32, silos, (Metric("accuracy", 1.0, 1 << 24),))
    honest = tally.encode({"weight": 1, "examples": 1, "clipped": 0}, {"accuracy": (0.5, 100)})
    hostile = honest.copy()
    hostile[len(tally) - 4 + place] = element
    total = (honest.astype(np.uint64) * np.uint64(silos - 1) + hostile) % np.uint64(1 << 32)
    try:
        _, metrics = tally.decode(total.astype(np.uint32), silos)
    except AggregationError as error:
        assert "no honest silos can" in str(error)  # noqa: PT017 - either outcome is sound
        return
    value, count = metrics["accuracy"]
    assert 0 < count <= silos << 24
    assert abs(value) <= count + silos * (1 << 24) * 2.0**-38


def test_a_weighted_mean_through_the_whole_protocol() -> None:
    """Update, weight, counts and metrics in one masked vector; the coordinator decodes only sums."""
    plan = choose_parameters(6, 0.2, 0.1, weight_bound=5, clip_norm=2.0)
    quantiser, tally = Quantiser.of(plan), Tally.of(plan, (Metric("loss", 10.0),))
    random = np.random.default_rng(3)
    updates, weights = random.normal(size=(6, 30)) * 0.2, [1, 2, 3, 4, 5, 1]
    sources = []
    for update, weight in zip(updates, weights, strict=True):
        tail = tally.encode(
            {"weight": weight, "examples": 100 * weight, "clipped": 0}, {"loss": (weight / 2, 1)}
        )
        sources.append(QuantisedUpdate(update, weight, quantiser, tail))
    result = run_in_memory(sources, plan)
    counters, metrics = tally.decode(result.total[30:], len(result.survivors))
    assert counters == {"weight": 16, "examples": 1600, "clipped": 0}
    assert metrics["loss"] == (pytest.approx(8.0, abs=1e-9), 6)
    mean = quantiser.decode_mean(result.total[:30], counters["weight"])
    np.testing.assert_allclose(mean, weights @ updates / 16, atol=quantiser.unit + 1e-7)
    assert mean.dtype == np.float32
    seeded = [
        [
            QuantisedUpdate(u, w, quantiser, rounding=np.random.default_rng(i))
            for i, (u, w) in enumerate(zip(updates, weights, strict=True))
        ]
        for _ in range(2)
    ]
    np.testing.assert_array_equal(run_in_memory(seeded[0], plan).total, plain_sum(seeded[1], plan).total)
