"""How well a model's scores tell an outcome: AUROC, AUPRC, calibration, decision curve, confusion, subgroups.

All of it follows from how often each score of a grid occurs, for each outcome and group. The AUROC's error is
DeLong's (1988), a sum over the grid; the interval of the AUPRC is the logit one (Boyd, Eng & Page 2013); net
benefit is that of Vickers & Elkin (2006). Scores in one cell of the grid count as equal, so that an AUROC is
within half of the share of pairs that are tied, which the answer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.moments import shown_count
from roundtable.core.analyses.question import DONE, HIDDEN, TOO_FEW, Answer, Question, by_group, cells
from roundtable.core.analyses.ranked_values import ValueGrid
from roundtable.core.analyses.scipy_parts import special, stats
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_CELLS = 1000
_FIGURES = ("auroc", "error", "tied", "auprc")
_LEAST_CHANCE = 2.0**-52


class ScoreEvaluation(Question):
    """Of the scores in a column, for an outcome of two values, of which high scores tell the second.

    A row counts as told positive where its score is at least `threshold`. `bins` are those of the
    calibration curve, of equal width from 0 to 1; calibration, decision curve, Brier score and log loss are
    of scores that are probabilities, whose column lies between 0 and 1.
    """

    ask: ClassVar[str] = "evaluate"
    most_rounds: ClassVar[int] = 2

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        score: str,
        outcome: str,
        threshold: float,
        bins: int,
        by: str | None,
        every: float | None,
    ) -> None:
        super().__init__(columns, least, title)
        self.score = score
        self.outcome = outcome
        self.threshold = threshold
        self.bins = bins
        self.by = by
        span = self.number(score)
        low, high = float(span.least or 0.0), float(span.most or 0.0)
        self.grid = ValueGrid(self, score, (high - low) / _CELLS if every is None else every)
        self.of = self.category(outcome).labels
        if len(self.of) != 2:
            raise ConfigError(
                f"{title}: evaluate is of an outcome of two values, and {outcome!r} has {len(self.of)}"
            )
        self.labels = self.category(by).labels if by is not None else []
        self.chances = low >= 0 and high <= 1

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (self.score, self.outcome, *([self.by] if self.by is not None else []))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome, *([self.by] if self.by is not None else []))

    @property
    def _groups(self) -> int:
        """All rows, then each group."""
        return 1 + len(self.labels)

    @property
    def _shapes(self) -> dict[str, Shape]:
        return {"confusion": (self._groups, 2, 2), "calibration": (2, self.bins)}

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"scores": (self._groups, 2, self.grid.size), **self._shapes}

    @property
    def _summed(self) -> dict[str, Shape]:
        return {"predicted": (self.bins,), "losses": (2,)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return self._summed

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {
            "rows": (self._groups, 2),
            "figures": (self._groups, len(_FIGURES)),
            **self._shapes,
            "points": (3, self.bins + 1),
            **self._summed,
        }

    def _whole(self, table: DataTable) -> tuple[Doubles, Doubles, list[Doubles]]:
        """(scores, outcomes, whether each row is in each group) of rows with score and outcome."""
        score, outcome = table.column(self.score), table.column(self.outcome)
        whole = ~(np.isnan(score) | np.isnan(outcome))
        group = by_group(table, self.by, self._groups)[whole]
        members = [np.ones(len(group), bool), *(group == number for number in range(len(self.labels)))]
        return score[whole], outcome[whole], members

    def _bin(self, score: Doubles) -> Doubles:
        edges = np.linspace(0.0, 1.0, self.bins + 1)
        return np.searchsorted(edges[1:-1], score).astype(np.float64)

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        score, outcome, members = self._whole(table)
        place = self.grid.places(DataTable({self.score: score}, table.descriptions))
        if stage == 0:
            told = (score >= self.threshold).astype(np.float64)
            return {
                "scores": np.stack([cells([outcome[m], place[m]], (2, self.grid.size)) for m in members]),
                "confusion": np.stack([cells([outcome[m], told[m]], (2, 2)) for m in members]),
                "calibration": cells([outcome, self._bin(score)], (2, self.bins))
                if self.chances
                else np.zeros((2, self.bins)),
            }
        told_of = public["calibration"][0] != HIDDEN
        bins = self._bin(score).astype(np.int64)
        kept = np.clip(score, _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        log_loss = -(special.xlogy(outcome, kept) + special.xlog1py(1 - outcome, -kept)).sum()
        return {
            "predicted": np.bincount(bins, weights=score, minlength=self.bins) * told_of,
            "losses": np.array([((score - outcome) ** 2).sum(), log_loss]),
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 1:
            return {"stage": DONE, "predicted": sums["predicted"], "losses": sums["losses"]}
        rows = sums["scores"].sum(axis=2)
        if (rows[0] < max(self.least, 2)).any():
            return {"stage": -float(TOO_FEW), "rows": np.full_like(rows, HIDDEN)}
        enough = (rows >= max(self.least, 2)).all(axis=1)
        figures = np.stack(
            [
                self._ranked(each) if ok else np.zeros(4)
                for each, ok in zip(sums["scores"], enough, strict=True)
            ]
        )
        confusion = np.stack([self.hide_cells(each, (0, 1)) for each in sums["confusion"]])
        lost = ~enough | (confusion == HIDDEN).any(axis=(1, 2))
        if len(self.labels) and lost[1:].sum() == 1:
            # The rest of all rows would tell of the one group that is hidden.
            lost[1 + int(np.where(lost[1:], np.inf, rows[1:].sum(axis=1)).argmin())] = True
        confusion[1:][lost[1:]] = HIDDEN
        hidden = self._hidden_bins(sums["calibration"])
        return {
            "stage": 1.0 if self.chances else DONE,
            "rows": np.where(enough[:, None], rows, HIDDEN),
            "figures": figures,
            "confusion": confusion,
            "calibration": np.where(hidden, HIDDEN, sums["calibration"]),
            "points": self._points(sums["calibration"], hidden),
        }

    def _ranked(self, scores: Doubles) -> Doubles:
        """AUROC, its error, the share of tied pairs, and AUPRC, of counts [2, scores]."""
        without, having = scores
        none, some = without.sum(), having.sum()
        above = (np.cumsum(without) - without / 2) / none
        below = 1 - (np.cumsum(having) - having / 2) / some
        auroc = float((having * above).sum() / some)
        parts = (
            (having * (above - auroc) ** 2).sum() / (some - 1) / some,
            (without * (below - auroc) ** 2).sum() / (none - 1) / none,
        )
        tied = float((having * without).sum() / (some * none))
        caught = np.cumsum(having[::-1])
        called = np.cumsum((having + without)[::-1])
        with np.errstate(invalid="ignore"):
            precision = np.where(called > 0, caught / called, 0.0)
        auprc = float((having[::-1] * precision).sum() / some)
        return np.array([auroc, np.sqrt(sum(parts)), tied, auprc])

    def _covered(self, calibration: Doubles, hidden: Doubles) -> bool:
        """Whether the sum over these hidden bins, which what else is told may give, is of enough rows."""
        sums = calibration[:, hidden].sum(axis=1)
        return not hidden.any() or (hidden.sum() > 1 and bool(((sums == 0) | (sums >= self.least)).all()))

    def _hidden_bins(self, calibration: Doubles) -> Doubles:
        """Which bins are hidden, bool [bins]: those with a small cell, and as many beside them as it takes,
        on either side of the threshold, where the confusion matrix gives a sum."""
        edges, total = np.linspace(0.0, 1.0, self.bins + 1), calibration.sum(axis=0)
        hidden: Any = ((calibration > 0) & (calibration < self.least)).any(axis=0)
        for side in (edges[1:] <= self.threshold, edges[:-1] >= self.threshold, np.ones(self.bins, bool)):
            while not self._covered(calibration, hidden & side):
                left = np.flatnonzero(side & ~hidden & (total > 0))
                if not left.size:
                    break
                hidden[left[total[left].argmin()]] = True
        return np.asarray(hidden)

    def _points(self, calibration: Doubles, hidden: Doubles) -> Doubles:
        """[whether it is told, true, false positives] of each threshold that is an edge of the bins: those
        alone between which the sum over hidden bins is of enough rows."""
        found = np.zeros((3, self.bins + 1))
        last = self.bins
        for edge in range(self.bins - 1, 0, -1):
            between, below = np.zeros(self.bins, bool), np.zeros(self.bins, bool)
            between[edge:last] = True
            below[:edge] = True
            if all(self._covered(calibration, hidden & part) for part in (between, below)):
                last = edge
                none, some = calibration[:, edge:].sum(axis=1)
                found[:, edge] = [1.0, some, none]
        return found

    @override
    def answer(self, public: Arrays) -> Answer:
        names = ["all", *self.labels]
        groups = {name: self._figures(public, number) for number, name in enumerate(names)}
        keys = ("rows", "auroc", "auprc", "sensitivity", "specificity", "precision")
        header = [self.by or "rows of", "rows", "AUROC", "95 % from", "to", "AUPRC", *keys[3:]]
        rows = [
            [name, each["rows"], each["auroc"], *each["auroc_interval"], *(each[key] for key in keys[2:])]
            for name, each in groups.items()
        ]
        values: dict[str, Any] = {**groups["all"], "threshold": self.threshold}
        if self.by is not None:
            values["groups"] = {name: groups[name] for name in self.labels}
            values["differences"] = differences([groups[name] for name in self.labels])
        notes = [
            f"{values['rows']} rows; {self.outcome} is {self.of[1]} in {values['positive']}; told positive "
            f"where {self.score} is at least {self.threshold:g}"
        ]
        if self.chances:
            values |= self._chances(public)
            notes.append(f"Brier score {values['brier']:.5g}, log loss {values['log_loss']:.5g}")
        hidden = sum(int((public[name] == HIDDEN).sum()) for name in ("confusion", "calibration"))
        return Answer(self.title, self.ask, header, rows, values, hidden=hidden, notes=notes)

    def _figures(self, public: Arrays, number: int) -> dict[str, Any]:
        (none, some), figures = public["rows"][number], public["figures"][number]
        [[right, false], [missed, hit]] = public["confusion"][number]
        known = some != HIDDEN
        auroc, error, tied, auprc = (float(value) for value in figures) if known else [float("nan")] * 4
        reach = float(stats.norm.ppf(0.975))
        wide = reach / np.sqrt(some * auprc * (1 - auprc)) if known and 0 < auprc < 1 else 0.0
        middle = special.logit(auprc)
        shown = HIDDEN not in (right, false, missed, hit)
        return {
            "rows": int(none + some) if known else None,
            "positive": int(some) if known else None,
            "auroc": auroc if known else None,
            "auroc_error": error if known else None,
            "auroc_interval": [max(0.0, auroc - reach * error), min(1.0, auroc + reach * error)]
            if known
            else [None, None],
            "auroc_within": tied / 2 if known else None,
            "auprc": auprc if known else None,
            "auprc_interval": [float(special.expit(middle - wide)), float(special.expit(middle + wide))]
            if known
            else [None, None],
            "confusion": [[shown_count(cell) for cell in line] for line in public["confusion"][number]],
            "sensitivity": _share(hit, hit + missed) if shown else None,
            "specificity": _share(right, right + false) if shown else None,
            "precision": _share(hit, hit + false) if shown else None,
            "told_positive": _share(hit + false, right + false + missed + hit) if shown else None,
        }

    def _chances(self, public: Arrays) -> dict[str, Any]:
        """Calibration, decision curve and losses."""
        n = float(public["rows"][0].sum())
        edges = np.linspace(0.0, 1.0, self.bins + 1)
        none, some = public["calibration"]
        curve = []
        for place in range(self.bins):
            if HIDDEN in (none[place], some[place]) or not none[place] + some[place]:
                continue
            many = float(none[place] + some[place])
            curve.append(
                {
                    "from": float(edges[place]),
                    "to": float(edges[place + 1]),
                    "rows": int(many),
                    "predicted": float(public["predicted"][place] / many),
                    "observed": float(some[place] / many),
                }
            )
        share = float(public["rows"][0][1]) / n
        decisions = []
        for place in np.flatnonzero(public["points"][0]).tolist():
            odds = float(edges[place] / (1 - edges[place]))
            caught, false = (float(value) for value in public["points"][1:, place])
            decisions.append(
                {
                    "threshold": float(edges[place]),
                    "sensitivity": _share(caught, n * share),
                    "false_positive_rate": _share(false, n * (1 - share)),
                    "net_benefit": caught / n - false / n * odds,
                    "net_benefit_all": share - (1 - share) * odds,
                }
            )
        brier, log_loss = (float(value) / n for value in public["losses"])
        return {"calibration": curve, "decision": decisions, "brier": brier, "log_loss": log_loss}


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def differences(groups: list[dict[str, Any]]) -> dict[str, float | None]:
    """The largest difference between groups that are told of."""
    found: dict[str, float | None] = {}
    for key in ("auroc", "sensitivity", "specificity", "precision", "told_positive"):
        values = [each[key] for each in groups if each[key] is not None]
        found[key] = max(values) - min(values) if len(values) > 1 else None
    return found
