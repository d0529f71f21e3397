"""Logistic regression by Newton's method on summed gradients and Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients, inverted
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import TOO_FEW, Answer
from roundtable.core.analyses.regressions.newton_fits import FIRST_STEP, NewtonFit
from roundtable.core.analyses.scipy_parts import special
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_APART = 1e-6


class Logistic(NewtonFit):
    """Logistic regression of a category of two values, the second against the first, with an intercept,
    by Newton's method from zero."""

    ask: ClassVar[str] = "logistic"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self.of = self.category(outcome).labels

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (2,), "levels": (max(1, len(self._levels)),)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"rows": (2,), **super().public}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        design, outcome = self._design(table)
        if stage == 0:
            counted = np.array([float((outcome == 0).sum()), float((outcome == 1).sum())])
            return {"rows": counted, "levels": self._level_counts(table)}
        if stage < FIRST_STEP:
            return self.standardising(design, public, stage)
        scaled = self.scaled(design, public)
        linear = scaled @ public["slopes"]
        chance = special.expit(linear)
        weight = chance * special.expit(-linear)
        return {
            "likelihood": np.array([(outcome * linear - np.logaddexp(0.0, linear)).sum()]),
            "gradient": scaled.T @ (outcome - chance),
            "hessian": (scaled * weight[:, None]).T @ scaled,
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            counted = sums["rows"]
            code = self._enough(float(counted.sum()), sums["levels"])
            if (counted < max(self.least, 1)).any():
                code = TOO_FEW
            return {"stage": -float(code) if code else 1.0, "rows": self.hide(counted)}
        rows = float(public["rows"].sum())
        if stage < FIRST_STEP:
            return self.standardised(public, sums, stage, rows)
        # The likelihood of a separated outcome rises to that of certainty.
        return self.climb(public, sums, stage, parted=float(sums["likelihood"][0]) > -_APART * rows)

    @override
    def answer(self, public: Arrays) -> Answer:
        counted = public["rows"]
        rows, p = float(counted.sum()), self._width
        turn = self.raw(public)
        estimates = turn @ public["slopes"]
        covariance = turn @ inverted(public["hessian"]) @ turn.T
        loglik = float(public["likelihood"][0])
        null = float((counted * np.log(counted / rows)).sum())
        values = {
            "n": int(rows),
            **coefficients(["intercept", *self.terms], estimates, np.sqrt(np.diag(covariance)), None),
            "odds_ratios": np.exp(estimates).tolist(),
            "log_likelihood": loglik,
            "log_likelihood_null": null,
            "deviance": -2 * loglik,
            "aic": 2 * (p + 1) - 2 * loglik,
            "bic": float(np.log(rows) * (p + 1) - 2 * loglik),
        }
        likeness = 1 - loglik / null
        notes = [
            f"{int(rows)} rows; of {self.outcome} the value {self.of[1]} against {self.of[0]}; "
            f"log-likelihood {loglik:.6g}, McFadden's R² {likeness:.4g}"
        ]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)
