"""Chooses a strategy: of those that fit the fastest by predicted time, of nearly equal ones the plainest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable, StrategyTable
from roundtable.cluster.choice.machine_rates import MachineRates, rates_of
from roundtable.cluster.choice.plan_reasons import Considered, considered, why_chosen, why_not_faster
from roundtable.cluster.choice.savings import Saving, savings
from roundtable.cluster.choice.search import HEADROOM, Found, Search
from roundtable.cluster.choice.step_time import StepTime, format_seconds
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.candidates import Waiting, candidates
from roundtable.cluster.plan.diloco_plan import diloco_table
from roundtable.cluster.plan.hand_checks import check_by_hand, check_shares
from roundtable.cluster.plan.links import Links, reduction_for
from roundtable.cluster.plan.memory_estimate import Estimate, ModelProbe, with_momentum
from roundtable.cluster.plan.precision_choice import settled
from roundtable.cluster.plan.privacy_composition import is_example_level, narrowed
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.plan.step_composition import check_step
from roundtable.cluster.stepping.compile_trial import APART, STATISTICS, cannot_compile, why_plain
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.quantities import format_bytes


@dataclass(frozen=True)
class ClusterPlan:
    """A strategy with the memory and the time that it needs; `reasons` are in the order of their coming up.

    `tensor_parallel` says which layers are split, where any are; `considered` the best of each kind, and
    `savings` what each optimisation of memory is worth here.
    """

    strategy: Strategy
    estimate: Estimate
    time: StepTime
    rates: MachineRates
    resources: Resources
    parameters: int
    batch: int
    tokens: int
    flops: float
    micro_batches: int
    reasons: tuple[str, ...]
    considered: tuple[Considered, ...]
    savings: tuple[Saving, ...]
    tensor_parallel: TensorParallel | None = None
    links: Links | None = None

    @property
    def examples_per_second(self) -> float:
        """Of all ranks, predicted."""
        return self.batch / self.time.seconds

    @property
    def utilisation(self) -> float | None:
        """The model's own operations over the peak of all devices (MFU), predicted; None without a peak."""
        able = self.rates.peak * self.resources.world * self.time.seconds
        return self.flops * self.batch / able if able and self.flops else None

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "strategy": self.strategy.to_plain(),
            "estimate": asdict(self.estimate),
            "time": {
                **asdict(self.time),
                "seconds": self.time.seconds,
                "bubble_share": self.time.bubble_share,
                "examples_per_second": self.examples_per_second,
                "tokens_per_second": self.examples_per_second * self.tokens or None,
                "utilisation": self.utilisation,
            },
            "rates": asdict(self.rates),
            "resources": asdict(self.resources),
            "parameters": self.parameters,
            "micro_batches": self.micro_batches,
            "reasons": list(self.reasons),
            "considered": [each.to_plain() for each in self.considered],
            "savings": [asdict(each) for each in self.savings],
            "links": asdict(self.links) if self.links is not None else None,
        }


def make_plan(
    probe: ModelProbe,
    resources: Resources,
    job: JobConfig,
    table: ClusterTable,
    links: Links | None = None,
) -> ClusterPlan:
    """The fastest strategy that fits; what `[cluster.strategy]` sets is kept.

    Raises ConfigError for a mesh that does not fit the devices, PrivacyError for privacy that does not
    compose with what is set, ResourceError, with the bytes that are missing, where nothing fits.
    """
    check_step(job)
    probe = with_momentum(probe, make_algorithm(job.algorithm).step().momentum)
    check_by_hand(probe, resources, table)
    table, why_precision = settled(table, resources, job, probe)
    private = is_example_level(job)
    check_shares(probe, table, private=private)
    table = narrowed(job, resources, table)
    reduction, why_reduction = reduction_for(None if private else links)
    apart, why_apart = diloco_table(probe, resources, job, table, links)
    hand = table.strategy
    reasons = [each for each in (why_precision, why_apart, "" if apart else why_reduction) if each]
    assert table.precision != "auto", "settled before"
    rates = rates_of(resources, table.precision, links, table.peak_flops)
    search = Search(probe, resources, rates, job.algorithm.batch_size, hand, private=private)
    search.uneven = table.shares == "measured"
    # Nodes that train apart come first where that pays, and what waits in the host's memory last.
    first: Waiting = "optimizer" if hand.offload_optimizer else "nothing"
    ways: Iterator[tuple[ClusterTable, Waiting]] = chain(
        ((each, first) for each in (apart,) if each),
        ((table, each) for each in _waiting(probe, resources, hand)),
    )
    for each, waiting in ways:
        search.add(candidates(probe, resources, job, each, reduction, reasons, waiting))
        best = search.best()
        if best is not None:
            reasons.append(_compiling(probe, resources, table, best.strategy, private=private))
            return _plan(probe, resources, job, rates, search, best, reasons)
    if not search.seen:
        plain = (why_precision, why_apart, why_reduction)
        refused = [each for each in reasons if each not in plain] or [_no_mesh(hand, resources)]
        raise ConfigError("no plan is possible with what [cluster.strategy] sets: " + "; ".join(refused))
    raise _nothing_fits(probe, resources, search, private=private)


def _no_mesh(hand: StrategyTable, resources: Resources) -> str:
    """Why no mesh is one of this many devices, where nothing else refuses what is set."""
    set_by_hand = ", ".join(
        f"{key} = {value!r}".replace("'", '"')
        for key in ("data_parallel", "dp", "fsdp", "tp", "pp", "ep", "local_steps")
        if (value := getattr(hand, key))
    )
    return (
        f"no mesh over {resources} has {set_by_hand or 'all of it'}; set what goes with so many, or leave it "
        "to the planner"
    )


def _compiling(
    probe: ModelProbe, resources: Resources, table: ClusterTable, strategy: Strategy, *, private: bool
) -> str:
    refusal = cannot_compile(strategy, len(probe.anatomy.blocks), private=private)
    if table.elastic == "replica":
        refusal = APART
    elif probe.anatomy.batch_norms:
        refusal = refusal or STATISTICS
    plain = why_plain(table.compile, resources.device, refusal)
    return plain or "blocks are tried compiled in a job's first steps, and kept where that is faster"


def _waiting(probe: ModelProbe, resources: Resources, hand: StrategyTable) -> Iterator[Waiting]:
    """What may wait in the host's memory: nothing, then the optimizer's state, then weights and all."""
    if not (hand.offload or hand.offload_optimizer):
        yield "nothing"
    if hand.optimizer_bits == 8:
        return
    by_itself = resources.device == "cuda" and probe.by_entry and probe.state_factor > 0
    if not hand.offload and (by_itself if hand.offload_optimizer is None else hand.offload_optimizer):
        yield "optimizer"
    by_itself = resources.device == "cuda" and not hand.local_steps
    if not hand.offload_optimizer and (by_itself if hand.offload is None else hand.offload):
        yield "all"


def _plan(
    probe: ModelProbe,
    resources: Resources,
    job: JobConfig,
    rates: MachineRates,
    search: Search,
    best: Found,
    reasons: list[str],
) -> ClusterPlan:
    strategy, needed = best.strategy, search.needed(best)
    reasons += why_chosen(search, best)
    reasons += why_not_faster(search, best)
    if strategy.mesh.tp > 1:
        reasons += [f"not shared out over tp: {each}" for each in probe.tensor_parallel.whole]
    reasons.append(
        f"{strategy} fits: {format_bytes(needed.peak)} of {format_bytes(search.allowed)}, and is the "
        f"plainest within {rates.near:.0%} of the fastest: {format_seconds(best.seconds)} a step"
    )
    return ClusterPlan(
        strategy=strategy,
        estimate=needed,
        time=best.time,
        rates=rates,
        resources=resources,
        parameters=probe.anatomy.elements,
        batch=job.algorithm.batch_size,
        tokens=probe.work.tokens,
        flops=probe.flops,
        micro_batches=search.micro_batches(strategy),
        reasons=tuple(reasons),
        considered=considered(search, best),
        savings=savings(search, strategy),
        tensor_parallel=probe.tensor_parallel if strategy.mesh.tp > 1 else None,
    )


def _nothing_fits(probe: ModelProbe, resources: Resources, search: Search, *, private: bool) -> ResourceError:
    one = search.smallest_where(lambda strategy: True)
    assert one is not None
    needed = search.needed(one)
    said = search.problem(one)
    if needed.peak > search.allowed:
        said = (
            f"needs {format_bytes(needed.peak)} on each device, {format_bytes(needed.peak - search.allowed)} "
            f"more than the {format_bytes(search.allowed)} that may be used ({HEADROOM:.0%} of the device's)"
        )
    return ResourceError(
        f"the model ({probe.anatomy.elements:,} parameters) fits in no plan on {resources}: the "
        f"smallest, {one.strategy}, {said}; more devices, a smaller batch or shorter examples would help"
        + ("; privacy.level = 'example' needs the whole model on each device" if private else "")
    )
