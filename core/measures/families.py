"""Metrics that are no mean: a task reports their state as many named sums, and whoever has added those up
over batches and silos works out the figures, without the task.

    NAME..KIND_SIZE..CELL       risk..auroc_20..pos_3

A cell's sum is over examples, and so is its count: they add up, are masked and bounded as any metric is. The
name says what is to be made of them: nobody who adds up needs to have the task.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

Sums = Mapping[str, tuple[float, int]]
Cells = Mapping[str, float]
Figures = Mapping[str, float | None]
MARK = ".."
MOST_CELLS = 256
_FAMILY = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,40})\.\.([a-z]+)_(\d{1,3})((?:_-?[0-9.e+-]{1,24}){0,2})")


@dataclass(frozen=True)
class Family:
    """One metric with state: `size` bins or classes, `span` the two ends of its bins where it has any."""

    name: str
    kind: str
    size: int
    span: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no kind of metric {self.kind!r}; there are {', '.join(KINDS)}")
        if self.size < 1 or len(self.cells) > MOST_CELLS:
            raise ValueError(
                f"{self.name}: {self.kind} of size {self.size} has {len(self.cells)} cells; 1 to "
                f"{MOST_CELLS} can be"
            )
        if self.kind == "quantiles" and not (len(self.span) == 2 and self.span[0] < self.span[1]):
            raise ValueError(f"{self.name}: quantiles need the two ends of their bins, not {self.span}")

    @property
    def prefix(self) -> str:
        """What stands before each cell."""
        span = "".join(f"_{end!r}" for end in self.span)
        return f"{self.name}{MARK}{self.kind}_{self.size}{span}"

    @property
    def cells(self) -> list[str]:
        """The names of its sums, without what stands before them."""
        return KINDS[self.kind].cells(self.size)

    def key(self, cell: str) -> str:
        """The whole name of a cell."""
        return f"{self.prefix}{MARK}{cell}"

    def figures(self, sums: Sums) -> dict[str, float | None]:
        """What the sums come to, by whole names; None where that is not defined, as with no example."""
        held = {cell: sums.get(self.key(cell), (0.0, 0)) for cell in self.cells}
        count = max((n for _, n in held.values()), default=0)
        values = {cell: value for cell, (value, _) in held.items()}
        try:
            found = KINDS[self.kind].figures(self, values, count)
        except ArithmeticError:
            # Sums that nobody measured: too large to be squared.
            return dict.fromkeys(self.figures({}))
        return {f"{self.name}_{figure}": _known(value) for figure, value in found.items()}


def family_of(text: str) -> Family | None:
    """The family that `NAME..KIND_SIZE`, or one of its cells, names; None for another text."""
    return _named(text.rpartition(MARK)[0] if text.count(MARK) == 2 else text)


@lru_cache(1024)
def _named(prefix: str) -> Family | None:
    """Of each silo and round every cell is asked for, and a family's cells all begin alike."""
    found = _FAMILY.fullmatch(prefix)
    if found is None:
        return None
    try:
        span = tuple(float(end) for end in found[4].split("_")[1:])
        return Family(found[1], found[2], int(found[3]), span)
    except ValueError:
        return None


def is_cell(name: str) -> bool:
    """Whether a metric is a part of another one's state, which no table shows."""
    return name.count(MARK) == 2 and family_of(name) is not None


def families_in(names: Iterable[str]) -> list[Family]:
    """The families whose cells are among these names."""
    found = {family: None for name in names if is_cell(name) and (family := family_of(name)) is not None}
    return list(found)


def expanded(bounds: Mapping[str, float]) -> dict[str, float]:
    """Bounds in which each family stands with all of its cells."""
    all_of: dict[str, float] = {}
    for name, bound in bounds.items():
        family = None if name.count(MARK) != 1 else family_of(name)
        all_of |= {name: bound} if family is None else {family.key(cell): bound for cell in family.cells}
    return all_of


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _over(value: float, by: float) -> float | None:
    return value / by if by else None


def _confusion(family: Family, cells: Cells, count: int) -> Figures:
    """Rows are labels. Macro means are over the classes that occur or are predicted, and a class that nobody
    predicts, or that does not occur, counts 0, as in scikit-learn."""
    size = family.size
    rows = [sum(cells[f"{i}_{j}"] for j in range(size)) for i in range(size)]
    columns = [sum(cells[f"{i}_{j}"] for i in range(size)) for j in range(size)]
    right = [cells[f"{i}_{i}"] for i in range(size)]
    there = [i for i in range(size) if rows[i] or columns[i]]
    precision = [_over(right[i], columns[i]) or 0.0 for i in there]
    recall = [_over(right[i], rows[i]) or 0.0 for i in there]
    f1 = [2 * right[i] / (rows[i] + columns[i]) for i in there]
    return {
        "accuracy": _over(sum(right), sum(rows)),
        "precision_macro": _over(sum(precision), len(there)),
        "recall_macro": _over(sum(recall), len(there)),
        "f1_macro": _over(sum(f1), len(there)),
        # One label and one prediction for each example: all micro means are the accuracy.
        "f1_micro": _over(sum(right), sum(rows)),
    }


def _ranking(family: Family, cells: Cells, count: int) -> Figures:
    """Scores in one bin are ties: half a pair each for the area, one threshold for the average precision."""
    positive = negative = pairs = precision = 0.0
    for i in reversed(range(family.size)):
        here, others = cells[f"pos_{i}"], cells[f"neg_{i}"]
        pairs += others * (positive + here / 2)
        positive, negative = positive + here, negative + others
        precision += here * (_over(positive, positive + negative) or 0.0)
    return {"auroc": _over(pairs, positive * negative), "average_precision": _over(precision, positive)}


def _calibration(family: Family, cells: Cells, count: int) -> Figures:
    """Expected calibration error (Guo et al. 2017, equation 3)."""
    number = sum(cells[f"n_{i}"] for i in range(family.size))
    gaps = sum(abs(cells[f"right_{i}"] - cells[f"said_{i}"]) for i in range(family.size))
    return {"ece": _over(gaps, number)}


def _regression(family: Family, cells: Cells, count: int) -> Figures:
    if not count:
        return {"rmse": None, "mae": None, "r2": None}
    spread = cells["yy"] - cells["y"] ** 2 / count
    unexplained = None if spread <= 0 else cells["ee"] / spread
    return {
        "rmse": math.sqrt(max(0.0, cells["ee"]) / count),
        "mae": cells["e"] / count,
        "r2": None if unexplained is None else 1 - unexplained,
    }


def _correlation(family: Family, cells: Cells, count: int) -> Figures:
    """Pearson's; not defined where either does not vary."""
    if not count:
        return {"pearson": None}
    spreads = [cells[one * 2] - cells[one] ** 2 / count for one in "xy"]
    shared = cells["xy"] - cells["x"] * cells["y"] / count
    # What is left of equal values is the rounding of their squares.
    varies = all(spread > 1e-12 * cells[one * 2] for spread, one in zip(spreads, "xy", strict=True))
    found = shared / math.sqrt(spreads[0] * spreads[1]) if varies else None
    return {"pearson": None if found is None else max(-1.0, min(1.0, found))}


def _concordance(family: Family, cells: Cells, count: int) -> Figures:
    """Harrell's C over the pairs of one batch."""
    return {"c_index": _over(cells["concordant"], cells["comparable"])}


def _quantiles(family: Family, cells: Cells, count: int) -> Figures:
    """Within a bin values are taken to be spread evenly."""
    low, high = family.span
    width, total = (high - low) / family.size, sum(cells.values())
    found: dict[str, float | None] = {}
    for percent in (5, 25, 50, 75, 95):
        wanted, below = total * percent / 100, 0.0
        found[f"p{percent}"] = None
        for i in range(family.size) if total > 0 else ():
            here = cells[str(i)]
            if here > 0 and below + here >= wanted:
                found[f"p{percent}"] = low + width * (i + (wanted - below) / here)
                break
            below += here
    return found


def _perplexity(family: Family, cells: Cells, count: int) -> Figures:
    """exp of the mean loss of a token, in nats."""
    return {"perplexity": math.exp(cells["nats"] / count) if count else None}


@dataclass(frozen=True)
class _Kind:
    cells: Callable[[int], list[str]]
    figures: Callable[[Family, Cells, int], Figures]


def _numbered(*names: str) -> Callable[[int], list[str]]:
    return lambda size: [f"{name}_{i}" for name in names for i in range(size)]


KINDS: Mapping[str, _Kind] = {
    "confusion": _Kind(lambda size: [f"{i}_{j}" for i in range(size) for j in range(size)], _confusion),
    "ranking": _Kind(_numbered("pos", "neg"), _ranking),
    "calibration": _Kind(_numbered("n", "said", "right"), _calibration),
    "regression": _Kind(lambda size: ["e", "ee", "y", "yy"], _regression),
    "correlation": _Kind(lambda size: ["x", "y", "xx", "yy", "xy"], _correlation),
    "concordance": _Kind(lambda size: ["concordant", "comparable"], _concordance),
    "quantiles": _Kind(lambda size: [str(i) for i in range(size)], _quantiles),
    "perplexity": _Kind(lambda size: ["nats"], _perplexity),
}
"""What there is: its cells by its size, and what they come to."""
