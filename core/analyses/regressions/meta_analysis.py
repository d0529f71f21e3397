"""Random-effects meta-analysis of the silos' own fits.

Each silo fits the regression to its own rows; of a term's slopes y with variances v only sums over silos of
wᵃ (y − centre)ᵇ are sent, w = 1 / (v + tau²). Fixed effect, and random effects with tau² after DerSimonian &
Laird (1986) and by restricted maximum likelihood (Viechtbauer 2005), by Newton's method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, FEW_SILOS, NO_LIMIT, Answer, Question
from roundtable.core.analyses.regression import Linear, Regression
from roundtable.core.analyses.regressions.logistic_regression import Logistic
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

LEAST_SILOS = 3
_SEARCH, _STEPS = 3, 25
_CLOSE, _SMALL = 1e-11, 1e-3
_POWERS, _MOMENTS = 3, 3
_HEADER = ("term", "estimate", "error", "95 % from", "to", "p", "tau²", "I²")
_FOUND = ("estimate", "error", "error_hksj", "tau2")


class MetaAnalysis(Question):
    """Slopes over silos: of a linear regression where the outcome is a number, of a logistic one where it is
    a category of two values. A silo whose rows do not allow the fit is not among them."""

    ask: ClassVar[str] = "meta_analysis"
    most_rounds: ClassVar[int] = _SEARCH + _STEPS
    tells_of_silos: ClassVar[bool] = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
    ) -> None:
        super().__init__(columns, least, title)
        kind = Logistic if self.described(outcome).kind == "category" else Linear
        self.fit: Regression = kind(columns, least, title, outcome, on)
        self.terms = self.fit.terms

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self.fit.names

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return self.fit.told

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {"rows": (1,)}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {"fitted": (1,), "sums": (len(self.terms), _POWERS, _MOMENTS)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        each = (len(self.terms),)
        return {
            "rows": (1,),
            "fitted": (1,),
            "scale": each,
            "centre": each,
            "tau2": each,
            "still": each,
            "q": each,
            "i2": each,
            **dict.fromkeys(("fixed", "dl", "reml"), (len(self.terms), len(_FOUND))),
        }

    def _own(self, table: DataTable) -> tuple[Doubles, Doubles] | None:
        """This silo's slopes and their variances, in units of half of a column's range; None where its rows
        allow no fit."""
        public = {name: np.zeros(shape) for name, shape in {"stage": (1,), **self.fit.public}.items()}
        nothing = {name: np.zeros(shape) for name, shape in {**self.fit.counts, **self.fit.reals}.items()}
        for _ in range(self.fit.most_rounds):
            stage = int(public["stage"][0])
            found = self.fit.sums(table, public, stage)
            sums = nothing | {key: own for key, own in found.items() if isinstance(own, np.ndarray)}
            for name, values in self.fit.step(public, sums, stage).items():
                public[name] = np.broadcast_to(np.asarray(values, np.float64), public[name].shape).copy()
            if not 0 <= public["stage"][0] < DONE:
                break
        if public["stage"][0] != DONE:
            return None
        values = self.fit.answer(public).values
        halves = self.fit.halves
        errors = np.array(values["errors"][1:]) * halves
        return np.array(values["coefficients"][1:]) * halves, errors**2

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        own = self._own(table)
        rows = float((~np.isnan(table.matrix(self.names)).any(axis=1)).sum())
        if own is None:
            return {"rows": np.zeros(1)} if stage == 0 else {}
        if stage == 0:
            return {"rows": np.array([rows]), "fitted": np.ones(1)}
        slopes, variances = own
        scale = public["scale"] if stage > 1 else np.ones(len(slopes))
        weight = 1 / (variances + public["tau2"]) / scale
        away = slopes - public["centre"]
        parts = [[weight**a * away**b for b in range(_MOMENTS)] for a in range(1, _POWERS + 1)]
        return {"sums": np.moveaxis(np.array(parts), 2, 0)}

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            silos = float(sums["fitted"][0])
            few = silos < LEAST_SILOS
            return {
                "stage": -float(FEW_SILOS) if few else 1.0,
                "fitted": sums["fitted"],
                "rows": self.hide(sums["rows"]),
            }
        silos, found = float(public["fitted"][0]), sums["sums"]
        if stage == 1:
            centre = found[:, 0, 1] / found[:, 0, 0]
            return {"stage": 2.0, "centre": centre, "scale": found[:, 0, 0] / silos}
        scale, tau2 = public["scale"], public["tau2"]
        (w, wy, wyy), (ww, wwy, wwyy), (www, wwwy, wwwyy) = (
            [found[:, a, b] * scale ** (a + 1) for b in range(_MOMENTS)] for a in range(_POWERS)
        )
        mean = wy / w
        around = wyy - wy * mean
        told = np.stack(
            [public["centre"] + mean, np.sqrt(1 / w), np.sqrt(around / (silos - 1) / w), tau2], axis=1
        )
        if stage == 2:
            between = np.maximum((around - (silos - 1)) / (w - ww / w), 0.0)
            inside = np.maximum(1 - (silos - 1) / np.maximum(around, 1e-300), 0.0)
            after = {"fixed": told, "q": around, "i2": inside, "tau2": between}
            return {"stage": 3.0, "still": np.ones(len(w)), **after}
        # Restricted likelihood in tau²: its slope and bend, P the projection that takes out the mean.
        left = wwy - mean * ww
        score = (-w + ww / w + wwyy - 2 * mean * wwy + mean**2 * ww) / 2
        cubes = wwwyy - 2 * mean * wwwy + mean**2 * www - left**2 / w
        bend = (ww - 2 * www / w + (ww / w) ** 2 - 2 * cubes) / 2
        safe = (ww - 2 * www / w + (ww / w) ** 2) / 2
        moved = score / np.where(bend < 0, -bend, safe)
        after_tau = tau2 + moved
        after_tau = np.where(after_tau > 0, after_tau, np.where(tau2 > _SMALL * silos / w, tau2 / 8, 0.0))
        close = np.abs(after_tau - tau2) <= _CLOSE * np.maximum(tau2, silos / w)
        still = public["still"] * ~close
        reml = np.where((public["still"] > 0)[:, None], told, public["reml"])
        over = stage + 1 >= self.most_rounds
        changed: dict[str, Any] = {
            "stage": float(stage + 1) if still.any() else DONE,
            "still": still,
            "reml": reml,
            "tau2": np.where(still > 0, after_tau, tau2),
        }
        if stage == _SEARCH:
            changed["dl"] = told
        return {"stage": -float(NO_LIMIT)} if over and still.any() else changed

    @override
    def answer(self, public: Arrays) -> Answer:
        halves, reach = self.fit.halves, float(stats.norm.ppf(0.975))
        values: dict[str, Any] = {
            "n": int(public["rows"][0]),
            "silos": int(public["fitted"][0]),
            "terms": self.terms,
            "Q": public["q"].tolist(),
            "I2": public["i2"].tolist(),
        }
        for kind in ("fixed", "dl", "reml"):
            estimate, error, hksj, tau2 = public[kind].T
            estimate, error, hksj, tau2 = estimate / halves, error / halves, hksj / halves, tau2 / halves**2
            values[kind] = {
                "estimates": estimate.tolist(),
                "errors": error.tolist(),
                "errors_hksj": hksj.tolist(),
                "tau2": tau2.tolist(),
                "intervals": np.column_stack([estimate - reach * error, estimate + reach * error]).tolist(),
                "p": (2 * stats.norm.sf(np.abs(estimate / error))).tolist(),
            }
        shown = values["reml"]
        rows = [
            [
                term,
                shown["estimates"][place],
                shown["errors"][place],
                *shown["intervals"][place],
                shown["p"][place],
                shown["tau2"][place],
                values["I2"][place],
            ]
            for place, term in enumerate(self.terms)
        ]
        notes = [
            f"random effects over the fits of {values['silos']} silos ({values['n']} rows), tau² by "
            f"restricted maximum likelihood; the pooled estimate is that of {self.fit.ask}"
        ]
        return Answer(self.title, self.ask, _HEADER, rows, values, notes=notes)
