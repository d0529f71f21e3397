"""Finds the fastest strategies that fit: candidates in the order of their predicted time, until one does."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from roundtable.client.policy.cluster_table import StrategyTable
from roundtable.cluster.choice.checkpoint_choice import fewest_blocks
from roundtable.cluster.choice.machine_rates import MachineRates
from roundtable.cluster.choice.step_time import StepTime, step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.memory_estimate import Estimate, ModelProbe, estimate, least_bytes
from roundtable.cluster.plan.privacy_composition import with_noisy_gradient
from roundtable.cluster.plan.resources import Resources
from roundtable.core.quantities import format_bytes

# The part of a device's memory, and of a node's, that may be used.
HEADROOM = 0.9


@dataclass
class Found:
    """A candidate: `order` is its place from plain to elaborate, `least` bytes that it needs at any rate.

    `estimate` is there when it was asked for, and when `tried` the same with a few blocks `listed`. `seconds`
    are a step's.
    """

    order: float
    strategy: Strategy
    time: StepTime
    least: float
    estimate: Estimate | None = None
    tried: bool = False
    listed: Found | None = None

    def __post_init__(self) -> None:
        self.seconds = self.time.seconds
        self.key = self.seconds, self.order

    def __lt__(self, other: Found) -> bool:
        return self.key < other.key


@dataclass
class Search:
    """The candidates of one plan.

    `hand` is `[cluster.strategy]`; `private`: each example's gradient is clipped; `uneven`: a rank may get
    more than an equal share of a batch.
    """

    probe: ModelProbe
    resources: Resources
    rates: MachineRates
    batch: int
    hand: StrategyTable
    private: bool = False
    uneven: bool = False
    allowed: int = 0
    seen: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allowed = self.allowed or int(self.resources.memory * HEADROOM)
        self.sums = UnitSums(self.probe)
        self._sorted: list[Found] = []

    def add(self, strategies: Iterable[Strategy]) -> None:
        """Takes candidates from plain to elaborate, each with its predicted time."""
        for strategy in strategies:
            if self.hand.checkpointing == "budget":
                listed = fewest_blocks(self.probe, strategy, self.micro_batches(strategy), self._problem)
                strategy = listed or strategy.with_checkpointing("every")
            self.seen.append(self._found(len(self.seen), strategy))
        self._sorted = sorted(self.seen)

    def _found(self, order: float, strategy: Strategy) -> Found:
        time = step_time(self.probe, self.sums, strategy, self.batch, self.rates, self.resources)
        return Found(order, strategy, time, least_bytes(self.probe, strategy))

    def best(self) -> Found | None:
        """The plainest of the fastest that fit; None where none does."""
        return self.best_where(lambda strategy: True)

    def best_where(self, wanted: Callable[[Strategy], bool]) -> Found | None:
        """As `best`, of those that are wanted."""
        fitting: list[Found] = []
        limit = inf
        for one in self._in_order(wanted):
            if one.seconds > limit * (1 + self.rates.near):
                break
            if not self.problem(one):
                fitting.append(one)
                limit = min(limit, one.seconds)
        return min(fitting, key=lambda one: (one.order, one.seconds), default=None)

    def _in_order(self, wanted: Callable[[Strategy], bool]) -> Iterator[Found]:
        """Yields candidates by time, those with a few blocks listed, which are slower, where they come."""
        listed: list[Found] = []
        for one in self._sorted:
            if one.least > self.allowed or not wanted(one.strategy):
                continue
            while listed and listed[0] < one:
                yield heapq.heappop(listed)
            yield one
            if self.problem(one) and (few := self._listed(one)) is not None and wanted(few.strategy):
                heapq.heappush(listed, few)
        while listed:
            yield heapq.heappop(listed)

    def smallest_where(self, wanted: Callable[[Strategy], bool]) -> Found | None:
        """The one that needs least, of those that are wanted and, where any do not, do not fit by `least`."""
        those = sorted((one for one in self.seen if wanted(one.strategy)), key=lambda one: one.least)
        smallest: Found | None = None
        for one in those:
            if smallest is not None and one.least >= self.needed(smallest).peak:
                break
            if smallest is None or self.needed(one).peak < self.needed(smallest).peak:
                smallest = one
        return smallest

    def micro_batches(self, strategy: Strategy) -> int:
        """How many make a step on each rank."""
        return -(-self.probe.share(self.batch, strategy.mesh.data) // strategy.micro_batch)

    def needed(self, one: Found) -> Estimate:
        """The memory that a candidate needs."""
        if one.estimate is None:
            # A fast rank has another micro-batch to accumulate.
            more = self.uneven and one.strategy.mesh.data > 1
            needed = estimate(self.probe, one.strategy, self.micro_batches(one.strategy) + more)
            one.estimate = with_noisy_gradient(needed) if self.private else needed
        return one.estimate

    def problem(self, one: Found) -> str:
        """Why a candidate does not fit; empty where it does."""
        return self._problem(self.needed(one))

    def _problem(self, needed: Estimate) -> str:
        if needed.peak > self.allowed:
            more = format_bytes(needed.peak - self.allowed)
            return f"it needs {format_bytes(needed.peak)}, {more} more than may be used"
        budget = self.hand.checkpoint_memory
        if budget is not None:
            most = budget * self.resources.memory if isinstance(budget, float) else budget
            if (taken := needed.activations + needed.working) > most:
                return (
                    f"its activations take {format_bytes(taken)}, more than checkpoint_memory = "
                    f"{format_bytes(most)}"
                )
        there = int(self.resources.host_memory * HEADROOM)
        waiting = needed.host * self.resources.devices
        if there and waiting > there:
            return (
                f"{format_bytes(waiting)} would wait in the host memory of each node, "
                f"{format_bytes(waiting - there)} more than the {format_bytes(there)} that may be used of it"
            )
        return ""

    def _listed(self, one: Found) -> Found | None:
        """The candidate with as few blocks checkpointed as let it fit; None where it has another kind."""
        fixed = self.hand.checkpointing is not None or self.hand.offload_activations or self.private
        # A pass that is run again would change the model twice.
        fixed = fixed or bool(self.probe.trace.rewritten)
        if fixed or one.strategy.checkpointing != "none":
            return None
        if not one.tried:
            one.tried, count = True, self.micro_batches(one.strategy)
            strategy = fewest_blocks(self.probe, one.strategy, count, self._problem)
            one.listed = None if strategy is None else self._found(one.order + 0.5, strategy)
        return one.listed
