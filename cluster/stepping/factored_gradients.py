"""Gradients as low-rank factors: PowerSGD (Vogels et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from roundtable.cluster.stepping.gradient_hooks import GradientHook, Pieces
from roundtable.core.seeds import torch_generator


class FactoredGradients(GradientHook):
    """PowerSGD with error feedback and warm start (algorithms 1 and 2), over sums of all ranks' factors.

    A gradient is a matrix M [rows, the rest]. With e what was left over, on each rank Δ = M + e; P is an
    orthonormal basis of the mean of ΔQ, Q ← the mean of ΔᵀP, kept for the next step; PQᵀ takes the gradient's
    place, and e ← Δ − PQᵀ. What has one dimension, or would not be shorter, is reduced as it is.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(names, group)
        self.rank = rank
        self._left: dict[nn.Parameter, Tensor] = {}
        self._factors: dict[nn.Parameter, Tensor] = {}
        self.reset()

    @override
    @torch.no_grad()
    def reset(self) -> None:
        for parameter, name in self.names.items():
            if not _shorter(parameter, self.rank):
                continue
            columns = parameter.numel() // len(parameter)
            drawn = torch.randn(columns, self.rank, generator=torch_generator(0, name, "powersgd"))
            self._factors[parameter] = drawn.to(parameter.device, parameter.dtype, non_blocking=True)
            self._left[parameter] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)

    @override
    def state(self, place: int) -> Iterator[tuple[str, Tensor]]:
        for parameter, left in self._left.items():
            yield f"{place}/{self.names[parameter]}", left
            yield f"all/{self.names[parameter]}", self._factors[parameter]

    @override
    def reduce(self, pieces: Pieces) -> None:
        matrices, whole = [], []
        for parameter, gradient in pieces:
            left = self._left.get(parameter)
            if left is None:
                whole.append(gradient)
                continue
            left.add_(gradient)
            matrices.append((gradient, left.view(len(left), -1), self._factors[parameter]))
        bases = [total @ factor for _, total, factor in matrices]
        self._average([*bases, *whole])
        bases = [torch.linalg.qr(basis)[0] for basis in bases]
        factors = [factor for _, _, factor in matrices]
        for (_, total, factor), basis in zip(matrices, bases, strict=True):
            torch.mm(total.T, basis, out=factor)
        self._average(factors)
        for (gradient, total, factor), basis in zip(matrices, bases, strict=True):
            found = basis @ factor.T
            total.sub_(found)
            gradient.copy_(found.view_as(gradient))

    def _average(self, tensors: list[Tensor]) -> None:
        """One collective for all of them."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= self.size
        for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _shorter(parameter: Tensor, rank: int) -> bool:
    """Whether factors are smaller than the gradient."""
    if parameter.dim() < 2:
        return False
    rows = len(parameter)
    columns = parameter.numel() // max(rows, 1)
    return rank * (rows + columns) < rows * columns
