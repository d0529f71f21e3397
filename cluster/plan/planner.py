"""Chooses a strategy: the plainest that fits, and says why the plainer ones do not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import chain
from math import prod
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.parallel.strategy import DataParallel, Mesh, Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.candidates import candidates
from roundtable.cluster.plan.diloco_plan import diloco_table
from roundtable.cluster.plan.links import Links, reduction_for
from roundtable.cluster.plan.memory_estimate import Estimate, ModelProbe, estimate
from roundtable.cluster.plan.precision_choice import settled
from roundtable.cluster.plan.privacy_composition import is_example_level, narrowed, with_noisy_gradient
from roundtable.cluster.plan.resources import Resources, format_bytes
from roundtable.cluster.plan.step_composition import check_step
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, ResourceError

HEADROOM = 0.9
_Key = tuple[Mesh, DataParallel, bool, int]


@dataclass(frozen=True)
class ClusterPlan:
    """A strategy with the memory that it needs; `reasons` are in the order in which they came up.

    `tensor_parallel` says which layers are split, where any are.
    """

    strategy: Strategy
    estimate: Estimate
    resources: Resources
    parameters: int
    micro_batches: int
    reasons: tuple[str, ...]
    tensor_parallel: TensorParallel | None = None
    links: Links | None = None

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "strategy": self.strategy.to_plain(),
            "estimate": asdict(self.estimate),
            "resources": asdict(self.resources),
            "parameters": self.parameters,
            "micro_batches": self.micro_batches,
            "reasons": list(self.reasons),
            "links": asdict(self.links) if self.links is not None else None,
        }


def make_plan(
    probe: ModelProbe, resources: Resources, job: JobConfig, table: ClusterTable, links: Links | None = None
) -> ClusterPlan:
    """The first strategy that fits, from plain to elaborate; what `[cluster.strategy]` sets is kept.

    Raises ConfigError for a mesh that does not fit the devices, PrivacyError for privacy that does not
    compose with what is set, ResourceError, with the bytes that are missing, where nothing fits.
    """
    check_step(job)
    check_by_hand(resources, table)
    allowed = int(resources.memory * HEADROOM)
    table, why_precision = settled(table, resources, job)
    private = is_example_level(job)
    table = narrowed(job, resources, table)
    reduction, why_reduction = reduction_for(None if private else links)
    apart, why_apart = diloco_table(probe, resources, job, table, links)
    reasons = [each for each in (why_precision, why_apart, "" if apart else why_reduction) if each]
    smallest: dict[_Key, tuple[int, Strategy]] = {}
    for strategy in chain.from_iterable(
        candidates(probe, resources, job, each, reduction, reasons) for each in (apart, table) if each
    ):
        share = -(-job.algorithm.batch_size // strategy.mesh.data)
        micro_batches = -(-share // strategy.micro_batch)
        needed = estimate(probe, strategy, micro_batches)
        if private:
            needed = with_noisy_gradient(needed)
        if needed.peak <= allowed:
            for peak, other in smallest.values():
                reasons.append(f"{other} does not fit: it needs {format_bytes(peak)}")
            reasons.append(f"{strategy} fits: {format_bytes(needed.peak)} of {format_bytes(allowed)}")
            if strategy.mesh.tp > 1:
                reasons += [f"not shared out over tp: {each}" for each in probe.tensor_parallel.whole]
            return ClusterPlan(
                strategy=strategy,
                estimate=needed,
                resources=resources,
                parameters=probe.anatomy.elements,
                micro_batches=micro_batches,
                reasons=tuple(reasons),
                tensor_parallel=probe.tensor_parallel if strategy.mesh.tp > 1 else None,
            )
        key = (strategy.mesh, strategy.data_parallel, strategy.offload, strategy.local_steps)
        if key not in smallest or needed.peak < smallest[key][0]:
            smallest[key] = (needed.peak, strategy)
    if not smallest:
        raise ConfigError(
            "no plan is possible with what [cluster.strategy] sets: " + ("; ".join(reasons) or "no mesh fits")
        )
    raise _nothing_fits(probe, resources, allowed, smallest.values(), private=private)


def _nothing_fits(
    probe: ModelProbe,
    resources: Resources,
    allowed: int,
    tried: Collection[tuple[int, Strategy]],
    *,
    private: bool,
) -> ResourceError:
    peak, strategy = min(tried, key=lambda one: one[0])
    return ResourceError(
        f"the model ({probe.anatomy.elements:,} parameters) fits in no plan on {resources}: the "
        f"smallest, {strategy}, needs {format_bytes(peak)} on each device, {format_bytes(peak - allowed)} "
        f"more than the {format_bytes(allowed)} that may be used ({HEADROOM:.0%} of the device's); more "
        "devices, a smaller batch or shorter examples would help"
        + ("; privacy.level = 'example' needs the whole model on each device" if private else "")
    )


def check_by_hand(resources: Resources, table: ClusterTable) -> None:
    """Raises ConfigError for degrees in `[cluster.strategy]` that the devices cannot form."""
    hand, world = table.strategy, resources.world
    if (hand.cp or 1) > 1:
        raise ConfigError(
            f"[cluster.strategy] cp = {hand.cp}: context parallelism is not offered, as torch's has no CPU "
            "kernel to be checked with; tp with sequence_parallel shards the sequence between the blocks"
        )
    degrees = {key: getattr(hand, key) for key in ("pp", "dp", "fsdp", "tp") if getattr(hand, key)}
    product = prod(degrees.values())
    mesh = " × ".join(f"{key} {value}" for key, value in degrees.items())
    if product > world:
        raise ConfigError(
            f"[cluster.strategy] {mesh} is a mesh of {product} ranks; there are {world} devices"
        )
    if world % product:
        raise ConfigError(
            f"[cluster.strategy] {mesh}: {world} devices do not divide by {product}; "
            f"use {world // product * product} of them, or other degrees"
        )
    split = next((key for key in ("tp", "pp", "ep") if (getattr(hand, key) or 1) > 1), None)
    if split and hand.data_parallel in ("ddp", "zero1"):
        why = {
            "ddp": "DDP reduces whole gradients in buckets of its own",
            "zero1": "ZeRO-1's ranks share out the optimizer's state by whole parameters",
        }[hand.data_parallel]
        raise ConfigError(
            f"[cluster.strategy] data_parallel = {hand.data_parallel!r} and {split} = "
            f"{getattr(hand, split)}: {why}, and {split} leaves each rank a part of them; use zero2, which "
            "shards the optimizer too and replicates over dp"
        )
    if (hand.tp or 1) > resources.devices:
        raise ConfigError(
            f"[cluster.strategy] tp = {hand.tp} would cross nodes of {resources.devices} devices: "
            "every layer would wait for the network"
        )
