"""One training step of many clients at once: their weights are the rows of a matrix.

`torch.func.vmap` turns the task's loss into one over a stack of weights and batches: a Linear becomes one
batched product, a convolution one in groups. The clients do not touch each other, so the gradient of
the sum of their losses holds the gradient of each, and ordinary autograd computes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from roundtable.client.training.module_state import bit_sum
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.initial_model import hooked_parameter
from roundtable.core.layout import Layout
from roundtable.core.task import Task
from roundtable.simulation.backends.module_condition import ModuleComposition, TaskState
from roundtable.simulation.backends.precision import MixedPrecision
from roundtable.simulation.backends.vectorised.recorded_work import Loss

Where = slice | Tensor
"""Places in the stack: a slice, which costs nothing, or int64 [clients]."""

Parts = tuple[Tensor, ...]

# A GPU may round what it multiplies to TF32, 10 bits, in one of the two ways that are compared.
_TOLERANCES = {"cpu": 1e-4, "cuda": 1e-2}
# bfloat16 keeps 8 bits, and stacked products round elsewhere than single ones.
_MIXED_TOLERANCE = 5e-2


class Unstackable(Exception):
    """The task's step cannot be taken for many clients at once; the message says why."""


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies in the flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, rows: Tensor) -> Tensor:
        """The tensor of each row: a view [rows, *shape] of `rows` [rows, d]."""
        return rows[:, self.start : self.stop].view(-1, *self.shape)


class _WeightsFirst(TorchFunctionMode):
    """Computes x Wᵀ as (W xᵀ)ᵀ: so the gradient comes as W lies, and not transposed, which is slow to add."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        product = (weight @ rows.mT).mT.reshape(*input.shape[:-1], -1)
        return product if bias is None else product + bias


class Stack:
    """Clients' weights `[clients, d]`, all beginning at `anchor` [d], and their velocities.

    Once a batch has been checked, `random` says whether the loss draws random numbers (dropout), and
    `bytes_each` what memory each client takes.
    """

    def __init__(self, task: Task, model: nn.Module, layout: Layout, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.anchor = torch.zeros(layout.size, device=device)
        self.weights = self.velocity = self.constants = self.anchor.expand(0, -1)
        self.random = False
        self.bytes_each = 0
        self._loss = Loss(task, self.model)
        self._mixed = isinstance(task, MixedPrecision)
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        spans = [_Span(t.name, t.offset, t.offset + t.size, t.shape) for t in layout.averaged]
        self._trained = [span for span in spans if span.name in trained]
        self._resting = {
            f"model.{span.name}": span.of(self.anchor[None])[0] for span in spans if span.name not in trained
        }

    def begin(self, count: int, step: LocalStep, constants: Tensor | None = None) -> None:
        """So many clients begin at the anchor; `constants` [count, d] are added to each one's gradients."""
        if len(self.weights) != count:
            # First given back, then taken: there may be no room for both.
            self.weights = self.velocity = self.anchor.expand(0, -1)
            self.weights = self.anchor.expand(count, -1).clone()
        else:
            self.weights.copy_(self.anchor)
        if constants is not None:
            self.constants = constants.to(self.anchor.device)
        if step.momentum:
            self.velocity = torch.zeros_like(self.weights)

    def step(self, where: Where, batch: Parts, step: LocalStep, rate: float) -> Tensor:
        """A step of the clients at `where` on `batch` [clients, size, …]; their losses, not waited for."""
        weights = self.weights[where]
        velocity = self.velocity[where] if step.momentum else None
        constants = self.constants[where] if step.corrected else None
        losses, gradients = self._stacked(weights, batch, "different" if self.random else "error")
        self._move(weights, velocity, constants, gradients, step, rate)
        if isinstance(where, Tensor):
            self.weights[where] = weights
            if velocity is not None:
                self.velocity[where] = velocity
        return losses

    def check(self, batch: Parts, step: LocalStep) -> None:
        """Holds the stacked step against autograd's, client by client, at the anchor; nothing is trained.

        What draws random numbers is compared in evaluation mode, where dropout is off. Raises
        Unstackable where the loss cannot be stacked or comes out different.
        """
        versions = self._versions()
        if (hooked := hooked_parameter(self.model)) is not None:
            raise Unstackable(f"{hooked!r} has a hook on its gradient, which stacked weights do not have")
        try:
            self._check_forgets(tuple(part[0] for part in batch))
            saved = self._try(batch)
            self.model.train(not self.random)
            self._compare(batch)
        except Unstackable:
            raise
        except Exception as error:
            # A task is foreign code: whatever it raises here it may not raise by itself.
            raise Unstackable(_in_words(error)) from error
        finally:
            self.model.train()
        if self._versions() != versions:
            raise Unstackable("it changes a buffer or a frozen weight of the model in place")
        vectors = 4 + bool(step.momentum) + bool(step.pull) + step.corrected
        self.bytes_each = vectors * self.anchor.nbytes + 2 * saved // len(batch[0])

    def _check_forgets(self, batch: Parts) -> None:
        """A loss that goes on from what the last one has set on the task or the model is not stacked: clients
        would go on from each other's. What a first one sets is not looked at, for it may be a cache."""
        task = self._loss.task
        own = getattr(task, "__dict__", {})
        before = dict(own)
        task.loss(self.model, batch)
        state, composition = TaskState(task), ModuleComposition(self.model)
        task.loss(self.model, batch)
        if not state.holds():
            own.clear()
            own.update(before)
            raise Unstackable("it keeps something on the task from one step to the next")
        if not composition.holds():
            raise Unstackable("it sets something anew on the model from one step to the next")

    def _try(self, batch: Parts) -> int:
        """Finds out whether the loss is random; the bytes that autograd keeps for the backward pass."""
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        weights = self.anchor.expand(len(batch[0]), -1).clone()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            try:
                self._stacked(weights, batch, "error")
            except RuntimeError as error:
                if "randomness" not in str(error):
                    raise
                self.random = True
                self._stacked(weights, batch, "different")
        return sum(sizes.values())

    def _compare(self, batch: Parts) -> None:
        """At the anchor; a loss that is not finite decides nothing."""
        count = len(batch[0])
        losses, gradients = self._stacked(self.anchor.expand(count, -1).clone(), batch, "error")
        for client in range(count):
            leaves = [leaf[0] for leaf in self._leaves(self.anchor.expand(1, -1))]
            loss = self._loss_of(leaves, tuple(part[client] for part in batch))
            expected = torch.autograd.grad(loss, leaves, allow_unused=True)
            if not torch.isfinite(loss):
                continue
            actual = [None if g is None else g[client] for g in gradients]
            error, scale = _difference(actual, expected)
            tolerance = _MIXED_TOLERANCE if self._mixed else _TOLERANCES[self.anchor.device.type]
            same = torch.isclose(losses[client], loss, rtol=tolerance, atol=1e-6)
            if not same or not error <= tolerance * scale + 1e-7:
                raise Unstackable(
                    f"its first loss is {losses[client].item():.6g}, and without stacking {loss.item():.6g}; "
                    f"their gradients differ by {error:.3g} of {scale:.3g}"
                )

    def _stacked(
        self, weights: Tensor, batch: Parts, randomness: str
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Losses [clients] and each trained tensor's gradient [clients, *shape]; None where unreached."""
        leaves = self._leaves(weights)
        # Of the ways to compute attention only the plain one is made of operations that vmap can stack.
        with sdpa_kernel(SDPBackend.MATH), _WeightsFirst():
            losses = vmap(self._loss_of, randomness=randomness)(leaves, batch)
            return losses.detach(), torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    def _loss_of(self, leaves: Sequence[Tensor], batch: Parts) -> Tensor:
        trained = {f"model.{span.name}": leaf for span, leaf in zip(self._trained, leaves, strict=True)}
        loss: Tensor = functional_call(self._loss, {**trained, **self._resting}, (batch,))
        return loss

    def _leaves(self, weights: Tensor) -> list[Tensor]:
        """The trained tensors of each row, as views."""
        rows = weights.detach()
        return [span.of(rows).requires_grad_() for span in self._trained]

    @torch.no_grad()
    def _move(
        self,
        weights: Tensor,
        velocity: Tensor | None,
        constants: Tensor | None,
        gradients: Sequence[Tensor | None],
        step: LocalStep,
        rate: float,
    ) -> None:
        """What `client.training` does after a backward pass, for every row; gradients may share memory."""
        reached: list[tuple[_Span, Tensor]] = []
        for span, gradient in zip(self._trained, gradients, strict=True):
            drawn = self._drawn(span, weights, constants, step)
            if drawn is not None:
                reached.append((span, drawn if gradient is None else drawn.add_(gradient)))
            elif gradient is not None:
                reached.append((span, gradient))
        if step.max_norm is not None and reached:
            squares = torch.stack([gradient.square().flatten(1).sum(1) for _, gradient in reached])
            factor = (step.max_norm / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
            reached = [(span, g * factor.view(-1, *[1] * (g.dim() - 1))) for span, g in reached]
        for span, gradient in reached:
            if step.weight_decay:
                gradient = gradient.add(span.of(weights), alpha=step.weight_decay)
            if velocity is not None:
                gradient = span.of(velocity).mul_(step.momentum).add_(gradient)
            span.of(weights).add_(gradient, alpha=-rate)

    def _drawn(
        self, span: _Span, weights: Tensor, constants: Tensor | None, step: LocalStep
    ) -> Tensor | None:
        """What the step adds to the gradients of a tensor: pull · (w − x) + k; None for nothing."""
        drawn = step.pull * (span.of(weights) - span.of(self.anchor[None])) if step.pull else None
        if constants is None:
            return drawn
        return span.of(constants).clone() if drawn is None else drawn.add_(span.of(constants))

    def _versions(self) -> list[int]:
        """Grow whenever what a step must leave alone is written to."""
        # What is written through `.data` moves no version.
        frozen = [int(bit_sum(each)) for each in self.model.parameters() if not each.requires_grad]
        return frozen + [tensor._version for tensor in (self.anchor, *self.model.buffers())]


def _in_words(error: Exception) -> str:
    """Why torch cannot stack a loss, with the operation that it names."""
    message = str(error).strip().partition("\n")[0]
    if unbatched := re.search(r"Batching rule not implemented for (\S+?)\.? ", message):
        return f"torch.func.vmap has no form of {unbatched[1]} for many clients"
    if "data-dependent control flow" in message or ".item()" in message:
        return "it reads a tensor's value into Python (item(), if, float())"
    return f"torch.func.vmap: {message}"


def _difference(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> tuple[float, float]:
    """Largest difference and largest value; infinite where one is unreached and the other is not."""
    error = scale = 0.0
    for mine, theirs in zip(actual, expected, strict=True):
        if (mine is None) != (theirs is None):
            return float("inf"), scale
        if mine is not None and theirs is not None and theirs.numel():
            error = max(error, float((mine - theirs).abs().amax()))
            scale = max(scale, float(theirs.abs().amax()))
    return error, scale
