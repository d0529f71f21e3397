"""Ridge, lasso and elastic net: linear and logistic regression with a penalty on standardised slopes.

With z the columns centred and divided by their standard deviations (of all n rows), and b the slopes of z,

    mean loss + penalty · (l1_ratio · |b|₁ + (1 − l1_ratio) / 2 · |b|₂²)

is least; the loss is half the squared error, or the log loss. The intercept is free. This is scikit-learn's
ElasticNet(alpha = penalty) and LogisticRegression(C = 1 / (n · penalty)). The linear one follows from one
matrix of sums; the logistic one takes proximal Newton steps (Lee, Sun & Saunders 2014), each the least of a
quadratic that the sums give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import LEAST_PIVOT, solve
from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.regression import Linear
from roundtable.core.analyses.regressions.logistic_regression import Logistic
from roundtable.core.analyses.regressions.newton_fits import FIRST_STEP
from roundtable.core.tables.table_description import ColumnTable

_SWEEPS, _POLISH = 5000, 10
_AGREES = 1e-12
_HEADER = ("term", "coefficient", "standardised")


def least(
    curve: Doubles, pull: Doubles, absolute: Doubles, squared: Doubles, start: Doubles
) -> tuple[Doubles | None, int]:
    """The b with the least ½ b·curve·b − pull·b + Σ absolute |b| + ½ Σ squared b², all float64 [terms];
    or None and the place of a column that leaves it open.

    Coordinate descent (Friedman, Hastie & Tibshirani 2010, section 2) finds which are zero; those that are
    not solve a linear system, and the conditions of the optimum tell whether that is it.
    """
    b = start.copy()
    size = max(float(np.abs(pull).max(initial=0.0)), float(absolute.max(initial=0.0)), 1e-300)
    bend = np.diag(curve) + squared
    place = -1
    for sweep in range(_SWEEPS):
        if sweep % _POLISH == 0:
            kept = np.flatnonzero((b != 0) | (absolute == 0))
            signs = np.sign(b[kept])
            right = pull[kept] - absolute[kept] * signs
            matrix = curve[np.ix_(kept, kept)] + np.diag(squared[kept])
            found, stuck = solve(matrix, right) if kept.size else (right, -1)
            if found is None:
                place = int(kept[stuck])
            elif ((np.sign(found) == signs) | (absolute[kept] == 0)).all():
                whole = np.zeros_like(b)
                whole[kept] = found
                left = np.abs(pull - curve @ whole)
                left[kept] = 0.0
                if (left <= absolute + _AGREES * size).all():
                    return whole, -1
        for j in range(len(b)):
            slope = pull[j] - curve[j] @ b + curve[j, j] * b[j]
            b[j] = np.sign(slope) * max(abs(slope) - absolute[j], 0.0) / bend[j]
    return None, place


def _shown(
    of: Answer, names: list[str], estimates: Doubles, slopes: Doubles, values: Mapping[str, Any], note: str
) -> Answer:
    standardised = [None, *slopes.tolist()]
    found = {
        "n": values["n"],
        "terms": names,
        "coefficients": estimates.tolist(),
        "standardised": slopes.tolist(),
        "zeros": int((slopes == 0).sum()),
        **values,
    }
    rows = [list(line) for line in zip(names, found["coefficients"], standardised, strict=True)]
    notes = [f"{values['n']} rows; {found['zeros']} of {len(slopes)} slopes are zero; {note}"]
    return Answer(of.title, of.ask, _HEADER, rows, found, notes=notes)


class PenalisedLinear(Linear):
    """The elastic net of a number."""

    ask: ClassVar[str] = "elastic_net"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        penalty: float,
        l1_ratio: float,
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self.penalty = penalty
        self.l1_ratio = l1_ratio

    @override
    def fitted(self, gram: Doubles, rows: float) -> tuple[Doubles | None, int]:
        squares = np.diag(gram)[:-1]
        constant = np.flatnonzero(~(squares > LEAST_PIVOT**2 * rows))
        if constant.size:
            return None, int(constant[0])
        spread, sd = self._halves[-1], np.sqrt(squares / rows)
        each = np.ones(len(sd))
        found, place = least(
            gram[:-1, :-1] / rows / np.outer(sd, sd),
            gram[:-1, -1] / rows / sd * spread,
            self.penalty * self.l1_ratio * each,
            self.penalty * (1 - self.l1_ratio) * each,
            0 * each,
        )
        return (None, place) if found is None else (found / sd / spread, -1)

    @override
    def answer(self, public: Arrays) -> Answer:
        rows, spread, halves = float(public["rows"][0]), self._halves[-1], self._halves[:-1]
        slopes, means, left = public["slopes"] * spread / halves, public["mean"], public["residual"]
        sd = halves * np.sqrt(np.diag(public["gram"])[:-1] / rows)
        first = float(means[-1] - slopes @ means[:-1] + left[0] * spread / rows)
        residual = float(left[1] - left[0] ** 2 / rows)
        explained = 1 - residual / float(public["gram"][-1, -1])
        values = {
            "n": int(rows),
            "penalty": self.penalty,
            "l1_ratio": self.l1_ratio,
            "r_squared": explained,
        }
        names = ["intercept", *self.terms]
        base = Answer(self.title, self.ask)
        return _shown(base, names, np.array([first, *slopes]), slopes * sd, values, f"R² {explained:.4g}")


class PenalisedLogistic(Logistic):
    """The elastic net of a category of two values."""

    ask: ClassVar[str] = "elastic_net"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        penalty: float,
        l1_ratio: float,
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self.penalty = penalty
        self.l1_ratio = l1_ratio

    def _paid(self, public: Arrays) -> float:
        """The penalty of the public coefficients, in units of the summed likelihood."""
        slopes = public["slopes"][1:]
        share = self.l1_ratio * np.abs(slopes).sum() + (1 - self.l1_ratio) / 2 * (slopes**2).sum()
        return float(public["rows"].sum() * self.penalty * share)

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage < FIRST_STEP:
            return super().step(public, sums, stage)
        # A penalised likelihood has a maximum where the outcome is separated, too.
        return self.climb(public, {**sums, "likelihood": sums["likelihood"] - self._paid(public)}, stage)

    @override
    def direction(self, public: Arrays, sums: Arrays) -> tuple[Doubles | None, int]:
        here, rows = public["slopes"], float(public["rows"].sum())
        free = np.array([0.0, *np.ones(self._width)])
        found, place = least(
            sums["hessian"] / rows,
            (sums["gradient"] + sums["hessian"] @ here) / rows,
            self.penalty * self.l1_ratio * free,
            self.penalty * (1 - self.l1_ratio) * free,
            here,
        )
        return (None, place) if found is None else (found - here, -1)

    @override
    def close(self, found: Doubles, public: Arrays, sums: Arrays) -> bool:
        return bool(np.abs(found).max() < 1e-10 * max(1.0, float(np.abs(public["slopes"]).max())))

    @override
    def answer(self, public: Arrays) -> Answer:
        counted, slopes = public["rows"], public["slopes"]
        loglik = float(public["likelihood"][0]) + self._paid(public)
        null = float((counted * np.log(counted / counted.sum())).sum())
        values = {
            "n": int(counted.sum()),
            "penalty": self.penalty,
            "l1_ratio": self.l1_ratio,
            "log_likelihood": loglik,
        }
        names = ["intercept", *self.terms]
        likeness = f"McFadden's R² {1 - loglik / null:.4g}"
        note = f"of {self.outcome} the value {self.of[1]} against {self.of[0]}; {likeness}"
        base = Answer(self.title, self.ask)
        return _shown(base, names, self.raw(public) @ slopes, slopes[1:], values, note)
