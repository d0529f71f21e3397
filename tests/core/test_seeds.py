"""Streams never change silently, and distinct paths have nothing to do with each other."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core import derive_seed, numpy_generator, torch_generator

PARTS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.text(max_size=6))
PATHS = st.lists(PARTS, max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((0,), 5356452572517080502),
        ((7, 3, "silo-a", "batches"), 1148967849845931940),
        ((7, 3, "silo-b", "batches"), 156581470273419171),
        (((1 << 63) - 1, "ü"), 5966786170888249239),
    ],
)
def test_known_answers(path: tuple[int | str, ...], expected: int) -> None:
    assert derive_seed(*path) == expected


def test_known_draws() -> None:
    assert torch_generator(7, 1, "a", "batches").initial_seed() == derive_seed(7, 1, "a", "batches")
    assert torch.randperm(8, generator=torch_generator(7, 1, "a", "batches")).tolist() == [
        2,
        7,
        1,
        5,
        0,
        6,
        3,
        4,
    ]
    assert numpy_generator(7, "partition").integers(0, 1000, 4).tolist() == [558, 453, 190, 435]


@given(st.lists(PATHS, min_size=2, max_size=8, unique_by=lambda path: repr(path)))
def test_distinct_paths_give_distinct_seeds(paths: list[tuple[int | str, ...]]) -> None:
    seeds = [derive_seed(5, *path) for path in paths]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "bc"), ("ab", "c")), ((1,), ("1",)), ((1, 2), (12,)), (("",), ()), ((0, 1), (1, 0))],
)
def test_paths_that_look_alike(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert derive_seed(0, *one) != derive_seed(0, *other)


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_an_integer_is_an_integer_whoever_made_it(number: int) -> None:
    assert derive_seed(number, number, "x") == derive_seed(3, 3, "x")


def test_floats_are_no_part_of_a_path() -> None:
    with pytest.raises(TypeError):
        derive_seed(0, 1.0)  # type: ignore[arg-type]


def test_streams_of_neighbours_are_uncorrelated() -> None:
    draws = torch.stack([torch.randn(2000, generator=torch_generator(0, n, "noise")) for n in range(20)])
    correlations = torch.corrcoef(draws) - torch.eye(20)
    # 190 pairs of independent normal series: |r| beyond 5/sqrt(2000) has probability about 1e-4.
    assert correlations.abs().max() < 5 / 2000**0.5


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    torch.randn(3, generator=torch_generator(4))
    numpy_generator(4).random(3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_derives_the_same(hash_seed: str) -> None:
    code = "from roundtable.core import derive_seed; print(derive_seed(7, 3, 'silo-a', 'batches'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed},
    )
    assert int(done.stdout) == derive_seed(7, 3, "silo-a", "batches")
