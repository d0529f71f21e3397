"""Passes over the rows of a round: each block of columns is worked on, the results are put together in order.

Where workers have been named (`sharded_over`), the columns of a large round are sharded: this process reads
the rows, once for each pass and hashed as ever, hands each block to whoever is free, and adds up what comes
back in the order of the columns. What is done with a block and how sums are added up stays the same, so the
result is the same to the bit, and it does not matter who worked on which block, or whether somebody died of
it: a block whose worker gives no answer is worked on here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from roundtable.aggregation.rows.column_work import (
    CellWork,
    ColumnWork,
    FillWork,
    work_from_plain,
    work_to_plain,
)
from roundtable.aggregation.rows.kernels import Kernels, blocks_with_kernels, kernels_for, lying_in
from roundtable.aggregation.rows.matrix import (
    BLOCK_BYTES,
    Block,
    MixedRows,
    SelectedRows,
    TensorMatrix,
    UpdateMatrix,
    accelerated,
)

WORTH_SHARDING = 1 << 24
"""Values of a round (rows × columns) from which its columns are sharded: a declared number, not measured."""


@dataclass(frozen=True)
class ShardOrder:
    """What is to be made of one block of columns.

    `steps` come before the work: rows that are chosen, int64 [k], or mixed, float64 [m, n]. `size` is the
    number of values of the whole round: it says, there as here, whether compiled kernels are used.
    """

    work: ColumnWork
    steps: tuple[np.ndarray, ...]
    size: int

    def made_of(self, values: torch.Tensor) -> np.ndarray:
        """The result for a block [rows, width]: [width], or the sums of each cell, [cells, …]."""
        matrix: UpdateMatrix = TensorMatrix(values)
        for step in self.steps:
            matrix = MixedRows(matrix, step) if step.ndim == 2 else SelectedRows(matrix, step.tolist())
        if isinstance(self.work, FillWork):
            out = torch.empty(values.shape[1], dtype=matrix.dtype)
            _fill_here(matrix, self.work, out, self.size)
            return out.numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            return np.stack(list(_parts_here(matrix, self.work, self.size)))

    def to_plain(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The order as a JSON object and arrays by name."""
        plain, arrays = work_to_plain(self.work)
        steps = {f"step {place}": step for place, step in enumerate(self.steps)}
        return {**plain, "size": self.size, "steps": len(steps)}, {**arrays, **steps}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ShardOrder:
        """The order that `to_plain` wrote."""
        steps = tuple(arrays[f"step {place}"] for place in range(plain["steps"]))
        return cls(work_from_plain(plain, arrays), steps, plain["size"])


class ShardWorkers(Protocol):
    """Whoever works on blocks of columns beside this process."""

    def ready(self) -> int:
        """How many blocks they take at a time; 0 where there is nobody now.

        Called before a pass, while they have nothing to do: who has died is started again, and waited for.
        """

    def give(self, order: ShardOrder, values: torch.Tensor) -> Future[np.ndarray]:
        """Has somebody work on a block [rows, width], which is copied; waits for whoever is free first.

        The answer is what `order.made_of` gives, whatever happens to the worker.
        """

    def close(self) -> None:
        """Ends them."""


_workers: ContextVar[ShardWorkers | None] = ContextVar("shard workers", default=None)


@contextmanager
def sharded_over(workers: ShardWorkers) -> Iterator[None]:
    """Within it, and in this thread, large rounds in the memory or files of this host go over the workers."""
    token = _workers.set(workers)
    try:
        yield
    finally:
        _workers.reset(token)


def sum_over_cells(matrix: UpdateMatrix, work: CellWork, shape: tuple[int, ...]) -> np.ndarray:
    """What the work makes of each cell, added up in order: float64 of `shape`."""
    total = np.zeros(shape)
    size = matrix.rows * matrix.columns
    workers, most = _workers_for(matrix, size)
    if workers is None:
        parts = _parts_here(matrix, work, size)
    else:
        parts = (part for _, _, sums in _sharded(workers, most, matrix, work, size) for part in sums)
    # A row that is not finite must spoil its own sums only, and silently: the caller looks for it.
    with np.errstate(invalid="ignore", over="ignore"):
        for part in parts:
            total += part
    return total


@dataclass(frozen=True, eq=False)
class ColumnPass:
    """A vector [columns] that one pass over the rows gives, made when it is asked for.

    `size` is the number of values of the round, of which the matrix may be a part.
    """

    matrix: UpdateMatrix
    work: FillWork
    size: int

    @classmethod
    def over(cls, matrix: UpdateMatrix, work: FillWork) -> ColumnPass:
        """The pass over a round's whole matrix."""
        return cls(matrix, work, matrix.rows * matrix.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.matrix.columns,)

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first column, values) of successive blocks; the values are the caller's."""
        workers, most = _workers_for(self.matrix, self.size)
        if workers is not None:
            for start, _, made in _sharded(workers, most, self.matrix, self.work, self.size):
                yield start, torch.from_numpy(made)
            return
        for start, stop, values, compiled in _blocks(self.matrix, self.work, self.size):
            yield start, self._made_of(start, stop, values, compiled)

    def whole(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The vector, in `out` where that is given."""
        if out is None:
            out = torch.empty(self.matrix.columns, dtype=self.matrix.dtype, device=self.matrix.device)
        if _workers_for(self.matrix, self.size)[0] is None:
            _fill_here(self.matrix, self.work, out, self.size)
            return out
        for start, values in self.blocks():
            out[start : start + len(values)] = values
        return out

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Some columns by themselves, [stop − start]: a look at the vector, not a pass over it."""
        values = self.matrix.block(start, stop)
        compiled = kernels_for(values, self.size) if self.work.kernels else None
        return self._made_of(start, stop, values, compiled)

    def _made_of(self, start: int, stop: int, values: torch.Tensor, compiled: Kernels | None) -> torch.Tensor:
        made = torch.empty(stop - start, dtype=self.matrix.dtype, device=self.matrix.device)
        self.work.at(start, stop).fill(values, compiled, made)
        return made


def _parts_here(matrix: UpdateMatrix, work: CellWork, size: int) -> Iterator[np.ndarray]:
    for start, stop, values, compiled in _blocks(matrix, work, size):
        yield from work.at(start, stop).parts(values, compiled)


def _fill_here(matrix: UpdateMatrix, work: FillWork, out: torch.Tensor, size: int) -> None:
    for start, stop, values, compiled in _blocks(matrix, work, size):
        work.at(start, stop).fill(values, compiled, out[start:stop])


def _blocks(
    matrix: UpdateMatrix, work: ColumnWork, size: int
) -> Iterator[tuple[int, int, torch.Tensor, Kernels | None]]:
    if work.kernels:
        return blocks_with_kernels(matrix, size)
    return ((start, stop, values, None) for start, stop, values in matrix.blocks())


def _workers_for(matrix: UpdateMatrix, size: int) -> tuple[ShardWorkers | None, int]:
    """The workers for a pass, if any, and how many blocks they take at a time."""
    workers = _workers.get()
    if workers is None or size < WORTH_SHARDING or accelerated(matrix.device):
        return None, 0
    most = workers.ready()
    return (workers, most) if most else (None, 0)


def _sharded(
    workers: ShardWorkers, most: int, matrix: UpdateMatrix, work: ColumnWork, size: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """The result for each block, in the order of the columns."""
    blocks, steps = _base(matrix, work)
    given: deque[tuple[int, int, Future[np.ndarray]]] = deque()
    try:
        for start, stop, values in blocks(BLOCK_BYTES):
            given.append((start, stop, workers.give(ShardOrder(work.at(start, stop), steps, size), values)))
            if len(given) > most:
                start, stop, answer = given.popleft()
                yield start, stop, answer.result()
        while given:
            start, stop, answer = given.popleft()
            yield start, stop, answer.result()
    finally:
        wait([answer for _, _, answer in given])


def _base(
    matrix: UpdateMatrix, work: ColumnWork
) -> tuple[Callable[[int], Iterator[Block]], tuple[np.ndarray, ...]]:
    """The blocks to read, and what makes the matrix's rows of theirs; cut as `_blocks` would cut them."""
    if type(matrix) is SelectedRows and work.kernels:
        base, order = lying_in(matrix)
        return base.blocks, (order,)
    steps: list[np.ndarray] = []
    parts = 1
    while type(matrix) is SelectedRows or type(matrix) is MixedRows:
        chosen: Sequence[int] | np.ndarray = (
            matrix.mixing if isinstance(matrix, MixedRows) else np.array(matrix.indices, dtype=np.int64)
        )
        steps.insert(0, np.asarray(chosen))
        matrix, parts = matrix.base, 2 * parts
    return (lambda budget: matrix.blocks(budget // parts)), tuple(steps)
