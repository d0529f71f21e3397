"""A step that all ranks take or none: its loss, the gradient's norm, clipping, and what is wished of it.

All of it travels in one reduction. The host need not wait for what comes of that: an optimizer's fused kernel
asks the device itself whether the step is to be taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.pipeline_stages import OTHER_INPUTS
from roundtable.cluster.parallel.routing import ExpertLoads, ExpertShares
from roundtable.cluster.parallel.shards import local_of
from roundtable.cluster.stepping.local_parameters import asks_device, drop_gradients, hand_over
from roundtable.cluster.stepping.loss_scaling import LossScale
from roundtable.cluster.stepping.sharded_optimizer import align_gradients, parts_by_kind
from roundtable.core.errors import TaskError

_LOSS, _STOP, _DUE, _SQUARES, _BAD = range(5)


@dataclass(frozen=True)
class AgreedFigures:
    """What all ranks know of a step.

    `loss` is the batch's mean, `norm` that before clipping, infinite on all ranks if it is on one; `own` are
    this rank's losses; `stop` and `due` are rank 0's wishes.
    """

    loss: float
    norm: float
    own: tuple[float, ...]
    stop: bool
    due: bool
    experts: ExpertShares | None = None

    @property
    def sound(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class PendingFigures:
    """A step's figures on their way to the host."""

    def __init__(
        self,
        figures: Tensor,
        losses: Tensor | None,
        total: int,
        loads: ExpertLoads | None = None,
        differs: Tensor | None = None,
    ) -> None:
        """`figures` float64 [5, then the experts' loads] as reduced; `total` counts the step's examples.

        `differs` is that of a Pipeline.
        """
        self.total = total
        self._loads = loads
        self._counts = len(figures) - _BAD - 1
        own = torch.zeros(0, device=figures.device) if losses is None else losses
        other = torch.zeros(1, device=figures.device) if differs is None else differs.view(1)
        self._values = torch.cat([figures, own.double(), other.double()])
        self._arrived: torch.cuda.Event | None = None
        if figures.is_cuda:
            there = torch.empty(self._values.shape, dtype=torch.float64, pin_memory=True)
            self._values = there.copy_(self._values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> AgreedFigures:
        """Waits for them; TaskError where a pipeline's loss called the model with other inputs."""
        if self._arrived is not None:
            self._arrived.synchronize()
        *values, differs = self._values.tolist()
        if differs:
            raise TaskError(OTHER_INPUTS)
        own = _BAD + 1 + self._counts
        return AgreedFigures(
            loss=values[_LOSS] / self.total,
            norm=math.inf if values[_BAD] else math.sqrt(values[_SQUARES]),
            own=tuple(values[own:]),
            stop=bool(values[_STOP]),
            due=bool(values[_DUE]),
            experts=None if self._loads is None else self._loads.shares(values[_BAD + 1 : own]),
        )


class AgreedStep:
    """Takes the steps of a round with one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        meshes: Meshes,
        device: torch.device,
        *,
        max_norm: float | None = None,
        correction: Callable[[], None] | None = None,
        scale: LossScale | None = None,
        loads: ExpertLoads | None = None,
    ) -> None:
        """`correction` is done to unscaled gradients, before clipping; `scale` is that of the losses.

        `loads`, of the same experts on all ranks, are told with each step's figures.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._owned = [each for each in parameters if meshes.owns(each, within=meshes.apart)]
        self._meshes = meshes
        self._device = device
        self._max_norm = max_norm
        self._correction = correction
        self._scale = scale
        self._loads = loads

    @property
    def lags(self) -> bool:
        """Whether a step that may not be taken is recognised on the device, so that the host can go on.

        Not where parameters are offloaded: the step is then the host's own.
        """
        here = all(local_of(each).device.type == self._device.type for each in self._parameters)
        return here and self._scale is None and asks_device(self._optimizer)

    @torch.no_grad()
    def agree(
        self,
        losses: Tensor | None,
        sizes: Sequence[int],
        total: int,
        wishes: Sequence[float],
        differs: Tensor | None = None,
    ) -> PendingFigures:
        """Unscales, corrects and clips the gradients; collective.

        `losses` are the means over micro-batches of `sizes` examples where this rank has them, `total` counts
        the examples of all ranks, `wishes` are rank 0's (stop, due), 0 on others, `differs` is a Pipeline's.
        """
        align_gradients(self._parameters)
        if self._scale is not None:
            for parts in parts_by_kind(self._parameters).values():
                torch._foreach_mul_(parts, 1.0 / self._scale.scale)
        if self._correction is not None:
            self._correction()
        self._figures = self._reduced(losses, sizes, wishes)
        if self._max_norm is not None:
            clip(self._parameters, self._figures[_SQUARES].sqrt(), self._max_norm)
        return PendingFigures(self._figures, losses, total, self._loads, differs)

    def clear(self) -> None:
        """Forgets the gradients, before the next step's."""
        drop_gradients(self._optimizer, self._parameters)

    def take(self, *, ask: bool = False) -> None:
        """Takes the step; with `ask` only where the device finds that it may be."""
        hand_over(self._optimizer)
        if ask:
            self._optimizer.found_inf = self._figures[_BAD].float()  # type: ignore[attr-defined]
        self._optimizer.step()

    def _reduced(self, losses: Tensor | None, sizes: Sequence[int], wishes: Sequence[float]) -> Tensor:
        figures = torch.tensor([0.0, *wishes, 0.0, 0.0], dtype=torch.float64)
        figures = figures.to(self._device, non_blocking=True)
        if losses is not None and self._meshes.place("tp") == 0:
            weights = torch.tensor(sizes, dtype=torch.float64).to(self._device, non_blocking=True)
            figures[_LOSS] = (losses.double() * weights).nan_to_num(math.inf, math.inf, math.inf).sum()
        squares = squared_norm(self._owned, self._device)
        if self._meshes.apart:
            dist.all_reduce(squares, group=self._meshes.inner())
        else:
            figures[_SQUARES] = squares
        figures[_BAD] = (~torch.isfinite(squares + figures[_LOSS])).double()
        if self._loads is not None:
            figures = torch.cat([figures, self._loads.take(self._device)])
        dist.all_reduce(figures)
        if self._meshes.apart:
            figures[_SQUARES] = squares
        # Squares that are finite on each rank may have none that is finite together.
        figures[_BAD] += (~torch.isfinite(figures[_SQUARES])).double()
        figures[_BAD].clamp_(max=1.0)
        return figures


def squared_norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Σ of squares of these gradients' parts on this rank, float64 scalar.

    Each tensor's norm is taken in its own precision, as `torch.nn.utils.get_total_norm` does, their sum of
    squares in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parts in parts_by_kind(parameters).values():
        total += torch.stack(torch._foreach_norm(parts, 2.0)).double().square().sum().to(device)
    return total


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales gradients as `torch.nn.utils.clip_grad_norm_` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (place, kind), parts in parts_by_kind(parameters).items():
        torch._foreach_mul_(parts, factor.to(place, kind))
