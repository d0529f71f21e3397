"""Columns that are combined elsewhere: the bits of one process, whoever dies of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from roundtable.aggregation import (
    AggregationConfig,
    ClientRow,
    FileMatrix,
    RuleContext,
    TensorMatrix,
    aggregate,
)
from roundtable.aggregation.rows import kernels, row_passes
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.aggregation.rows.row_passes import sharded_over
from roundtable.aggregation.rows.sketches import sketches
from roundtable.aggregation.shards import named_workers, shard_processes
from roundtable.aggregation.shards.named_workers import shard_workers
from roundtable.aggregation.shards.shard_processes import ShardProcess, ShardProcesses
from roundtable.core.errors import ConfigError

ROWS, COLUMNS, F = 11, 50_000, 2
RULES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("mean", {}, ()),
    ("median", {}, ()),
    ("mean_around_median", {"f": F}, ()),
    ("multi_krum", {"f": F}, ()),
    ("bulyan", {"f": F}, ()),
    ("monna", {"f": F, "pivot": "004"}, ()),
    ("geometric_median", {}, ()),
    ("centred_clipping", {"tau": 1.0, "iterations": 3}, ()),
    ("dnc", {"f": F}, ()),
    ("trimmed_mean", {"f": F}, ("arc", "nnm")),
)
Combine = Callable[[str, dict[str, Any], tuple[str, ...]], torch.Tensor]


@pytest.fixture(scope="module")
def workers() -> Iterator[ShardProcesses]:
    made = shard_workers("processes", 2)
    assert isinstance(made, ShardProcesses)
    yield made
    made.close()


@pytest.fixture
def updates(tmp_path: Path) -> tuple[list[Path], list[str]]:
    """Files in an order that is not that of their names, close to each other, and their digests."""
    common = np.random.default_rng(99).standard_normal(COLUMNS)
    paths = [tmp_path / f"{(7 * index) % ROWS:03}" for index in range(ROWS)]
    for index, path in enumerate(paths):
        own = np.random.default_rng(index).standard_normal(COLUMNS)
        (common + (1e-4 if index % 2 else 3.0) * own).astype(np.float32).tofile(path)
    return paths, [blake3(path.read_bytes()).hexdigest() for path in paths]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of this size are sharded, into many blocks."""
    monkeypatch.setattr(row_passes, "WORTH_SHARDING", 1)
    monkeypatch.setattr(row_passes, "BLOCK_BYTES", 1 << 20)


@pytest.fixture
def combine(updates: tuple[list[Path], list[str]], small_blocks: None) -> Combine:
    paths, digests = updates

    def work(rule: str, parameters: dict[str, Any], pre: tuple[str, ...] = ()) -> torch.Tensor:
        config = AggregationConfig(rule, parameters, tuple((step, {}) for step in pre))
        context = RuleContext(previous=torch.full((COLUMNS,), 0.5))
        clients = [ClientRow(path.name, 1 + index) for index, path in enumerate(paths)]
        rows = FileMatrix(paths, COLUMNS, digests=digests)
        return aggregate(rows, clients, config, 7, context=context).vector

    return work


@pytest.mark.parametrize("worth", [1, 1 << 60], ids=["kernels", "numpy"])
def test_workers_give_the_bits_of_one_process(
    workers: ShardProcesses, combine: Combine, monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(kernels, "WORTH_COMPILING", worth)
    # Workers read the size that they are told, against their own number.
    given = []
    original = ShardProcesses.give

    def give(self: ShardProcesses, order: Any, values: torch.Tensor) -> Any:
        size = kernels.load() is not None and worth == 1
        given.append(type(order.work).__name__)
        told = row_passes.ShardOrder(order.work, order.steps, 1 << 40 if size else 1)
        return original(self, told, values)

    monkeypatch.setattr(ShardProcesses, "give", give)
    for rule, parameters, pre in RULES:
        alone = combine(rule, parameters, pre)
        before = len(given)
        with sharded_over(workers):
            assert torch.equal(combine(rule, parameters, pre), alone), rule
        assert len(given) > before + 1, f"{rule} was not sharded"
    assert set(given) == {
        "AlongCells", "ApartCells", "AroundCells", "Combination", "GramCells", "NormCells", "OrderStatistic"
    }  # fmt: skip


def test_rows_in_memory_in_float64_and_in_another_order(workers: ShardProcesses, small_blocks: None) -> None:
    rows = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    clients = [ClientRow(f"{index:03}") for index in reversed(range(ROWS))]
    config = AggregationConfig("trimmed_mean", {"f": F}, (("bucketing", {"size": 2}),))
    alone = aggregate(TensorMatrix(rows), clients, config, 7).vector
    with sharded_over(workers):
        assert torch.equal(aggregate(TensorMatrix(rows), clients, config, 7).vector, alone)


def test_sketches_keep_angles_and_are_the_same_wherever_they_are_made(
    workers: ShardProcesses, updates: tuple[list[Path], list[str]], small_blocks: None
) -> None:
    rows = np.stack([np.fromfile(path, dtype=np.float32) for path in updates[0]]).astype(np.float64)
    alone = sketches(FileMatrix(updates[0], COLUMNS), 5, 128)
    with sharded_over(workers):
        assert np.array_equal(sketches(TensorMatrix(torch.from_numpy(rows)), 5, 128), alone)
    assert not np.allclose(sketches(FileMatrix(updates[0], COLUMNS), 6, 128), alone)
    cosines = [np.corrcoef(values) for values in (rows, alone)]
    # Rows of even numbers are nearly the common part with much noise, the others are nearly that alone.
    assert np.abs(cosines[0] - cosines[1]).max() < 0.45
    assert cosines[1][1, 3] > 0.999


def test_a_worker_that_is_killed_costs_no_bit_and_is_started_again(
    workers: ShardProcesses,
    combine: Combine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = combine("multi_krum", {"f": F})
    original, killed = ShardProcess.ask, []

    def ask(self: ShardProcess, *arguments: Any) -> np.ndarray:
        if not killed and self.process is not None:
            killed.append(self.process.pid)
            self.process.kill()
        return original(self, *arguments)

    monkeypatch.setattr(ShardProcess, "ask", ask)
    with caplog.at_level(logging.WARNING), sharded_over(workers):
        assert torch.equal(combine("multi_krum", {"f": F}), alone)
    assert "gave no answer for a block, which is worked on here: it died of signal 9" in caplog.text
    assert workers.ready() == 4
    living = [process.process.pid for process in workers.processes if process.process is not None]
    assert len(living) == 2
    assert killed[0] not in living


def test_a_round_whose_file_has_changed_fails_as_ever(
    workers: ShardProcesses, combine: Combine, updates: tuple[list[Path], list[str]]
) -> None:
    """Rows are hashed as they are handed out; what was given by then is waited for."""
    path = updates[0][4]
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with sharded_over(workers):
        with pytest.raises(DamagedRows):
            combine("geometric_median", {})
        path.write_bytes(sound)
        assert combine("geometric_median", {}).isfinite().all()


def test_without_ray_a_coordinator_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_workers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'combine = "ray" needs Ray: pip install "roundtable-fl\[ray\]"'):
        shard_workers("ray", None)


@pytest.mark.slow
def test_a_ray_cluster_gives_the_bits_of_one_process(
    combine: Combine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes of one core each, then none: a cluster that is lost costs no bit either."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install roundtable-fl[ray]")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    workers = shard_workers("ray", None)
    cases = RULES[1], RULES[3], RULES[-1]
    alone = [combine(*case) for case in cases]
    try:
        with sharded_over(workers):
            assert workers.ready() == 4
            assert all(torch.equal(combine(*case), bits) for case, bits in zip(cases, alone, strict=True))
            assert "worked on here" not in caplog.text
            cluster.shutdown()
            monkeypatch.setattr(shard_processes, "_START", 5.0)
            assert all(torch.equal(combine(*case), bits) for case, bits in zip(cases, alone, strict=True))
            assert "the Ray cluster gave no answer" in caplog.text
            assert "the Ray cluster cannot be used, rounds are combined without it" in caplog.text
    finally:
        workers.close()
        ray.shutdown()
