"""How a round's aggregate moves the global vector: by the server optimizer, or by the algorithm's server.

An algorithm's places lie behind the model in the flat vector, so they are aggregated, stored and sent as a
part of it; only here are they told apart. Its server's state is a part of the server optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundtable.aggregation import OptimizerState
from roundtable.core.algorithms.contract import ClientShare, ServerRound
from roundtable.core.errors import AggregationError
from roundtable.engine.validation.round_plan import Plan, ServerPart

_STATE = "algorithm."


def initial_optimizer_state(plan: Plan, columns: int) -> OptimizerState:
    """The state before round 1 of a vector of so many values."""
    if plan.server is None:
        return plan.optimizer.init(columns)
    size = plan.server.model_size(columns)
    state = plan.optimizer.init(size)
    own = {_STATE + name: value for name, value in plan.server.algorithm.init(size).items()}
    return OptimizerState({**state.vectors, **own}, state.scalars)


def sent_size(plan: Plan, columns: int) -> int:
    """Values of an update of a vector of so many: what only the server sends is not in it."""
    if plan.server is None:
        return columns
    return plan.server.sent_size(plan.server.model_size(columns))


@dataclass(frozen=True)
class ServerStep:
    """The step of round `round` (from 1): `update` is the aggregate of `present` of `population` clients,
    divided by `divisor` of them."""

    plan: Plan
    vector: Tensor
    update: Tensor
    round: int
    present: float
    population: int
    divisor: float
    work: Sequence[ClientShare] = ()

    def take(self, state: OptimizerState) -> tuple[OptimizerState, Tensor, Mapping[str, tuple[float, int]]]:
        """The state and the vector after the round, and what the algorithm tells of it."""
        if self.plan.server is None:
            return *self.plan.optimizer.apply(state, self.vector, self.update, self.round - 1), {}
        return self._by_algorithm(self.plan.server, state)

    def _by_algorithm(
        self, server: ServerPart, state: OptimizerState
    ) -> tuple[OptimizerState, Tensor, Mapping[str, tuple[float, int]]]:
        size = server.model_size(self.vector.numel())
        places = server.slices(size)
        after = OptimizerState(
            {name: value for name, value in state.vectors.items() if not name.startswith(_STATE)},
            state.scalars,
        )

        def optimize(delta: Tensor) -> Tensor:
            nonlocal after
            # An optimizer may put the new model where the update was, which the algorithm may still look at.
            after, model = self.plan.optimizer.apply(after, self.vector[:size], delta.clone(), self.round - 1)
            return model

        moved = server.algorithm.step(
            ServerRound(
                number=self.round,
                model=self.vector[:size],
                places={name: self.vector[place] for name, place in places.items()},
                update=self.update[:size],
                up={
                    name: self.update[place]
                    for name, place in places.items()
                    if place.stop <= len(self.update)
                },
                state={n.removeprefix(_STATE): v for n, v in state.vectors.items() if n.startswith(_STATE)},
                present=self.present,
                population=self.population,
                optimize=optimize,
                work=self.work,
                divisor=self.divisor,
                bound=self.plan.bound,
            )
        )
        if set(moved.places) != set(places):
            raise AggregationError(
                f"the algorithm's server gave the places {sorted(moved.places)}; "
                f"{sorted(places)} are declared"
            )
        result = torch.empty_like(self.vector)
        result[:size] = moved.model
        for name, place in places.items():
            result[place] = moved.places[name].reshape(-1)
        own = {_STATE + name: value for name, value in moved.state.items()}
        return OptimizerState({**after.vectors, **own}, after.scalars), result, moved.told
