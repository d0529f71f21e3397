"""Regressions that are fitted by Newton's method: what they have in common.

Three rounds count and standardise; each further one sums likelihood, gradient and Hessian at public
coefficients. A step that does not raise the likelihood is halved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.estimates import LEAST_PIVOT, inverted, solve
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, NO_LIMIT, SEPARATED, SINGULAR
from roundtable.core.analyses.regression import Regression
from roundtable.core.tables.table_description import ColumnTable

CLOSE, FAR, NEWTON_STEPS = 1e-9, 20.0, 25
FIRST_STEP = 3
"""The stage of the first sums at public coefficients."""
_WORST = -1e30


class NewtonFit(Regression):
    """A regression whose likelihood is climbed in columns that are centred and scaled by public figures.

    Subclasses give the counts, `start`, `climb` and the answer.
    """

    most_rounds = FIRST_STEP + NEWTON_STEPS

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        outcome: str,
        on: tuple[str, ...],
    ) -> None:
        super().__init__(columns, least, title, outcome, on)
        self._middles = np.array(self._middle)
        self._halves = np.array(self._half)

    @property
    def _free(self) -> int:
        """Numbers that are estimated: the intercept, the slopes, and what a subclass adds behind them."""
        return self._width + 1

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {
            "first": (self._width,),
            "second": (self._width,),
            "likelihood": (1,),
            "gradient": (self._free,),
            "hessian": (self._free, self._free),
        }

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {
            "mean": (self._width,),
            "sd": (self._width,),
            "slopes": (self._free,),
            "before": (self._free,),
            "likelihood": (1,),
            "hessian": (self._free, self._free),
            "blame": (1,),
        }

    def standardising(self, design: Doubles, public: Arrays, stage: int) -> dict[str, Doubles]:
        """The sums of stages 1 and 2."""
        if stage == 1:
            return {"first": ((design - self._middles) / self._halves).sum(axis=0)}
        away = (design - public["mean"]) / self._halves
        return {"first": away.sum(axis=0), "second": (away**2).sum(axis=0)}

    def scaled(self, design: Doubles, public: Arrays) -> Doubles:
        """The design with a column of ones, standardised, [rows, terms + 1]."""
        return np.column_stack([np.ones(len(design)), (design - public["mean"]) / public["sd"]])

    def standardised(self, public: Arrays, sums: Arrays, stage: int, rows: float) -> dict[str, Any]:
        """What follows from the sums of stages 1 and 2."""
        if stage == 1:
            return {"stage": 2.0, "mean": self._middles + self._halves * sums["first"] / rows}
        squares = sums["second"] - sums["first"] ** 2 / rows
        mean = public["mean"] + self._halves * sums["first"] / rows
        constant = np.flatnonzero(~(squares > LEAST_PIVOT**2 * rows))
        if constant.size:
            return {"stage": -float(SINGULAR), "blame": constant[:1].astype(np.float64)}
        sd = self._halves * np.sqrt(squares / rows)
        return {
            "stage": float(FIRST_STEP),
            "mean": mean,
            "sd": sd,
            "slopes": self.start(public, sums),
            "likelihood": np.array([_WORST]),
        }

    def start(self, public: Arrays, sums: Arrays) -> Doubles:
        """Where Newton's method begins, from the sums of stage 2."""
        return np.zeros(self._free)

    def halved(self, public: Arrays, stage: int) -> dict[str, Any]:
        """The middle between the last step and the one before it."""
        here, before = public["slopes"], public["before"]
        return {"stage": float(stage + 1), "slopes": before + (here - before) / 2}

    def climb(self, public: Arrays, sums: Arrays, stage: int, *, parted: bool = False) -> dict[str, Any]:
        """The next step, or why there is none; `parted`: the likelihood tells of a separation."""
        here = public["slopes"]
        likelihood, last = float(sums["likelihood"][0]), float(public["likelihood"][0])
        if likelihood < last - 1e-12 * abs(last):
            return self.halved(public, stage)
        found, place = self.direction(public, sums)
        far = np.abs(here[1 : self._width + 1])
        if found is None or parted or (far > FAR).any():
            later = stage > FIRST_STEP
            blamed = int(far.argmax()) if later and far.size else place - 1
            return {
                "stage": -float(SEPARATED if later else SINGULAR),
                "blame": np.array([float(blamed)]),
            }
        last_one = stage + 1 >= self.most_rounds
        grows = last_one and (far > FAR / 4).any()
        open_still = -float(SEPARATED if grows else NO_LIMIT) if last_one else float(stage + 1)
        return {
            "stage": DONE if self.close(found, public, sums) else open_still,
            "blame": np.array([float(far.argmax())]),
            "slopes": here + found,
            "before": here,
            "likelihood": sums["likelihood"],
            "hessian": sums["hessian"],
        }

    def direction(self, public: Arrays, sums: Arrays) -> tuple[Doubles | None, int]:
        """Newton's step; or None and the place of the column that leaves none."""
        return solve(sums["hessian"], sums["gradient"])

    def close(self, found: Doubles, public: Arrays, sums: Arrays) -> bool:
        """Whether a step is nothing beside the standard errors."""
        errors = np.sqrt(np.diag(inverted(sums["hessian"])))
        return bool((np.abs(found) / errors).max() < CLOSE)

    def raw(self, public: Arrays) -> Doubles:
        """The matrix that turns intercept and slopes of standardised columns into those of raw ones."""
        mean, sd = public["mean"], public["sd"]
        turn = np.diag([1.0, *(1 / sd)])
        turn[0, 1:] = -mean / sd
        return turn
