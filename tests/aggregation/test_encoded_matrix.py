"""Rows that are decoded as they are read: the same values as rows that were decoded before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blake3 import blake3

from roundtable.aggregation import rows_in_files
from roundtable.aggregation.rows.matrix import CELL, UpdateMatrix
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.errors import InvalidUpdate

COLUMNS = 40 * CELL + 77
CHAINS = ["int8", "int4(block=256, rounding=stochastic)"]


def written(
    folder: Path, chain: str, rows: int = 3
) -> tuple[list[Path], list[StreamKey], list[str], torch.Tensor]:
    encoding = get_encoding(chain)
    paths, keys, digests, values = [], [], [], torch.empty(rows, COLUMNS)
    for row in range(rows):
        vector = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(row))
        key = StreamKey(5, f"silo-{row}", 2, 1)
        data = b"".join(encoding.encode(vector, key))
        encoding.decode(data, values[row], key)
        path = folder / f"{row}"
        path.write_bytes(data)
        paths.append(path)
        keys.append(key)
        digests.append(blake3(data).hexdigest())
    return paths, keys, digests, values


def joined(matrix: UpdateMatrix, budget: int = 1) -> torch.Tensor:
    return torch.cat([values.clone() for _, _, values in matrix.blocks(budget)], 1)


@pytest.mark.parametrize("chain", CHAINS)
def test_blocks_windows_and_chosen_rows_are_the_decoded_ones(tmp_path: Path, chain: str) -> None:
    paths, keys, digests, values = written(tmp_path, chain)
    matrix = rows_in_files(paths, COLUMNS, [get_encoding(chain)] * len(paths), keys, digests)
    assert torch.equal(joined(matrix), values)
    assert torch.equal(joined(matrix, 64 << 20), values)
    assert torch.equal(joined(matrix.select([2, 0])), values[[2, 0]])
    for start, stop in [
        (0, 5),
        (5, CELL + 3),
        (CELL + 3, CELL + 3),
        (9 * CELL + 1, 30 * CELL),
        (7, COLUMNS),
        (3, 9),
    ]:
        assert torch.equal(matrix.block(start, stop), values[:, start:stop])


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_bytes_that_changed_on_the_disk_end_the_pass(tmp_path: Path, place: int) -> None:
    paths, keys, digests, _ = written(tmp_path, "int8")
    data = bytearray(paths[1].read_bytes())
    data[place] ^= 0xFF
    paths[1].write_bytes(data)
    with pytest.raises(DamagedRows) as error:
        joined(rows_in_files(paths, COLUMNS, [get_encoding("int8")] * len(paths), keys, digests))
    assert error.value.digests == (digests[1],)


@pytest.mark.parametrize("change", [-1, 1])
def test_files_of_another_length(tmp_path: Path, change: int) -> None:
    paths, keys, _, _ = written(tmp_path, "int8")
    paths[2].write_bytes((paths[2].read_bytes() + b"\0")[: paths[2].stat().st_size + change])
    with pytest.raises(InvalidUpdate, match="bytes too"):
        joined(rows_in_files(paths, COLUMNS, [get_encoding("int8")] * len(paths), keys))
