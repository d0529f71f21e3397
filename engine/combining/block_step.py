"""The server optimizer's step, block by block: neither the aggregate nor the new model need fit in memory."""

from __future__ import annotations

from torch import Tensor

from roundtable.aggregation import OptimizerState, ServerOptimizer
from roundtable.aggregation.foreign_optimizer import ForeignOptimizer
from roundtable.aggregation.fragment_optimizer import FragmentOptimizer
from roundtable.aggregation.optimizers import check_lengths
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.aggregation.taking import blocks_of
from roundtable.core.errors import AggregationError
from roundtable.engine.combining.received import Received, Rows
from roundtable.engine.combining.server_state import ServerState
from roundtable.engine.combining.vector_places import MemoryVector, PlacedVector, VectorPlaces
from roundtable.engine.validation.round_noise import CorrelatedRounds, FreshNoise
from roundtable.engine.validation.round_plan import Plan

TOO_FAR = "the new model is not finite although the aggregate is: lower the server's learning rate"


def works_by_blocks(optimizer: ServerOptimizer) -> bool:
    """Whether each parameter's step depends on nothing but that parameter's values, nor on its place."""
    if isinstance(optimizer, ForeignOptimizer):
        return optimizer.elementwise
    return not isinstance(optimizer, FragmentOptimizer)


class BlockStep:
    """Step `step` (from 0) of an optimizer that `works_by_blocks`: takes the aggregate [d], and puts the new
    model and the optimizer's new vectors in their places. The same as the step as a whole, to the bit."""

    def __init__(
        self,
        optimizer: ServerOptimizer,
        model: Tensor,
        state: OptimizerState,
        step: int,
        target: PlacedVector,
        places: VectorPlaces,
    ) -> None:
        """LayoutError for a state of another model."""
        check_lengths(model.numel(), state.vectors)
        self._optimizer = optimizer
        self._model = model
        self._state = state
        self._step = step
        self._target = target
        self._places = places
        self._vectors: dict[str, PlacedVector] = {}
        self._scalars = dict(state.scalars)
        self._taken = 0
        self._finite = True

    def begin(self) -> None:
        self._target.begin()
        self._vectors = {}
        self._taken = 0
        self._finite = True

    def take(self, start: int, values: Tensor) -> None:
        part = slice(start, start + len(values))
        own = OptimizerState(
            {n: vector[part] for n, vector in self._state.vectors.items()}, self._state.scalars
        )
        after, moved = self._optimizer.apply(own, self._model[part], values, self._step)
        self._scalars = dict(after.scalars)
        self._finite = self._finite and is_finite(moved)
        self._target.take(start, moved)
        for name, vector in after.vectors.items():
            if name not in self._vectors:
                self._vectors[name] = self._places.state(self._model.numel())
                self._vectors[name].begin()
            self._vectors[name].take(start, vector)
        for read in (self._model[part], *own.vectors.values()):
            self._places.passed(read)
        self._taken += len(values)

    def take_all(self, aggregate: Tensor) -> None:
        """Takes a whole aggregate [d]. LayoutError for one of another model."""
        check_lengths(self._model.numel(), {"delta": aggregate})
        self.begin()
        for start, values in blocks_of(aggregate):
            self.take(start, values)

    def end(self) -> tuple[OptimizerState, Tensor]:
        """The state after the round, and what the place for the model gives of it [d]. AggregationError for
        a model that is not finite."""
        if not self._taken:
            # A model without values has counters all the same.
            self.take(0, self._model[:0])
        check_lengths(self._taken, {"the model": self._model})
        if not self._finite:
            raise AggregationError(TOO_FAR)
        return OptimizerState(
            {name: vector.end() for name, vector in self._vectors.items()}, self._scalars
        ), self._target.end()


def needs_no_whole(plan: Plan, received: Received) -> bool:
    """Whether nothing looks at the aggregate as a whole: each block is made and at once stepped on."""
    summed = not isinstance(received, Rows) or isinstance(plan.noise, FreshNoise | CorrelatedRounds)
    coded = plan.estimates or plan.thinned is not None or plan.common is not None
    whole = plan.server is not None or not works_by_blocks(plan.optimizer)
    return not (summed or coded or whole or plan.aggregation.takes("previous"))


def block_step(plan: Plan, model: Tensor, state: ServerState, round: int, places: VectorPlaces) -> BlockStep:
    """The step of round `round` (from 1), from the exact model, if silos hold another one than that."""
    exact = model if state.exact is None else state.exact
    in_memory = plan.down is not None or plan.common is not None
    target = MemoryVector(len(exact)) if in_memory else places.model(len(exact))
    return BlockStep(plan.optimizer, exact, state.optimizer, round - 1, target, places)
