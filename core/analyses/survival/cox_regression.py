"""Cox's proportional hazards by Newton's method, on sums over risk sets.

Two rounds a step. In the first, silos send by interval the sums over those who leave in it, of which the
likelihood and its gradient follow; a step that does not raise the likelihood is halved. In the second, from
the public hazard, each sends one matrix, the part of the information that is a sum over rows (after Lu et
al. 2015, WebDISCO, which sends such a matrix for every time). Stratified by silo, risk sets are those of one
silo, and nothing leaves by time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import (
    HEADER,
    coefficient_rows,
    inverted,
    solve,
)
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import (
    DONE,
    MOST_TIES,
    NO_EVENTS,
    NO_LIMIT,
    SEPARATED,
    SINGULAR,
    TOO_FEW,
    Answer,
    by_group,
)
from roundtable.core.analyses.regressions.newton_fits import CLOSE, FAR, FIRST_STEP, NewtonFit
from roundtable.core.analyses.survival.fitted_hazards import baseline_hazards, fitted, likelihood_note
from roundtable.core.analyses.survival.proportional_hazards import (
    TIME_FUNCTIONS,
    departures,
    departures_note,
    schoenfeld_test,
)
from roundtable.core.analyses.survival.risk_sets import (
    RiskCurves,
    RiskRows,
    RiskSums,
    by_cell,
    influences,
    of_events,
    risk_curves,
    risk_sums,
    second_moments,
)
from roundtable.core.analyses.survival.time_grid import TimeGrid, merged
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_LAST_STEP, _RESIDUALS, _GONE = 61, 900, 1e-6
_MOST_TIED = 200_000
"""Events of an interval for which Efron's ties take seconds a step."""


class Cox(NewtonFit):
    """Cox regression with Breslow's or Efron's ties, optionally stratified by a category, by silo, or both.

    `every` is the width of the grid. Intervals are merged, in each stratum, until at least the least count
    leave each; with Efron's ties, whose sums tell those with the event apart, that many of both kinds.
    """

    ask: ClassVar[str] = "cox"
    weighted: ClassVar[bool] = False
    most_rounds: ClassVar[int] = _LAST_STEP + 2

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        time: str,
        event: str,
        every: float,
        on: tuple[str, ...],
        ties: Literal["efron", "breslow"] = "efron",
        strata: str | None = None,
        by_silo: bool = False,
        robust: bool = False,
        proportional: bool = False,
    ) -> None:
        super().__init__(columns, least, title, event, on)
        self.time = time
        self.event = event
        self.ties = ties
        self.strata = strata
        self.by_silo = by_silo
        self.small_cells = not by_silo
        self.robust = robust
        self.proportional = proportional
        self.labels = self.category(strata).labels if strata is not None else ["all"]
        self._grid = TimeGrid(self, time, event, every)

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.time, *super().names, *([self.strata] if self.strata is not None else []))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.time, self.event, *([self.strata] if self.strata is not None else []))

    @property
    @override
    def _free(self) -> int:
        return self._width

    @property
    def _local(self) -> Shape:
        """Strata and intervals of one silo."""
        return (len(self.labels), self._grid.intervals)

    @property
    def _cells(self) -> Shape:
        """Strata and intervals of which silos tell."""
        return (len(self.labels), 1) if self.by_silo else self._local

    @property
    def _curved(self) -> bool:
        """Whether silos are told the curves of which residuals follow."""
        return (self.robust or self.proportional) and not self.by_silo

    def _if(self, there: bool, *shape: int) -> Shape:
        return shape if there else (1,)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"events": self._cells, "censored": self._cells, "levels": (max(1, len(self._levels)),)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        p = self._width
        shared = not self.by_silo
        return {
            "first": (p,),
            "second": (p,),
            "beyond": (1,),
            "likelihood": (1,),
            "gradient": (p,),
            "information": (p, p),
            "leaving": self._if(shared, *self._cells, 1 + p),
            "dying": self._if(shared and self.ties == "efron", *self._cells, 1 + p),
            "sandwich": self._if(self.robust, p, p),
            "departures": self._if(self.proportional, len(TIME_FUNCTIONS), p),
        }

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        p = self._width
        curves = self._if(self._curved, *self._cells, p)
        return {
            "rows": (2,),
            "events": self._cells,
            "leavers": self._cells,
            "places": self._cells,
            "ends": self._cells,
            "used": (len(self.labels),),
            "mean": (p,),
            "sd": (p,),
            "slopes": (p,),
            "before": (p,),
            "likelihood": (1,),
            "null": (1,),
            "gradient": (p,),
            "outer": (p, p),
            "hazard": self._cells,
            "tied": self._cells,
            "middle": curves,
            "drift": curves,
            "tied_drift": curves,
            "hessian": (p, p),
            "at_zero": (p,),
            "sandwich": self._if(self.robust, p, p),
            "departures": self._if(self.proportional, len(TIME_FUNCTIONS), p),
            "blame": (1,),
        }

    def _whole(self, table: DataTable) -> DataTable:
        """The rows without a missing value."""
        whole = ~np.isnan(table.matrix(self.names)).any(axis=1)
        return DataTable({name: table.column(name)[whole] for name in self.names}, self.columns)

    def _weights(self, kept: DataTable, public: Arrays) -> Doubles:
        """Of the whole rows."""
        return np.ones(len(kept))

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        kept = self._whole(table)
        design, died = self._design(kept)
        stratum = by_group(kept, self.strata, len(self.labels))
        place = self._grid.place(kept.column(self.time))
        if stage == 0:
            at = np.zeros_like(place) if self.by_silo else place
            people = RiskRows(design, stratum, at, died, np.ones(len(died)), self._cells)
            kinds = by_cell(np.column_stack([died, 1 - died]), people.flat, self._cells)
            return {
                "events": kinds[..., 0],
                "censored": kinds[..., 1],
                "levels": self._level_counts(table),
            }
        if stage < FIRST_STEP:
            return self.standardising(design, public, stage)
        if not self.by_silo:
            place = public["places"][stratum.astype(np.int64), place.astype(np.int64)]
        columns, weights = (design - public["mean"]) / public["sd"], self._weights(kept, public)
        rows = RiskRows(columns, stratum, place, died, weights, self._local)
        return self._of_silo(rows, public, stage) if self.by_silo else self._of_all(rows, public, stage)

    def _of_all(self, rows: RiskRows, public: Arrays, stage: int) -> dict[str, Doubles]:
        """Sums for risk sets over all silos."""
        slopes = public["slopes"]
        if stage == _RESIDUALS:
            curves = (public[name] for name in ("hazard", "tied", "middle", "drift", "tied_drift"))
            felt = influences(rows, slopes, *curves)
            found = {"sandwich": felt.T @ felt} if self.robust else {}
            return {**found, "departures": departures(rows, public)} if self.proportional else found
        if stage % 2 == 0:
            return {"information": second_moments(rows, slopes, public["hazard"], public["tied"])}
        sums = risk_sums(rows, slopes)
        if sums is None:
            return {"beyond": np.ones(1)}
        found = {**of_events(rows, slopes), "leaving": sums.leaving}
        return {**found, "dying": sums.dying} if self.ties == "efron" else found

    def _of_silo(self, rows: RiskRows, public: Arrays, stage: int) -> dict[str, Doubles]:
        """A silo's part of the likelihood where its people are a stratum of their own."""
        slopes, sums = public["slopes"], risk_sums(rows, public["slopes"])
        if sums is None:
            return {"beyond": np.ones(1)}
        events = by_cell(rows.died[:, None], rows.flat, rows.cells)[..., 0]
        own = of_events(rows, slopes)
        curves = risk_curves(sums, events, own["fallen"], self.ties == "efron")
        if curves is None:
            return {"beyond": np.ones(1)}
        if stage == _RESIDUALS:
            felt = influences(
                rows, slopes, curves.hazard, curves.tied, curves.middle, curves.drift, curves.tied_drift
            )
            return {"sandwich": felt.T @ felt}
        return {
            "likelihood": own["likelihood"] + curves.likelihood,
            "gradient": own["gradient"] + curves.gradient,
            "information": second_moments(rows, slopes, curves.hazard, curves.tied) - curves.outer,
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            return self._counted(sums)
        if stage < FIRST_STEP:
            return self.standardised(public, sums, stage, float(public["rows"].sum()))
        if stage == _RESIDUALS:
            return {"stage": DONE, "sandwich": sums["sandwich"], "departures": sums["departures"]}
        if stage % 2 == 0:
            return self._newton(public, sums["information"] - public["outer"], stage)
        return self._evaluated(public, sums, stage)

    def _counted(self, sums: Arrays) -> dict[str, Any]:
        """The grid, from the counts; or why there is none."""
        events, censored = sums["events"], sums["censored"]
        kinds = np.array([censored.sum(), events.sum()])
        efron = self.ties == "efron"
        groups = [
            [own, other] if efron else [own + other] for own, other in zip(events, censored, strict=True)
        ]
        totals = np.array([[each.sum() for each in group] for group in groups])
        code = self._enough(float(kinds.sum()), sums["levels"])
        if not kinds[1]:
            code = NO_EVENTS
        elif kinds[1] < self.least or (self.hide(totals) < 0).any():
            code = TOO_FEW
        places, ends, kept, gone = (np.zeros(self._cells) for _ in range(4))
        used = np.ones(len(self.labels))
        if not self.by_silo:
            for number, group in enumerate(groups):
                starts = merged(np.array(group), self.least)
                used[number] = len(starts)
                places[number] = np.repeat(np.arange(len(starts)), np.diff([*starts, self._grid.intervals]))
                ends[number, : len(starts)] = self._grid.ends(starts)
                kept[number, : len(starts)] = np.add.reduceat(events[number], starts)
                gone[number, : len(starts)] = np.add.reduceat(np.sum(group, axis=0), starts)
            if (used < 2).all() and not code:
                code = TOO_FEW
        if efron and kept.max(initial=0.0) > _MOST_TIED and not code:
            code = MOST_TIES
        shown = {"rows": self.hide(kinds), "places": places, "ends": ends, "used": used}
        return {
            "stage": -float(code) if code else 1.0,
            **shown,
            **({} if code else {"events": kept, "leavers": gone}),
        }

    def _evaluated(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        """On with Newton's step where the likelihood has risen, else half of the way back."""
        curves: RiskCurves | None = None
        likelihood, gradient = sums["likelihood"], sums["gradient"]
        if not self.by_silo and not sums["beyond"][0]:
            dying = sums["dying"] if self.ties == "efron" else np.zeros_like(sums["leaving"])
            events = public["events"]
            fallen = sums.get("fallen", events)
            curves = risk_curves(RiskSums(sums["leaving"], dying), events, fallen, self.ties == "efron")
            if curves is not None:
                likelihood = likelihood + curves.likelihood
                gradient = gradient + curves.gradient
        last = float(public["likelihood"][0])
        failed = bool(sums["beyond"][0]) or (curves is None and not self.by_silo)
        if failed or float(likelihood[0]) < last - 1e-12 * abs(last):
            if stage >= _LAST_STEP:
                return {"stage": -float(NO_LIMIT)}
            here, before = public["slopes"], public["before"]
            return {"stage": float(stage + 2), "slopes": before + (here - before) / 2}
        found: dict[str, Any] = {"likelihood": likelihood, "gradient": gradient, "before": public["slopes"]}
        if stage == FIRST_STEP:
            found["null"] = likelihood
        if curves is None:
            after = self._newton({**public, **found}, sums["information"], stage + 1)
            return {**found, **after}
        found |= {"stage": float(stage + 1), "outer": curves.outer, "hazard": curves.hazard}
        found["tied"] = curves.tied
        if self._curved:
            found |= {"middle": curves.middle, "drift": curves.drift, "tied_drift": curves.tied_drift}
        return found

    def _newton(self, public: Arrays, hessian: Doubles, stage: int) -> dict[str, Any]:
        here = public["slopes"]
        first = stage == FIRST_STEP + 1
        at_zero = np.diag(hessian) if first else public["at_zero"]
        found, place = solve(hessian, public["gradient"])
        far = np.abs(here)
        if not first:
            # The likelihood of a column that tells who goes first rises for ever: its information fades.
            fading = ~(np.diag(hessian) > _GONE * at_zero)
            if found is None or (far > FAR).any() or fading.any():
                blamed = int(fading.argmax()) if fading.any() else int(far.argmax())
                return {"stage": -float(SEPARATED), "blame": np.array([float(blamed)])}
        if found is None:
            return {"stage": -float(SINGULAR), "blame": np.array([float(place)])}
        errors = np.sqrt(np.diag(inverted(hessian)))
        close = bool((np.abs(found) / errors).max() < CLOSE)
        after = float(_RESIDUALS) if self.robust or self.proportional else DONE
        if not close:
            after = float(stage + 1) if stage < _LAST_STEP else -float(NO_LIMIT)
        return {"stage": after, "slopes": here + found, "hessian": hessian, "at_zero": at_zero}

    @override
    def blame(self, public: Arrays, code: int) -> str:
        if code == TOO_FEW and self.ties == "efron":
            return '; with ties = "efron" also of those with the event, and of the others, in each stratum'
        return super().blame(public, code)

    @override
    def answer(self, public: Arrays) -> Answer:
        censored, events = (int(each) for each in public["rows"])
        values = {
            "n": censored + events,
            "events": events,
            "ties": self.ties,
            **fitted(self.terms, public, self.robust, self.weighted),
        }
        if not self.by_silo:
            values["baseline"] = baseline_hazards(self.labels, public)
        rows = [
            [*row, ratio]
            for row, ratio in zip(coefficient_rows(values), values["hazard_ratios"], strict=True)
        ]
        label = self.category(self.event).labels[1]
        notes = [
            f"{censored + events} rows, {events} with {self.event} {label}; {self.ties.capitalize()} ties"
            f"{', by silo' * self.by_silo}; {likelihood_note(values)}"
        ]
        if self.proportional:
            values["proportional"] = schoenfeld_test(self.terms, public)
            notes.append(departures_note(self.terms, values["proportional"]))
        if self.robust:
            notes.append("robust errors, intervals and p values (infinitesimal jackknife)")
        if (
            merged_away := sum(self._grid.intervals - int(each) for each in public["used"])
        ) and not self.by_silo:
            kinds = " of those with and without the event" if self.ties == "efron" else ""
            notes.append(
                f"{merged_away} intervals are merged: at least {self.least}{kinds} leave each, or none"
            )
        return Answer(self.title, self.ask, (*HEADER, "hazard ratio"), rows, values, notes=notes)
