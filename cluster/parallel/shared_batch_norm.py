"""Batch normalisation over the examples of all data-parallel ranks: what one process computes of the batch.

The statistics of Ioffe and Szegedy 2015 (algorithm 1) are put together from the ranks' counts, means and
sums of squares (Chan et al. 1979, equation 2.1); the gradient goes through them. A rank's filler, which is
there to keep ranks in step, is no example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import override

from roundtable.cluster.parallel.strategy import Strategy
from roundtable.core.errors import TaskError

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class MicroBatch:
    """What a rank runs now: a filler does not count."""

    counts: bool = True


def batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that take statistics over a batch; not those that the model keeps in evaluation."""
    return tuple(
        name
        for name, module in model.named_modules()
        if (isinstance(module, _BatchNorm) and (module.training or module.running_mean is None))
        or (isinstance(module, _InstanceNorm) and module.track_running_stats and module.training)
    )


def share_batch_norms(model: nn.Module, group: dist.ProcessGroup | None, current: MicroBatch) -> None:
    """Makes the layers take their statistics over the group, or over this rank alone where there is none.

    Raises TaskError for a layer that would need the group and is of a kind of its own.
    """
    if group is not None:
        for name in batch_norms(model):
            layer = model.get_submodule(name)
            if type(layer) not in _KINDS and not isinstance(layer, SharedBatchNorm):
                raise TaskError(own_way(name))
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and type(layer) in _KINDS:
            share(layer, group, current)


def share(layer: _BatchNorm, group: dist.ProcessGroup | None, current: MicroBatch) -> None:
    """Makes a layer one with shared statistics; it stays what it is, with its hooks and attributes."""
    layer.__class__ = _SHARED_KINDS[type(layer)]
    assert isinstance(layer, SharedBatchNorm)
    layer._group, layer._current = group, current


def own_way(name: str) -> str:
    """What is said of a module whose statistics cannot be taken over ranks."""
    return (
        f"{name or 'the model'} takes statistics over a batch in a way of its own, which is not done over "
        'ranks; use nn.BatchNorm, or set batch_norm = "local" in [cluster.strategy], so that each rank takes '
        "those of its own examples"
    )


def refuse_parts(layers: Sequence[str], strategy: Strategy, share: int) -> str:
    """Why a batch cannot be run in parts under the strategy; empty where it can, or is not.

    `share` is the most examples of a batch that a rank gets.
    """
    if not layers or strategy.batch_norm == "local" or strategy.micro_batch >= share:
        return ""
    return (
        f"micro_batch = {strategy.micro_batch}: {layers[0] or 'the model'} takes statistics over the whole "
        f"batch, so that a rank's {share} examples of it must run at once; use nn.GroupNorm in its place, "
        'more devices, a smaller batch, or batch_norm = "local" in [cluster.strategy]'
    )


class SharedBatchNorm(_BatchNorm):
    """A batch normalisation layer whose statistics are those of a group of ranks, as `share` makes one.

    What checkpointing runs again changes no running statistics.
    """

    _group: dist.ProcessGroup | None
    _current: MicroBatch

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, ...] → the same shape. Collective in training; TaskError for a single value."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if not self.training:
            batch = self.running_mean is None
            # Shards gather weights in bfloat16 beside statistics in float32, a mixture that no kernel takes.
            weight, bias = (None if one is None else _widened(one) for one in (self.weight, self.bias))
            wide = F.batch_norm(
                _widened(x), self.running_mean, self.running_var, weight, bias, batch, 0.0, self.eps
            )
            return wide.to(x.dtype)
        counts = self._current.counts
        y, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self._group, counts
        )
        again = torch._C._current_graph_task_id() != -1
        if self.running_mean is not None and not again and (counts or self._group is not None):
            self._note(mean, variance, count)
        out: Tensor = y
        return out

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share: Any = self.momentum
        if share is None:
            assert self.num_batches_tracked is not None
            share = 1.0 / self.num_batches_tracked.double()
        unbiased = variance * (count / (count - 1))
        self.running_mean.copy_((1 - share) * self.running_mean + share * mean)
        self.running_var.copy_((1 - share) * self.running_var + share * unbiased)


_SHARED_KINDS: dict[type[_BatchNorm], type[_BatchNorm]] = {
    kind: type(f"Shared{kind.__name__}", (SharedBatchNorm, kind), {}) for kind in _KINDS
}
"""Classes of layers that code which asks for their kind still finds."""


class _Normalise(torch.autograd.Function):
    """Normalises by the group's statistics: (result, mean, variance, number of values of each channel)."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _widened(x)
        mean, variance, count = _statistics(wide, group, counts)
        scale = torch.rsqrt(variance + eps)
        y = (wide - _along(mean, x)) * _along(scale, x)
        if weight is not None:
            y = y * _along(weight, x)
        if bias is not None:
            y = y + _along(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.bias, ctx.group, ctx.counts = None if bias is None else bias.dtype, group, counts
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        gradient = _widened(gradients[0])
        normal = (_widened(x) - _along(mean, x)) * _along(scale, x)
        own = torch.stack([_sum(gradient), _sum(gradient * normal)])
        of_bias = None if ctx.bias is None else own[0].to(ctx.bias)
        of_weight = None if weight is None else own[1].to(weight.dtype)
        total = own.clone()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        if ctx.counts:
            through = total / count
            gradient = gradient - _along(through[0], x) - normal * _along(through[1], x)
        factor = scale if weight is None else scale * _widened(weight)
        of_x = (gradient * _along(factor, x)).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None


def _statistics(x: Tensor, group: dist.ProcessGroup | None, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, biased variance, number of values) of each channel over the group. Collective."""
    values = x.numel() // x.shape[1]
    mean = _sum(x) / values
    squares = _sum((x - _along(mean, x)).square())
    if group is None:
        parts = torch.stack([torch.full_like(mean, values), mean, squares]).unsqueeze(0)
    else:
        own = torch.stack([torch.full_like(mean, values), mean, squares]) * float(counts)
        gathered = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(gathered, own, group=group)
        parts = torch.stack(gathered)
    sizes, means, sums = parts.unbind(1)
    count = sizes.sum(0)
    # The host knows its own count; asking the device for the sum each time would wait for it.
    if values < 2 and counts and bool(count[0] < 2):
        raise TaskError(
            "a batch normalisation layer got one value of each channel, which have no variance; set "
            "[algorithm] batch_size so that no batch of an epoch is left with a single example"
        )
    whole = (sizes * means).sum(0) / count
    spread = sums.sum(0) + (sizes * (means - whole).square()).sum(0)
    return whole, spread / count, count


def _widened(tensor: Tensor) -> Tensor:
    """In float32 at least: statistics need the digits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Values of each channel, to be combined with x."""
    return _widened(values).view(1, -1, *[1] * (x.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    """Sums over all but channels."""
    return x.sum(dim=[0, *range(2, x.dim())])
