"""Logistic and Poisson regression under noise: Newton's method on noisy gradients and Hessians.

With t = (1, features) scaled as for products, a row's gradient is t (y − m), with |y − m| ≤ 1 of the
logistic mean, and its Hessian t tᵀ times m (1 − m) ≤ 1/4. Each step is one release of both.

Counts have no small bound: the range that a study states is far above most of them. So a count pulls by
`BoundedScore`, whose bound follows from the first round's noisy mean count, and weights in the Hessian are
cut; both travel in units of their bounds, which are public. Weights that are cut change no estimate, as a
step still ends where the gradient is 0, and make errors larger.

Errors. The last step goes from b to b + H⁻¹ g, with noise N on the gradient g and D on the Hessian H. To
first order what that is off by is H⁻¹ (s + N + D e): s is the score of the sample at the truth, with variance
H, and e what b was off by, whose variance the step before gave. So the variance is
H⁻¹ (H + σ² + E[D e eᵀ D]) H⁻¹.

That holds where the last step ends near the maximum. Under perfect separation there is none, and each step
is about as long as the one before, at least 1 in the linear predictor: so there is no answer where the last
step changes a coefficient by more than 1, and by more than the errors of both ends explain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients
from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.noisy.bounded_counts import bounded_score
from roundtable.core.analyses.noisy.noisy_products import DROWNED, NoisyProducts
from roundtable.core.analyses.noisy.noisy_question import Q95, SumBlock, count_interval
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.scipy_parts import special
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_STEPS = 4
_LONGEST = 3.0
"""The most that a coefficient of a scaled column changes in a step: noise may make it a leap."""
_RESTLESS = (
    "the fit did not come to rest in its steps: a column may tell the outcome for certain (perfect "
    "separation), so that its coefficient has no limit"
)
_FAR, _HEAVY = 5.0, 2.0
"""Where counts are bounded beside the noise: as many standard deviations of a Poisson count off their mean,
and a weight of as many mean counts."""
_QUIET_GRADIENT, _QUIET_HESSIAN = 0.2, 0.003
"""Noise that is nothing: of the gradient's beside that of sampling, of the Hessian's beside the Hessian.
Up to there counts are bounded less, or not at all."""
_LEAST_UNIT = 1e-6
_SEEN = 3.0
"""Standard deviations of its noise that what the fit explains has to reach."""
_SHARES = {"gradient": 3.0, "last_gradient": 4.0, "hessian": 3.0, "last_hessian": 2.0, "start": 1.0}
"""What first and last steps count when the budget is divided. Coverage and width were tried for several:
the last gradient decides the errors, earlier steps have to come near the maximum at all."""


class NoisyNewton(NoisyProducts):
    """A regression by Newton's method: stage 0 counts, and each of the next is a step; subclasses say of
    which mean."""

    ratios: ClassVar[str] = ""
    rests_on: ClassVar[tuple[str, ...]] = ()
    """What the errors count on that nothing released can show, for the reader."""
    clear: ClassVar[float] = 1.0
    """As for linear regression, how often the noise's spectral norm goes into the smallest eigenvalue."""
    curvature: ClassVar[float] = 1.0
    """How much more a Hessian counts where the budget is divided."""

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, outcome: str, on: tuple[str, ...]
    ) -> None:
        super().__init__(columns, title, on)
        self.outcome = outcome

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (*self._of, self.outcome)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self.outcome,)

    @property
    def most(self) -> tuple[float, float]:
        """Bounds of what a row pulls, and of its weight in the Hessian, in the units in which both travel."""
        raise NotImplementedError

    @property
    def largest(self) -> float:
        """The largest outcome."""
        return 1.0

    def units_of(self, rows: float, total: float, silos: float) -> tuple[float, float]:
        """The units of pulls and weights in the outcome's own, as public counts tell it: of so many rows, and
        of the sum of their outcomes."""
        return 1.0, 1.0

    def read(self, table: DataTable, whole: npt.NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
        """(outcome, offset) of the whole rows."""
        raise NotImplementedError

    def pulls(self, outcome: Doubles, linear: Doubles, units: Doubles) -> tuple[Doubles, Doubles]:
        """(pull, weight) of rows with a linear predictor, in these units, within `most`."""
        raise NotImplementedError

    def intercept(self, share: float, offset: float) -> float:
        """With which to begin, the slopes being 0: `share` is the mean of what `start` adds up."""
        raise NotImplementedError

    def unseen(self, rows: float, total: float, noise: float) -> str:
        """Why nothing can be explained of outcomes with this noisy sum, all of them in units of the most that
        one may be; "" where something can."""
        raise NotImplementedError

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        gradient, weight = self.most
        width, pairs = len(self.terms) + 1, len(self._pairs)
        norm = math.sqrt(1 + len(self._of))
        first, last = range(1, _STEPS), range(_STEPS, _STEPS + 1)

        def block(name: str, size: int, reach: float, stages: range) -> SumBlock:
            more = self.curvature if "hessian" in name else 1.0
            return SumBlock((size,), reach, stages, _SHARES[name] * more * norm / 4)

        return {
            "start": block("start", 3, math.sqrt(3.0), range(1)),
            "gradient": block("gradient", width, gradient * norm, first),
            "hessian": block("hessian", pairs, weight * self.reach, first),
            "last_gradient": block("last_gradient", width, gradient * norm, last),
            "last_hessian": block("last_hessian", pairs, weight * self.reach, last),
        }

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        width = len(self.terms) + 1
        fit: dict[str, Shape] = {"slopes": (width,), "covariance": (width, width), "rest": (1,)}
        return {"start": (3,), "units": (2,), "least": (1,), **fit}

    @override
    def added_at(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        whole = np.asarray(~np.isnan(table.matrix(self.names)).any(axis=1), dtype=np.bool_)
        outcome, offset = self.read(table, whole)
        if stage == 0:
            scaled = outcome / self.largest
            return {"start": np.array([float(len(outcome)), scaled.sum(), np.clip(offset, -1.0, 1.0).sum()])}
        t = self.design(table, whole)
        with np.errstate(all="ignore"):
            linear = np.nan_to_num(t @ public["slopes"] + self.stretch * offset, nan=0.0)
        pull, weight = self.pulls(outcome, np.clip(linear, -700.0, 700.0), public["units"])
        mark = "last_" if stage == _STEPS else ""
        return {
            f"{mark}gradient": t.T @ pull,
            f"{mark}hessian": self.products(t, weight),
        }

    stretch = 1.0
    """What an offset of 1 is in the linear predictor."""

    @override
    def follow(self, public: Arrays, released: Arrays, stage: int) -> dict[str, Any]:
        width = len(self.terms) + 1
        if stage == 0:
            slopes = np.zeros(width)
            rows = max(float(released["start"][0]), 1.0)
            slopes[0] = self.intercept(*(released["start"][1:] / rows))
            units = self.units_of(rows, float(released["start"][1]) * self.largest, self.silos(public))
            return {"start": released["start"], "slopes": slopes, "units": np.array(units)}
        mark, silos = "last_" if stage == _STEPS else "", self.silos(public)
        pull, weight = public["units"]
        hessian = weight * (self._map @ released[f"{mark}hessian"])
        noise = pull * self.spread(f"{mark}gradient", silos)
        blur = weight * self.spread(f"{mark}hessian", silos)
        least = float(np.linalg.eigvalsh(hessian)[0])
        # Where noise has made the Hessian nearly singular, a step is as long as it would be beside the noise.
        ridge = max(0.0, 2 * blur * math.sqrt(width) - least) if stage < _STEPS else 0.0
        clear = least / (self.clear * blur * math.sqrt(width))
        if stage == _STEPS and clear < 1.0:
            return {"least": clear}
        inverse = np.linalg.inv(hessian + ridge * np.eye(width))
        step = inverse @ (pull * released[f"{mark}gradient"])
        if stage < _STEPS:
            step *= min(1.0, _LONGEST / max(float(np.abs(step).max()), _LONGEST))
        middle = hessian + noise**2 * np.eye(width)
        middle += blur**2 * np.einsum("ijk,jl,mlk->im", self._map, public["covariance"], self._map)
        covariance = inverse @ middle @ inverse
        explained = 2 * np.sqrt(np.maximum(np.diag(covariance + public["covariance"]), 0.0))
        return {
            "slopes": public["slopes"] + step,
            "covariance": covariance,
            "least": clear,
            "rest": float((np.abs(step) / np.maximum(explained, 1.0)).max()),
        }

    @override
    def answer(self, public: Arrays) -> Answer:
        n, noise = float(public["start"][0]), self.spread("start", self.silos(public))
        if why := self.unseen(n, float(public["start"][1]), noise):
            return Answer(self.title, self.ask, why=why)
        if public["least"][0] < 1.0 or not (np.diag(public["covariance"]) > 0).all():
            return Answer(self.title, self.ask, why=DROWNED)
        if public["rest"][0] > 1.0:
            return Answer(self.title, self.ask, why=_RESTLESS)
        units = np.diag([1.0, *(1 / self._half)])
        units[0, 1:] = -self._middle / self._half
        estimates = units @ public["slopes"]
        errors = np.sqrt(np.diag(units @ public["covariance"] @ units.T))
        values = {
            "n": n,
            "n_interval": count_interval(n, noise),
            **coefficients(["intercept", *self.terms], estimates, errors, None),
            self.ratios: np.exp(np.clip(estimates, -700, 700)).tolist(),
        }
        notes = [
            f"{max(0, round(n))} ± {Q95 * noise:.4g} rows; errors, intervals and p count the noise in",
            "no likelihood is told: it is a sum over rows without a bound",
            *self.rests_on,
        ]
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)


class NoisyLogistic(NoisyNewton):
    """Logistic regression of a category of two values, the second against the first."""

    ask: ClassVar[str] = "logistic"
    ratios: ClassVar[str] = "odds_ratios"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, outcome: str, on: tuple[str, ...]
    ) -> None:
        super().__init__(columns, title, outcome, on)
        if len(self.category(outcome).values) != 2:
            raise ConfigError(f"{title}: logistic regression is of two values, and {outcome!r} has others")

    @property
    @override
    def most(self) -> tuple[float, float]:
        return 1.0, 0.25

    @override
    def read(self, table: DataTable, whole: npt.NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
        outcome = table.column(self.outcome)[whole]
        return outcome, np.zeros(len(outcome))

    @override
    def pulls(self, outcome: Doubles, linear: Doubles, units: Doubles) -> tuple[Doubles, Doubles]:
        chance = special.expit(linear)
        return outcome - chance, np.minimum(chance * (1 - chance), 0.25)

    @override
    def intercept(self, share: float, offset: float) -> float:
        return float(special.logit(min(max(share, 0.02), 0.98)))

    @override
    def unseen(self, rows: float, total: float, noise: float) -> str:
        first, second = self.category(self.outcome).values
        for value, many, spread in ((first, rows - total, math.sqrt(2) * noise), (second, total, noise)):
            if many < _SEEN * spread:
                return f"beside the noise no rows have {self.outcome} = {value}: there is nothing to explain"
        return ""


class NoisyPoisson(NoisyNewton):
    """Poisson regression of a count within its range; means beyond the most count as the most. Silos take the
    units that are public within the range, whatever they are: a row moves what is sent by no more."""

    ask: ClassVar[str] = "poisson"
    ratios: ClassVar[str] = "rate_ratios"
    rests_on: ClassVar[tuple[str, ...]] = (
        "errors are those of counts that vary as Poisson's do; no sum is released that tells whether these "
        "vary more, and then the intervals are too short",
    )
    # A weight's bound is above most weights, so noise is larger beside the Hessian, which bends more.
    clear: ClassVar[float] = 1.5
    curvature: ClassVar[float] = 2.0

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        title: str,
        outcome: str,
        on: tuple[str, ...],
        exposure: str | None,
    ) -> None:
        super().__init__(columns, title, outcome, on)
        self.exposure = exposure
        found = self.number(outcome)
        if (found.least or 0.0) < 0 or not found.most:
            raise ConfigError(f"{title}: counts are from 0 on: set least = 0 in [columns.{outcome}]")
        self.stretch = 1.0
        if exposure is not None:
            span = self.number(exposure)
            if not span.least or span.least <= 0:
                raise ConfigError(
                    f"{title}: under [privacy] an exposure needs a least above 0: without one its logarithm "
                    f"has no bound ([columns.{exposure}])"
                )
            self.stretch = max(1.0, *(abs(math.log(end)) for end in (span.least, span.most or span.least)))

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return (*super().names, *([self.exposure] if self.exposure is not None else []))

    @property
    @override
    def most(self) -> tuple[float, float]:
        return 1.0, 1.0

    @property
    @override
    def largest(self) -> float:
        return float(self.number(self.outcome).most or 1.0)

    @override
    def units_of(self, rows: float, total: float, silos: float) -> tuple[float, float]:
        most = self.largest
        # Rather too large than too small: a standard deviation above what the noise left of it.
        mean = (total + most * self.spread("start", silos)) / rows
        mean = min(max(mean, 1e-3 * most), most)
        quiet = (
            _QUIET_GRADIENT * math.sqrt(rows * mean) / self.spread("last_gradient", silos),
            _QUIET_HESSIAN * rows * mean / self.spread("last_hessian", silos),
        )
        bounds = max(quiet[0], _FAR * math.sqrt(mean)), max(quiet[1], _HEAVY * mean)
        return min(bounds[0], most), min(bounds[1], most)

    @override
    def read(self, table: DataTable, whole: npt.NDArray[np.bool_]) -> tuple[Doubles, Doubles]:
        outcome = np.clip(table.column(self.outcome)[whole], 0.0, self.largest)
        if self.exposure is None:
            return outcome, np.zeros(len(outcome))
        span = self.number(self.exposure)
        lasts = np.clip(table.column(self.exposure)[whole], span.least, span.most)
        return outcome, np.log(lasts) / self.stretch

    @override
    def pulls(self, outcome: Doubles, linear: Doubles, units: Doubles) -> tuple[Doubles, Doubles]:
        bound, heaviest = np.clip(units, _LEAST_UNIT * self.largest, self.largest)
        mean = np.minimum(np.exp(linear), self.largest)
        pull, weight = bounded_score(float(bound), self.largest).at(outcome, mean)
        return np.clip(pull / bound, -1.0, 1.0), np.minimum(weight / heaviest, 1.0)

    @override
    def intercept(self, share: float, offset: float) -> float:
        lasts = math.exp(self.stretch * min(max(offset, -1.0), 1.0))
        return math.log(max(share, 1e-3) * self.largest / lasts)

    @override
    def unseen(self, rows: float, total: float, noise: float) -> str:
        if total < _SEEN * noise:
            return (
                f"beside the noise nothing is counted in {self.outcome}: there is nothing to explain, or its "
                f"most ({self.largest:g}) is far above its counts"
            )
        return ""
