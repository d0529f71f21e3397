"""Mixture of experts whose experts are shared out over ranks: a building block for tasks.

Top-k routing with a load-balancing loss (Fedus et al. 2022, Switch Transformers, equations 4 to 6;
Lepikhin et al. 2021 for shared-out experts). Tokens travel by all-to-all to their expert's rank and back.
"""

from __future__ import annotations

import math
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

from roundtable.cluster.parallel.routing import CROWDED, ExpertLoads, capacity_of, places_at, spread
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch
from roundtable.core.errors import TaskError


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
            return _run(tokens, _known(counts.unsqueeze(0), len(tokens))[0], up, gate, down)
        # Tokens of all ranks that share the experts arrive here, where other weights see their own rank's.
        up, gate, down = (_scaled(w, 1 / self.mesh.size()) for w in (up, gate, down))
        group = self.mesh.get_group()
        here = self.experts // self.mesh.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        # The host waits once for both: sizes of what it sends and receives follow from values.
        mine, others = _known(torch.stack([counts, theirs]), len(tokens))
        sent, received = (
            [sum(each[first : first + here]) for first in range(0, self.experts, here)]
            for each in (mine, others)
        )
        arrived: Tensor = all_to_all_single_autograd(tokens, received, sent, group)
        # They come by rank and then by expert; an expert wants its own from all ranks together.
        places = torch.arange(here, device=tokens.device).repeat(self.mesh.size())
        owner = places.repeat_interleave(theirs, output_size=sum(received))
        order = owner.argsort(stable=True)
        own = [sum(others[expert::here]) for expert in range(here)]
        done = _run(arrived[order], own, up, gate, down)
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


class Router(nn.Linear):
    """Logits of the experts, in float32 or wider whatever the precision of the rest.

    Choices jump where two logits are rounded alike (Fedus et al. 2022, section 2.4: selective precision).
    """

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__(dim, experts, bias=False)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[n, dim] → [n, experts]."""
        wide = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(wide), self.weight.to(wide))


class MixtureOfExperts(nn.Module):
    """A feed-forward part in which each token passes `top_k` of `experts` experts.

    After a forward pass `balance_loss` holds the mean over examples of experts · Σ fᵢ·Pᵢ over an example's
    tokens (Lepikhin et al. 2021, algorithm 1, whose groups are the examples), for the task's loss to add with
    a small factor: 1 at even use of all experts. f counts what tokens chose. So a batch's is the mean of its
    parts', however ranks and micro-batches share it out. Of tokens without examples, [tokens, dim], all are
    one group, and a loss that reads it is refused where a batch is not run at once.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        dynamic: bool = False,
    ) -> None:
        """With `capacity_factor` an expert takes that many times an example's mean load of choices.

        Later ones are dropped: they add nothing, and a token without any goes on by the residual alone.
        `dynamic` sends what is above 1.5 times the mean load to the least loaded expert. Raises TaskError for
        values that do not go together.
        """
        super().__init__()
        if not 1 <= top_k <= experts:
            raise TaskError(f"MixtureOfExperts: top_k = {top_k} of experts = {experts}; give 1 to {experts}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise TaskError(
                f"MixtureOfExperts: capacity_factor = {capacity_factor}; give one above 0, as 1.25"
            )
        if dynamic and top_k == experts:
            raise TaskError(
                "MixtureOfExperts: dynamic = True and top_k = experts: no expert is left to send to"
            )
        if dynamic and capacity_factor is not None and capacity_factor < CROWDED:
            raise TaskError(
                f"MixtureOfExperts: dynamic = True and capacity_factor = {capacity_factor}: loads are "
                f"levelled at {CROWDED} times the mean, and would be cut below it; give {CROWDED} or more, "
                "or leave one out"
            )
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.dynamic = dynamic
        self.router = Router(dim, experts)
        self.experts = Experts(experts, dim, hidden)
        self.one_group = self.balance_read = False
        self.load: Tensor | None = None
        self.current = MicroBatch()
        self._balance: Tensor | None = None

    @property
    def balance_loss(self) -> Tensor | None:
        """Of the last pass, a scalar; None before the first."""
        self.balance_read = True
        return self._balance

    @property
    def ordered(self) -> bool:
        """Whether what becomes of a token depends on those of its example before it."""
        return self.dynamic or self.capacity_factor is not None

    @property
    def crowding(self) -> float:
        """How many times its share of an example's choices an expert may get; 1 where nothing bounds it."""
        if self.capacity_factor is not None:
            return max(1.0, self.capacity_factor)
        return CROWDED if self.dynamic else 1.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape; [examples, tokens, dim] with a capacity or a dynamic router."""
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = self.router(tokens).softmax(-1)
        chosen = probabilities.topk(self.top_k, -1).indices
        experts = self.experts.experts
        self.one_group = x.dim() < 3
        groups = 1 if self.one_group else len(x)
        share = F.one_hot(chosen.reshape(groups, -1), experts).to(probabilities.dtype).mean(1)
        used = probabilities.reshape(groups, -1, experts).mean(1)
        self._balance = experts * (share * used).sum(-1).mean()
        most = chosen.numel()
        places = chosen
        if self.ordered:
            chosen, places, most = self._settled(chosen, x)
        weights = probabilities.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        places = places.flatten()
        counts = F.one_hot(places, experts + 1).sum(0)
        self._count(counts)
        # Those that are dropped come last.
        order = places.argsort(stable=True)[: _arriving(counts, most)]
        source = order // self.top_k
        out = self.experts(tokens[source], counts[:experts]) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, source, out.to(tokens.dtype)).view_as(x)

    def _settled(self, chosen: Tensor, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """The choices, where they go (`experts` for the dropped), and how many there can be at most."""
        if x.dim() != 3:
            raise TaskError(
                "MixtureOfExperts with capacity_factor or dynamic takes [examples, tokens, dim], as it "
                f"counts loads in each example; it was given {list(x.shape)}"
            )
        experts = self.experts.experts
        examples, tokens, _ = x.shape
        groups = chosen.view(examples, tokens, self.top_k)
        if self.dynamic:
            groups = spread(groups, experts)
        if self.capacity_factor is None:
            return groups.reshape(-1, self.top_k), groups, groups.numel()
        capacity = capacity_of(self.capacity_factor, tokens, self.top_k, experts)
        kept = torch.where(places_at(groups, experts) < capacity, groups, experts)
        return groups.reshape(-1, self.top_k), kept, min(groups.numel(), examples * experts * capacity)

    def _count(self, counts: Tensor) -> None:
        """Adds to the step's loads, of examples and not of fillers; checkpointed layers count twice, which no
        share shows."""
        if self.training and self.current.counts and not isinstance(counts, FakeTensor):
            self.load = counts if self.load is None else self.load + counts


def balances_batch(model: nn.Module) -> bool:
    """Whether a loss that was traced adds the balance of experts over all tokens of a batch, which is not the
    mean of its parts': of tokens without examples, or as models of transformers do by `output_router_logits`.
    """
    own = any(
        isinstance(module, MixtureOfExperts) and module.balance_read and module.one_group
        for module in model.modules()
    )
    configs = (getattr(module, "config", None) for module in model.modules())
    return own or any(getattr(each, "output_router_logits", False) is True for each in configs)


def expert_loads(model: nn.Module) -> ExpertLoads:
    """Of all layers with experts, in the model's order."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return ExpertLoads(layers, [layer.experts.experts for layer in layers])


def count_examples_alone(model: nn.Module, current: MicroBatch) -> None:
    """Has layers leave the tokens of fillers, which are there to keep ranks in step, out of their loads."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.current = current


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


def _arriving(counts: Tensor, most: int) -> int:
    """How many choices go to an expert; as many as can where values are fake."""
    return most if isinstance(counts, FakeTensor) else int(counts[:-1].sum())


def _known(counts: Tensor, total: int) -> list[list[int]]:
    """Each row's number of tokens of each expert; equal shares of `total` where values are fake."""
    rows, experts = counts.shape
    if isinstance(counts, FakeTensor):
        return [[total // experts + (i < total % experts) for i in range(experts)]] * rows
    known: list[list[int]] = counts.tolist()
    return known


def _local(weight: Any) -> Tensor:
    """This rank's part of a weight, whose gradient is local too."""
    return weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[no-any-return]
