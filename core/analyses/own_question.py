"""A question that code of one's own answers: which sums it asks for, round by round, and of which groups.

Everybody but the silos and whoever reads the answer needs only its `OwnForm`: totals of counts come first,
totals of sums follow in the rounds that it states, and all of them are public. The coordinator runs no code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from roundtable.core.analyses.ask_table import AskTable, Described
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, HIDDEN, TOO_FEW, Answer, Question
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnName, ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml_tables import Table, as_tuple

_MOST_ROUNDS = 20
SumName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
_ShapeField = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...], BeforeValidator(as_tuple), Field(max_length=4)
]
_Columns = Annotated[tuple[ColumnName, ...], BeforeValidator(as_tuple), Field(max_length=200)]


class OwnSum(Table):
    """Sums of real numbers over the rows of each cell of a count.

    A silo sends none for a cell whose total count is below the least count.
    """

    of: SumName = Field(description="the count over whose rows it is")
    round: int = Field(2, ge=2, le=_MOST_ROUNDS, description="the round in which it is asked")
    shape: _ShapeField = Field((), description="numbers for each cell of the count, behind its own shape")


class OwnForm(Table):
    """What an analysis of one's own reads and sends."""

    reads: _Columns = Field((), description="the columns that it reads")
    told: _Columns = Field((), description="those of them that it uses as an outcome or a group")
    counts: dict[SumName, _ShapeField] = Field(
        default_factory=dict, max_length=50, description="numbers of rows, asked in round 1: name and shape"
    )
    sums: dict[SumName, OwnSum] = Field(default_factory=dict, max_length=200, description="sums by name")

    @model_validator(mode="after")
    def _consistent(self) -> OwnForm:
        if both := sorted({*self.counts} & {*self.sums}):
            raise ValueError(f"{', '.join(map(repr, both))}: the name of a count and of a sum")
        for name, each in self.sums.items():
            if each.of not in self.counts:
                known = ", ".join(self.counts) or "none"
                raise ValueError(f"sum {name!r} is over the rows of {each.of!r}, which is no count: {known}")
        if gaps := set(range(2, self.rounds + 1)) - {each.round for each in self.sums.values()}:
            raise ValueError(f"no sum is asked in round {min(gaps)}: number the rounds from 2 on")
        if strange := [name for name in self.told if name not in self.reads]:
            raise ValueError(f"told names {', '.join(map(repr, strange))}, which it does not read")
        return self

    @property
    def rounds(self) -> int:
        """How many rounds it takes."""
        return max((each.round for each in self.sums.values()), default=1)


class OwnCode(Protocol):
    """What runs at a silo, and where the answer is read."""

    def form(self, columns: Described) -> OwnForm:
        """What it asks for."""

    def count(self, table: DataTable) -> Mapping[str, Any]:
        """The counts of a silo's rows."""

    def add_up(self, table: DataTable, known: Arrays, round: int) -> Mapping[str, Any]:
        """The sums of a silo's rows that are asked in a round."""

    def answer(self, known: Arrays, columns: Described) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """(header, rows) of the table that people read."""


class OwnTable(AskTable):
    """An analysis of one's own: the code that the survey names."""

    why_exact: ClassVar[str] = "nothing bounds what one row changes of the sums that other code makes"
    ask: Literal["own"] = Field(description="this kind of question")
    form: OwnForm | None = Field(
        None, description="what it reads and sends; written from the code where the survey is read"
    )

    def make(self, columns: Described, least: int, title: str) -> Question:
        """The question."""
        if self.form is None or not self.form.counts:
            raise ConfigError(
                f'{title}: ask = "own" is what the survey\'s code asks: name it as code = "file.py:Class"'
            )
        return OwnQuestion(columns, least, title, self.form)


class OwnQuestion(Question):
    """Counts, then sums over the rows of those cells whose total reached the least count."""

    ask: ClassVar[str] = "own"

    def __init__(self, columns: Mapping[str, ColumnTable], least: int, title: str, form: OwnForm) -> None:
        super().__init__(columns, least, title)
        self.form = form
        self._code: OwnCode | None = None
        for name in form.reads:
            self.described(name)

    @override
    def run_by(self, code: Any) -> OwnQuestion:
        bound = copy.copy(self)
        bound._code = code
        return bound

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self.form.reads

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.form.told

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return self.form.counts

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        counts = self.form.counts
        return {name: (*counts[each.of], *each.shape) for name, each in self.form.sums.items()}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {**self.counts, **self.reals}

    @property
    @override
    def rounds(self) -> int:
        return self.form.rounds

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        code = self._code
        if code is None:
            raise TaskError(f'{self.title}: ask = "own" needs the code that asks, as the task of the job')
        if code.form(self.columns) != self.form:
            raise TaskError(
                f"{self.title}: {type(code).__name__} asks for other sums here than the analysis says: it is "
                "another version of the code"
            )
        if stage == 0:
            found = self._shaped(code.count(table), self.counts, "count()")
            for name, counts in found.items():
                if not ((counts >= 0) & (counts <= len(table)) & (counts == np.rint(counts))).all():
                    raise TaskError(f"{self.title}: count() gives {name!r}, which are no numbers of rows")
            return found
        asked = self._asked_in(stage)
        found = self._shaped(code.add_up(table, self._known(public), stage + 1), asked, "add_up()")
        return {name: np.where(self._open(public, name), values, 0.0) for name, values in found.items()}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        last = stage + 1 == self.form.rounds
        after = DONE if last else stage + 1.0
        if stage == 0:
            hidden = {name: self._hidden(sums[name]) for name in self.counts}
            if not any((counts >= self.least).any() for counts in hidden.values()):
                after = -float(TOO_FEW)
            return {"stage": after, **hidden}
        return {"stage": after, **{name: sums[name] for name in self._asked_in(stage)}}

    @override
    def answer(self, public: Arrays) -> Answer:
        known = self._known(public)
        totals = {name: values.tolist() for name, values in known.items()}
        hidden = sum(int((public[name] == HIDDEN).sum()) for name in self.counts)
        if self._code is None:
            rows = [[name, place, value] for name, each in known.items() for place, value in _flat(each)]
            note = "these are the totals: the code that makes an answer of them is not here"
            return Answer(
                self.title,
                self.ask,
                ["total", "place", "value"],
                rows,
                {"totals": totals},
                "",
                hidden,
                [note],
            )
        header, lines = self._code.answer(known, self.columns)
        rows = [[_plain(value) for value in line] for line in lines]
        named = [dict(zip(header, row, strict=True)) for row in rows]
        return Answer(
            self.title, self.ask, list(header), rows, {"totals": totals, "rows": named}, hidden=hidden
        )

    def _asked_in(self, stage: int) -> dict[str, Shape]:
        asked = {name for name, each in self.form.sums.items() if each.round == stage + 1}
        return {name: shape for name, shape in self.reals.items() if name in asked}

    def _hidden(self, counts: Doubles) -> Doubles:
        """Small counts, and beside a single one of a line the smallest other, as others may know the line's
        sum."""
        if counts.ndim == 0:
            return self.hide(counts)
        lines = counts.reshape(-1, counts.shape[-1])
        return self.hide_cells(lines, (1,)).reshape(counts.shape)

    def _open(self, public: Arrays, name: str) -> npt.NDArray[np.bool_]:
        """Whether the cells of a sum have rows enough, in a shape that goes with the sum's."""
        each = self.form.sums[name]
        counts = public[each.of]
        return (counts >= self.least).reshape(*counts.shape, *(1 for _ in each.shape))

    def _known(self, public: Arrays) -> dict[str, Doubles]:
        """The totals so far, NaN where they are hidden or not asked yet."""
        stage = float(public["stage"][0])
        reached = self.form.rounds + 1 if stage == DONE else int(stage) + 1
        known = {name: np.where(public[name] == HIDDEN, np.nan, public[name]).copy() for name in self.counts}
        for name, each in self.form.sums.items():
            if each.round < reached or stage == DONE:
                known[name] = np.where(self._open(public, name), public[name], np.nan)
        return known

    def _shaped(self, made: Mapping[str, Any], wanted: Mapping[str, Shape], by: str) -> dict[str, Doubles]:
        if set(made) != set(wanted):
            said = f"{', '.join(sorted(map(str, made)))} where {', '.join(sorted(wanted))} are asked"
            raise TaskError(f"{self.title}: {by} gives {said}")
        found = {}
        for name, shape in wanted.items():
            values = np.asarray(made[name], dtype=np.float64)
            if values.shape != tuple(shape):
                raise TaskError(
                    f"{self.title}: {by} gives {name!r} in the shape {list(values.shape)}, and {list(shape)} "
                    "is stated"
                )
            if not np.isfinite(values).all():
                raise TaskError(f"{self.title}: {by} gives {name!r} with a value that is not finite")
            found[name] = values
        return found


def _flat(values: Doubles) -> list[tuple[str, float | None]]:
    places = ["".join(f"[{at}]" for at in place) for place in np.ndindex(values.shape)]
    return list(zip(places, [_plain(value) for value in values.ravel()], strict=True))


def _plain(value: Any) -> Any:
    """A value that JSON has; None for a number that is not defined."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if np.isfinite(number) else None
