"""Cox regression of a treatment weighted by the inverse of its probability, after a summed logistic fit.

First all silos fit the propensity to be treated; its coefficients are public, and the weights 1/p of the
treated and 1/(1 - p) of the others stay with the rows. Errors are robust, with the weights taken as known (as
FedECA does: Ogier du Terrail et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, Answer
from roundtable.core.analyses.regressions.logistic_regression import Logistic
from roundtable.core.analyses.regressions.newton_fits import FIRST_STEP
from roundtable.core.analyses.survival.cox_regression import Cox
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_MARK = "propensity "


class WeightedCox(Cox):
    """Cox regression with weights for the average effect of a treatment, a category of two values."""

    ask: ClassVar[str] = "weighted_cox"
    weighted: ClassVar[bool] = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        time: str,
        event: str,
        every: float,
        treatment: str,
        propensity: tuple[str, ...],
        on: tuple[str, ...] = (),
        ties: Literal["efron", "breslow"] = "efron",
        strata: str | None = None,
        by_silo: bool = False,
    ) -> None:
        super().__init__(
            columns, least, title, time, event, every, (treatment, *on), ties, strata, by_silo, robust=True
        )
        if len(self.category(treatment).values) != 2:
            raise ConfigError(
                f"{title}: {treatment!r} must have two values, first that of those who are not treated"
            )
        self._fit = Logistic(columns, least, title, treatment, propensity)

    @property
    @override
    def rounds(self) -> int:
        return self.most_rounds + self._fit.rounds

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().names, *self._fit.names)))

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (*super().told, *self._fit.told)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {**super().counts, **_marked(self._fit.counts)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        terms = len(self._fit.terms)
        own = {"fallen": self._cells, "balance": (2, 2, 2 + 2 * terms)}
        return {**super().reals, **_marked(self._fit.reals), **own}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        own = {f"{_MARK}stage": (1,), "balance": self.reals["balance"]}
        return {**super().public, **_marked(self._fit.public), **own}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        inner = _own(public)
        fitting = float(inner["stage"][0])
        found = super().sums(table, public, stage) if stage == 0 or fitting == DONE else {}
        if fitting != DONE:
            return {**found, **_marked(self._fit.sums(self._whole(table), inner, int(fitting)))}
        if stage == FIRST_STEP:
            found["balance"] = self._balance(table, public)
        return found

    @override
    def _weights(self, kept: DataTable, public: Arrays) -> Doubles:
        scaled, treated = self._propensity(kept, public)
        fitted = scaled @ _own(public)["slopes"]
        with np.errstate(over="ignore"):
            weights: Doubles = 1 + np.exp(np.where(treated > 0, -fitted, fitted))
        return weights

    def _propensity(self, kept: DataTable, public: Arrays) -> tuple[Doubles, Doubles]:
        """(a column of ones and the standardised columns of the propensity, the treatment)."""
        design, treated = self._fit._design(kept)
        return self._fit.scaled(design, _own(public)), treated

    def _balance(self, table: DataTable, public: Arrays) -> Doubles:
        """Without and with weights, of the others and of the treated: the sums of w, w², and of w x and w x²
        of the propensity's columns, centred and scaled."""
        kept = self._whole(table)
        scaled, treated = self._propensity(kept, public)
        columns = scaled[:, 1:]
        found = np.zeros(self.reals["balance"])
        for place, weights in enumerate((np.ones(len(treated)), self._weights(kept, public))):
            each = np.column_stack([np.ones(len(treated)), weights, columns, columns**2]) * weights[:, None]
            for group in (0, 1):
                found[place, group] = each[treated == group].sum(axis=0)
        return found

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        inner = _own(public)
        fitting = float(inner["stage"][0])
        if fitting == DONE:
            found = super().step(public, sums, stage)
            if stage == FIRST_STEP:
                found["balance"] = sums["balance"]
            return found
        found = super().step(public, sums, stage) if stage == 0 else {}
        fitted = self._fit.step(inner, _own(sums), int(fitting))
        if not found.get("stage", 1.0) < 0:
            found["stage"] = fitted["stage"] if fitted["stage"] < 0 else 1.0
        return {**found, **_marked(fitted)}

    @override
    def blame(self, public: Arrays, code: int) -> str:
        inner = _own(public)
        if float(inner["stage"][0]) < 0:
            return self._fit.blame(inner, code) + f", where {self._fit.outcome!r} is explained"
        return super().blame(public, code)

    @override
    def answer(self, public: Arrays) -> Answer:
        found = super().answer(public)
        propensity = self._fit.answer(_own(public)).values
        before, after = _differences(public["balance"])
        sizes = [float(each[0] ** 2 / each[1]) for each in public["balance"][1]]
        values = {
            **found.values,
            "propensity": {key: propensity[key] for key in ("terms", "coefficients", "errors", "p")},
            "differences_before": dict(zip(self._fit.terms, before.tolist(), strict=True)),
            "differences_after": dict(zip(self._fit.terms, after.tolist(), strict=True)),
            "effective_sizes": dict(zip(self._fit.of, sizes, strict=True)),
        }
        told = ", ".join(f"{label} {size:.1f}" for label, size in values["effective_sizes"].items())
        notes = [
            f"weighted by the inverse probability of {self._fit.outcome}; effective rows: {told}; largest "
            f"standardised difference {np.abs(before).max():.3g} before, {np.abs(after).max():.3g} after",
            *found.notes,
        ]
        return Answer(found.title, self.ask, found.header, found.rows, values, notes=notes)


def _differences(sums: Doubles) -> tuple[Doubles, Doubles]:
    """Mean differences of columns, treated less others, without and with weights, in units of the mean
    standard deviation without weights; from sums [without and with, others and treated, 2 + 2 terms]."""
    terms = (sums.shape[-1] - 2) // 2
    rows, first, second = sums[..., :1], sums[..., 2 : 2 + terms], sums[..., 2 + terms :]
    spreads = (second[0] - first[0] ** 2 / rows[0]) / (rows[0] - 1)
    means = first / rows
    before, after = (means[:, 1] - means[:, 0]) / np.sqrt(spreads.mean(axis=0))
    return before, after


def _marked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_MARK}{name}": each for name, each in values.items()}


def _own(values: Arrays) -> dict[str, Doubles]:
    return {name.removeprefix(_MARK): each for name, each in values.items() if name.startswith(_MARK)}
