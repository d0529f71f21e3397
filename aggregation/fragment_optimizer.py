"""A server optimizer that moves one fragment of the model a round, each with a state of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roundtable.aggregation.optimizers import OptimizerState, ServerOptimizer
from roundtable.core.encodings.composed.fragments import Fragments


@dataclass(frozen=True)
class FragmentOptimizer:
    """`inner` on the values of the fragment that is due; what it remembers of the others stays as it is.

    `inner` works on each parameter by itself. Its vectors [d] hold every fragment's own state, each in its
    place. Rounds count for its schedule; a round moves nothing else.
    """

    inner: ServerOptimizer
    fragments: Fragments

    def init(self, columns: int) -> OptimizerState:
        return self.inner.init(columns)

    def apply(
        self, state: OptimizerState, model: Tensor, delta: Tensor, step: int
    ) -> tuple[OptimizerState, Tensor]:
        vectors = {name: vector.clone() for name, vector in state.vectors.items()}
        result, scalars = torch.empty_like(model), state.scalars
        result.copy_(model)
        for place in self.fragments.places(self.fragments.due(step + 1)):
            own = OptimizerState({n: v[place] for n, v in state.vectors.items()}, state.scalars)
            after, result[place] = self.inner.apply(own, model[place], delta[place], step)
            for name, vector in after.vectors.items():
                vectors[name][place] = vector
            scalars = after.scalars
        return OptimizerState(vectors, scalars), result
