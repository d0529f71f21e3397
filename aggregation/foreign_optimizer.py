"""Server optimizers of others: an installed package's, or a file's beside the job.

Such an optimizer is a class that takes the job's `parameters` by name and has the two methods of
`ServerOptimizer`. Before round 1 it is tried on a small model: what would be forgotten at a restart, told
apart by a repeated round, or computed differently in slices is refused there, not found in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from roundtable.aggregation.optimizers import OPTIMIZERS, TABLE, OptimizerState, ServerOptimizer
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.plugins.calls import check_methods, create, foreign_call, named_at, place_of
from roundtable.core.plugins.doors import resolve

ENTRY_POINT_GROUP = "roundtable.server_optimizers"
RESERVED = "algorithm."
_METHODS = {"init": ("columns",), "apply": ("state", "model", "delta", "step")}
_COLUMNS = 6


@dataclass(frozen=True)
class ForeignOptimizer:
    """Somebody else's optimizer, whose every answer is checked.

    `elementwise`: it says of itself that each parameter's step depends on nothing but that parameter's
    values, so that a coordinator may apply it a slice at a time.
    """

    name: str
    inner: ServerOptimizer
    elementwise: bool

    def init(self, columns: int) -> OptimizerState:
        with foreign_call(f"{self._reference}: init", self.inner, AggregationError):
            state = self.inner.init(columns)
        self._check_state(state, columns)
        return state

    def apply(
        self, state: OptimizerState, model: Tensor, delta: Tensor, step: int
    ) -> tuple[OptimizerState, Tensor]:
        with foreign_call(f"{self._reference}: apply", self.inner, AggregationError):
            answer = self.inner.apply(state, model, delta, step)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise AggregationError(
                f"{self._reference}: apply returned a {type(answer).__name__}, not (state, model)"
            )
        after, moved = answer
        self._check_state(after, model.numel())
        self._check_vector("the new model", moved, model.numel())
        if (set(after.vectors), set(after.scalars)) != (set(state.vectors), set(state.scalars)):
            raise AggregationError(
                f"{self._reference}: apply returned the state {_names(after)}, and init declared "
                f"{_names(state)}"
            )
        return after, moved

    @property
    def _reference(self) -> str:
        return f"server optimizer {self.name!r}"

    def _check_state(self, state: object, columns: int) -> None:
        if not isinstance(state, OptimizerState):
            raise AggregationError(
                f"{self._reference}: its state is a {type(state).__name__}, not an OptimizerState, which "
                f"alone "
                "is stored with the model"
            )
        for name, vector in state.vectors.items():
            self._check_name(name)
            self._check_vector(f"its state's {name!r}", vector, columns)
        for name, value in state.scalars.items():
            self._check_name(name)
            if type(value) is not int:
                raise AggregationError(
                    f"{self._reference}: its state's {name!r} is {value!r}; numbers of a state are whole"
                )

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not name or name.startswith(RESERVED):
            raise AggregationError(
                f"{self._reference}: its state has the name {name!r}; a name is text that does not begin "
                f"with "
                f"{RESERVED!r}"
            )

    def _check_vector(self, what: str, vector: object, columns: int) -> None:
        if not isinstance(vector, Tensor):
            raise AggregationError(f"{self._reference}: {what} is a {type(vector).__name__}, not a tensor")
        if vector.shape != (columns,) or vector.dtype != torch.float32:
            kind = str(vector.dtype).removeprefix("torch.")
            raise AggregationError(
                f"{self._reference}: {what} is {kind} {list(vector.shape)}, not float32 [{columns}]"
            )


def find_optimizer(name: str, parameters: Mapping[str, object], folder: Path | None) -> ForeignOptimizer:
    """Somebody else's optimizer of this name, with the job's parameters, tried once.

    `folder` is where `file.py:Class` is looked for; None refuses files. Raises ConfigError where there is
    none, or where it does not do what is asked of one.
    """
    reference, table = f"server optimizer {name!r}", (*TABLE, "parameters")
    with named_at(*TABLE, "name"):
        kind = resolve("server optimizer", name, OPTIMIZERS, ENTRY_POINT_GROUP, folder)
        if not isinstance(kind, type):
            raise ConfigError(
                f"{reference}{place_of(kind)} is not a class with the methods of a ServerOptimizer"
            )
        check_methods(reference, kind, _METHODS)
    inner = create(reference, kind, parameters, table)
    optimizer = ForeignOptimizer(name, inner, bool(getattr(inner, "elementwise", False)))
    try:
        _try(optimizer)
    except AggregationError as error:
        raise ConfigError(f"{error}{place_of(kind)}", key=table) from error
    return optimizer


def _try(optimizer: ForeignOptimizer) -> None:
    """Two rounds over a small model. Raises AggregationError for what a job would suffer from later."""
    reference = f"server optimizer {optimizer.name!r}"
    model, delta = torch.linspace(-1.0, 1.0, _COLUMNS), torch.linspace(0.5, -0.25, _COLUMNS)
    first = optimizer.apply(optimizer.init(_COLUMNS), model.clone(), delta.clone(), 0)
    kept_state = _copied(first[0])
    kept_model, kept_delta = first[1].clone(), delta.clone()
    second = optimizer.apply(first[0], first[1], kept_delta, 1)
    untouched = torch.equal(first[1], kept_model) and torch.equal(kept_delta, delta)
    if not (untouched and _equal(first[0], kept_state)):
        raise AggregationError(
            f"{reference}: apply changes its arguments; a round that is repeated needs them as they were: "
            "compute new tensors"
        )
    again = optimizer.apply(kept_state, kept_model, kept_delta, 1)
    if not (torch.equal(again[1], second[1]) and _equal(again[0], second[0])):
        raise AggregationError(
            f"{reference}: apply gives another answer to the same arguments; what it remembers or draws "
            f"beside "
            "its OptimizerState would be lost at a restart"
        )
    if optimizer.elementwise and not _sliced_alike(optimizer, kept_state, kept_model, kept_delta, second):
        raise AggregationError(
            f"{reference}: it says elementwise = True, and gives another answer for half of a vector: "
            f"leave that "
            "out, and it gets whole vectors"
        )


def _sliced_alike(
    optimizer: ForeignOptimizer,
    state: OptimizerState,
    model: Tensor,
    delta: Tensor,
    whole: tuple[OptimizerState, Tensor],
) -> bool:
    for part in (slice(0, _COLUMNS // 2), slice(_COLUMNS // 2, _COLUMNS)):
        own = OptimizerState({name: vector[part] for name, vector in state.vectors.items()}, state.scalars)
        after, moved = optimizer.apply(own, model[part], delta[part], 1)
        expected = {name: vector[part] for name, vector in whole[0].vectors.items()}
        if not torch.equal(moved, whole[1][part]):
            return False
        if not _equal(after, OptimizerState(expected, whole[0].scalars)):
            return False
    return True


def _copied(state: OptimizerState) -> OptimizerState:
    return OptimizerState({name: v.clone() for name, v in state.vectors.items()}, dict(state.scalars))


def _equal(one: OptimizerState, other: OptimizerState) -> bool:
    return (
        dict(one.scalars) == dict(other.scalars)
        and set(one.vectors) == set(other.vectors)
        and all(torch.equal(vector, other.vectors[name]) for name, vector in one.vectors.items())
    )


def _names(state: OptimizerState) -> str:
    return ", ".join(sorted((*state.vectors, *state.scalars))) or "nothing"
