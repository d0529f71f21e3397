"""Logistic regression by Newton's method on summed gradients and Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import (
    HEADER,
    LEAST_PIVOT,
    coefficient_rows,
    coefficients,
    inverted,
    solve,
)
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, NO_LIMIT, SEPARATED, SINGULAR, TOO_FEW, Answer
from roundtable.core.analyses.regression import Regression
from roundtable.core.analyses.scipy_parts import special
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_CLOSE, _FAR, _STEPS = 1e-9, 20.0, 25
_WORST = -1e30
_APART = 1e-6


class Logistic(Regression):
    """Logistic regression of a category of two values, the second against the first, with an intercept.

    Newton from zero. A step that does not raise the likelihood is halved.
    """

    ask: ClassVar[str] = "logistic"
    most_rounds: ClassVar[int] = 3 + _STEPS

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
        self._middles = np.array(self._middle)
        self._halves = np.array(self._half)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (2,), "levels": (max(1, len(self._levels)),)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        width = self._width + 1
        return {
            "first": (self._width,),
            "second": (self._width,),
            "likelihood": (1,),
            "gradient": (width,),
            "hessian": (width, width),
        }

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        width = self._width + 1
        return {
            "rows": (2,),
            "mean": (self._width,),
            "sd": (self._width,),
            "slopes": (width,),
            "before": (width,),
            "likelihood": (1,),
            "hessian": (width, width),
            "blame": (1,),
        }

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        design, outcome = self._design(table)
        if stage == 0:
            counted = np.array([float((outcome == 0).sum()), float((outcome == 1).sum())])
            return {"rows": counted, "levels": self._level_counts(table)}
        if stage == 1:
            return {"first": ((design - self._middles) / self._halves).sum(axis=0)}
        if stage == 2:
            away = (design - public["mean"]) / self._halves
            return {"first": away.sum(axis=0), "second": (away**2).sum(axis=0)}
        scaled = np.column_stack([np.ones(len(design)), (design - public["mean"]) / public["sd"]])
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
        if stage == 1:
            return {"stage": 2.0, "mean": self._middles + self._halves * sums["first"] / rows}
        if stage == 2:
            squares = sums["second"] - sums["first"] ** 2 / rows
            mean = public["mean"] + self._halves * sums["first"] / rows
            constant = np.flatnonzero(~(squares > LEAST_PIVOT**2 * rows))
            if constant.size:
                return {"stage": -float(SINGULAR), "blame": constant[:1].astype(np.float64)}
            sd = self._halves * np.sqrt(squares / rows)
            return {"stage": 3.0, "mean": mean, "sd": sd, "likelihood": np.array([_WORST])}
        return self._newton(public, sums, stage)

    def _newton(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        here, before = public["slopes"], public["before"]
        likelihood, last = float(sums["likelihood"][0]), float(public["likelihood"][0])
        if likelihood < last - 1e-12 * abs(last):
            return {"stage": float(stage + 1), "slopes": before + (here - before) / 2}
        found, place = solve(sums["hessian"], sums["gradient"])
        far = np.abs(here[1:])
        told_apart = likelihood > -_APART * float(public["rows"].sum())
        if found is None or told_apart or (far > _FAR).any():
            parted = stage > 3
            blamed = int(far.argmax()) if parted and far.size else place - 1
            return {
                "stage": -float(SEPARATED if parted else SINGULAR),
                "blame": np.array([float(blamed)]),
            }
        errors = np.sqrt(np.diag(inverted(sums["hessian"])))
        after = here + found
        close = bool((np.abs(found) / errors).max() < _CLOSE)
        last_one = stage + 1 >= self.most_rounds
        grows = last_one and (far > _FAR / 4).any()
        open_still = -float(SEPARATED if grows else NO_LIMIT) if last_one else float(stage + 1)
        return {
            "stage": DONE if close else open_still,
            "blame": np.array([float(far.argmax())]),
            "slopes": after,
            "before": here,
            "likelihood": sums["likelihood"],
            "hessian": sums["hessian"],
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        counted = public["rows"]
        rows, p = float(counted.sum()), self._width
        mean, sd = public["mean"], public["sd"]
        # From standardised columns back: raw = turn @ standardised.
        turn = np.diag([1.0, *(1 / sd)])
        turn[0, 1:] = -mean / sd
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
