"""How fast devices and links are: as the silo's ranks measured them, else as makers publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from roundtable.cluster.parallel.strategy import Precision
from roundtable.cluster.plan.device_peaks import Published, published, usual_device
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.resources import Resources
from roundtable.core.quantities import format_bytes

# What training reaches of published peaks: NCCL's bus bandwidth over NVLink and over adapters (nccl-tests on
# DGX A100 and H100: 235 of 300, 370 of 450, 23 of 25 GB/s), streams of memory.
_WITHIN, _BETWEEN, _MEMORY = 0.8, 0.9, 0.85
# Seconds before the first byte of a collective arrives, and that starting a kernel takes.
_NEAR, _FAR, _CALL = 20e-6, 40e-6, 5e-6
# Predictions that differ by less do not decide, and the plainer strategy is taken.
_NEAR_MEASURED, _NEAR_PUBLISHED, _NEAR_ASSUMED = 0.03, 0.05, 0.25
_SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
# Bytes a second of a host's memory, which the optimizers of all its devices share when they are offloaded.
HOST_MEMORY = 200e9
# Of a CPU of which nothing was measured: an order of magnitude, for the order of plans alone.
_CPU_PRODUCTS, _CPU_MEMORY, _CPU_CALL, _LOOPBACK, _ETHERNET = 5e10, 1e10, 1e-5, 1e9, 1.25e8


@dataclass(frozen=True)
class MachineRates:
    """Of one device: operations a second of products, bytes a second of its memory, of what norms and
    functions between products move (`operators`), of additions and copies of activations (`copies`) and of
    its link to the host's, seconds that a call of an operator takes. `within` and
    `between` are the bus bandwidth of an all-reduce by payload, in a node and between nodes, for each device
    while all are busy; `kinds` has the same tables of other collectives, {where: {name: table}}, where they
    were measured. A CPU's fused attention has `attention` operations a second in its products and takes
    `score` seconds for each exponential beside; 0: it goes at the rate of products. `split` is what a layer
    that is split over ranks takes beside its operators, as `split_rates` measures it; empty: not measured.

    `overlaps`: collectives run beside computation, and so do calls; over gloo both take the same cores.
    `near` is the share by which predictions must differ to tell plans apart.
    `peak` is the published rate of products, 0 if there is none. `source` says where the figures are from.
    """

    products: float
    memory: float
    operators: float
    copies: float
    host: float
    call: float
    within: Mapping[int, float]
    between: Mapping[int, float]
    overlaps: bool
    peak: float
    near: float
    source: str
    attention: float = 0.0
    score: float = 0.0
    kinds: Mapping[str, Mapping[str, Mapping[int, float]]] = field(default_factory=dict)
    split: Mapping[str, float] = field(default_factory=dict)

    def table(self, where: Literal["within", "between"], kind: str) -> Mapping[int, float]:
        """Bus bandwidth by payload of a collective, or of an all-reduce where it was not measured itself."""
        found = self.kinds.get(where, {}).get(kind)
        return found or (self.within if where == "within" else self.between)


def rates_of(
    resources: Resources, precision: Precision, links: Links | None = None, peak: float | None = None
) -> MachineRates:
    """The measured figures where there are some, the device's published ones in the place of the rest."""
    known = published(resources.gpu_name) or usual_device(resources.memory)
    base = _published(known, precision) if resources.device == "cuda" else _nominal()
    if peak:
        base = replace(base, peak=peak)
    if links is None or not links.products:
        return base
    missing = [] if links.memory else ["memory and calls"]
    missing += [] if links.within or resources.devices == 1 else ["links within a node"]
    missing += [] if links.between or resources.nodes == 1 else ["links between nodes"]
    source = "measured by the silo's ranks" + (f"; {base.source}: {', '.join(missing)}" if missing else "")
    return replace(
        base,
        products=_measured(links.products, precision),
        memory=links.memory or base.memory,
        operators=links.operators or base.operators,
        copies=links.copies or base.copies,
        attention=links.attention,
        score=links.score,
        kinds=links.kinds,
        split=links.split,
        call=links.call or base.call,
        near=_NEAR_MEASURED,
        within=links.within or base.within,
        between=links.between or base.between,
        source=source,
    )


def _measured(products: Mapping[str, float], precision: Precision) -> float:
    """The measured rate of a precision, of the other one of two bytes for one of these, else the greatest."""
    other = {"float16": "bfloat16", "bfloat16": "float16"}.get(precision, precision)
    return products.get(precision) or products.get(other) or max(products.values())


def bandwidth(table: Mapping[int, float], payload: float) -> float:
    """Bus bandwidth at a payload: between measured payloads the time is on a line over bytes.

    A smaller payload takes as long as the smallest, a larger one goes at the rate of the largest.
    """
    sizes = sorted(table)
    if payload <= sizes[0]:
        return table[sizes[0]] * max(payload, 1.0) / sizes[0]
    for low, high in pairwise(sizes):
        if payload <= high:
            part = (payload - low) / (high - low)
            return payload / (low / table[low] * (1 - part) + high / table[high] * part)
    return table[sizes[-1]]


def _published(device: Published, precision: Precision) -> MachineRates:
    peak = device.products(precision)
    return MachineRates(
        products=peak * device.reached,
        memory=device.memory * _MEMORY,
        operators=device.memory * _MEMORY,
        copies=device.memory * _MEMORY,
        host=device.host * _WITHIN,
        call=_CALL,
        within=_curve(device.within * _WITHIN, _NEAR),
        between=_curve(device.between * _BETWEEN, _FAR),
        overlaps=True,
        peak=peak,
        near=_NEAR_PUBLISHED,
        source=(
            f"published for {device.name} ({peak / 1e12:.4g} Tflop/s in {precision}, "
            f"{device.within / 1e9:.4g} GB/s within a node and {device.between / 1e9:.4g} between nodes), of "
            f"which {device.reached:.0%}, {_WITHIN:.0%} and {_BETWEEN:.0%} are taken to be reached"
        ),
    )


def _nominal() -> MachineRates:
    return MachineRates(
        products=_CPU_PRODUCTS,
        memory=_CPU_MEMORY,
        operators=_CPU_MEMORY / 2,
        copies=_CPU_MEMORY / 2,
        host=_CPU_MEMORY,
        call=_CPU_CALL,
        within=_curve(_LOOPBACK, 1e-4),
        between=_curve(_ETHERNET, 1e-3),
        overlaps=False,
        peak=0.0,
        near=_NEAR_ASSUMED,
        source="assumed for any CPU, nothing was measured: they order plans, and no more",
    )


def _curve(rate: float, latency: float) -> dict[int, float]:
    return {size: size / (size / rate + latency) for size in _SIZES}


def in_words(rates: MachineRates, resources: Resources) -> list[str]:
    """The figures that predictions rest on, a line each."""
    lines = [
        f"rates {rates.source}",
        f"products {rates.products / 1e12:.3g} Tflop/s, memory {rates.memory / 1e9:.3g} GB/s, "
        f"norms and functions {rates.operators / 1e9:.3g} GB/s, additions {rates.copies / 1e9:.3g} GB/s, "
        f"{rates.call * 1e6:.2g} µs a call",
    ]
    if rates.attention:
        lines.append(
            f"attention {rates.attention / 1e12:.3g} Tflop/s and {rates.score * 1e9:.3g} ns for each score"
        )
    tables = [("within a node", rates.within, resources.devices > 1)]
    tables += [("between nodes", rates.between, resources.nodes > 1)]
    for name, table, there in tables:
        if there:
            lines.append(f"{name}: {_ends(table)}")
    for where, named in rates.kinds.items():
        lines += [f"{kind} {where}: {_ends(table)}" for kind, table in named.items()]
    return lines


def _ends(table: Mapping[int, float]) -> str:
    return ", ".join(f"{rate / 1e9:.3g} GB/s at {format_bytes(size)}" for size, rate in table.items())
