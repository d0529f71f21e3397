"""Measures how fast the silo's ranks reduce and multiply, once, and keeps the figures for plans."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from roundtable.client.durable_files import replace_synced
from roundtable.cluster.parallel.meshes import gather_text
from roundtable.cluster.plan.collective_rates import collective_rates
from roundtable.cluster.plan.device_rates import DeviceRates
from roundtable.cluster.plan.rank_clock import Clock
from roundtable.cluster.plan.split_rates import split_rates
from roundtable.core.evidence.release import release

FILE = "links.json"
# Bandwidth within nodes over that between them: from here in bfloat16, from there as low-rank factors.
_SLOW, _VERY_SLOW = 10.0, 100.0


@dataclass(frozen=True)
class Links:
    """Bus bandwidth of an all-reduce in bytes a second by payload: among a node's ranks, and between nodes.

    A table is empty where there is one rank on a node, or one node. `kinds` has, for "within" and
    "between", the same of other collectives over gloo by their name. `products` are the operations a
    second of the slowest rank's matrix products, there and back, by precision; `attention` those of a
    CPU's fused attention, which takes `score` seconds more for each exponential. `memory` is the bytes a
    second of its sums of vectors, `operators` those of a norm and an activation function, `copies` those
    of additions of activations. `call` is the seconds that an operator of a small layer takes, with what
    its module does around it; `split` those that a layer takes beside where it is split over ranks, as
    `split_rates` has them. `at` is the time of measurement in seconds since the epoch. `key` is a digest
    of hosts, devices, backend and versions: the figures hold for no other.
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
    copies: float = 0.0
    attention: float = 0.0
    score: float = 0.0
    kinds: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    split: dict[str, float] = field(default_factory=dict)

    def lines(self, now: float) -> list[str]:
        """The figures in words, a line each."""
        hours = max(0.0, now - self.at) / 3600
        age = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
        lines = [f"measured {age} ago on {self.world} ranks; all-reduce, bus bandwidth:"]
        for name, measured in (("within a node", self.within), ("between nodes", self.between)):
            lines.append(f"{name}: {in_words(measured) or 'not measured, there is only one'}")
        if self.products:
            products = ", ".join(f"{rate / 1e12:.3g} in {name}" for name, rate in self.products.items())
            lines.append(f"matrix products of a device: Tflop/s {products}")
        if self.attention:
            lines.append(
                f"attention: {self.attention / 1e12:.3g} Tflop/s and {self.score * 1e9:.3g} ns a score"
            )
        if self.memory:
            lines.append(
                f"memory: {self.memory / 1e9:.3g} GB/s, norms and functions {self.operators / 1e9:.3g}, "
                f"additions {self.copies / 1e9:.3g}; a call: {self.call * 1e6:.3g} µs"
            )
        if self.split:
            layer, sequence = (self.split[name] * 1e6 for name in ("layer", "sequence"))
            lines.append(f"a layer that is split: {layer:.3g} µs beside, with the sequence {sequence:.3g}")
        for where, kinds in self.kinds.items():
            lines += [f"{name} {where}: {in_words(table)}" for name, table in kinds.items()]
        return lines


def read_links(folder: Path, key: str | None = None) -> Links | None:
    """The kept figures; None where there are none, or, with a `key`, none of this hardware.

    What another version kept may be in another form, and is measured anew.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        tables = {name: _by_size(values[name]) for name in ("within", "between")}
        kinds = {
            where: {name: _by_size(table) for name, table in named.items()}
            for where, named in values.get("kinds", {}).items()
        }
        links = Links(**{**values, **tables, "kinds": kinds})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return links if key is None or links.key == key else None


def _by_size(table: Mapping[str, float]) -> dict[int, float]:
    return {int(size): rate for size, rate in table.items()}


def known_links(folder: Path, device: torch.device, per_node: int, control: dist.ProcessGroup) -> Links:
    """The kept figures where they are of the same ranks; else new ones, which rank 0 keeps. Collective."""
    key = links_key(device, control)
    kept = read_links(folder, key) if dist.get_rank() == 0 else None
    kept = (
        kept if kept is not None and kept.products and kept.copies and (kept.split or per_node == 1) else None
    )
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
    """Times collectives among a node's ranks and among ranks in the same place of nodes, then each rank's
    own operators while all are busy. Collective.
    """
    world = dist.get_world_size()
    nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
    across = [list(range(place, world, per_node)) for place in range(per_node)]
    tables = {
        "within": collective_rates(nodes, device, clock),
        "between": collective_rates(across, device, clock),
    }
    split = split_rates(per_node, device, clock, tables["within"])
    within, between = (named.pop("all_reduce", {}) for named in tables.values())
    own = DeviceRates.measured(device, clock)
    kinds = {where: named for where, named in tables.items() if named}
    return Links(key, world, time.time(), within, between, kinds=kinds, split=split, **vars(own))


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


def in_words(table: Mapping[int, float]) -> str:
    """A table of bandwidths in a line."""
    return ", ".join(f"{rate / 1e9:.3g} GB/s at {_size(size)}" for size, rate in table.items())


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"
