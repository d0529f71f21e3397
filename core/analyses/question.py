"""What a question is: what it asks of rows, round by round, and what it makes of their sums.

A question goes through stages, of which `stage` among its public numbers tells; in stage 0 nothing but counts
is asked. Later stages ask for sums of those groups alone whose total reached the least count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from roundtable.core.analyses.exact_sums import Arrays, Digits, Doubles, Shape, Sums
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

DONE = 1000.0
"""The stage of a question that has its answer; one that cannot be answered has the stage −code."""
HIDDEN = -1.0
"""In the place of a count that is above 0 and below the least count."""
ROUNDED = 2.0**-57
"""How far off a silo's sum may be: half of the last place behind the point."""
_EXACT = 1e-8
_WHY = {
    1: "fewer rows than the least count, in all or in one of the groups that it compares",
    2: "the sums are singular: a column is constant, a sum of others, or spread over too little of its range",
    3: "perfect separation: a column tells the outcome for certain, so that its coefficient has no limit",
    4: "no convergence within the rounds of the analysis",
    5: "fewer than three rows for each coefficient: the fit would tell of single rows",
    6: "no events: everybody in these rows is censored",
    7: "the counts vary no more than Poisson's, so that alpha goes to 0: ask poisson",
    8: "fewer than three silos have rows enough to fit the model to their own",
    9: "too many rows have the event in one interval for Efron's ties, which take as many steps: ask "
    'ties = "breslow", or a finer grid (every)',
}
TOO_FEW, SINGULAR, SEPARATED, NO_LIMIT, SATURATED, NO_EVENTS, NO_SPREAD = 1, 2, 3, 4, 5, 6, 7
FEW_SILOS, MOST_TIES = 8, 9


@dataclass(frozen=True)
class Answer:
    """An answer in full precision: `values` by name, for programs; `header` and `rows` for people.

    `why` says why there is none; `hidden` how many cells were left out for being below the least count;
    `model` is a model for another library, as values that JSON has.
    """

    title: str
    ask: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    hidden: int = 0
    notes: Sequence[str] = ()
    model: Mapping[str, Any] | None = None


class Question:
    """One question of a survey; subclasses say how it is answered.

    `columns` are the descriptions of the study's columns; `least` is the least count of a cell.
    `small_cells`: a silo's own sums are of cells that hold few rows by their nature.
    """

    ask: ClassVar[str] = ""
    most_rounds: ClassVar[int] = 1
    tells_of_silos: ClassVar[bool] = False
    """Whether sums over few silos tell of each one's own figures, so that a silo's policy has to name it."""
    tells_counts_alone: ClassVar[bool] = False
    """Whether its public numbers are counts and follow from nothing else, so that they can be rounded."""
    small_cells: bool = False
    shows_silos: bool = False
    """Whether its answer shows single silos' own figures, which a silo's policy has to allow."""
    digits: Digits = Digits()
    """How its sums are cut, as the survey says."""
    round_to: int = 1
    """What counts are rounded to whole multiples of, as the survey says."""

    def __init__(self, columns: Mapping[str, ColumnTable], least: int, title: str) -> None:
        self.columns = columns
        self.least = least
        self.title = title

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it reads."""
        raise NotImplementedError

    @property
    def told(self) -> tuple[str, ...]:
        """The columns that it uses as an outcome, also of a test, or whose values divide people in groups."""
        return ()

    @property
    def counts(self) -> Mapping[str, Shape]:
        """The shapes of the counts that a silo sends."""
        raise NotImplementedError

    @property
    def reals(self) -> Mapping[str, Shape]:
        """The shapes of the real sums that a silo sends."""
        return {}

    @property
    def wholes(self) -> Mapping[str, Shape]:
        """The shapes of the sums of whole numbers, of either sign, that a silo sends."""
        return {}

    @property
    def histograms(self) -> Mapping[str, Shape]:
        """The shapes of the counts and whole numbers in cells that a silo sends, [1 + arrays, ...]."""
        return {}

    @property
    def public(self) -> Mapping[str, Shape]:
        """The shapes of its public numbers, without the stage."""
        raise NotImplementedError

    @property
    def kept(self) -> Mapping[str, Shape]:
        """The shapes of numbers that the coordinator keeps for itself from round to round; 0 at first."""
        return {}

    @property
    def rounds(self) -> int:
        """The most rounds that it takes."""
        return self.most_rounds

    def divide(self, silos: Sequence[str]) -> None:
        """Hears the names of the silos, in the order of their numbers; none where nobody has given them.
        ConfigError where it needs them, or others."""

    def why_in_the_clear(self) -> str:
        """Why it has to be seen which silo sent which sums; empty where their total does."""
        return ""

    def own_places(self, silo: int) -> Mapping[str, int]:
        """Of sums whose first axis is of silos, or groups of them: which place there is this silo's, or −1
        for a silo that has none. Its digits in the other places are those of 0."""
        return {}

    def sums_of(self, table: DataTable, public: Arrays, stage: int, silo: int) -> Sums:
        """The sums of the silo with this number."""
        return self.sums(table, public, stage)

    def run_by(self, code: Any) -> Question:
        """The same for code of one's own, which a question that is not built in needs."""
        return self

    def sums(self, table: DataTable, public: Arrays, stage: int) -> Sums:
        """A silo's sums of this stage."""
        raise NotImplementedError

    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        """The public and kept numbers that change, `stage` among them, from the sums over all silos; `public`
        has the kept ones, too."""
        raise NotImplementedError

    def answer(self, public: Arrays) -> Answer:
        """What the public numbers of a question that is `DONE` say."""
        raise NotImplementedError

    def report(self, public: Arrays) -> Answer:
        """The answer, or why there is none."""
        stage = float(public["stage"][0])
        if stage == DONE:
            found = self.answer(public)
            if self.round_to == 1:
                return found
            said = f"counts are rounded to multiples of {self.round_to}, and all else is made of those"
            return replace(found, notes=[*found.notes, said])
        code = int(-stage) if stage < 0 else NO_LIMIT
        return Answer(self.title, self.ask, why=_WHY[code] + self.blame(public, code))

    def blame(self, public: Arrays, code: int) -> str:
        """Which column it is, behind the reason why there is no answer."""
        return ""

    def hide(self, counts: Doubles) -> Doubles:
        """Counts with `HIDDEN` in the place of those below the least count."""
        return np.where((counts > 0) & (counts < self.least), HIDDEN, counts)

    def rounded(self, counts: Doubles) -> Doubles:
        """Counts as multiples of `round_to`, halves upwards; what is hidden stays so."""
        near = np.floor(counts / self.round_to + 0.5) * self.round_to
        return np.where(counts == HIDDEN, HIDDEN, near)

    def hide_cells(self, counts: Doubles, axes: tuple[int, ...]) -> Doubles:
        """The same for cells [lines, cells] whose sums along `axes` others may know, as from another question
        of the same survey: where what is hidden of a line is a single cell, or fewer rows together than the
        least count, the smallest other one that is not empty is hidden with it. What is left is rounded."""
        hidden = self.hide(counts)
        changed = True
        while changed:
            changed = False
            for axis in axes:
                for line, own in zip(
                    np.moveaxis(hidden, axis, -1), np.moveaxis(counts, axis, -1), strict=True
                ):
                    left, lost = np.flatnonzero(line > 0), line == HIDDEN
                    if left.size and lost.any() and (lost.sum() == 1 or own[lost].sum() < self.least):
                        line[left[own[left].argmin()]] = HIDDEN
                        changed = True
        return self.rounded(hidden)

    def check_possible(self, sums: Doubles, most: Doubles, who: str = "a silo") -> None:
        """AggregationError for sums beyond ± `most`, which no rows have that are as the columns say."""
        if (np.abs(sums) > most * (1 + 1e-9)).any():
            raise AggregationError(
                f"{self.title}: the round's sums are none that so many rows within the columns' ranges can "
                f"have: {who} sent something else than its sums"
            )

    def number(self, name: str) -> ColumnTable:
        """The description of a column of numbers with a range. ConfigError for any other."""
        found = self.described(name)
        if found.kind != "number":
            raise ConfigError(f"{self.title}: column {name!r} is a category, and {self.ask} needs a number")
        if found.least is None or found.most is None:
            raise ConfigError(
                f"{self.title}: column {name!r} has no least and most: sums travel in fixed point, scaled by "
                f"the range that the study states ([columns.{name}])"
            )
        return found

    def category(self, name: str) -> ColumnTable:
        """The description of a category. ConfigError for any other column."""
        found = self.described(name)
        if found.kind != "category" or not found.values:
            raise ConfigError(
                f"{self.title}: {self.ask} needs a category with its values, and column {name!r} is none: "
                f'set kind = "category" and values = […] in [columns.{name}]'
            )
        return found

    def described(self, name: str) -> ColumnTable:
        """The study's description of a column."""
        if name not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise ConfigError(f"{self.title}: the study has no column {name!r}; it has {known} ([columns])")
        return self.columns[name]


def silos_of(public: Arrays) -> float:
    """Over how many silos sums are; one where a silo adds up its own."""
    return max(float(public["silos"][0]), 1.0) if "silos" in public else 1.0


def unresolved(squares: Any, silos: float) -> Any:
    """Which sums of squares about a mean, in halves of a column's range, are not known to 1e-8: those of a
    constant column, or of one whose stated range is far wider than its values."""
    return ~(np.asarray(squares) > silos * ROUNDED / _EXACT)


def by_group(table: DataTable, by: str | None, groups: int) -> Doubles:
    """The group of each row, NaN where it is missing; all in group 0 where nothing divides them."""
    return table.column(by) if by is not None else np.zeros(len(table))


def cells(places: Sequence[Doubles], shape: Shape) -> Doubles:
    """How many rows are in each cell; a row with a missing place is in none."""
    whole = ~np.isnan(np.column_stack(places)).any(axis=1)
    flat = np.ravel_multi_index([place[whole].astype(np.int64) for place in places], shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).astype(np.float64).reshape(shape)
