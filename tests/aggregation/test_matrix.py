"""Rows in memory and rows in files give the same results, to the bit, whatever the size of the blocks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import (
    AggregationConfig,
    ClientRow,
    FileMatrix,
    MixedRows,
    RuleContext,
    TensorMatrix,
    aggregate,
    combine,
    gram,
)
from roundtable.aggregation.rows import matrix as matrix_module
from roundtable.aggregation.rows.matrix import CELL
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.core.errors import InvalidUpdate
from roundtable.privacy import CentralDP, SecureNoise

ROWS, COLUMNS = 11, 5 * CELL + 123
RULES: list[tuple[str, dict[str, Any]]] = [
    ("mean", {}),
    ("median", {}),
    ("trimmed_mean", {"f": 2}),
    ("mean_around_median", {"f": 2}),
    ("krum", {"f": 2}),
    ("multi_krum", {"f": 2}),
    ("bulyan", {"f": 2}),
    ("geometric_median", {}),
    ("minimum_diameter_averaging", {"f": 2}),
    ("centred_clipping", {"tau": 1.0, "iterations": 2}),
    ("monna", {"f": 2, "pivot": "silo-03"}),
    ("caf", {"f": 2}),
    ("smea", {"f": 2}),
    ("dnc", {"f": 2, "coordinates": 500, "iterations": 2}),
    ("fltrust", {}),
    ("foolsgold", {}),
    ("group_robust", {"f": 2, "rule": "trimmed_mean"}),
]
PRE: list[tuple[tuple[str, dict[str, Any]], ...]] = [
    (),
    (("arc", {"f": 2}), ("nnm", {"f": 2})),
    (("clip", {"norm": 1.0}),),
    (("bucketing", {"size": 2}),),
]


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, COLUMNS, generator=generator) + torch.randn(COLUMNS, generator=generator)
    return rows * torch.linspace(0.5, 2, ROWS)[:, None]


@pytest.fixture(scope="module")
def files(values: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / f"{index}.bin" for index in range(ROWS)]
    for path, row in zip(paths, values, strict=True):
        path.write_bytes(b"header.." + row.numpy().tobytes())
    return paths


def clients() -> list[ClientRow]:
    return [ClientRow(f"silo-{index:02}", 10 + index) for index in range(ROWS)]


def context(values: torch.Tensor) -> RuleContext:
    return RuleContext(previous=values[0] * 0.1, root_update=values.mean(dim=0))


@pytest.mark.parametrize("pre", PRE, ids=lambda pre: "+".join(name for name, _ in pre) or "alone")
@pytest.mark.parametrize(("rule", "parameters"), RULES, ids=[name for name, _ in RULES])
def test_files_give_what_memory_gives(
    rule: str,
    parameters: dict[str, Any],
    pre: tuple[tuple[str, dict[str, Any]], ...],
    values: torch.Tensor,
    files: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if pre and pre[0][0] == "bucketing":
        parameters = {**parameters, "f": 0} if "f" in parameters else parameters
        parameters = {**parameters, "pivot": 3} if "pivot" in parameters else parameters
    config = AggregationConfig(rule, parameters, pre)
    in_memory = aggregate(TensorMatrix(values), clients(), config, seed=3, context=context(values))
    for module in ("matrix", "file_matrix"):
        name = f"roundtable.aggregation.rows.{module}.block_width"
        monkeypatch.setattr(name, lambda rows, itemsize, budget: CELL)
    out_of_core = aggregate(
        FileMatrix(files, COLUMNS, offset=8), clients(), config, seed=3, context=context(values)
    )
    assert torch.equal(in_memory.vector, out_of_core.vector)
    assert in_memory.weights == out_of_core.weights


@pytest.mark.parametrize("pre", [(), (("arc", {"f": 2}), ("nnm", {"f": 2}))], ids=["alone", "arc+nnm"])
@pytest.mark.parametrize(("rule", "parameters"), RULES, ids=[name for name, _ in RULES])
def test_whatever_a_rule_reads_is_hashed(
    rule: str,
    parameters: dict[str, Any],
    pre: tuple[tuple[str, dict[str, Any]], ...],
    values: torch.Tensor,
    tmp_path: Path,
) -> None:
    """The lowest bit of one value: too little for a rule to notice by itself."""
    paths, digests = stored_rows(values, tmp_path)
    config = AggregationConfig(rule, parameters, pre)
    whole = FileMatrix(paths, COLUMNS, digests=digests)
    aggregate(whole, clients(), config, seed=3, context=context(values))
    flip(paths[5], 2 * COLUMNS)
    with pytest.raises(DamagedRows) as raised:
        aggregate(
            FileMatrix(paths, COLUMNS, digests=digests), clients(), config, seed=3, context=context(values)
        )
    assert raised.value.digests == (digests[5],)


@pytest.mark.parametrize("slices", [(), (slice(0, 9000), slice(9000, COLUMNS))], ids=["whole", "by layer"])
def test_whatever_central_noise_is_added_to_is_hashed(
    slices: tuple[slice, ...], values: torch.Tensor, tmp_path: Path
) -> None:
    paths, digests = stored_rows(values, tmp_path)
    mechanism = CentralDP(1.0, 1.0, float(ROWS), slices)
    mechanism.prepare(FileMatrix(paths, COLUMNS, digests=digests), SecureNoise())
    flip(paths[2], -1)
    with pytest.raises(DamagedRows):
        mechanism.prepare(FileMatrix(paths, COLUMNS, digests=digests), SecureNoise())


def stored_rows(values: torch.Tensor, folder: Path) -> tuple[list[Path], list[str]]:
    """Files with the rows alone, and their digests."""
    paths = [folder / str(index) for index in range(ROWS)]
    for path, row in zip(paths, values, strict=True):
        path.write_bytes(row.numpy().tobytes())
    return paths, [blake3(path.read_bytes()).hexdigest() for path in paths]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_order_of_arrival_does_not_show(values: torch.Tensor, files: list[Path]) -> None:
    order = [4, 1, 10, 0, 9, 3, 5, 2, 8, 6, 7]
    for rule, parameters in RULES:
        config = AggregationConfig(rule, parameters)
        sorted_rows = aggregate(TensorMatrix(values), clients(), config, 3, context=context(values))
        shuffled = [clients()[index] for index in order]
        for matrix in (
            TensorMatrix(values[order]),
            FileMatrix([files[index] for index in order], COLUMNS, offset=8),
        ):
            as_arrived = aggregate(matrix, shuffled, config, 3, context=context(values))
            assert torch.equal(sorted_rows.vector, as_arrived.vector), rule
            assert sorted_rows.weights == as_arrived.weights


def test_rows_left_out_leave_no_trace(values: torch.Tensor, files: list[Path]) -> None:
    broken = values.clone()
    broken[3, 77] = float("nan")
    broken[6] = float("inf")
    rest = [index for index in range(ROWS) if index not in (3, 6)]
    for rule, parameters in RULES:
        if rule == "monna":
            continue
        lowered = {**parameters, "f": 0} if "f" in parameters else parameters
        expected = aggregate(
            TensorMatrix(values[rest]),
            [clients()[index] for index in rest],
            AggregationConfig(rule, lowered),
            3,
            context=context(values),
        )
        config = AggregationConfig(rule, parameters)
        found = aggregate(TensorMatrix(broken), clients(), config, 3, context=context(values))
        torch.testing.assert_close(found.vector, expected.vector, rtol=1e-6, atol=1e-7)
        assert {exclusion.client for exclusion in found.excluded} == {"silo-03", "silo-06"}


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 3 * CELL),
    budget=st.integers(1, 1 << 20),
    data=st.data(),
)
def test_blocks_cover_every_column_once(rows: int, columns: int, budget: int, data: st.DataObject) -> None:
    values = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    matrix: Any = TensorMatrix(values)
    expected = values
    for _ in range(data.draw(st.integers(0, 2))):
        chosen = data.draw(st.lists(st.integers(0, matrix.rows - 1), min_size=1, max_size=6, unique=True))
        matrix, expected = matrix.select(chosen), expected[chosen]
    if data.draw(st.booleans()):
        mixing = np.eye(matrix.rows)[::-1] * 2
        matrix, expected = MixedRows(matrix, mixing), expected.flip(0) * 2
    position, seen = 0, []
    for start, stop, block in matrix.blocks(budget):
        assert start == position
        assert start % CELL == 0
        assert block.shape == (matrix.rows, stop - start)
        seen.append(block.clone())
        position = stop
    assert position == columns == matrix.columns
    assert torch.equal(torch.cat(seen, dim=1), expected)


def test_bfloat16_files_are_upcast(tmp_path: Path) -> None:
    values = torch.randn(3, CELL + 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    paths = []
    for index, row in enumerate(values):
        paths.append(tmp_path / f"{index}")
        paths[-1].write_bytes(row.view(torch.uint8).numpy().tobytes())
    matrix = FileMatrix(paths, CELL + 5, "bfloat16")
    assert torch.equal(matrix.block(10, CELL + 5), values[:, 10:].float())
    assert torch.equal(torch.cat([block for _, _, block in matrix.blocks(1)], dim=1), values.float())
    assert torch.equal(TensorMatrix(values).block(0, 9), values[:, :9].float())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(39))
    with pytest.raises(InvalidUpdate, match="has 39 bytes; 10 values of float32 need 40") as caught:
        FileMatrix([path], 10)
    assert caught.value.reason == "layout"
    with pytest.raises(InvalidUpdate, match="is missing"):
        FileMatrix([tmp_path / "none"], 1)
    with pytest.raises(InvalidUpdate, match="float64"):
        FileMatrix([path], 1, "float64")  # type: ignore[arg-type]


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "row"
    path.write_bytes(bytes(4 * CELL * 4))
    matrix = FileMatrix([path], 4 * CELL)
    os.truncate(path, 5 * CELL)
    with pytest.raises(InvalidUpdate, match="cut short"):
        gram(matrix)


def test_leaving_a_block_loop_early_closes_files_and_ends_the_reader(files: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    blocks = FileMatrix(files, COLUMNS, offset=8).blocks(1)
    next(blocks)
    blocks.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("updates")]
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_combining_few_rows_reads_no_other_file(
    values: torch.Tensor, files: list[Path], tmp_path: Path
) -> None:
    """A rule that keeps one update out of many must not read all of them again."""
    copies = [tmp_path / str(index) for index in range(3)]
    for copy, path in zip(copies, files, strict=False):
        copy.write_bytes(path.read_bytes())
    matrix = FileMatrix(copies, COLUMNS, offset=8)
    os.unlink(copies[0])
    os.unlink(copies[2])
    result = combine(matrix, np.array([0.0, 2.0, 0.0]))
    assert torch.equal(result, values[1] * 2)
    assert torch.equal(combine(matrix.select([0, 1]), np.array([0.0, 1.0])), values[1])


def test_no_step_copies_the_updates(values: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that ARC + NNM + trimmed mean makes is one block, not clients × parameters."""
    wide = values.repeat(1, 8)
    largest = 0
    mix = matrix_module.MixedRows._mix

    def watched(self: MixedRows, block: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, block.numel() * 8)
        return mix(self, block)

    monkeypatch.setattr(matrix_module.MixedRows, "_mix", watched)
    config = AggregationConfig("trimmed_mean", {"f": 2}, (("arc", {}), ("nnm", {})))
    aggregate(TensorMatrix(wide), clients(), config)
    assert 0 < largest <= 2 * matrix_module.MIX_BYTES < wide.numel() * 4 / 4


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidUpdate, match="row 1 has shape") as caught:
        TensorMatrix.from_vectors([torch.zeros(3), torch.zeros(4)])
    assert caught.value.reason == "layout"
    with pytest.raises(InvalidUpdate, match="floating-point"):
        TensorMatrix(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(InvalidUpdate, match="shape"):
        TensorMatrix(torch.zeros(3))
