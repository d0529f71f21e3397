"""Measures how fast the silo's ranks reduce and multiply, once, and keeps the figures for plans."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from roundtable.client.durable_files import replace_synced
from roundtable.cluster.parallel.text_collectives import gather_text
from roundtable.cluster.plan.rank_clock import REPEATS, Clock, seconds_of, wait
from roundtable.core.evidence.release import release

FILE = "links.json"
_SIZES = (1 << 16, 1 << 20, 1 << 24)
_SIDE = {"cuda": 4096, "cpu": 512}
# Bytes of a vector whose sums are timed and of an activation, blocks whose calls are.
_VECTOR = {"cuda": 1 << 28, "cpu": 1 << 25}
_ACTIVATION = {"cuda": 1 << 27, "cpu": 1 << 19}
_BLOCKS = 24
# Bandwidth within nodes over that between them: from here in bfloat16, from there as low-rank factors.
_SLOW, _VERY_SLOW = 10.0, 100.0


@dataclass(frozen=True)
class Links:
    """Bus bandwidth of an all-reduce in bytes a second by payload: among a node's ranks, and between nodes.

    A table is empty where there is one rank on a node, or one node. `products` are the operations a second of
    the slowest rank's matrix products, there and back, by precision, `memory` the bytes a second of its sums
    of vectors, `operators` those of a norm and an activation function, `call` the seconds that an operator of
    a small layer takes, with what its module does around it. `at` is the time of measurement in seconds since
    the epoch. `key` is a digest of hosts, devices, backend and versions: the figures hold
    for no other.
    """

    key: str
    world: int
    at: float
    within: dict[int, float]
    between: dict[int, float]
    products: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    operators: float = 0.0
    call: float = 0.0

    def lines(self, now: float) -> list[str]:
        """The figures in words, a line each."""
        hours = max(0.0, now - self.at) / 3600
        age = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
        lines = [f"measured {age} ago on {self.world} ranks; all-reduce, bus bandwidth:"]
        for name, measured in (("within a node", self.within), ("between nodes", self.between)):
            rates = ", ".join(f"{rate / 1e9:.3g} GB/s at {_size(size)}" for size, rate in measured.items())
            lines.append(f"{name}: {rates or 'not measured, there is only one'}")
        if self.products:
            products = ", ".join(f"{rate / 1e12:.3g} in {name}" for name, rate in self.products.items())
            lines.append(f"matrix products of a device: Tflop/s {products}")
        if self.memory:
            lines.append(
                f"memory: {self.memory / 1e9:.3g} GB/s, between products {self.operators / 1e9:.3g}; "
                f"a call: {self.call * 1e6:.3g} µs"
            )
        return lines


def read_links(folder: Path, key: str | None = None) -> Links | None:
    """The kept figures; None where there are none, or, with a `key`, none of this hardware."""
    path = folder / FILE
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    sizes = {name: {int(size): rate for size, rate in values[name].items()} for name in ("within", "between")}
    links = Links(**{**values, **sizes})
    return links if key is None or links.key == key else None


def known_links(folder: Path, device: torch.device, per_node: int, control: dist.ProcessGroup) -> Links:
    """The kept figures where they are of the same ranks; else new ones, which rank 0 keeps. Collective."""
    key = links_key(device, control)
    kept = read_links(folder, key) if dist.get_rank() == 0 else None
    kept = kept if kept is not None and kept.products and kept.operators else None
    if "1" in gather_text("1" if kept is not None else "", control):
        # Only rank 0 plans with the figures.
        return kept or Links(key, dist.get_world_size(), at=0.0, within={}, between={})
    links = measure_links(device, per_node, key)
    if dist.get_rank() == 0:
        replace_synced(folder / FILE, [json.dumps(asdict(links)).encode()], many=True)
    return links


def links_key(device: torch.device, control: dist.ProcessGroup) -> str:
    """A digest of hosts, devices, backend and versions. Collective."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    backend = dist.get_backend()
    here = f"{os.uname().nodename} {name} {backend} {torch.__version__} {release().version}"
    return hashlib.blake2b("\n".join(gather_text(here, control)).encode(), digest_size=16).hexdigest()


def measure_links(
    device: torch.device, per_node: int, key: str = "", clock: Clock = time.perf_counter
) -> Links:
    """Times all-reduce among a node's ranks, and among ranks in the same place of nodes. Collective."""
    world = dist.get_world_size()
    nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
    across = [list(range(place, world, per_node)) for place in range(per_node)]
    within, between = _rates(nodes, device, clock), _rates(across, device, clock)
    return Links(
        key,
        world,
        time.time(),
        within,
        between,
        products=_products(device, clock),
        memory=_memory(device, clock),
        operators=_operators(device, clock),
        call=_call(device, clock),
    )


def reduction_for(links: Links | None) -> tuple[str, str]:
    """(how DDP's gradients travel by default, the reason): exact but where slow links were measured."""
    if links is None or not links.within or not links.between:
        return "exact", ""
    within, between = max(links.within.values()), max(links.between.values())
    slower = within / between
    measured = f"between nodes {between / 1e9:.3g} GB/s was measured, within them {within / 1e9:.3g}"
    if slower >= _VERY_SLOW:
        return "powersgd", f"{measured}: DDP's gradients travel as low-rank factors"
    if slower >= _SLOW:
        return "bfloat16", f"{measured}: DDP's gradients travel in bfloat16"
    return "exact", f"{measured}: gradients travel as they are"


def _rates(groups: list[list[int]], device: torch.device, clock: Clock) -> dict[int, float]:
    """The slowest rank's bandwidth by payload while all groups reduce, as they share wires in training."""
    members = len(groups[0])
    if members == 1:
        return {}
    process_groups = [dist.new_group(ranks) for ranks in groups]
    mine = next(
        group for group, ranks in zip(process_groups, groups, strict=True) if dist.get_rank() in ranks
    )
    rates = {}
    for size in _SIZES:
        data = torch.ones(size // 4, device=device)
        dist.all_reduce(data, group=mine)
        wait(device)
        began = clock()
        for _ in range(REPEATS):
            dist.all_reduce(data, group=mine)
        wait(device)
        seconds = torch.tensor((clock() - began) / REPEATS, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        rates[size] = size * 2 * (members - 1) / members / float(seconds)
    for group in process_groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    return rates


def _products(device: torch.device, clock: Clock) -> dict[str, float]:
    """Operations a second of the slowest rank, by precision, while all ranks multiply there and back."""
    side = _SIDE[device.type]
    rates = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        x, weight = (torch.ones(side, side, dtype=dtype, device=device, requires_grad=True) for _ in "xw")
        passes = partial(_there_and_back, partial(F.linear, x, weight), torch.ones_like(x))
        rates[name] = 6.0 * side**3 / seconds_of(passes, device, clock)
    return rates


def _there_and_back(forward: Callable[[], Tensor], gradient: Tensor) -> None:
    forward().backward(gradient)  # type: ignore[no-untyped-call]


def _memory(device: torch.device, clock: Clock) -> float:
    """Bytes a second of the slowest rank's memory, while all ranks add vectors that no cache holds."""
    one = torch.ones(_VECTOR[device.type] // 4, device=device)
    out = torch.empty_like(one)
    return 3.0 * one.nbytes / seconds_of(lambda: torch.add(one, one, out=out), device, clock)


def _operators(device: torch.device, clock: Clock) -> float:
    """Bytes a second of what lies between products: a norm and a GELU, there and back.

    On a CPU they compute longer than they move. The norm reads and writes 2 + 3 tensors, the GELU as many.
    """
    x = torch.ones(_ACTIVATION[device.type] // 4 // 512, 512, device=device, requires_grad=True)
    forward = partial(lambda x: F.gelu(F.layer_norm(x, x.shape[1:])), x)
    return 10.0 * x.nbytes / seconds_of(partial(_there_and_back, forward, torch.ones_like(x)), device, clock)


class _Small(nn.Module):
    """A block of tiny layers: 5 operators there, and 8 back."""

    operators = 13

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., 8] → the same shape."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def _call(device: torch.device, clock: Clock) -> float:
    """Seconds that an operator of a small layer takes, with what its module and autograd do around it."""
    model = nn.Sequential(*(_Small() for _ in range(_BLOCKS))).to(device)
    x = torch.ones(4, 8, device=device)

    def passes() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return seconds_of(passes, device, clock) / (_BLOCKS * _Small.operators)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"
