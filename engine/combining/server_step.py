"""How a round's aggregate moves the global vector: by the server optimizer, or by the algorithm's server.

An algorithm's places lie behind the model in the flat vector, so they are aggregated, stored and sent as a
part of it; only here are they told apart. Its server's state is a part of the server optimizer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundtable.aggregation import OptimizerState
from roundtable.core.algorithms.contract import ServerRound
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


def take_step(
    plan: Plan, state: OptimizerState, vector: Tensor, update: Tensor, round: int, present: int
) -> tuple[OptimizerState, Tensor]:
    """The state and the vector after a round (from 1); `update` is the aggregate of `present` updates."""
    if plan.server is None:
        return plan.optimizer.apply(state, vector, update, round - 1)
    return _by_algorithm(plan, plan.server, state, vector, update, round, present)


def _by_algorithm(
    plan: Plan,
    server: ServerPart,
    state: OptimizerState,
    vector: Tensor,
    update: Tensor,
    round: int,
    present: int,
) -> tuple[OptimizerState, Tensor]:
    size = server.model_size(vector.numel())
    places = server.slices(size)
    after = OptimizerState(
        {name: value for name, value in state.vectors.items() if not name.startswith(_STATE)}, state.scalars
    )

    def optimize(delta: Tensor) -> Tensor:
        nonlocal after
        # An optimizer may put the new model where the update was, and the algorithm may still look at that.
        after, model = plan.optimizer.apply(after, vector[:size], delta.clone(), round - 1)
        return model

    moved = server.algorithm.step(
        ServerRound(
            number=round,
            model=vector[:size],
            places={name: vector[place] for name, place in places.items()},
            update=update[:size],
            up={name: update[place] for name, place in places.items()},
            state={n.removeprefix(_STATE): v for n, v in state.vectors.items() if n.startswith(_STATE)},
            present=present,
            population=server.population,
            optimize=optimize,
        )
    )
    if set(moved.places) != set(places):
        raise AggregationError(
            f"the algorithm's server gave the places {sorted(moved.places)}; {sorted(places)} are declared"
        )
    result = torch.empty_like(vector)
    result[:size] = moved.model
    for name, place in places.items():
        result[place] = moved.places[name].reshape(-1)
    own = {_STATE + name: value for name, value in moved.state.items()}
    return OptimizerState({**after.vectors, **own}, after.scalars), result
