"""Server optimizers: how the aggregate of a round moves the global model.

All work on flat vectors. `delta` is the round's aggregate, local − global, so it points downhill and is
added. `apply` leaves its arguments alone and returns a new state and a new model, computed a slice at a time:
a round that has to be repeated starts from what it started from, and no temporary is as large as the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from typing_extensions import override

from roundtable.core.algorithms.schedules import Schedule
from roundtable.core.config import DILOCO_RATE, SERVER_MOMENTUM
from roundtable.core.errors import ConfigError, LayoutError

_SLICE = 1 << 18
_CONSTANT = Schedule()
TABLE = ("aggregation", "server_optimizer")


@dataclass(frozen=True)
class OptimizerState:
    """What a server optimizer remembers: named float32 vectors [d] and named whole numbers, such as `steps`.

    It is stored with each model: `vectors` as tensors, `scalars` as metadata; the constructor takes both
    back, and the next step is the same to the bit. What is not in it is forgotten.
    """

    vectors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.scalars["steps"]


class ServerOptimizer(Protocol):
    """Moves the global model by the aggregate of a round."""

    def init(self, columns: int) -> OptimizerState:
        """The state before the first round of a model of `columns` parameters."""

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        """The state and the model [d] after round `step` (from 0, which the learning-rate schedule sees).

        Raises LayoutError where state, model and delta differ in length.
        """


def _slices(columns: int) -> Iterator[slice]:
    for start in range(0, columns, _SLICE):
        yield slice(start, min(start + _SLICE, columns))


def check_lengths(columns: int, vectors: Mapping[str, torch.Tensor]) -> None:
    """LayoutError where one of the vectors has not as many values as the model."""
    for name, vector in vectors.items():
        if vector.shape != (columns,):
            raise LayoutError(
                f"server optimizer: {name} has {vector.numel()} values and the model {columns}; the "
                "saved state belongs to another model"
            )


def _beside(model: torch.Tensor, delta: torch.Tensor, state: OptimizerState) -> OptimizerState:
    """The state on the model's device, where `init` and what is read from a file do not put it."""
    check_lengths(model.numel(), {"delta": delta, **state.vectors})
    return replace(state, vectors={name: vector.to(model.device) for name, vector in state.vectors.items()})


def _initial(columns: int, *names: str) -> OptimizerState:
    # One zero for all places, which takes no memory.
    return OptimizerState({name: torch.zeros(()).expand(columns) for name in names}, {"steps": 0})


@dataclass(frozen=True)
class ServerSGD:
    """x ← x + η Δ (McMahan et al. 2017; η = 1 is plain averaging)."""

    learning_rate: float = 1.0
    schedule: Schedule = _CONSTANT

    def init(self, columns: int) -> OptimizerState:
        return OptimizerState()

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        state = _beside(model, delta, state)
        rate = self.learning_rate * self.schedule.factor(step)
        return OptimizerState(), torch.add(model, delta, alpha=rate)


@dataclass(frozen=True)
class FedAvgM:
    """m ← β m + Δ; x ← x + η m (Hsu et al. 2019, section 4.3)."""

    learning_rate: float = 1.0
    momentum: float = SERVER_MOMENTUM
    schedule: Schedule = _CONSTANT

    def init(self, columns: int) -> OptimizerState:
        return _initial(columns, "momentum")

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        state = _beside(model, delta, state)
        rate = self.learning_rate * self.schedule.factor(step)
        momentum = torch.add(delta, state.vectors["momentum"], alpha=self.momentum)
        return OptimizerState({"momentum": momentum}, {"steps": state.steps + 1}), torch.add(
            model, momentum, alpha=rate
        )


@dataclass(frozen=True)
class Nesterov:
    """m ← β m + Δ; x ← x + η (Δ + β m): the outer optimizer of DiLoCo (Douillard et al. 2023, algorithm 1),
    with η and β as published there. It is torch's SGD with Nesterov momentum by the gradient −Δ."""

    learning_rate: float = DILOCO_RATE
    momentum: float = SERVER_MOMENTUM
    schedule: Schedule = _CONSTANT

    def init(self, columns: int) -> OptimizerState:
        return _initial(columns, "momentum")

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        state = _beside(model, delta, state)
        rate = self.learning_rate * self.schedule.factor(step)
        momentum, result = torch.empty_like(model), torch.empty_like(model)
        for part in _slices(model.numel()):
            change = delta[part]
            new = torch.add(change, state.vectors["momentum"][part], alpha=self.momentum, out=momentum[part])
            ahead = torch.add(change, new, alpha=self.momentum)
            torch.add(model[part], ahead, alpha=rate, out=result[part])
        return OptimizerState({"momentum": momentum}, {"steps": state.steps + 1}), result


@dataclass(frozen=True)
class _Adaptive:
    """Reddi et al. 2021, algorithm 2: m ← β₁ m + (1 − β₁) Δ; v as the kind says; x ← x + η m / (√v + τ).

    As in the paper there is no bias correction and v starts at 0. `bias_correction` multiplies η by
    √(1 − β₂ᵗ) / (1 − β₁ᵗ), t from 1 (Kingma & Ba 2015, end of section 2; Flower does so with t + 1).
    """

    learning_rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False
    schedule: Schedule = _CONSTANT

    def init(self, columns: int) -> OptimizerState:
        return _initial(columns, "momentum", "second_moment")

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        state = _beside(model, delta, state)
        rate = self._rate(state.steps + 1, self.learning_rate * self.schedule.factor(step))
        moments = {name: torch.empty_like(vector) for name, vector in state.vectors.items()}
        result = torch.empty_like(model)
        for part in _slices(model.numel()):
            change = delta[part]
            first = torch.mul(state.vectors["momentum"][part], self.beta_1, out=moments["momentum"][part])
            first.add_(change, alpha=1 - self.beta_1)
            second = moments["second_moment"][part]
            self._second_moment(state.vectors["second_moment"][part], change * change, second)
            torch.addcdiv(model[part], first, second.sqrt().add_(self.tau), value=rate, out=result[part])
        return OptimizerState(moments, {"steps": state.steps + 1}), result

    def _rate(self, count: int, rate: float) -> float:
        if not self.bias_correction:
            return rate
        return rate * math.sqrt(1 - self.beta_2**count) / (1 - self.beta_1**count)

    def _second_moment(self, old: torch.Tensor, square: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """v ← β₂ v + (1 − β₂) Δ²."""

    @override
    def _second_moment(self, old: torch.Tensor, square: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(old, self.beta_2, out=out).add_(square, alpha=1 - self.beta_2)


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    @override
    def _second_moment(self, old: torch.Tensor, square: torch.Tensor, out: torch.Tensor) -> None:
        torch.sub(old, square, out=out).sign_().mul_(square)
        torch.add(old, out, alpha=self.beta_2 - 1, out=out)


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """v ← v + Δ², and no momentum unless asked for: β₁ is 0."""

    beta_1: float = 0.0

    @override
    def _second_moment(self, old: torch.Tensor, square: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(old, square, out=out)


@dataclass(frozen=True)
class FedLion:
    """x ← x + η sign(β₁ m + (1 − β₁) Δ); m ← β₂ m + (1 − β₂) Δ: Lion (Chen et al. 2023, algorithm 2) on the
    server, which keeps half the state of FedAdam and moves every parameter by exactly η."""

    learning_rate: float = 1e-3
    beta_1: float = 0.9
    beta_2: float = 0.99
    schedule: Schedule = _CONSTANT

    def init(self, columns: int) -> OptimizerState:
        return _initial(columns, "momentum")

    def apply(
        self, state: OptimizerState, model: torch.Tensor, delta: torch.Tensor, step: int
    ) -> tuple[OptimizerState, torch.Tensor]:
        state = _beside(model, delta, state)
        rate = self.learning_rate * self.schedule.factor(step)
        momentum, result = torch.empty_like(model), torch.empty_like(model)
        for part in _slices(model.numel()):
            old, change = state.vectors["momentum"][part], delta[part]
            torch.lerp(old, change, 1 - self.beta_2, out=momentum[part])
            torch.add(
                model[part], torch.lerp(old, change, 1 - self.beta_1).sign_(), alpha=rate, out=result[part]
            )
        return OptimizerState({"momentum": momentum}, {"steps": state.steps + 1}), result


OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    "fedavg": ServerSGD,
    "fedavgm": FedAvgM,
    "diloco": Nesterov,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedlion": FedLion,
}


def make_optimizer(
    name: str, parameters: Mapping[str, object] | None = None, schedule: Mapping[str, object] | None = None
) -> ServerOptimizer:
    """A built-in optimizer: its name, its parameters, the table of its schedule.

    Raises ConfigError for a name or parameter that does not exist, or a value out of range.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown server optimizer {name!r}; known are {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    options = dict(parameters or {})
    allowed = [key for key in kind.__dataclass_fields__ if key != "schedule"]  # type: ignore[attr-defined]
    for key, value in options.items():
        if key not in allowed:
            raise ConfigError(
                f"server optimizer {name!r} has no parameter {key!r}; it takes: {', '.join(allowed)}",
                key=(*TABLE, key),
            )
        _check_range(name, key, value)
    try:
        plan = Schedule.of(schedule)
    except ConfigError as error:
        raise ConfigError(f"server optimizer {name!r}: {error}", key=(*TABLE, "schedule")) from error
    return kind(**options, schedule=plan)  # type: ignore[call-arg]


def _check_range(name: str, key: str, value: object) -> None:
    if key == "bias_correction":
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        fits, wanted = False, "a number"
    elif key in ("learning_rate", "tau"):
        fits, wanted = 0 < value < float("inf"), "a positive number"
    else:
        fits, wanted = 0 <= value < 1, "in [0, 1)"
    if not fits:
        raise ConfigError(
            f"server optimizer {name!r}: {key} must be {wanted}, not {value!r}", key=(*TABLE, key)
        )
