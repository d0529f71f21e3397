"""Measures what a layer that is split over ranks takes beside its operators and its collectives' wires.

DTensor's dispatch, the hooks around layers and what torch's functional collectives do on the host are
Python, and take longer than the operators of small layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from typing_extensions import override

from roundtable.cluster.plan.rank_clock import Clock, seconds_of

_PAIRS, _WIDTH, _REPEATS = 6, 8, 9
# Collectives of a pair of layers in its forward pass and in both. With a split sequence its input is
# gathered, its output scattered, and in the backward pass two gradients of the norm's weights are summed too.
_COLLECTIVES: dict[tuple[bool, bool], dict[str, int]] = {
    (False, False): {"all_reduce": 1},
    (False, True): {"all_reduce": 2},
    (True, False): {"all_gather": 1, "reduce_scatter": 1},
    (True, True): {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 3},
}
# What counts as a layer of a pair: that by columns, that by rows; the norm, and what gathers its output.
_LAYERS = {False: 2, True: 4}


def split_rates(
    per_node: int, device: torch.device, clock: Clock, within: Mapping[str, Mapping[int, float]]
) -> dict[str, float]:
    """{"layer", "sequence", and of the forward pass alone "layer again", "sequence again"}: seconds of the
    slowest rank for a layer; empty where a node has one rank. Collective.

    `within` has the bus bandwidth of a node's collectives by payload, of an all-reduce at least: a collective
    of few bytes takes as long as that of the smallest payload.
    """
    if per_node == 1:
        return {}
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // per_node, per_node), mesh_dim_names=("node", "split"))[
        "split"
    ]
    whole = _taken(_pairs(device), per_node, device, clock, parts=1)
    found = {}
    for sequence, name in ((False, "layer"), (True, "sequence")):
        model = _pairs(device)
        for pair in model:
            parallelize_module(pair, mesh, _styles(sequence=sequence))
        taken = _taken(model, per_node, device, clock, parts=per_node if sequence else 1)
        for back, key in ((False, f"{name} again"), (True, name)):
            wires = sum(
                number * _least(within, kind, per_node)
                for kind, number in _COLLECTIVES[sequence, back].items()
            )
            beside = (taken[back] - whole[back]) / _PAIRS - wires
            found[key] = max(0.0, beside) / _LAYERS[sequence]
    return found


class _Pair(nn.Module):
    """A norm and a tiny feed-forward part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.inner = _Inner(hidden)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] → the same shape."""
        out: Tensor = self.inner(self.norm(x))
        return out


class _Inner(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, hidden)
        self.down = nn.Linear(hidden, _WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] → the same shape."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def _pairs(device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(_Pair(8 * dist.get_world_size()) for _ in range(_PAIRS))).to(device)


def _styles(*, sequence: bool) -> dict[str, ParallelStyle]:
    """As `apply_strategy.split_tensors` splits a block."""
    styles: dict[str, ParallelStyle] = {
        "inner.up": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate()),
    }
    if sequence:
        styles["norm"] = SequenceParallel()
        styles["inner"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    return styles


def _taken(
    model: nn.Module, ranks: int, device: torch.device, clock: Clock, *, parts: int
) -> dict[bool, float]:
    """Seconds of the forward pass (False), and of both (True); a rank has one of so many `parts` of x."""
    x = torch.ones(2, 2 * ranks // parts, _WIDTH, device=device, requires_grad=True)

    def both() -> None:
        model(x).sum().backward()
        align(model)
        model.zero_grad()

    def forward() -> None:
        with torch.no_grad():
            model(x)

    return {
        False: seconds_of(forward, device, clock, _REPEATS),
        True: seconds_of(both, device, clock, _REPEATS),
    }


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Sums the gradients of weights that all ranks have, as a step does with those of norms."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _least(within: Mapping[str, Mapping[int, float]], kind: str, ranks: int) -> float:
    """Seconds of a collective of few bytes."""
    table = within.get(kind) or within["all_reduce"]
    size = min(table)
    return (2.0 if kind == "all_reduce" else 1.0) * size * (ranks - 1) / ranks / table[size]
