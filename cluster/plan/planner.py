"""Chooses a strategy: the plainest that fits, and says why the plainer ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.parallel.strategy import Checkpointing, DataParallel, Mesh, Reduction, Strategy
from roundtable.cluster.plan.diloco_plan import apart
from roundtable.cluster.plan.links import Links, reduction_for
from roundtable.cluster.plan.memory_estimate import Estimate, ModelProbe, estimate
from roundtable.cluster.plan.privacy_composition import is_example_level, narrowed, with_noisy_gradient
from roundtable.cluster.plan.resources import Resources, format_bytes
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, ResourceError

HEADROOM = 0.9
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "every", "sqrt")
_KINDS: tuple[DataParallel, ...] = ("none", "ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class ClusterPlan:
    """A strategy with what it needs, `reasons` in the order in which they were met."""

    strategy: Strategy
    estimate: Estimate
    resources: Resources
    parameters: int
    micro_batches: int
    reasons: tuple[str, ...]
    links: Links | None = None

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        from dataclasses import asdict

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
    compose with what is set, ResourceError, with the memory that lacks, where nothing fits.
    """
    batch = job.algorithm.batch_size
    allowed = int(resources.memory * HEADROOM)
    reasons: list[str] = []
    tried: dict[tuple[Mesh, DataParallel, bool, int], tuple[int, Strategy]] = {}
    check_by_hand(resources, table)
    private, table = is_example_level(job), narrowed(job, resources, table)
    reduction, travel = reduction_for(None if private else links)
    meeting, parting = apart(probe, resources, job, table, links)
    reasons += [why for why in (parting, "" if meeting else travel) if why]
    for strategy in chain.from_iterable(
        _candidates(probe, resources, job, each, reasons, reduction) for each in (meeting, table) if each
    ):
        share = -(-batch // strategy.mesh.data)
        found = estimate(probe, strategy, -(-share // strategy.micro_batch))
        found = with_noisy_gradient(found) if private else found
        if found.peak <= allowed:
            for peak, other in tried.values():
                reasons.append(f"{other} does not fit: it needs {format_bytes(peak)}")
            reasons.append(f"{strategy} fits: {format_bytes(found.peak)} of {format_bytes(allowed)}")
            count = -(-share // strategy.micro_batch)
            return ClusterPlan(strategy, found, resources, probe.anatomy.elements, count, tuple(reasons))
        key = (strategy.mesh, strategy.data_parallel, strategy.offload, strategy.local_steps)
        if key not in tried or found.peak < tried[key][0]:
            tried[key] = (found.peak, strategy)
    if not tried:
        raise ConfigError(
            "no plan is possible with what [cluster.strategy] sets: " + ("; ".join(reasons) or "no mesh fits")
        )
    peak, strategy = min(tried.values(), key=lambda one: one[0])
    raise ResourceError(
        f"the model ({probe.anatomy.elements:,} parameters) fits in no plan on {resources}: the "
        f"smallest, {strategy}, needs {format_bytes(peak)} on each device, {format_bytes(peak - allowed)} "
        f"more than the {format_bytes(allowed)} that may be used ({HEADROOM:.0%} of the device's); more "
        "devices, a smaller batch or shorter examples would help"
        + ("; privacy.level = 'example' needs the whole model on each device" if private else "")
    )


def check_by_hand(resources: Resources, table: ClusterTable) -> None:
    """Refuses what `[cluster.strategy]` asks for and the devices cannot give."""
    hand, world = table.strategy, resources.world
    if (hand.cp or 1) > 1:
        raise ConfigError(
            f"[cluster.strategy] cp = {hand.cp}: context parallelism is not offered, as torch's has no CPU "
            "kernel to be checked with; tp with sequence_parallel shards the sequence between the blocks"
        )
    degrees = {key: getattr(hand, key) for key in ("pp", "dp", "fsdp", "tp") if getattr(hand, key)}
    product = 1
    for degree in degrees.values():
        product *= degree
    said = " × ".join(f"{key} {value}" for key, value in degrees.items())
    if product > world:
        raise ConfigError(
            f"[cluster.strategy] {said} is a mesh of {product} ranks; there are {world} devices"
        )
    if world % product:
        raise ConfigError(
            f"[cluster.strategy] {said}: {world} devices do not divide by {product}; "
            f"use {world // product * product} of them, or other degrees"
        )
    if (hand.tp or 1) > resources.devices:
        raise ConfigError(
            f"[cluster.strategy] tp = {hand.tp} would cross nodes of {resources.devices} devices: "
            "every layer would wait for the network"
        )


def _candidates(
    probe: ModelProbe,
    resources: Resources,
    job: JobConfig,
    table: ClusterTable,
    reasons: list[str],
    reduction: Reduction,
) -> Iterator[Strategy]:
    """Strategies from plain to elaborate."""
    hand = table.strategy
    ways = (False, True) if resources.device == "cuda" else (False,)
    for offload in ways if hand.offload is None else (hand.offload,):
        for tp, pp in _splits(probe, resources, table, reasons if not offload else []):
            data = resources.world // (tp * pp)
            for mesh, kind in _data_meshes(resources, tp, pp, data, table, offload):
                if offload and kind not in ("zero2", "zero3"):
                    continue
                yield from _variants(probe, job, table, mesh, kind, offload, reduction)


def _splits(
    probe: ModelProbe, resources: Resources, table: ClusterTable, reasons: list[str]
) -> Iterator[tuple[int, int]]:
    """(tp, pp): none, then within a node, then stages too."""
    hand, world = table.strategy, resources.world
    found = []
    for tp in [hand.tp] if hand.tp else _divisors(resources.devices):
        for pp in [hand.pp] if hand.pp else _divisors(world // tp):
            if world % (tp * pp):
                continue
            found.append((tp, pp))
    noted: set[str] = set()
    for tp, pp in sorted(found, key=lambda pair: (pair[1] > 1, pair[0] * pair[1], pair[1])):
        why = ""
        if tp > 1:
            why = probe.cannot_split.get(tp, "" if tp == 1 else f"tp = {tp} is not a power of two up to 16")
            why = why and f"no tensor parallelism over {tp}: {why}"
        if pp > 1 and not why:
            stages = pp * (hand.virtual_stages or 1)
            why = probe.cannot_pipeline
            if not why and len(probe.anatomy.units) < stages:
                why = f"the model has {len(probe.anatomy.units)} parts for {stages} stages"
            why = why and f"no pipeline: {why}"
        if not why:
            yield tp, pp
        elif why not in noted:
            noted.add(why)
            reasons.append(why)


def _data_meshes(
    resources: Resources, tp: int, pp: int, data: int, table: ClusterTable, offload: bool
) -> Iterator[tuple[Mesh, DataParallel]]:
    """How the ranks that see different examples share the model."""
    hand = table.strategy
    ep = hand.ep or 1
    # Replicas that train apart cannot share one optimizer's state out.
    kinds = [kind for kind in _KINDS if not (hand.local_steps and kind == "zero1")]
    for kind in [hand.data_parallel] if hand.data_parallel else kinds:
        shapes = [(data, 1)] if kind in ("none", "ddp", "zero1") else [(1, data)]
        within = resources.devices // tp
        if kind in ("zero2", "zero3") and 1 < within < data and data % within == 0:
            shapes.insert(0, (data // within, within))
        for dp, fsdp in shapes:
            dp, fsdp = _fixed(dp, fsdp, data, hand.dp, hand.fsdp)
            plain = kind in ("none", "ddp", "zero1")
            if dp * fsdp != data or (plain and (fsdp > 1 or (tp * pp * ep > 1 and kind != "none"))):
                continue
            if (kind == "none" and data > 1) or (kind in ("ddp", "zero1") and data == 1) or fsdp % ep:
                continue
            if not plain and data == 1 and hand.data_parallel is None and not offload:
                continue
            yield Mesh(pp, dp, fsdp, tp, ep), kind


def _fixed(dp: int, fsdp: int, data: int, by_dp: int | None, by_fsdp: int | None) -> tuple[int, int]:
    if by_dp and by_fsdp:
        return by_dp, by_fsdp
    if by_dp:
        return by_dp, max(1, data // by_dp)
    if by_fsdp:
        return max(1, data // by_fsdp), by_fsdp
    return dp, fsdp


def _variants(
    probe: ModelProbe,
    job: JobConfig,
    table: ClusterTable,
    mesh: Mesh,
    kind: DataParallel,
    offload: bool,
    reduction: Reduction,
) -> Iterator[Strategy]:
    """Without and with checkpointing, from large micro-batches to single examples."""
    hand = table.strategy
    share = max(1, -(-job.algorithm.batch_size // mesh.data))
    ways: list[Checkpointing] = [hand.checkpointing] if hand.checkpointing else [*_CHECKPOINTING]
    sequence = mesh.tp > 1 and not probe.tensor_parallel.no_sequence
    shape = probe.trace.calls[-1].inputs if probe.trace.calls else ()
    if shape and shape[0] and len(shape[0]) > 1 and shape[0][1] % mesh.tp:
        sequence = False
    for way in ways:
        for micro in [hand.micro_batch] if hand.micro_batch else _halvings(share, mesh.pp):
            yield Strategy(
                mesh,
                kind,
                micro,
                hand.schedule or "1f1b",
                hand.virtual_stages or (2 if hand.schedule == "interleaved" else 1),
                sequence if hand.sequence_parallel is None else hand.sequence_parallel,
                way,
                hand.checkpoint_every or 1,
                offload,
                table.precision,
                hand.reduction or (reduction if kind == "ddp" and not hand.local_steps else "exact"),
                hand.local_steps or 0,
                hand.outer_learning_rate or 1.0,
                hand.outer_momentum or 0.0,
            )


def _halvings(share: int, stages: int) -> Iterator[int]:
    """The share of a step, and half of it again and again; a pipeline wants several micro-batches."""
    size = max(1, share // (4 * stages) if stages > 1 else share)
    while size > 1:
        yield size
        size = -(-size // 2)
    yield 1


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
