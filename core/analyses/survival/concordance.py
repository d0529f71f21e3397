"""Harrell's C-index of a score, from counts by time and score.

Pairs of people are compared where one has the event before the other leaves, or where the other leaves in
the same interval without it. The one with the event first should have the higher score; equal scores count
half (Harrell, Lee & Mark 1996). Scores are counted in cells: those that lie on the cells' grid are told apart
exactly, else a pair in one cell may be in either order, which bounds the index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, NO_EVENTS, TOO_FEW, Answer, Question, cells
from roundtable.core.analyses.survival.time_grid import TimeGrid
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

MOST_SCORES = 4096
_PAIRS = ("concordant", "discordant", "tied")


class Concordance(Question):
    """The C-index of a column of scores, of which a higher one means an earlier event.

    The coordinator publishes numbers of pairs, no cell.
    """

    ask: ClassVar[str] = "concordance"
    small_cells: bool = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        time: str,
        event: str,
        every: float,
        score: str,
        score_every: float,
    ) -> None:
        super().__init__(columns, least, title)
        self.time = time
        self.event = event
        self.score = score
        self.score_every = score_every
        self._grid = TimeGrid(self, time, event, every)
        span = self.number(score)
        self._from = float(span.least or 0.0)
        self.scores = math.ceil(2 * span.half / score_every + 0.5)
        if self.scores > MOST_SCORES:
            raise ConfigError(
                f"{title}: score_every = {score_every:g} makes {self.scores} cells of {score!r} from "
                f"{self._from:g} to {span.most:g}; up to {MOST_SCORES} can be: take a coarser grid"
            )

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.time, self.event, self.score)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        shape = (self._grid.intervals, self.scores)
        return {"events": shape, "censored": shape, "off": (1,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"rows": (2,), "pairs": (len(_PAIRS),), "exact": (1,)}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        values, died = table.column(self.score), table.column(self.event)
        step = (values - self._from) / self.score_every
        nearest = np.rint(step)
        whole = ~np.isnan(table.matrix(self.names)).any(axis=1)
        off = whole & (np.abs(step - nearest) > 1e-9 * np.maximum(1.0, np.abs(step)))
        place, shape = self._grid.place(table.column(self.time)), self.counts["events"]
        score = np.clip(nearest, 0, self.scores - 1)
        return {
            "events": cells([np.where(died == 1, place, np.nan), score], shape),
            "censored": cells([np.where(died == 0, place, np.nan), score], shape),
            "off": np.array([float(off.sum())]),
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        events, censored = sums["events"], sums["censored"]
        kinds = np.array([censored.sum(), events.sum()])
        if not kinds[1]:
            return {"stage": -float(NO_EVENTS)}
        if (self.hide(kinds) < 0).any() or kinds.sum() < self.least:
            return {"stage": -float(TOO_FEW)}
        gone = events + censored
        later = np.cumsum(gone[::-1], axis=0)[::-1] - events
        below = np.cumsum(later, axis=1) - later
        above = later.sum(axis=1, keepdims=True) - later - below
        pairs = np.array([(events * each).sum() for each in (below, above, later)])
        return {"stage": DONE, "rows": kinds, "pairs": pairs, "exact": np.array([sums["off"][0] == 0]) * 1.0}

    @override
    def answer(self, public: Arrays) -> Answer:
        pairs, exact = public["pairs"], bool(public["exact"][0])
        total = float(pairs.sum())
        index = float((pairs[0] + pairs[2] / 2) / total) if total else None
        within = 0.0 if exact or not total else float(pairs[2] / 2 / total)
        values: dict[str, Any] = {
            "n": int(public["rows"].sum()),
            "events": int(public["rows"][1]),
            "c_index": index,
            "within": within,
            **{name: int(each) for name, each in zip(_PAIRS, pairs, strict=True)},
        }
        notes = [] if total else ["no two people can be compared"]
        if not exact:
            notes.append(
                f"{self.score} is not on its grid of {self.score_every:g}: the index is within ± {within:.3g}"
            )
        header = ("score", "rows", "events", "C-index", "within", "pairs")
        row = [self.score, values["n"], values["events"], index, within, int(total)]
        return Answer(self.title, self.ask, header, [row], values, notes=notes)
