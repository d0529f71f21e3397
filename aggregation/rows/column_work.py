"""What a pass over the rows makes of each block of columns: sums for each cell, or one value for each column.

Every pass of every rule is one of these. A block needs nothing of any other, so that blocks can be worked on
anywhere: each work is a value of a few numbers and arrays, and the pass puts the results together in the
order of the columns (`row_passes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from roundtable.aggregation.rows.column_statistics import column_statistic
from roundtable.aggregation.rows.kernels import Kernels
from roundtable.aggregation.rows.matrix import CELL, block_ranges
from roundtable.aggregation.rows.reductions import (
    as_numpy,
    cell_on,
    cells_compiled,
    combine_block,
    in_float64,
)
from roundtable.core.seeds import numpy_generator


@dataclass(frozen=True)
class GramCells:
    """⟨row i, row j⟩ of all pairs, [rows, rows]."""

    kernels: ClassVar[bool] = True

    def at(self, start: int, stop: int) -> GramCells:
        return self

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        if compiled is not None:
            return cells_compiled(compiled, "gram_cells", values, pairs=True)
        return (as_numpy(cell @ cell.T) for cell in _cells(values))


@dataclass(frozen=True)
class NormCells:
    """‖row i‖², [rows]."""

    kernels: ClassVar[bool] = True

    def at(self, start: int, stop: int) -> NormCells:
        return self

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        if compiled is not None:
            return cells_compiled(compiled, "norm_cells", values)
        return (as_numpy((cell * cell).sum(1)) for cell in _cells(values))


@dataclass(frozen=True)
class AroundCells:
    """⟨row i − row c, row j − row c⟩ of all pairs, [rows, rows]."""

    centre: int
    kernels: ClassVar[bool] = False

    def at(self, start: int, stop: int) -> AroundCells:
        return self

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        for cell in _cells(values):
            apart = cell - cell[self.centre]
            yield as_numpy(apart @ apart.T)


@dataclass(frozen=True)
class ApartCells:
    """‖row i − row p‖², [rows], of the differences themselves."""

    pivot: int
    kernels: ClassVar[bool] = True

    def at(self, start: int, stop: int) -> ApartCells:
        return self

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        if compiled is not None:
            return cells_compiled(compiled, "apart_cells", values, self.pivot)
        return (as_numpy(((cell - cell[self.pivot]) ** 2).sum(1)) for cell in _cells(values))


@dataclass(frozen=True)
class AlongCells:
    """⟨row i, vector⟩ of all rows, and last ‖vector‖²: [rows + 1]."""

    vector: torch.Tensor | np.ndarray
    kernels: ClassVar[bool] = False

    def at(self, start: int, stop: int) -> AlongCells:
        return AlongCells(self.vector[start:stop])

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        vector = torch.as_tensor(self.vector)
        for start, stop in block_ranges(values.shape[1], cell_on(values.device)):
            part = in_float64(vector[start:stop].to(values.device))
            across = as_numpy(in_float64(values[:, start:stop]) @ part)
            yield np.append(across, float(part @ part))


@dataclass(frozen=True)
class SketchCells:
    """Each value, times the sign of its column, added to place column % width of its row: [rows, width].

    `first` is the number of the block's first cell: signs are drawn for each cell by itself.
    """

    seed: int
    width: int
    first: int = 0
    kernels: ClassVar[bool] = False

    def at(self, start: int, stop: int) -> SketchCells:
        return SketchCells(self.seed, self.width, self.first + start // CELL)

    def parts(self, values: torch.Tensor, compiled: Kernels | None) -> Iterable[np.ndarray]:
        for number, (start, stop) in enumerate(block_ranges(values.shape[1], CELL), self.first):
            signs = 2 * numpy_generator(self.seed, "signs", number).integers(0, 2, stop - start) - 1
            cell = as_numpy(in_float64(values[:, start:stop])) * signs
            whole = np.pad(cell, ((0, 0), (0, -cell.shape[1] % self.width)))
            yield whole.reshape(len(whole), -1, self.width).sum(axis=1)


@dataclass(frozen=True)
class Combination:
    """Σ_i factors[i] · row i."""

    factors: np.ndarray
    kernels: ClassVar[bool] = True

    def at(self, start: int, stop: int) -> Combination:
        return self

    def fill(self, values: torch.Tensor, compiled: Kernels | None, out: torch.Tensor) -> None:
        combine_block(values, self.factors, out, compiled)


@dataclass(frozen=True)
class OrderStatistic:
    """A statistic of each column in order: `comparators`, int32 [count, 2], are the network that sorts it."""

    comparators: np.ndarray
    statistic: int
    first: int
    last: int
    kernels: ClassVar[bool] = True

    def at(self, start: int, stop: int) -> OrderStatistic:
        return self

    def fill(self, values: torch.Tensor, compiled: Kernels | None, out: torch.Tensor) -> None:
        column_statistic(values, self.comparators, self.statistic, self.first, self.last, out, compiled)


CellWork: TypeAlias = GramCells | NormCells | AroundCells | ApartCells | AlongCells | SketchCells
"""Sums over columns: `parts` gives those of each cell of a block [rows, width], in order, in float64."""

FillWork: TypeAlias = Combination | OrderStatistic
"""A value for each column: `fill` writes those of a block [rows, width] into `out` [width]."""

ColumnWork: TypeAlias = CellWork | FillWork
"""`kernels` says whether compiled kernels can do it; `at` gives the work on the block of some columns: a
worker cuts that once more, counted from the block's first."""

_WORKS: Mapping[str, type[Any]] = {
    each.__name__: each
    for each in (
        GramCells,
        NormCells,
        AroundCells,
        ApartCells,
        AlongCells,
        SketchCells,
        Combination,
        OrderStatistic,
    )
}


def work_to_plain(work: ColumnWork) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The work as a JSON object and arrays by name."""
    values = {field.name: getattr(work, field.name) for field in fields(work)}
    arrays = {
        name: np.ascontiguousarray(value)
        for name, value in values.items()
        if isinstance(value, np.ndarray | torch.Tensor)
    }
    numbers = {name: value for name, value in values.items() if name not in arrays}
    return {"work": type(work).__name__, **numbers}, arrays


def work_from_plain(plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ColumnWork:
    """The work that `work_to_plain` wrote."""
    kind = _WORKS[plain["work"]]
    given = {**plain, **arrays}
    work: ColumnWork = kind(**{field.name: given[field.name] for field in fields(kind)})
    return work


def _cells(values: torch.Tensor) -> Iterator[Any]:
    for start, stop in block_ranges(values.shape[1], cell_on(values.device)):
        yield in_float64(values[:, start:stop])
