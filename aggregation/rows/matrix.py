"""Rows of updates, read in column blocks: the only shape in which a rule ever sees its input.

A matrix of n clients × d parameters may be a tensor in memory or a set of files larger than memory.
Rules read it block by block through `blocks`, or not at all: most of them need only the Gram matrix
(`roundtable.aggregation.rows.gram`) and one linear combination of the rows.

Reductions over columns walk a fixed grid of `CELL` columns and add the cells in order, and blocks
always begin and end on that grid. So the result does not depend on how large the blocks were, how
many threads worked, or where the rows are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from roundtable.core.errors import InvalidUpdate

CELL = 8192
"""Columns in one cell of the grid on which every reduction over columns is laid out."""

BLOCK_BYTES = 64 << 20
"""Default size of a block: large enough to read files at full speed, small beside any memory."""

MIX_BYTES = 1 << 20
"""Blocks that are computed or copied are this small on purpose: they are written and at once read again, from
the cache."""

Block = tuple[int, int, torch.Tensor]
"""`(start, stop, values)`: columns start to stop of every row, values of shape [rows, stop − start]."""


class UpdateMatrix(Protocol):
    """Rows of updates: n clients × d parameters, in float32 or float64."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """What `block` returns: float32, or float64 where the rows are kept in it."""

    @property
    def device(self) -> torch.device: ...

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Columns start to stop, of shape [rows, stop − start]; may be a view, must not be written to."""

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All columns in order, each block at most about `budget_bytes`; valid until the next one."""

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        """The rows named by `indices`, in that order, without a copy."""


def accelerated(device: torch.device) -> bool:
    """Whether torch works on rows of this device; on a CPU, compiled kernels and NumPy do."""
    return device.type != "cpu"


def block_width(rows: int, itemsize: int, budget_bytes: int) -> int:
    """Columns in a block of at most `budget_bytes`: a whole number of cells, at least one."""
    return max(1, budget_bytes // (max(rows, 1) * itemsize * CELL)) * CELL


def block_ranges(columns: int, width: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of successive blocks of `width` columns."""
    for start in range(0, columns, width):
        yield start, min(start + width, columns)


class TensorMatrix:
    """Rows in one tensor [n, d], on CPU or CUDA; float32 and float64 are kept, other floats upcast a block
    at a time. What is measured of the rows is remembered: do not write to the tensor afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise InvalidUpdate(
                "layout",
                f"updates must be a floating-point tensor [clients, parameters], not {tensor.dtype} of shape "
                f"{list(tensor.shape)}",
            )
        self._tensor = tensor.detach()

    @classmethod
    def from_vectors(cls, vectors: Sequence[torch.Tensor]) -> TensorMatrix:
        """Stacks flat vectors (a copy); raises InvalidUpdate where their lengths differ."""
        lengths = [tuple(vector.shape) for vector in vectors]
        for index, shape in enumerate(lengths):
            if shape != lengths[0] or len(shape) != 1:
                raise InvalidUpdate(
                    "layout",
                    f"row {index} has shape {list(shape)} and row 0 has {list(lengths[0])}: every update "
                    "must be one flat vector of the layout that the round announced",
                )
        return cls(torch.stack(list(vectors)) if vectors else torch.empty(0, 0))

    @property
    def rows(self) -> int:
        return self._tensor.shape[0]

    @property
    def columns(self) -> int:
        return self._tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self._tensor.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self._tensor[:, start:stop].to(self.dtype)

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        width = block_width(self.rows, self.dtype.itemsize, budget_bytes)
        for start, stop in block_ranges(self.columns, width):
            yield start, stop, self.block(start, stop)

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return SelectedRows(self, indices)


class DerivedRows:
    """Rows made of those of another matrix, `base`: as long, of the same type, in the same place."""

    base: UpdateMatrix

    @property
    def columns(self) -> int:
        return self.base.columns

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device


class SelectedRows(DerivedRows):
    """Some rows of another matrix, in a given order."""

    def __init__(self, base: UpdateMatrix, indices: Sequence[int]) -> None:
        self.base = base
        self.indices = tuple(int(index) for index in indices)
        self._index = torch.tensor(self.indices, dtype=torch.int64, device=base.device)

    @property
    def rows(self) -> int:
        return len(self.indices)

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.base.block(start, stop).index_select(0, self._index)

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        for start, _, values in self.base.blocks(budget_bytes // 2):
            yield from self.copies(start, values)

    def copies(self, start: int, values: torch.Tensor) -> Iterator[Block]:
        """The chosen rows of a block of the base that begins at column `start`, in pieces small enough to be
        written and at once read again from the cache."""
        width = block_width(self.rows, self.dtype.itemsize, _piece_bytes(self.device, BLOCK_BYTES))
        for left, right in block_ranges(values.shape[1], width):
            yield start + left, start + right, values[:, left:right].index_select(0, self._index)

    @property
    def in_order(self) -> bool:
        """Whether the rows keep the order of the base: what is known of that then holds to the bit."""
        return all(left < right for left, right in pairwise(self.indices))

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return SelectedRows(self, indices)


def _piece_bytes(device: torch.device, budget_bytes: int) -> int:
    """How much to compute or copy at a time; on an accelerator many small steps cost more than they save."""
    return budget_bytes if accelerated(device) else min(budget_bytes, MIX_BYTES)


class MixedRows(DerivedRows):
    """Linear combinations of the rows of another matrix, computed a block at a time.

    Row i is Σ_j `mixing[i, j]` · row j of `base`; mixing is [m, n] in float64. Norm clipping, ARC,
    nearest-neighbour mixing and bucketing are all of this form, so none of them copies the updates. Sums
    are taken in float64 and rounded once, so that the result does not depend on the shape of a block.
    """

    def __init__(self, base: UpdateMatrix, mixing: np.ndarray) -> None:
        self.mixing: np.ndarray = np.ascontiguousarray(mixing, dtype=np.float64)
        if isinstance(base, MixedRows):
            self.mixing = self.mixing @ base.mixing
        self.base = base.base if isinstance(base, MixedRows) else base
        self._factors = torch.from_numpy(self.mixing).to(base.device)

    @property
    def rows(self) -> int:
        return len(self.mixing)

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self._mix(self.base.block(start, stop))

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        width = block_width(self.rows, self.dtype.itemsize, _piece_bytes(self.device, budget_bytes))
        for start, stop, values in self.base.blocks(budget_bytes // 2):
            for left, right in block_ranges(stop - start, width):
                yield start + left, start + right, self._mix(values[:, left:right])

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return MixedRows(self.base, self.mixing[list(indices)])

    def _mix(self, values: torch.Tensor) -> torch.Tensor:
        if accelerated(values.device):
            return (self._factors @ values.double()).to(self.dtype)
        return torch.from_numpy(self.mixing @ values.numpy().astype(np.float64)).to(self.dtype)
