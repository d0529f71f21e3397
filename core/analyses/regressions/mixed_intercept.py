"""Linear regression with a random intercept for each silo.

y = intercept + slopes · columns + u + e, with u one normal number of each silo and e one of each row. Silos
are independent: with λ = var(u) / var(e) a silo of n rows whose columns (ones, columns, outcome) sum to s
adds S − λ / (1 + n λ) s s' to the cross products and log(1 + n λ) to the determinant (Searle, Casella &
McCulloch, Variance Components, 1992). The coordinator looks for the λ at which the derivative of the
(restricted) profile likelihood is zero, one λ a round, by the Illinois form of false position on the
intraclass correlation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients, inverted, solve
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import (
    DONE,
    FEW_SILOS,
    NO_LIMIT,
    SINGULAR,
    Answer,
    silos_of,
    unresolved,
)
from roundtable.core.analyses.regression import Linear
from roundtable.core.analyses.regressions.meta_analysis import LEAST_SILOS
from roundtable.core.errors import PrivacyError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_SEARCH, _STEPS = 3, 40
_FIRST, _CLOSE, _ALL = 0.1, 1e-12, 1 - 1e-9


class MixedIntercept(Linear):
    """Linear regression of rows within silos; by restricted maximum likelihood, or by maximum likelihood."""

    ask: ClassVar[str] = "mixed_intercept"
    most_rounds: ClassVar[int] = _SEARCH + _STEPS
    tells_of_silos: ClassVar[bool] = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
        restricted: bool = True,
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self.restricted = restricted

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        wide = self._width + 2
        return {**super().reals, "silos": (1,), "cross": (wide, wide), "slope": (wide, wide), "logs": (2,)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        wide = self._width + 2
        shapes = {"silos": (1,), "share": (1,), "bracket": (5,), "cross": (wide, wide), "logs": (2,)}
        return {**super().public, **shapes}

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        design, outcome = self._design(table)
        n = float(len(outcome))
        if 0 < n < self.least:
            raise PrivacyError(
                f"{self.title}: {n:g} rows of this silo have no missing value, fewer than the least count, "
                f"{self.least}"
            )
        if stage < _SEARCH:
            found = super().sums(table, public, stage)
            return {**found, "silos": np.array([float(n > 0)])} if stage == 0 else found
        away = (np.column_stack([design, outcome]) - public["mean"]) / self._halves
        rows = np.column_stack([np.ones(len(away)), away])
        ratio = _ratio(public)
        total, wide = rows.sum(axis=0), 1 + n * ratio
        both = np.outer(total, total)
        return {
            "cross": rows.T @ rows - ratio / wide * both,
            "slope": -both / wide**2,
            "logs": np.array([np.log(wide), n / wide]),
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            few = float(sums["silos"][0]) < LEAST_SILOS
            after = super().step(public, sums, stage)
            return {**after, "silos": sums["silos"], **({"stage": -float(FEW_SILOS)} if few else {})}
        if stage < _SEARCH:
            return super().step(public, sums, stage)
        cross, slope = sums["cross"], sums["slope"]
        fitted, place = solve(cross[:-1, :-1], cross[:-1, -1])
        if fitted is None:
            return {"stage": -float(SINGULAR), "blame": np.array([float(place - 1)])}
        left = np.append(-fitted, 1.0)
        residual = float(left @ cross @ left)
        if unresolved(residual, silos_of(public)):
            return {"stage": -float(SINGULAR), "blame": np.array([float(self._width)])}
        grows = self._freedom(public) * float(left @ slope @ left) / residual
        grows += float(sums["logs"][1])
        if self.restricted:
            grows += float(np.trace(inverted(cross[:-1, :-1]) @ slope[:-1, :-1]))
        found = {"cross": cross, "logs": sums["logs"]}
        share = float(public["share"][0])
        # In units of the share, of which λ = share / (1 − share).
        score = -grows / (1 - share) ** 2
        if score == 0 or (stage == _SEARCH and score < 0):
            return {"stage": DONE, **found}
        bracket = public["bracket"].copy()
        coming = _next(bracket, share, score)
        if stage > _SEARCH and abs(coming - share) <= _CLOSE * share:
            return {"stage": DONE, **found}
        endless = stage + 1 >= self.most_rounds or coming > _ALL
        return {
            "stage": -float(NO_LIMIT) if endless else float(stage + 1),
            "share": np.array([coming]),
            "bracket": bracket,
            **found,
        }

    def _freedom(self, public: Arrays) -> float:
        return float(public["rows"][0]) - (self._width + 1 if self.restricted else 0)

    @override
    def answer(self, public: Arrays) -> Answer:
        cross, halves, spread = public["cross"], self._halves[:-1], self._halves[-1]
        rows, freedom = float(public["rows"][0]), self._freedom(public)
        inverse = inverted(cross[:-1, :-1])
        fitted = inverse @ cross[:-1, -1]
        left = np.append(-fitted, 1.0)
        residual = float(left @ cross @ left / freedom * spread**2)
        turn = np.diag([spread, *(spread / halves)])
        turn[0, 1:] = -spread * public["mean"][:-1] / halves
        estimates = turn @ fitted
        estimates[0] += public["mean"][-1]
        errors = np.sqrt(residual * np.diag(turn @ inverse @ turn.T)) / spread
        loglik = freedom * (np.log(2 * np.pi * residual) + 1) + float(public["logs"][0])
        if self.restricted:
            loglik += float(np.linalg.slogdet(cross[:-1, :-1])[1]) + 2 * float(np.log(halves).sum())
        between = float(_ratio(public) * residual)
        values = {
            "n": int(rows),
            "silos": int(public["silos"][0]),
            **coefficients(["intercept", *self.terms], estimates, errors, None),
            "residual_variance": residual,
            "silo_variance": between,
            "intraclass_correlation": between / (between + residual),
            "log_likelihood": float(-loglik / 2),
            "restricted": self.restricted,
        }
        notes = [
            f"{int(rows)} rows of {values['silos']} silos; variance between silos {between:.6g}, within "
            f"{residual:.6g}, intraclass correlation {values['intraclass_correlation']:.4g}"
        ]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)


def _ratio(public: Arrays) -> float:
    share = float(public["share"][0])
    return share / (1 - share)


def _next(bracket: Doubles, share: float, score: float) -> float:
    """The next share of variance between silos; `bracket` is [low, its score, high, its score, which end came
    last], high 0 where none is known."""
    low, above, high, below, last = (float(value) for value in bracket)
    # An end that stays for a second time counts half.
    if score > 0:
        below = below / 2 if last > 0 else below
        low, above = share, score
    else:
        above = above / 2 if last < 0 else above
        high, below = share, score
    bracket[:] = low, above, high, below, np.sign(score) if high else 0.0
    if not high:
        return share + (1 - share) / 2 if share else _FIRST
    return (low * below - high * above) / (below - above)
