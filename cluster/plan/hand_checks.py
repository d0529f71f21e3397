"""Refuses what `[cluster]` fixes by hand and the devices, the model or its optimizer cannot do."""

from __future__ import annotations

from math import prod

from roundtable.client.policy.cluster_table import ClusterTable, StrategyTable
from roundtable.cluster.parallel.strategy import cannot_offload, cannot_offload_state
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.resources import Resources
from roundtable.core.errors import ConfigError


def check_shares(probe: ModelProbe, table: ClusterTable, *, private: bool) -> None:
    """Raises ConfigError for what ranks with unequal shares of a batch cannot train.

    `private`: each example's gradient is clipped.
    """
    if table.shares == "equal":
        return
    reason = ""
    if private:
        reason = "at privacy.level 'example' each rank samples from its own examples"
    elif probe.streamed:
        reason = "streamed data are dealt out by lanes"
    elif probe.anatomy.batch_norms and table.strategy.batch_norm != "local":
        reason = f"{probe.anatomy.batch_norms[0]} takes statistics over a batch that each rank runs at once"
    if reason:
        raise ConfigError(f'[cluster] shares = "measured": {reason}; leave it out')


def check_by_hand(probe: ModelProbe, resources: Resources, table: ClusterTable) -> None:
    """Raises ConfigError for degrees in `[cluster.strategy]` that the devices cannot form, and what
    cannot wait in the host's memory.
    """
    hand, world = table.strategy, resources.world
    if (hand.cp or 1) > 1:
        raise ConfigError(
            f"[cluster.strategy] cp = {hand.cp}: context parallelism is not offered, as torch's has no CPU "
            "kernel to be checked with; tp with sequence_parallel shards the sequence between the blocks"
        )
    _check_offloads(probe, resources, hand)
    _check_experts(probe, hand.ep or 1)
    degrees = {key: getattr(hand, key) for key in ("pp", "dp", "fsdp", "tp") if getattr(hand, key)}
    ranks = prod(degrees.values())
    mesh = " × ".join(f"{key} {value}" for key, value in degrees.items())
    if ranks > world:
        raise ConfigError(f"[cluster.strategy] {mesh} is a mesh of {ranks} ranks; there are {world} devices")
    if world % ranks:
        raise ConfigError(
            f"[cluster.strategy] {mesh}: {world} devices do not divide by {ranks}; "
            f"use {world // ranks * ranks} of them, or other degrees"
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


def _check_experts(probe: ModelProbe, ep: int) -> None:
    if ep == 1:
        return
    if not probe.experts:
        raise ConfigError(
            f"[cluster.strategy] ep = {ep}: the model has no roundtable.cluster.parallel.experts."
            "MixtureOfExperts, whose experts alone are shared out; leave ep out, or use fsdp"
        )
    for name in probe.experts:
        count = next(each.shape[0] for each in probe.anatomy.weights if each.name.startswith(f"{name}."))
        if count % ep:
            raise ConfigError(
                f"[cluster.strategy] ep = {ep}: {name} has {count} experts, which do not divide by {ep}"
            )


def _check_offloads(probe: ModelProbe, resources: Resources, hand: StrategyTable) -> None:
    for key in ("offload_optimizer", "offload_activations"):
        if getattr(hand, key) and resources.device == "cpu":
            raise ConfigError(
                f"[cluster.strategy] {key} = true: the devices are CPUs, whose memory is the host's"
            )
    if hand.offload_activations and (reason := cannot_offload(hand.pp or 1, hand.checkpointing or "none")):
        raise ConfigError(f"[cluster.strategy] offload_activations = true and {reason}")
    if hand.optimizer_bits == 8 and (reason := probe.cannot_code or _nothing_kept(probe)):
        raise ConfigError(f"[cluster.strategy] optimizer_bits = 8: {reason}")
    if not hand.offload_optimizer:
        return
    if reason := cannot_offload_state(probe.by_entry):
        raise ConfigError(f"[cluster.strategy] offload_optimizer = true: {reason}")
    if reason := _nothing_kept(probe):
        raise ConfigError(f"[cluster.strategy] offload_optimizer = true: {reason}")


def _nothing_kept(probe: ModelProbe) -> str:
    if probe.state_factor:
        return ""
    return "the optimizer keeps no state (plain SGD), and nothing would be saved; leave it out"
