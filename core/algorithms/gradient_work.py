"""One step's gradient as an algorithm makes it, of operations on tensors, so that backends can record it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

Objective = Callable[[nn.Module, Any], Tensor]
"""A scalar of a model and a batch."""

Gradients = list[Tensor | None]
"""One for each trained parameter; None for one that the step leaves alone."""


class GradientWork(Protocol):
    """A step as `ClientAlgorithm.gradients` sees it, without autograd around it.

    What it makes must follow from tensors by the same operations each time: no value is read into Python, and
    what differs between steps is said by `phase`, what differs between clients by what they hold.

    phase: of the step, as `ClientAlgorithm.phase` says. batch: the step's. module: for what it is made of.
    names, weights: of the trained parameters, as they are before the step; they must be left alone.
    """

    @property
    def phase(self) -> Hashable: ...

    @property
    def task(self) -> Any: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def batch(self) -> Any: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def weights(self) -> Sequence[Tensor]: ...

    def held(self, name: str) -> Sequence[Tensor]:
        """The trained parameters of a vector of `ClientAlgorithm.holds`, in the order of `weights`; they may
        be changed in place."""
        ...

    def figure(self, name: str) -> Tensor:
        """A scalar of `ClientAlgorithm.holds`, [], which may be changed in place."""
        ...

    def gradients(
        self,
        at: Sequence[Tensor] | None = None,
        *,
        earlier: bool = False,
        held: str | None = None,
        of: Objective | None = None,
        statistics: bool = True,
    ) -> tuple[Tensor, Gradients]:
        """Loss [] and its gradient at the weights `at`, in training mode; without `at` at those of the step.

        earlier: on the batch of the step before, where the algorithm `looks_back`. held: whose running
        statistics the pass moves, instead of the client's; without `statistics` none are moved. of: another
        objective than the task's loss; it is not made of parts of a batch.
        """
        ...

    def loss(self) -> Tensor:
        """The loss [] of the step's batch alone, in training mode; no statistics are moved."""
        ...

    def evaluated(self, held: str, function: Objective) -> Tensor:
        """A function of a held model in evaluation mode and the step's batch, without gradients."""
        ...


Held = Mapping[str, Tensor]
"""What a client holds beside its model for a round: vectors [d] of models, and scalars []."""


def sums(one: Gradients, other: Gradients) -> Gradients:
    """The sum of two gradients of the same parameters."""
    return [a if b is None else b if a is None else a + b for a, b in zip(one, other, strict=True)]
