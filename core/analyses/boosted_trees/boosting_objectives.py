"""What trees are boosted towards: gradient and Hessian of each row's loss, as xgboost computes them.

They are float32, and enter sums as whole multiples of 2^-24 (a gradient of the objective's unit): the trees
then depend neither on how rows are split between silos nor on their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.boosted_trees.row_kernels import PAIR
from roundtable.core.analyses.exact_sums import Doubles, Singles
from roundtable.core.analyses.scipy_parts import special
from roundtable.core.errors import InvalidUpdate

GRAIN = float(1 << 24)
POISSON_STEP = 0.7
"""The largest weight of a node with Poisson's likelihood, and what raises its Hessian, as in xgboost."""
_LEAST_HESSIAN = np.float32(1e-16)


@dataclass(frozen=True)
class Boosting:
    """Squared error of a number. `outputs` trees are grown a round, `unit` is a power of two, the scale of
    gradients, `hessian_unit` that of Hessians, `weight_unit` that of rows' weights; `classes` of the outcome
    whose rows are counted, 1 for a number."""

    outputs: int = 1
    unit: float = 1.0
    classes: int = 1
    hessian_unit: float = 1.0
    weight_unit: float = 1.0

    name: ClassVar[str] = "reg:squarederror"
    metric: ClassVar[str] = "rmse"
    rising: ClassVar[bool] = False
    """Whether a higher metric is better."""
    constant_hessian: ClassVar[bool] = True
    bases: ClassVar[str] = "any number"

    def margin(self, base: float) -> np.float32:
        """The margin before the first tree."""
        return np.float32(base)

    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        """Gradient and Hessian of each row and output, [rows, outputs]; `around` [rows, any] is what they
        take of the public numbers."""
        return margins - outcome[:, None], np.ones_like(margins)

    def loss(self, margins: Singles, outcome: Singles) -> Doubles:
        """Of each row, what `told` makes the metric of, float64 [rows]."""
        away = (margins[:, 0].astype(np.float64) - outcome) / self.unit
        found: Doubles = away**2
        return found

    @property
    def units(self) -> tuple[float, float]:
        """Of weighted gradients and Hessians."""
        return self.unit * self.weight_unit, self.hessian_unit * self.weight_unit

    def told(self, loss: Doubles, rows: Doubles) -> Doubles:
        """The metric of summed losses over so many rows; 0 where there is none."""
        return self.unit * np.sqrt(loss / np.maximum(rows, 1))

    @property
    def parameters(self) -> dict[str, Any]:
        """The objective's own part of xgboost's JSON."""
        return {"reg_loss_param": {"scale_pos_weight": "1"}}

    @property
    def num_class(self) -> int:
        """As xgboost's JSON has it."""
        return 0

    def takes(self, base: float) -> bool:
        """Whether it can begin with this prediction; `bases` says with which."""
        return True

    def pairs(
        self,
        margins: Singles,
        outcome: Singles,
        around: Doubles | None = None,
        weights: Singles | None = None,
    ) -> npt.NDArray[np.void]:
        """Gradient and Hessian as whole numbers, `PAIR` [outputs, rows], times the rows' weights [rows].
        InvalidUpdate for one beyond what sums hold."""
        gradient, hessian = self.gradients(margins, outcome, around)
        if weights is not None:
            gradient, hessian = gradient * weights[:, None], hessian * weights[:, None]
        found = np.empty(gradient.T.shape, dtype=PAIR)
        for name, values, unit in zip(("gradient", "hessian"), (gradient, hessian), self.units, strict=True):
            whole = np.rint(values.T.astype(np.float64) * (GRAIN / unit))
            if not (np.abs(whole) < 1 << 31).all():
                raise InvalidUpdate(
                    "range",
                    f"a {name} of boosted trees is beyond ± {(1 << 31) / GRAIN * unit:g}: the boosting "
                    "does not converge, or the outcome's least and most are too narrow",
                )
            found[name] = whole
        return found


class SquaredError(Boosting):
    """Squared error, its gradients scaled by half of the outcome's range."""

    @classmethod
    def of(cls, half: float) -> SquaredError:
        """For an outcome whose range is twice `half` wide."""
        return cls(unit=2.0 ** math.ceil(math.log2(half)))


class PoissonLoss(Boosting):
    """Poisson's likelihood of a count, by the logarithm of its mean."""

    name: ClassVar[str] = "count:poisson"
    metric: ClassVar[str] = "poisson-nloglik"
    constant_hessian: ClassVar[bool] = False
    bases: ClassVar[str] = "a mean above 0"

    @classmethod
    def of(cls, half: float) -> PoissonLoss:
        """For an outcome whose range is twice `half` wide."""
        unit = 2.0 ** math.ceil(math.log2(half))
        return cls(unit=unit, hessian_unit=unit)

    @override
    def takes(self, base: float) -> bool:
        return base > 0

    @override
    def margin(self, base: float) -> np.float32:
        return np.float32(np.log(np.float32(base)))

    @override
    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        return np.exp(margins) - outcome[:, None], np.exp(margins + np.float32(POISSON_STEP))

    @override
    def loss(self, margins: Singles, outcome: Singles) -> Doubles:
        linear = margins[:, 0].astype(np.float64)
        found: Doubles = special.gammaln(outcome + 1.0) + np.exp(linear) - outcome * linear
        return found

    @override
    def told(self, loss: Doubles, rows: Doubles) -> Doubles:
        return loss / np.maximum(rows, 1)

    @property
    @override
    def parameters(self) -> dict[str, Any]:
        return {"poisson_regression_param": {"max_delta_step": f"{np.float32(POISSON_STEP):.9g}"}}


class LogisticLoss(Boosting):
    """Logistic loss of a category of two values, the second against the first."""

    name: ClassVar[str] = "binary:logistic"
    metric: ClassVar[str] = "logloss"
    constant_hessian: ClassVar[bool] = False
    bases: ClassVar[str] = "a chance, between 0 and 1"

    @override
    def margin(self, base: float) -> np.float32:
        one = np.float32(1.0)
        return np.float32(-np.log(one / np.float32(base) - one))

    @override
    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        one = np.float32(1.0)
        chance = one / (one + np.exp(np.minimum(-margins, np.float32(88.7))))
        return chance - outcome[:, None], np.maximum(chance * (one - chance), _LEAST_HESSIAN)

    @override
    def loss(self, margins: Singles, outcome: Singles) -> Doubles:
        linear = margins[:, 0].astype(np.float64)
        # log(1 + exp(x)), without overflow; the rounding of 1 + exp(−|x|) is below that of the sum over rows.
        found: Doubles = np.maximum(linear, 0.0) + np.log(1.0 + np.exp(-np.abs(linear))) - outcome * linear
        return found

    @override
    def told(self, loss: Doubles, rows: Doubles) -> Doubles:
        return loss / np.maximum(rows, 1)

    @override
    def takes(self, base: float) -> bool:
        return 0 < base < 1


class SoftmaxLoss(LogisticLoss):
    """Multinomial loss of a category: a tree for each of its values."""

    name: ClassVar[str] = "multi:softprob"
    metric: ClassVar[str] = "mlogloss"
    bases: ClassVar[str] = "any number"

    @override
    def takes(self, base: float) -> bool:
        return True

    @override
    def margin(self, base: float) -> np.float32:
        return np.float32(base)

    @override
    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        one, two = np.float32(1.0), np.float32(2.0)
        raised = np.exp(margins - margins.max(axis=1, keepdims=True))
        chance = raised / raised.sum(axis=1, dtype=np.float64, keepdims=True).astype(np.float32)
        own = (outcome[:, None] == np.arange(self.outputs)).astype(np.float32)
        return chance - own, np.maximum(two * chance * (one - chance), _LEAST_HESSIAN)

    @override
    def loss(self, margins: Singles, outcome: Singles) -> Doubles:
        linear = margins.astype(np.float64)
        linear -= linear.max(axis=1, keepdims=True)
        own = linear[np.arange(len(linear)), outcome.astype(np.int64)]
        found: Doubles = np.log(np.exp(linear).sum(axis=1)) - own
        return found

    @property
    @override
    def parameters(self) -> dict[str, Any]:
        return {"softmax_multiclass_param": {"num_class": str(self.outputs)}}

    @property
    @override
    def num_class(self) -> int:
        return self.outputs


class CoxLoss(Boosting):
    """Cox's partial likelihood with Breslow's ties: a row's outcome is its interval of time from 1 on,
    negative where it is censored; around it are the sums over events up to then of 1/S and of 1/S², with S
    the sum of the hazards of those at risk.
    """

    name: ClassVar[str] = "survival:cox"
    metric: ClassVar[str] = "cox-nloglik"
    constant_hessian: ClassVar[bool] = False
    bases: ClassVar[str] = "a hazard above 0"

    @override
    def takes(self, base: float) -> bool:
        return base > 0

    @override
    def margin(self, base: float) -> np.float32:
        return np.float32(np.log(base))

    @override
    def gradients(
        self, margins: Singles, outcome: Singles, around: Doubles | None = None
    ) -> tuple[Singles, Singles]:
        assert around is not None
        hazard = np.exp(margins[:, 0].astype(np.float64))
        gradient = hazard * around[:, 0] - (outcome > 0)
        hessian = hazard * around[:, 0] - hazard**2 * around[:, 1]
        return gradient.astype(np.float32)[:, None], hessian.astype(np.float32)[:, None]

    @override
    def loss(self, margins: Singles, outcome: Singles) -> Doubles:
        return np.where(outcome > 0, margins[:, 0].astype(np.float64), 0.0)

    @property
    @override
    def parameters(self) -> dict[str, Any]:
        return {}
