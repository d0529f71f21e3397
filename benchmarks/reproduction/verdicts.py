"""Whether ours agrees with what was published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .cells import CellTable, GroupFile
from .results import Measured, Results

HALF_A_POINT = 0.005
Verdict = Literal["agrees", "differs", "too few seeds", "not run", "shown"]


@dataclass(frozen=True)
class PartRow:
    """One part of a cell; it is judged where its deviation is published."""

    part: str
    theirs: float | None
    their_deviation: float | None
    ours: float | None
    our_deviation: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Row:
    """A cell with what was measured; `difference` is ours − theirs in their deviations."""

    group: str
    cell: CellTable
    needed: int
    ours: Measured | None
    verdict: Verdict
    parts: tuple[PartRow, ...]

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.cell.value is None or not self.cell.deviation:
            return None
        return (self.ours.mean - self.cell.value) / self.cell.deviation


@dataclass(frozen=True)
class OrderRow:
    """An order with the two means; seeds are those that both cells have."""

    claim: str
    smaller: float
    larger: float
    seeds: int
    verdict: Verdict


def judge(cell: CellTable, needed: int, ours: Measured | None) -> Verdict:
    """Agrees within one published deviation or half a point, whichever is more."""
    if ours is None:
        return "not run"
    if not cell.judged:
        return "shown"
    if ours.seeds < needed:
        return "too few seeds"
    assert cell.value is not None
    assert cell.deviation is not None
    return _within(ours.mean, cell.value, cell.deviation)


def _within(ours: float, theirs: float, deviation: float) -> Verdict:
    return "agrees" if abs(ours - theirs) <= max(deviation, HALF_A_POINT) else "differs"


def judge_parts(
    parts: tuple[str, ...], cell: CellTable, whole: Verdict, ours: Measured | None
) -> Iterator[PartRow]:
    """Each part by the same rule; where nothing is said of the cell, nothing is said of its parts."""
    for place, part in enumerate(parts):
        theirs = cell.by_part[place] if cell.by_part else None
        deviation = cell.by_part_deviation[place] if cell.by_part_deviation else None
        mine, spread = (ours.parts[part], ours.part_deviations[part]) if ours else (None, None)
        verdict = whole
        if whole in ("agrees", "differs"):
            assert mine is not None
            verdict = "shown"
            if theirs is not None and deviation is not None:
                verdict = _within(mine, theirs, deviation)
        yield PartRow(part, theirs, deviation, mine, spread, verdict)


def rows(known: dict[str, GroupFile], results: Results) -> Iterator[Row]:
    """All cells of all groups in their order."""
    for name, group in known.items():
        for cell in group.cell:
            ours = results.measured(name, group, cell)
            needed = group.seeds(cell)
            verdict = judge(cell, needed, ours)
            parts = tuple(judge_parts(group.group.parts, cell, verdict, ours))
            yield Row(name, cell, needed, ours, verdict, parts)


def orders(name: str, group: GroupFile, results: Results) -> Iterator[OrderRow]:
    """The group's orders, over the seeds that both cells have."""
    cells = {cell.id: cell for cell in group.cell}
    for order in group.order:
        pair = [results.of(name, group, cells[cell]) for cell in (order.smaller, order.larger)]
        common = sorted(pair[0].keys() & pair[1].keys())
        if not common:
            yield OrderRow(order.claim, float("nan"), float("nan"), 0, "not run")
            continue
        smaller, larger = (sum(side[seed].value for seed in common) / len(common) for side in pair)
        verdict: Verdict = "agrees" if smaller < order.share * larger else "differs"
        if len(common) < group.group.seeds:
            verdict = "too few seeds"
        yield OrderRow(order.claim, smaller, larger, len(common), verdict)
