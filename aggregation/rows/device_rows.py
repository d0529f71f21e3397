"""Rows of updates on a GPU: those of any other matrix, read there block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from roundtable.aggregation.rows.matrix import (
    BLOCK_BYTES,
    Block,
    DerivedRows,
    SelectedRows,
    TensorMatrix,
    UpdateMatrix,
)
from roundtable.core.errors import AggregationError

WORTH_MOVING = 1 << 24
"""Values of a round from which its rows are moved: below, a rule takes less time than the way there."""


def pays(matrix: UpdateMatrix) -> bool:
    """Whether these rows are worth moving to a GPU: a declared number of values, whatever is measured."""
    return matrix.device.type == "cpu" and matrix.rows * matrix.columns >= WORTH_MOVING


def gpu() -> torch.device:
    """The GPU that torch takes by default. Raises AggregationError where there is none."""
    if not torch.cuda.is_available():
        raise AggregationError(
            'aggregation.device = "cuda": torch sees no GPU here; set device = "cpu", or let a machine with '
            "one combine the updates"
        )
    return torch.device("cuda")


class DeviceRows(DerivedRows):
    """Rows of `base` on `device`: kept there where all of them fit, else read again in each pass."""

    def __init__(self, base: UpdateMatrix, device: torch.device) -> None:
        self.base = base
        self._device = device
        self._kept: TensorMatrix | None = None

    @property
    def rows(self) -> int:
        return self.base.rows

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    def block(self, start: int, stop: int) -> torch.Tensor:
        if self._kept is not None:
            return self._kept.block(start, stop)
        return self.base.block(start, stop).to(self._device)

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        if self._kept is not None:
            yield from self._kept.blocks(budget_bytes)
            return
        size = (self.rows, self.columns)
        whole = torch.empty(size, dtype=self.dtype, device=self._device) if self._fits() else None
        for start, stop, values in self.base.blocks(budget_bytes):
            there = values.to(self._device)
            if whole is not None:
                whole[:, start:stop] = there
            yield start, stop, there
        if whole is not None:
            self._kept = TensorMatrix(whole)

    def select(self, indices: Sequence[int]) -> UpdateMatrix:
        return SelectedRows(self, indices)

    def _fits(self) -> bool:
        """Into a third of what is free: rules work on copies of blocks, and others use the device too."""
        free = torch.cuda.mem_get_info(self._device)[0]
        return self.rows * self.columns * self.dtype.itemsize <= free // 3
