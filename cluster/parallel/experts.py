"""Mixture of experts whose experts are shared out over ranks: a building block for tasks.

Top-k routing with a load-balancing loss (Fedus et al. 2022, Switch Transformers, equations 4 to 6;
Lepikhin et al. 2021 for shared-out experts). Tokens travel by all-to-all to their expert's rank and back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from typing_extensions import override


class Experts(nn.Module):
    """SwiGLU experts, their weights stacked: [experts, ...]. `share_experts` splits that dimension."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=dim**-0.5))
        self.gate = nn.Parameter(torch.empty(experts, dim, hidden).normal_(std=dim**-0.5))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim).normal_(std=hidden**-0.5))
        self.mesh: DeviceMesh | None = None

    @override
    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens [n, dim] sorted by expert, with counts [experts]; gives [n, dim]."""
        up, gate, down = (_local(weight) for weight in (self.up, self.gate, self.down))
        if self.mesh is None:
            return _run(tokens, _known(counts, len(tokens)), up, gate, down)
        # Tokens of all ranks that share the experts arrive here, where other weights see their own rank's.
        up, gate, down = (_scaled(w, 1 / self.mesh.size()) for w in (up, gate, down))
        group = self.mesh.get_group()
        here = self.experts // self.mesh.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(-1, here).sum(1).tolist()
        received = theirs.view(-1, here).sum(1).tolist()
        arrived: Tensor = all_to_all_single_autograd(tokens, received, sent, group)
        # They come by rank and then by expert; an expert wants its own from all ranks together.
        owner = torch.arange(here, device=tokens.device).repeat(self.mesh.size()).repeat_interleave(theirs)
        order = owner.argsort(stable=True)
        done = _run(arrived[order], theirs.view(-1, here).sum(0).tolist(), up, gate, down)
        back = torch.empty_like(done).index_copy(0, order, done)
        returned: Tensor = all_to_all_single_autograd(back, sent, received, group)
        return returned


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    @override
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scaled(weight: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaledGradient.apply(weight, factor)  # type: ignore[no-untyped-call]
    return scaled


class MixtureOfExperts(nn.Module):
    """A feed-forward part in which each token passes `top_k` of `experts` experts.

    After a forward pass `balance_loss` holds experts · Σ fᵢ·Pᵢ over the tokens of this rank, for the task's
    loss to add with a small factor: 1 at even use of all experts.
    """

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, dim, hidden)
        self.balance_loss: Tensor | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        experts = self.experts.experts
        places = chosen.flatten()
        counts = F.one_hot(places, experts).sum(0)
        order = places.argsort(stable=True)
        source = order // self.top_k
        out = self.experts(tokens[source], counts) * weights.flatten()[order].unsqueeze(1)
        self.balance_loss = experts * (counts / len(places) * probabilities.mean(0)).sum()
        return torch.zeros_like(tokens).index_add(0, source, out.to(tokens.dtype)).view_as(x)


def share_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives each rank of the mesh an equal part of the experts of every Experts module."""
    for module in model.modules():
        if isinstance(module, Experts):
            for name, weight in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(weight.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(part, weight.requires_grad))
            module.mesh = mesh


def _run(tokens: Tensor, counts: list[int], up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """Applies each expert to its run of tokens."""
    parts = [
        (F.silu(rows @ gate[i]) * (rows @ up[i])) @ down[i]
        for i, rows in enumerate(torch.split(tokens, counts))
    ]
    return torch.cat(parts)


def _known(counts: Tensor, total: int) -> list[int]:
    """The number of tokens of each expert; equal shares where values are fake."""
    if isinstance(counts, FakeTensor):
        experts = len(counts)
        return [total // experts + (i < total % experts) for i in range(experts)]
    known: list[int] = counts.tolist()
    return known


def _local(weight: Any) -> Tensor:
    """This rank's part of a weight, whose gradient is local too."""
    return weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[no-any-return]
