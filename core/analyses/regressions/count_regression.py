"""Regression of counts with a log link: Poisson, and negative binomial of the second kind (NB2).

The mean is exposure · exp(intercept + slopes · columns); the variance mean + alpha · mean², alpha 0 for
Poisson. Likelihood and derivatives: Cameron & Trivedi, Regression Analysis of Count Data (2013), sections
3.2 and 3.3; for whole counts log Γ(y + 1/alpha) − log Γ(1/alpha) + y log alpha is the sum of
log(1 + alpha · j) over j < y.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients, inverted, solve
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, NO_LIMIT, NO_SPREAD, TOO_FEW, Answer
from roundtable.core.analyses.regressions.newton_fits import FIRST_STEP, NewtonFit
from roundtable.core.analyses.scipy_parts import special
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_HIGHEST = float(1 << 33)
_LEAST_ALPHA = 1e-5
_MOST_COUNT = 1e6


class Poisson(NewtonFit):
    """Poisson regression of a count, `exposure` being a column of times, areas or people that each row stands
    for, or None."""

    ask: ClassVar[str] = "poisson"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        exposure: str | None = None,
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self.exposure = exposure
        for name in [outcome, *([exposure] if exposure is not None else [])]:
            found = self.number(name)
            if float(found.least or 0.0) < 0:
                raise ConfigError(
                    f"{title}: counts and exposures are not negative, and column {name!r} may be "
                    f"{found.least:g}: set least = 0 in [columns.{name}]"
                )
        self._unit = max(1.0, float(self.number(outcome).most or 0.0))
        self._lasts = max(1.0, float(self.number(exposure).most or 0.0)) if exposure is not None else 1.0

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (*super().names, *([self.exposure] if self.exposure is not None else []))

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,), "some": (1,), "levels": (max(1, len(self._levels)),)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {**super().reals, "totals": (6,), "spread": (2,), "over": (1,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {"rows": (1,), **super().public, "totals": (6,), "spread": (2,)}

    def _counted(self, table: DataTable) -> tuple[Doubles, Doubles, Doubles]:
        """(design, counts, exposures) of the whole rows. TaskError for a count that is not whole, or an
        exposure of nothing."""
        whole = ~np.isnan(table.matrix(self.names)).any(axis=1)
        kept = DataTable({name: table.column(name)[whole] for name in self.names}, table.descriptions)
        design, outcome = self._design(kept)
        lasts = kept.column(self.exposure) if self.exposure is not None else np.ones(len(outcome))
        if (broken := int((outcome != np.floor(outcome)).sum())) > 0:
            raise TaskError(
                f"{self.title}: column {self.outcome!r} is no whole number in {broken} rows, and {self.ask} "
                "counts: correct the data, or ask linear"
            )
        if (empty := int((lasts <= 0).sum())) > 0:
            raise TaskError(
                f"{self.title}: the exposure {self.exposure!r} is 0 in {empty} rows, which then cannot count "
                "anything: correct the data, or name 0 as missing"
            )
        return design, outcome, lasts

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        design, outcome, lasts = self._counted(table)
        if stage == 0:
            some = np.array([float((outcome > 0).sum())])
            return {
                "rows": np.array([float(len(outcome))]),
                "some": some,
                "levels": self._level_counts(table),
            }
        if stage < FIRST_STEP:
            found = self.standardising(design, public, stage)
            if stage == 2:
                each = [
                    outcome / self._unit,
                    lasts / self._lasts,
                    special.xlogy(outcome, outcome) / self._unit,
                    outcome * np.log(lasts) / self._unit,
                    special.gammaln(outcome + 1) / self._unit,
                    (outcome / self._unit) ** 2,
                ]
                found["totals"] = np.array([values.sum() for values in each])
            return found
        scaled = self.scaled(design, public)
        linear = scaled @ public["slopes"][: self._width + 1] + np.log(lasts)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            made = self._derivatives(scaled, outcome, linear, public)
            made = {name: values / self._unit for name, values in made.items()}
        if all((np.abs(values) < _HIGHEST).all() for values in made.values()):
            return made
        # Beyond what can be summed: the step was too long, which is all that is told.
        return {"over": np.ones(1)}

    def _derivatives(
        self, scaled: Doubles, outcome: Doubles, linear: Doubles, public: Arrays
    ) -> dict[str, Doubles]:
        """Likelihood, gradient, Hessian (of minus the likelihood), and deviance with Pearson's chi-square."""
        mean = np.exp(linear)
        left = outcome - mean
        likelihood = outcome * linear - mean - special.gammaln(outcome + 1)
        deviance = 2 * (special.xlogy(outcome, outcome) - outcome * linear - left)
        return {
            "likelihood": np.array([likelihood.sum()]),
            "gradient": scaled.T @ left,
            "hessian": (scaled * mean[:, None]).T @ scaled,
            "spread": np.array([deviance.sum(), (left**2 / mean).sum()]),
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            rows = float(sums["rows"][0])
            code = self._enough(rows, sums["levels"])
            if float(sums["some"][0]) < max(self.least, 1):
                code = TOO_FEW
            return {"stage": -float(code) if code else 1.0, "rows": self.hide(sums["rows"])}
        if stage < FIRST_STEP:
            found = self.standardised(public, sums, stage, float(public["rows"][0]))
            return {**found, "totals": sums["totals"]} if found["stage"] == FIRST_STEP else found
        if float(sums["over"][0]) > 0:
            return self.halved(public, stage) if stage > FIRST_STEP else {"stage": -float(NO_LIMIT)}
        whole = {name: values * self._unit for name, values in sums.items()}
        return {**self.climb(public, whole, stage), "spread": whole["spread"]}

    @override
    def start(self, public: Arrays, sums: Arrays) -> Doubles:
        begun = np.zeros(self._free)
        counted, lasted = float(sums["totals"][0]) * self._unit, float(sums["totals"][1]) * self._lasts
        begun[0] = np.log(counted / lasted)
        return begun

    @override
    def answer(self, public: Arrays) -> Answer:
        rows, k = float(public["rows"][0]), self._width + 1
        turn = self.raw(public)
        estimates = turn @ public["slopes"][:k]
        covariance = turn @ inverted(public["hessian"])[:k, :k] @ turn.T
        loglik = float(public["likelihood"][0])
        values = {
            "n": int(rows),
            **coefficients(["intercept", *self.terms], estimates, np.sqrt(np.diag(covariance)), None),
            "rate_ratios": np.exp(estimates).tolist(),
            "log_likelihood": loglik,
            "aic": 2 * self._free - 2 * loglik,
            "bic": float(np.log(rows) * self._free - 2 * loglik),
            **self._more(public),
        }
        notes = [f"{int(rows)} rows; log-likelihood {loglik:.6g}, {self._note(values, rows - k)}"]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)

    def _more(self, public: Arrays) -> dict[str, Any]:
        counted, _, log_counted, log_lasts, factorials, _ = public["totals"] * self._unit
        lasted = float(public["totals"][1]) * self._lasts
        level = float(counted * np.log(counted / lasted) + log_lasts)
        return {
            "deviance": float(public["spread"][0]),
            "pearson_chi2": float(public["spread"][1]),
            "deviance_null": float(2 * (log_counted - level)),
            "log_likelihood_null": float(level - counted - factorials),
        }

    def _note(self, values: Mapping[str, Any], freedom: float) -> str:
        spread = values["pearson_chi2"] / freedom
        warned = (
            ": more than Poisson's, so errors are too small; ask negative_binomial" if spread > 1.5 else ""
        )
        return (
            f"deviance {values['deviance']:.6g}, Pearson's chi-square for each degree of freedom "
            f"{spread:.4g}{warned}"
        )


class NegativeBinomial(Poisson):
    """Negative binomial regression (NB2); `alpha` is estimated with the coefficients, or given.

    With a given alpha errors are of the expected information, as those of a generalized linear model; else of
    the observed one, of coefficients and alpha together.
    """

    ask: ClassVar[str] = "negative_binomial"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        exposure: str | None = None,
        alpha: float | None = None,
    ) -> None:
        super().__init__(columns, least, title, outcome, on, exposure)
        self.alpha = alpha
        if self._unit > _MOST_COUNT:
            raise ConfigError(
                f"{title}: counts of {outcome!r} may be {self._unit:g}, and {self.ask} takes up to "
                f"{_MOST_COUNT:g}: set most in [columns.{outcome}]"
            )

    @property
    @override
    def _free(self) -> int:
        return self._width + (1 if self.alpha is not None else 2)

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {**super().reals, "expected": (self._width + 1, self._width + 1)}

    @override
    def start(self, public: Arrays, sums: Arrays) -> Doubles:
        begun = super().start(public, sums)
        if self.alpha is None:
            rows = float(public["rows"][0])
            mean = float(sums["totals"][0]) * self._unit / rows
            variance = float(sums["totals"][5]) * self._unit**2 / rows - mean**2
            begun[-1] = np.log(min(max((variance - mean) / mean**2, 0.01), 10.0))
        return begun

    @override
    def _derivatives(
        self, scaled: Doubles, outcome: Doubles, linear: Doubles, public: Arrays
    ) -> dict[str, Doubles]:
        a = self.alpha if self.alpha is not None else float(np.exp(public["slopes"][-1]))
        mean = np.exp(linear)
        wide = 1 + a * mean
        left = outcome - mean
        log_wide = np.log1p(a * mean)
        below = np.arange(outcome.max(initial=0.0))
        at = outcome.astype(np.int64)

        def up_to(values: Doubles) -> Doubles:
            """The sum over j below each row's count."""
            return np.concatenate([[0.0], np.cumsum(values)])[at]

        likelihood = (
            up_to(np.log1p(a * below))
            - special.gammaln(outcome + 1)
            + outcome * linear
            - (outcome + 1 / a) * log_wide
        )
        deviance = 2 * (
            special.xlogy(outcome, outcome)
            - outcome * linear
            - (outcome + 1 / a) * (np.log1p(a * outcome) - log_wide)
        )
        weight = mean * (1 + a * outcome) / wide**2
        gradient = scaled.T @ (left / wide)
        hessian = (scaled * weight[:, None]).T @ scaled
        if self.alpha is None:
            # In log alpha: d/dt = a d/da.
            slope = up_to(below / (1 + a * below)) + log_wide / a**2 - (outcome + 1 / a) * mean / wide
            bend = (
                -up_to((below / (1 + a * below)) ** 2)
                - 2 * log_wide / a**3
                + 2 * mean / (a**2 * wide)
                + (outcome + 1 / a) * (mean / wide) ** 2
            )
            across = scaled.T @ (a * left * mean / wide**2)
            gradient = np.append(gradient, a * slope.sum())
            corner = -(a**2 * bend.sum() + a * slope.sum())
            hessian = np.block([[hessian, across[:, None]], [across[None, :], np.array([[corner]])]])
        return {
            "likelihood": np.array([likelihood.sum()]),
            "gradient": gradient,
            "hessian": hessian,
            "expected": (scaled * (mean / wide)[:, None]).T @ scaled,
            "spread": np.array([deviance.sum(), (left**2 / (mean * wide)).sum()]),
        }

    @override
    def direction(self, public: Arrays, sums: Arrays) -> tuple[Doubles | None, int]:
        hessian, gradient, k = sums["hessian"], sums["gradient"], self._width + 1
        found, place = solve(hessian, gradient)
        if found is not None or self.alpha is not None:
            return found, place
        # Far from the maximum the likelihood is not concave in alpha: coefficients and alpha apart, then.
        found, place = solve(hessian[:k, :k], gradient[:k])
        if found is None:
            return None, place
        alone = gradient[-1] / max(abs(hessian[-1, -1]), abs(gradient[-1]), 1e-300)
        return np.append(found, alone), -1

    @override
    def close(self, found: Doubles, public: Arrays, sums: Arrays) -> bool:
        return solve(sums["hessian"], sums["gradient"])[0] is not None and super().close(found, public, sums)

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage >= FIRST_STEP and self.alpha is None and public["slopes"][-1] < np.log(_LEAST_ALPHA):
            return {"stage": -float(NO_SPREAD)}
        after = super().step(public, sums, stage)
        if self.alpha is not None and after["stage"] == DONE:
            after["hessian"] = sums["expected"] * self._unit
        return after

    @override
    def _more(self, public: Arrays) -> dict[str, Any]:
        figures = {"deviance": float(public["spread"][0]), "pearson_chi2": float(public["spread"][1])}
        if self.alpha is not None:
            return {"alpha": self.alpha, **figures}
        alpha = float(np.exp(public["slopes"][-1]))
        error = alpha * float(np.sqrt(inverted(public["hessian"])[-1, -1]))
        return {"alpha": alpha, "alpha_error": error, **figures}

    @override
    def _note(self, values: Mapping[str, Any], freedom: float) -> str:
        error = f" (error {values['alpha_error']:.4g})" if "alpha_error" in values else ", as given"
        return f"variance mean + alpha · mean², alpha {values['alpha']:.6g}{error}"
