"""Predicts the seconds of a step, by term, from counted work and the rates of devices and links.

A pass takes, for each stage, its products at the rate of products and reading the weights (on a GPU the
longer of both), a CPU's attention at its own rate, and the bytes of its other operators at the rates of those
that compute and those that add or copy; a model's backward pass is counted as a whole and
shared out as its forward pass. Collectives of tensor and expert parallelism and sends between stages stand
between operators, and wait for them. Gathered weights and reduced gradients travel while blocks compute where
the backend can (NCCL): what is longer than the pass it hides behind is waited for, and so is the first
block's gather or the last one's reduction. Over gloo nothing overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from roundtable.cluster.choice.collective_time import Wires
from roundtable.cluster.choice.gradient_time import GradientTraffic, optimizer_seconds
from roundtable.cluster.choice.host_time import split_seconds, step_calls
from roundtable.cluster.choice.machine_rates import MachineRates
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.activations import Pass
from roundtable.cluster.plan.arithmetic import PassWork
from roundtable.cluster.plan.collective_buffers import shards_weights
from roundtable.cluster.plan.memory_estimate import ModelProbe, fullest, run_of
from roundtable.cluster.plan.resources import Resources


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest stage's ranks; the terms add up to `seconds`.

    `computing` is forward and backward, `recomputing` what checkpointing does again, `tensor`, `experts` and
    `stages` what those collectives and sends take; `weights` what is waited for of gathers and reductions,
    `offload` of the host's link, `bubble` of other stages; `host` is the host's work for shards, split layers
    and the step that nothing hides, and `optimizer` the step itself.
    """

    computing: float = 0.0
    recomputing: float = 0.0
    tensor: float = 0.0
    experts: float = 0.0
    stages: float = 0.0
    weights: float = 0.0
    offload: float = 0.0
    bubble: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return math.fsum(getattr(self, each.name) for each in fields(self))

    @property
    def bubble_share(self) -> float:
        """The share of the passes' time in which a stage waits for others: (p − 1)/(m + p − 1) for 1F1B."""
        passes = self.computing + self.recomputing + self.tensor + self.experts + self.stages + self.bubble
        return self.bubble / passes if passes else 0.0

    def lines(self) -> list[str]:
        """The terms in words, a line each, without those that are nothing."""
        whole = max(self.seconds, 1e-12)
        return [
            f"{name:<14}{format_seconds(value):>12}{value / whole:>7.0%}"
            for name, value in asdict(self).items()
            if value
        ]


def format_seconds(value: float) -> str:
    """For people: 1.50 s, 312 ms."""
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if value >= unit:
            amount = value / unit
            return f"{amount:.0f} {name}" if amount >= 100 else f"{amount:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def bubbles(strategy: Strategy) -> float:
    """How many micro-batches' time a stage waits in a step.

    p − 1 for GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al. 2021, section 2.2.1),
    (p − 1)/v with v interleaved stages on each rank (section 2.2.2), a third of that where gradients of
    weights fill the gaps (Qi et al. 2023, table 2, ZB-H1, with equally long parts).
    """
    part = 1 / 3 if strategy.schedule == "zero_bubble" else 1.0
    return part * (strategy.mesh.pp - 1) / strategy.virtual_stages


def step_time(
    probe: ModelProbe,
    sums: UnitSums,
    strategy: Strategy,
    batch: int,
    rates: MachineRates,
    resources: Resources,
) -> StepTime:
    """The prediction for a batch of so many examples over all ranks."""
    wires = Wires(rates, resources, strategy.mesh, probe.gloo)
    share = probe.share(batch, strategy.mesh.data)
    count = -(-share // strategy.micro_batch)
    at_once = share / count
    if strategy.mesh.pp > 1:
        # A schedule runs micro-batches of one size, and as many as there are stages at least.
        count, at_once = max(count, strategy.mesh.pp), strategy.micro_batch
    stages = [
        _Stage(probe, sums, strategy, wires, units, at_once, count, last=rank == strategy.mesh.pp - 1)
        for rank, units in fullest(probe, strategy)
    ]
    slowest = max(stages, key=lambda stage: stage.micro())
    found = [stage.time(slowest.micro()) for stage in stages]
    return max(found, key=lambda one: one.seconds)


class _Stage:
    """What one pipeline rank does in a step."""

    def __init__(
        self,
        probe: ModelProbe,
        sums: UnitSums,
        strategy: Strategy,
        wires: Wires,
        units: Sequence[str],
        examples: float,
        count: int,
        *,
        last: bool,
    ) -> None:
        self._probe = probe
        self._sums = sums
        self._strategy = strategy
        self._wires = wires
        self._rates = wires.rates
        self._units = units
        self._examples = examples
        self._count = count
        self._last = last
        mesh, sharded = strategy.mesh, strategy.data_parallel in ("zero2", "zero3")
        # How the ranks with different examples share weights makes no difference to a micro-batch.
        key: tuple[Any, ...] = (mesh.pp, mesh.tp, mesh.ep, mesh.data, strategy.virtual_stages)
        key += (strategy.sequence_parallel, strategy.checkpointing, strategy.checkpoint_every)
        key += (strategy.checkpoint_blocks, strategy.half is not None, sharded, strategy.micro_batch)
        key += (examples, last)
        found = sums.remembered(("micro", *key), (units, wires.rates, wires.resources), self._micro)
        terms: tuple[float, float, float, float, float, float, float] = found
        self._calls, self.forward, self.computing, self.recomputing, *_ = terms
        self.tensor, self.experts, self.stages = terms[4:]

    def _micro(self) -> tuple[float, float, float, float, float, float, float]:
        """One micro-batch: calls of operators, seconds of its forward pass, of both, of the terms beside."""
        probe, sums, strategy = self._probe, self._sums, self._strategy
        work = sums.work(strategy, self._units, rest=self._last)
        forward = self._seconds(work)
        back = sums.backward(work)
        computing = forward + self._seconds(back)
        passed = Pass(probe.anatomy, probe.trace, probe.tensor_parallel, strategy).passed()
        # There and back, for each of the rank's stages.
        sent = self._wires.send("pp", passed * self._examples / strategy.micro_batch)
        stages = 2 * strategy.virtual_stages * sent
        beside = self._again(), self._tensor(self._last), self._experts(), stages
        return work.calls + back.calls, forward, computing, *beside

    def micro(self) -> float:
        """Seconds of one micro-batch."""
        return self.computing + self.recomputing + self.tensor + self.experts + self.stages

    def time(self, slowest: float) -> StepTime:
        """The step, in which the slowest stage's micro-batch takes so long."""
        windows = self.forward, self.micro() - self.forward
        traffic = GradientTraffic(self._sums, self._strategy, self._wires, self._units, self._count)
        count = self._count
        waited = slowest - self.micro()
        calls = step_calls(self._sums, self._strategy, self._units, traffic)
        split = split_seconds(self._sums, self._strategy, self._units, self._rates, last=self._last)
        host = calls * self._rates.call + count * split
        if self._rates.overlaps:
            # The host goes ahead of the device, and is waited for where it takes longer.
            host = max(0.0, host + count * self._calls * self._rates.call - count * self.micro())
        return StepTime(
            computing=count * self.computing + traffic.accumulated(),
            recomputing=count * self.recomputing,
            tensor=count * self.tensor,
            experts=count * self.experts,
            stages=count * self.stages,
            weights=traffic.waited(*windows),
            offload=traffic.offloaded() + self._activations_offloaded() + self._state_offloaded(),
            bubble=bubbles(self._strategy) * slowest + count * waited,
            host=host,
            optimizer=optimizer_seconds(self._probe, self._sums, self._strategy, self._wires, self._units),
        )

    def _activations_offloaded(self) -> float:
        """Seconds in which what forward passes keep goes to the host's memory and comes back."""
        probe, strategy = self._probe, self._strategy
        if not strategy.offload_activations:
            return 0.0
        half = strategy.half is not None and strategy.data_parallel in ("zero2", "zero3")
        traced = probe.half if half and probe.half is not None else probe.trace
        kept = run_of(probe, traced, strategy, self._count, self._units, 0).kept
        return 2 * self._count * kept / self._rates.host

    def _state_offloaded(self) -> float:
        """Seconds in which the optimizer's state comes from the host's memory and goes back."""
        strategy = self._strategy
        if not strategy.offload_optimizer:
            return 0.0
        shards = strategy.mesh.fsdp if shards_weights(strategy) else 1
        shards *= strategy.mesh.dp if strategy.data_parallel == "zero1" else 1
        trained = self._sums.weights(strategy, self._units).trained
        return 2 * self._probe.state_factor * trained / shards / self._rates.host

    def _seconds(self, work: PassWork) -> float:
        """Of a pass of one micro-batch."""
        rates, half, examples = self._rates, self._half(), self._examples
        attends = work.attention if rates.attention else 0.0
        multiplied = (work.flops - attends) * examples / rates.products
        reading = half * work.weights / rates.memory
        # A CPU brings weights into the order of its products first, a GPU reads them meanwhile.
        products = max(multiplied, reading) if rates.overlaps else multiplied + reading
        if attends:
            products += examples * (work.visited / rates.attention + work.scores * rates.score)
        moving = half * examples * (work.moved / rates.operators + work.carried / rates.copies)
        calls = work.calls * rates.call
        # A GPU starts the next kernels while one runs; a CPU does one after the other.
        return max(products + moving, calls) if rates.overlaps else products + moving + calls

    def _half(self) -> float:
        """Bytes of activations over those in float32: under autocast norms and sums stay as they are."""
        if self._strategy.half is None:
            return 1.0
        return 0.5 if self._strategy.data_parallel in ("zero2", "zero3") else 0.75

    def _again(self) -> float:
        """Seconds of what checkpointing computes again: whole blocks, or all in them but products."""
        strategy, here = self._strategy, self._sums.blocks(self._units)
        if strategy.checkpointing == "none" or not here:
            return 0.0
        chosen = here if strategy.checkpointing == "sqrt" else strategy.checkpointed(here)
        every = len(chosen) == len(here)
        work = self._sums.work(strategy, here if every else chosen, rest=False, lasting=every)
        if strategy.checkpointing == "selective":
            work = PassWork(moved=work.moved, calls=work.calls, carried=work.carried)
        return self._seconds(work)

    def _tensor(self, last: bool) -> float:
        """A sum of each split part's output in the forward pass, and in the backward pass of the gradients of
        its input (Shoeybi et al. 2019, figure 4), here for each layer that reads it; or as many gathers and
        scatters of the sequence (Korthikanti et al. 2022, section 4.2.2), which move as much. What is
        computed again sums again.
        """
        strategy = self._strategy
        if strategy.mesh.tp == 1:
            return 0.0
        item = (2 if strategy.half is not None else 4) * self._examples / self._probe.trace.examples
        here = self._sums.blocks(self._units)
        again = here if strategy.checkpointing == "sqrt" else strategy.checkpointed(here)
        calls = self._sums.split_calls(self._units, again, rest=last)
        seconds = ends = 0.0
        for (style, elements, repeated), number in calls.items():
            if style == "head":
                seconds += number * self._wires.all_gather("tp", elements * item)
                continue
            if style in ("norm", "inner"):
                # Sums of the gradients of a norm's weight and bias, which have its width.
                passes = 2.0 if strategy.sequence_parallel and style == "norm" else 0.0
                seconds += number * passes * self._summed(4.0 * elements)
                continue
            if style == "row" and strategy.sequence_parallel:
                seconds += number * self._spread(elements * item, repeated=repeated)
                # The last block's output is gathered, and so is the gradient of what the first one is given.
                ends = 2 * (
                    self._gathered(elements * item) + self._copied(elements * item / strategy.mesh.tp)
                )
                continue
            # A split attention sums its output and the gradient of its input.
            passes = 2.0 if style == "attention" else 1.0
            passes += repeated and style in ("row", "attention")
            seconds += number * passes * self._summed(elements * item)
        return seconds + ends

    def _spread(self, payload: float, *, repeated: bool) -> float:
        """Of a layer split by rows, with a split sequence: its output is scattered, and gathered for what
        comes after; its gradient is gathered, and a rank's part of theirs copied.
        """
        scattered = self._wires.reduce_scatter("tp", payload) + self._copied(payload)
        gathered = self._gathered(payload)
        own = self._copied(payload / self._strategy.mesh.tp)
        return scattered + 2 * gathered + own + repeated * (scattered + gathered)

    def _summed(self, payload: float) -> float:
        """A functional all-reduce works on a copy."""
        return self._wires.all_reduce("tp", payload) + self._copied(payload)

    def _gathered(self, payload: float) -> float:
        """What is gathered along the sequence, or scattered, is copied into order."""
        return self._wires.all_gather("tp", payload) + self._copied(payload)

    def _copied(self, payload: float) -> float:
        return 2.0 * payload / self._rates.copies

    def _experts(self) -> float:
        """Tokens travel to their experts and back, in both passes (Lepikhin et al. 2021, section 3.2)."""
        strategy = self._strategy
        if strategy.mesh.ep == 1:
            return 0.0
        item = (2 if strategy.half is not None else 4) * self._examples / self._probe.trace.examples
        sizes = [size for unit, size in self._sums.expert_inputs if unit in self._units]
        return 4 * sum(self._wires.all_to_all("ep", size * item) for size in sizes)
