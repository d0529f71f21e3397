"""Seconds of what data parallelism adds to a step: gathered weights, reduced gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundtable.cluster.choice.collective_time import Wires
from roundtable.cluster.choice.machine_rates import HOST_MEMORY
from roundtable.cluster.choice.unit_sums import UnitSums, Weights
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.collective_buffers import shards_weights
from roundtable.cluster.plan.memory_estimate import ModelProbe

# DDP's buckets in bytes; bytes that memory moves for each byte of gradients that is encoded, and decoded.
_BUCKET, _ENCODED, _DECODED = 25 << 20, 4.0, 3.0
# Bytes that coding an optimizer's state in 8 bits and decoding it move for each byte of it in float32: on a
# CPU, which looks levels up, and on a GPU, which searches for them and is not bound by memory (H100, torch
# 2.11: 111 and 127).
_CODED = {False: 19.8, True: 119.0}
# Bytes for each byte of gradients that their norm moves: read, written as float64, read again; calls that
# a step takes for each parameter beside the optimizer's own, and all of them on a GPU, whose kernels take
# many parameters at once (H100, torch 2.11: 15 µs a parameter of 582 and 19 of 291, at 29 µs a call).
_NORM, _STEP_EACH, _STEP_DEVICE = 5.0, 1.5, 0.6


@dataclass(frozen=True)
class GradientTraffic:
    """The collectives of one stage's weights in a step of `count` micro-batches.

    DDP sums each gradient once a step. ZeRO-2 gathers weights and scatters gradients for each micro-batch,
    ZeRO-3 gathers for each forward and each backward pass (Rajbhandari et al. 2020, section 7: 1.5 times
    DDP's volume); a pipeline gathers and scatters once. Over dp shards are summed as well (HSDP).
    """

    sums: UnitSums
    strategy: Strategy
    wires: Wires
    units: Sequence[str]
    count: int

    def waited(self, forward: float, backward: float) -> float:
        """Seconds that a step waits, where the two passes of a micro-batch take so long."""
        strategy = self.strategy
        if strategy.local_steps:
            own = self._sharded(forward, backward) if shards_weights(strategy) else 0.0
            part = self.weights.trained / strategy.mesh.fsdp
            return own + self.wires.all_reduce("dp", part) / strategy.local_steps
        if shards_weights(strategy):
            return self._sharded(forward, backward)
        return self._whole(backward) if strategy.data_parallel in ("ddp", "zero1") else 0.0

    @property
    def weights(self) -> Weights:
        """Of this stage, before sharding."""
        return self.sums.weights(self.strategy, self.units)

    @property
    def gathers(self) -> int:
        """How often weights are gathered in a step."""
        if self.strategy.mesh.pp > 1:
            return 1
        return 2 * self.count if self.strategy.data_parallel == "zero3" else self.count

    @property
    def groups(self) -> int:
        """Blocks, whose weights are gathered each by itself, and the rest."""
        return len(self.sums.blocks(self.units)) + 1

    @property
    def reductions(self) -> int:
        """How often gradients are reduced in a step."""
        return self.count if self.strategy.mesh.pp == 1 else 1

    def _whole(self, backward: float) -> float:
        """DDP and ZeRO-1: buckets travel while the last micro-batch's backward pass goes on."""
        trained, wires = self.weights.trained, self.wires
        pieces = max(1.0, trained / _BUCKET)
        travel, ranks = self.strategy.travel, self.strategy.mesh.dp
        if travel.kind == "encoding":
            # Each rank decodes what all sent.
            coding = (_ENCODED + _DECODED * ranks) * trained / self._host
            seconds = wires.all_gather("dp", travel.share * trained * ranks, pieces) + coding
        elif travel.kind == "powersgd":
            # Two products with a factor's columns, and what is put together of both.
            products = 6.0 * travel.rank * trained / 4
            seconds = (
                wires.all_reduce("dp", self.weights.factors, 2 * pieces) + products / wires.rates.products
            )
        else:
            seconds = wires.all_reduce("dp", travel.share * trained, pieces)
        waited = self._beside(seconds, backward) + seconds / pieces if wires.rates.overlaps else seconds
        # A gradient is copied into its bucket and divided there.
        waited = min(waited, seconds) + 4.0 * trained / wires.rates.memory
        if self.strategy.data_parallel == "zero1":
            # Each rank tells the others the weights of its share of the optimizer, each by itself.
            waited += wires.broadcast("dp", trained, self.weights.count)
        return waited

    @property
    def _host(self) -> float:
        """The rate of memory that encoding has, which is the CPU's work."""
        wires = self.wires
        return wires.rates.memory if wires.gloo else HOST_MEMORY / wires.resources.devices

    def _sharded(self, forward: float, backward: float) -> float:
        weights, wires, strategy = self.weights, self.wires, self.strategy
        half = 0.5 if strategy.half is not None else 1.0
        groups = self.groups
        gather = wires.all_gather("fsdp", half * weights.bytes, groups)
        travel, coding = strategy.travel, 0.0
        if travel.kind == "encoding":
            # Each rank gets its piece from every other, and decodes those.
            reduce = wires.all_to_all("fsdp", travel.share * weights.trained)
            coding = (_ENCODED + _DECODED) * weights.trained / self._host
        else:
            reduce = wires.reduce_scatter("fsdp", travel.share * weights.trained, groups)
        if not strategy.local_steps:
            reduce += wires.all_reduce("dp", travel.share * weights.trained / strategy.mesh.fsdp, groups)
        reduce += coding
        # Shards are copied into what is sent, gathered weights out of what arrives, gradients into what is
        # reduced. gloo copies both once more, where that is not in what was measured.
        copies = 4.0 if wires.gloo and not wires.rates.kinds else 2.0
        copied = self.gathers * half * weights.bytes + self.reductions * weights.trained
        copying = copies * copied / wires.rates.memory
        if not wires.rates.overlaps:
            return self.gathers * gather + self.reductions * reduce + copying
        first = 1 if strategy.mesh.pp > 1 else self.count
        waited = first * self._beside(gather, forward) + gather / groups + reduce / groups
        back = gather if strategy.data_parallel == "zero3" else 0.0
        if strategy.mesh.pp > 1:
            # The schedule reduces when its last backward pass is done.
            return waited + reduce + copying
        return waited + self.reductions * self._beside(back + reduce, backward) + copying

    def accumulated(self) -> float:
        """Seconds in which gradients of later micro-batches are added to those that are there.

        Not on GPUs: Megatron-LM, by whose published steps their rates were set, adds within the product.
        """
        if self.wires.rates.overlaps:
            return 0.0
        shards = self.strategy.mesh.fsdp if self.reductions > 1 and shards_weights(self.strategy) else 1
        return 3.0 * (self.count - 1) * self.weights.trained / shards / self.wires.rates.memory

    def _beside(self, traffic: float, window: float) -> float:
        """Seconds of `traffic` that do not fit beside a pass of `window` seconds."""
        return max(0.0, traffic - window)

    def offloaded(self) -> float:
        """Seconds in which shards come from the host's memory and gradients go there."""
        if not self.strategy.offload:
            return 0.0
        weights, shards = self.weights, self.strategy.mesh.fsdp
        moved = (self.gathers * weights.bytes + self.reductions * weights.trained) / shards
        return moved / self.wires.rates.host


def optimizer_seconds(
    probe: ModelProbe, sums: UnitSums, strategy: Strategy, wires: Wires, units: Sequence[str]
) -> float:
    """Seconds of the gradient's norm and the optimizer's step over a rank's part of the weights."""
    weights, rates = sums.weights(strategy, units), wires.rates
    shards = strategy.mesh.fsdp if shards_weights(strategy) else 1
    share = strategy.mesh.dp if strategy.data_parallel == "zero1" else 1
    memory = HOST_MEMORY / wires.resources.devices if strategy.offload else rates.memory
    part = weights.trained / shards
    moved = _NORM * part + probe.optimizer.moved * part / share
    if strategy.optimizer_bits == 8:
        moved += _CODED[rates.overlaps] * probe.state_factor * part / share
    # Its norm, and handing it to the optimizer, which looks at each parameter.
    each = _STEP_DEVICE if rates.overlaps else probe.optimizer.calls / share + _STEP_EACH
    calls = each * weights.count * rates.call
    return max(moved / memory, calls) if rates.overlaps else moved / memory + calls
