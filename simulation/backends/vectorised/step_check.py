"""A recorded step held against autograd, at inputs that the job alone decides.

Which kernels run a shape of batch must not depend on the client that happens to meet it first in a process:
one seed gives the same bits with any number of workers. So a step is checked at the task's initial weights on
rows of the population's first client, and its tolerance is one that a right kernel cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.program import StepProgram, Vectors
from roundtable.simulation.backends.vectorised.recording import Unrecordable

Resting = Sequence[tuple[Tensor, slice]]
_TOLERANCE = 1e-4
_ROUNDING = 1e-7
_RATE = 0.125


class StatedInputs:
    """Where a step is checked: weights `initial` [d], and the first client's `examples`, if it has any.

    `resting` are the model's tensors that no step moves, and their places in the flat vector. `beside` are
    what an algorithm holds beside the weights: vectors [d] and scalars, each another one.
    """

    def __init__(self, initial: Tensor, resting: Resting, examples: Sequence[Tensor] | None = None) -> None:
        self._initial = initial
        self._resting = resting
        self._examples = examples if examples and len(examples[0]) else None
        self.beside: Sequence[Tensor] = ()

    def batch(self, like: Sequence[Tensor]) -> list[Tensor]:
        """A batch of the shapes and strides of `like`, of the first client's rows over and over.

        `like` itself where that client's examples are of another kind.
        """
        if self._examples is None or len(self._examples) != len(like):
            return list(like)
        batch = []
        for wanted, examples in zip(like, self._examples, strict=True):
            fits = wanted.dim() and wanted.dtype == examples.dtype and wanted.shape[1:] == examples.shape[1:]
            if not fits:
                return list(like)
            rows = torch.arange(len(wanted)) % len(examples)
            values = torch.empty_strided(
                wanted.shape, wanted.stride(), dtype=wanted.dtype, device=wanted.device
            )
            batch.append(values.copy_(examples.index_select(0, rows)))
        return batch

    def rested(self) -> list[Tensor]:
        """Copies, as they are now, of the resting tensors and of those beside."""
        return [tensor.clone() for tensor in self._all()]

    def rest(self, values: Sequence[Tensor]) -> None:
        """Puts such copies back."""
        for tensor, value in zip(self._all(), values, strict=True):
            tensor.copy_(value)

    def _all(self) -> list[Tensor]:
        return [*(tensor for tensor, _ in self._resting), *self.beside]

    @contextmanager
    def placed(self, vectors: Vectors, step: LocalStep) -> Iterator[None]:
        """The initial weights and a target that is not zero, in `vectors`; all put back after."""
        held = [vectors.weights.clone(), vectors.target.clone(), vectors.velocity.clone()]
        rested = self.rested()
        initial = self._initial.to(vectors.weights.device)
        vectors.weights.copy_(initial)
        for tensor, span in self._resting:
            tensor.copy_(initial[span].view(tensor.shape))
        for number, tensor in enumerate(self.beside, 1):
            wave = torch.arange(len(initial), device=initial.device).mul(number).sin().mul(0.1).add(1.0)
            tensor.copy_(initial * wave if tensor.dim() else torch.tensor(_RATE))
        if step.shifted:
            torch.mul(initial, 0.9 * step.pull + 0.1 * step.corrected, out=vectors.target)
        try:
            yield
        finally:
            self.rest(rested)
            written = [vectors.weights, vectors.target, vectors.velocity]
            for tensor, value in zip(written, held, strict=True):
                tensor.copy_(value)


def check_program(
    program: StepProgram,
    gradients_of: Callable[..., list[Tensor | None]],
    parameters: Sequence[Tensor],
    vectors: Vectors,
    stated: StatedInputs,
    tensors: Sequence[Tensor],
) -> None:
    """Raises Unrecordable where a step of `program` is not what autograd and SGD give. Nothing is trained."""
    batch, step = stated.batch(tensors), program.rule
    devices = [vectors.weights.device] if vectors.weights.device.type == "cuda" else []
    with stated.placed(vectors, step):
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            rested = stated.rested()
            loss, *gradients = gradients_of(*parameters, *batch)
            assert loss is not None
            _put_velocity(parameters, vectors, gradients)
            expected = _stepped(parameters, vectors, gradients, step)
            before = vectors.weights.clone()
            moved = stated.rested()
            stated.rest(rested)
            torch.manual_seed(0)
            computed = program.run(_RATE, *batch)
        change = vectors.weights - before
        statistics = stated.rested()
    if not torch.isfinite(loss):
        return
    inputs = [part for part in batch if part.is_floating_point() and part.numel()]
    largest = max((_largest(part) for part in inputs), default=0.0)
    scale, error = _largest(expected), _largest(change - expected)
    # What is rounded is as large as the inputs and the weights, however small the loss and its gradient are.
    rounding = _ROUNDING * (1.0 + largest)
    if not error <= _TOLERANCE * scale + rounding or not torch.allclose(
        loss, computed, _TOLERANCE, 10 * rounding
    ):
        raise Unrecordable(
            f"its first step differs from autograd's by {error:.3g} in weights that moved {scale:.3g}"
        )
    for wanted, found in zip(moved, statistics, strict=True):
        if not torch.allclose(wanted, found, _TOLERANCE, 10 * rounding, equal_nan=True):
            raise Unrecordable(
                "its first step leaves other running statistics or values beside the model than autograd's"
            )


def _put_velocity(parameters: Sequence[Tensor], vectors: Vectors, gradients: Sequence[Tensor | None]) -> None:
    """A velocity that is not zero, where the loss reaches."""
    vectors.velocity.zero_()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            start = int(parameter.storage_offset() - vectors.weights.storage_offset())
            vectors.velocity[start : start + parameter.numel()] = 0.1 * parameter.detach().flatten()


def _largest(values: Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0


def _stepped(
    parameters: Sequence[Tensor], vectors: Vectors, gradients: Sequence[Tensor | None], step: LocalStep
) -> Tensor:
    """What one step of torch's SGD adds to the weights, as a flat vector; the weights are left alone."""
    twins: list[tuple[nn.Parameter, slice]] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        twin = nn.Parameter(parameter.detach().clone())
        start = int(parameter.storage_offset() - vectors.weights.storage_offset())
        place = slice(start, start + twin.numel())
        target = vectors.target[place].view(twin.shape)
        twin.grad = gradient + (step.pull * twin.detach() - target if step.shifted else 0.0)
        twins.append((twin, place))
    if step.max_norm is not None:
        nn.utils.clip_grad_norm_([twin for twin, _ in twins], step.max_norm)
    change = torch.zeros_like(vectors.weights)
    for twin, place in twins:
        assert twin.grad is not None
        velocity = vectors.velocity[place].view(twin.shape)
        gradient = twin.grad + step.weight_decay * twin.detach()
        change[place].view(twin.shape).copy_(-_RATE * (step.momentum * velocity + gradient))
    return change
