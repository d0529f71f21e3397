"""What a strategy needs on one device, by term: from the model's anatomy and one traced pass.

Weights, gradients and optimizer state are counted exactly for the fullest pipeline stage; activations are
what autograd keeps in a traced pass, scaled by the micro-batch and divided where tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from roundtable.client.streams.shares import largest_share
from roundtable.cluster.parallel.anatomy import Anatomy, Weight
from roundtable.cluster.parallel.forward_trace import Trace
from roundtable.cluster.parallel.pipeline_stages import partition
from roundtable.cluster.parallel.strategy import CODED_PORTION, PORTION, Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.activations import Activations, Pass, activations
from roundtable.cluster.plan.arithmetic import ExampleCost, PassWork
from roundtable.cluster.plan.collective_buffers import Buffers, buffers_of, shards_weights
from roundtable.core.quantities import format_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes on the fullest device.

    `activations` is what one step keeps for its backward pass, `working` the largest temporaries beside
    it, `communication` gathered weights, what is reduced, and the copies of both that the backend makes.
    `host` is what waits in the host's memory instead, for each device. Gradients grow as activations
    shrink, so the `peak` is less than the sum where one micro-batch makes a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    communication: int
    peak: int
    host: int = 0

    def lines(self) -> list[str]:
        """The figures in words, a line each."""
        terms = {name: value for name, value in asdict(self).items() if value or name != "host"}
        return [f"{name:<14}{format_bytes(value):>12}" for name, value in terms.items()]


@dataclass(frozen=True)
class ModelProbe:
    """What a plan has to know of a task: its anatomy, one traced pass, and where its layers can be split.

    `state_factor` is the optimizer's state in bytes for each byte of parameters: 2 for Adam, 0 for plain
    SGD. `cannot_split` has a reason by degree, `cannot_pipeline` and `cannot_run` one; empty where the
    model can be split, cut into stages, or its blocks checkpointed in runs. In bfloat16 `trace` is under
    autocast, and `half` the pass of a model in bfloat16 itself, as gathered shards are. `gloo`:
    collectives are gloo's, which work on copies. `work` is of one example, `optimizer` of a step for each
    byte of gradients, and each parameter; `own_optimizer`: the task makes it, not the job; `by_entry`: it
    treats each entry by itself; `cannot_code` is why its state cannot be in 8 bits, `cannot_share` why it is
    not for ZeRO-1, `cannot_part` why it is not for sharded weights. `streamed`: the training data are a
    stream, dealt out in `lanes` where there are any; `whole_loss`: a batch's loss is not the mean of its
    examples'. `evaluations` names what they change, and depend on. `varies` names a module that not every
    pass calls, empty where all do. `crowding` is how many times its share of the tokens an expert may
    get, by its layer's name. `known` has sums that were asked for before. `cannot_half` is why the model
    does not run in two bytes, and `rounded` what these would do to the
    examples.
    """

    anatomy: Anatomy
    trace: Trace
    tensor_parallel: TensorParallel
    state_factor: float
    optimizer_temporaries: float
    experts: tuple[str, ...]
    cannot_split: dict[int, str]
    cannot_pipeline: str
    cannot_run: str = ""
    half: Trace | None = None
    gloo: bool = False
    work: ExampleCost = field(default_factory=lambda: ExampleCost(0.0, 0, "counted"))
    optimizer: PassWork = field(default_factory=PassWork)
    own_optimizer: bool = True
    by_entry: bool = True
    cannot_code: str = ""
    cannot_share: str = ""
    cannot_part: str = ""
    streamed: bool = False
    lanes: int = 0
    whole_loss: bool = False
    evaluations: str = ""
    varies: str = ""
    cannot_half: str = ""
    rounded: str = ""
    crowding: dict[str, float] = field(default_factory=dict)
    known: dict[Any, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def flops(self) -> float:
        """Operations of one example, forward and backward."""
        return self.work.flops

    def share(self, batch_size: int, ranks: int) -> int:
        """The most examples of a batch that one of the ranks that share it gets."""
        return largest_share(batch_size, ranks, self.lanes)


def with_momentum(probe: ModelProbe, momentum: float) -> ModelProbe:
    """The probe under the job's own SGD, whose momentum is read and written beside weights and gradients."""
    if probe.own_optimizer or not momentum:
        return probe
    return replace(probe, state_factor=1.0, optimizer=PassWork(moved=5.0, calls=1.0))


@dataclass(frozen=True)
class Part:
    """A weight with the elements that a rank has before sharding, its unit, and whether it is an expert's."""

    weight: Weight
    elements: float
    unit: str | None
    expert: bool

    @property
    def bytes(self) -> float:
        """Of those elements."""
        return self.elements * self.weight.itemsize


def parts_of(probe: ModelProbe, strategy: Strategy) -> dict[str | None, list[Part]]:
    """Each unit's weights as tensor and expert parallelism divide them."""
    key = "parts", strategy.mesh.tp, strategy.mesh.ep
    if key not in probe.known:
        table: dict[str | None, list[Part]] = {}
        for weight in probe.anatomy.weights:
            module, _, kind = weight.name.rpartition(".")
            style = probe.tensor_parallel.styles.get(module)
            divided = style is not None and not (style == "row" and kind == "bias")
            expert = module in probe.experts
            elements = weight.elements / (strategy.mesh.tp if divided else 1)
            elements /= strategy.mesh.ep if expert else 1
            unit = probe.anatomy.unit_of(weight.name)
            table.setdefault(unit, []).append(Part(weight, elements, unit, expert))
        probe.known[key] = table
    found: dict[str | None, list[Part]] = probe.known[key]
    return found


def estimate(probe: ModelProbe, strategy: Strategy, accumulated: int) -> Estimate:
    """Memory of the fullest device; `accumulated` is the number of micro-batches in a step."""
    estimates = [
        estimate_rank(probe, strategy, accumulated, units, rank) for rank, units in fullest(probe, strategy)
    ]
    return max(estimates, key=lambda one: one.peak)


def stages_of(probe: ModelProbe, strategy: Strategy) -> list[list[str]]:
    """The units of each pipeline rank."""
    stages = strategy.mesh.pp * strategy.virtual_stages
    if stages == 1:
        return [list(probe.anatomy.units)]
    if ("cut", stages) not in probe.known:
        probe.known["cut", stages] = partition(probe.anatomy, stages)
    cuts = probe.known["cut", stages]
    pp = strategy.mesh.pp
    return [[unit for stage in strategy.stages_of(rank) for unit in cuts[stage]] for rank in range(pp)]


def fullest(probe: ModelProbe, strategy: Strategy) -> list[tuple[int, list[str]]]:
    """(rank, units) of the pipeline ranks of which one is the fullest, and one the slowest.

    They are the first two, the last, and the first of those with most blocks and of those with most weights.
    """
    key = "fullest", strategy.mesh.pp, strategy.virtual_stages, strategy.mesh.tp, strategy.mesh.ep
    if key not in probe.known:
        ranks, blocks = stages_of(probe, strategy), set(probe.anatomy.blocks)
        parts = parts_of(probe, strategy)
        sizes = {unit: sum(part.bytes for part in each) for unit, each in parts.items()}
        most = max(range(len(ranks)), key=lambda rank: sum(unit in blocks for unit in ranks[rank]))
        heavy = max(range(len(ranks)), key=lambda rank: sum(sizes.get(unit, 0.0) for unit in ranks[rank]))
        chosen = {0, min(1, len(ranks) - 1), most, heavy, len(ranks) - 1}
        probe.known[key] = [(rank, ranks[rank]) for rank in sorted(chosen)]
    found: list[tuple[int, list[str]]] = probe.known[key]
    return found


def least_bytes(probe: ModelProbe, strategy: Strategy) -> float:
    """Bytes of weights, gradients and optimizer of the rank that has most of them: the least it needs."""
    if strategy.offload:
        return 0.0
    mesh, parts = strategy.mesh, parts_of(probe, strategy)
    key = "heaviest", mesh.pp, strategy.virtual_stages, mesh.tp, mesh.ep
    if key not in probe.known:
        ranks = [list(parts)] if mesh.pp == 1 else [units for _, units in fullest(probe, strategy)]
        here = [[part for unit in units for part in parts.get(unit, ())] for units in ranks]
        probe.known[key] = max(
            (sum(part.bytes for part in each), sum(part.bytes for part in each if part.weight.trainable))
            for each in here
        )
    held, trained = probe.known[key]
    shards = mesh.fsdp if shards_weights(strategy) else 1
    factor = 0.0 if strategy.offload_optimizer else probe.state_factor * strategy.state_share
    optimizer = factor / (mesh.dp if strategy.data_parallel == "zero1" else 1)
    return float(held + trained * (1 + optimizer)) / shards


def estimate_rank(
    probe: ModelProbe, strategy: Strategy, accumulated: int, units: Sequence[str], rank: int
) -> Estimate:
    """Memory of one pipeline rank, which holds `units`."""
    anatomy, mesh, by_unit = probe.anatomy, strategy.mesh, parts_of(probe, strategy)
    key = mesh.pp, strategy.virtual_stages, mesh.tp, mesh.ep, rank
    if ("here", *key) not in probe.known:
        names: Iterable[str | None] = by_unit if mesh.pp == 1 else (unit for unit in units if unit in by_unit)
        of_rank = [part for name in names for part in by_unit[name]]
        probe.known["here", *key] = of_rank, _after(probe, of_rank)
    here, after = probe.known["here", *key]
    shards = mesh.fsdp if strategy.data_parallel in ("zero2", "zero3") else 1
    sums = _sums(probe, strategy, here, rank)
    own = shards / mesh.ep if shards > 1 else shards
    held = sums.dense / shards + sums.expert / own
    gradients = sums.trained_dense / shards + sums.trained_expert / own
    share = mesh.dp if strategy.data_parallel == "zero1" else 1
    plain = gradients * probe.state_factor / share
    optimizer = state = plain * strategy.state_share
    if strategy.local_steps:
        # The weights at the last meeting, and the outer optimizer's momentum.
        optimizer += gradients * (2 if strategy.outer_momentum else 1)
    if strategy.travel.keeps:
        # What was not sent yet, which the next step's gradients are added to.
        optimizer += gradients
    temporaries = gradients * probe.optimizer_temporaries / share
    half = strategy.half is not None and shards_weights(strategy)
    traced = probe.half if half and probe.half is not None else probe.trace
    run = run_of(probe, traced, strategy, accumulated, units, rank)
    waiting = 0.0
    if strategy.offload_activations:
        # One block's are on their way to the host or back.
        run, waiting = replace(run, kept=run.first), run.kept
    groups = _groups(probe, strategy, here)
    buffers = buffers_of(strategy, groups, after, shards, probe.gloo)
    fixed = held + anatomy.buffer_bytes + optimizer
    # A float64 copy of one gradient for its norm, or what an optimizer makes of one while it takes a step.
    passing = 8 * max(sums.largest_dense / shards, sums.largest_expert / own)
    host = waiting + (fixed - anatomy.buffer_bytes + gradients if strategy.offload else 0.0)
    if strategy.offload_optimizer:
        fixed, host = fixed - state, host + state
    if strategy.offload_optimizer or strategy.optimizer_bits == 8:
        # A portion's state, what its step makes of it, and one kind of it again where it is coded.
        coded = strategy.optimizer_bits == 8
        portion = max(CODED_PORTION if coded else PORTION, passing / 2)
        temporaries = min(temporaries, portion) + min(plain, portion * (probe.state_factor + coded))
    if strategy.offload:
        fixed = gradients = temporaries = passing = 0
    step = gradients + max(temporaries, passing)
    whole = sums.trained_dense + sums.trained_expert
    standing = _standing(strategy, gradients, whole, accumulated)
    peak = fixed + max(step, _peak(gradients, standing, run, buffers, groups))
    return Estimate(
        parameters=int(held + anatomy.buffer_bytes),
        gradients=int(gradients),
        optimizer=int(optimizer),
        activations=int(run.kept + run.constant),
        working=int(run.working),
        communication=int(buffers.most),
        peak=int(peak),
        host=int(host),
    )


def run_of(
    probe: ModelProbe, traced: Trace, strategy: Strategy, accumulated: int, units: Sequence[str], rank: int
) -> Activations:
    """The activations of a rank, which are the same however ranks share out the weights."""
    mesh = strategy.mesh
    key: tuple[Any, ...] = ("run", id(traced), mesh.pp, mesh.tp, mesh.ep > 1, strategy.virtual_stages, rank)
    key += (strategy.sequence_parallel, strategy.micro_batch, strategy.checkpointing)
    key += (strategy.checkpoint_every, strategy.checkpoint_blocks, strategy.half, shards_weights(strategy))
    key += (strategy.schedule, accumulated) if mesh.pp > 1 else ()
    if key not in probe.known:
        one = Pass(probe.anatomy, traced, probe.tensor_parallel, strategy, probe.known, probe.crowding)
        probe.known[key] = activations(one, units, rank, accumulated)
    found: Activations = probe.known[key]
    return found


def _peak(
    gradients: float, standing: float, run: Activations, buffers: Buffers, groups: dict[str, float]
) -> float:
    """The most bytes at any moment of a forward and backward pass, beside weights and optimizer."""
    sizes = [size for key, size in groups.items() if key]
    blocks, whole = max(1, len(sizes)), max(1.0, sum(groups.values()))
    held, largest = gradients * sum(sizes) / whole, gradients * max(sizes, default=0.0) / whole

    def there(count: int) -> float:
        """Bytes of gradients when all blocks but the first `count` have theirs."""
        return standing or held * max(0, blocks - count) / blocks

    working = max(run.head, run.block)
    # A checkpointed block, computed again at the beginning of the backward pass or at its end.
    again = run.again + run.block + buffers.block if run.again else 0.0
    return run.constant + max(
        standing + run.kept + max(working + buffers.beside, buffers.arriving),
        # The last block's gradients are reduced when its own activations are gone.
        standing + run.kept * (blocks - 1) / blocks + working / 2 + buffers.reducing,
        standing + run.kept + again,
        # Near the end of the backward pass activations are gone, and gradients there.
        there(2) + min(2, blocks) * run.first + buffers.between,
        there(2) + run.first + buffers.reducing,
        (standing or gradients - largest) + run.first + again,
        there(0) + buffers.ending,
        gradients + (0.0 if standing else working / 2) - run.constant,
    )


@dataclass(frozen=True)
class _Sums:
    """Bytes of a rank's weights before sharding, those of experts apart: the ranks that share experts hold
    different ones. The largest are elements of one trained weight.
    """

    dense: float
    expert: float
    trained_dense: float
    trained_expert: float
    largest_dense: float
    largest_expert: float


def _sums(probe: ModelProbe, strategy: Strategy, here: Sequence[Part], rank: int) -> _Sums:
    mesh = strategy.mesh
    key = "sums", mesh.pp, strategy.virtual_stages, mesh.tp, mesh.ep, rank
    if key not in probe.known:
        dense, expert = ([part for part in here if part.expert == one] for one in (False, True))
        trained = [[part for part in those if part.weight.trainable] for those in (dense, expert)]
        probe.known[key] = _Sums(
            *(sum(part.bytes for part in those) for those in (dense, expert, *trained)),
            *(max((part.elements for part in those), default=0.0) for those in trained),
        )
    found: _Sums = probe.known[key]
    return found


def _groups(probe: ModelProbe, strategy: Strategy, here: Sequence[Part]) -> dict[str, float]:
    """Bytes of the weights that are gathered together: each block, and under "" the rest."""
    mesh, first = strategy.mesh, here[0].unit if here else ""
    key = "groups", mesh, shards_weights(strategy), first, len(here), strategy.virtual_stages
    if key in probe.known:
        return dict(probe.known[key])
    groups: dict[str, float] = {"": 0.0}
    apart = set(probe.anatomy.alone if shards_weights(strategy) else probe.anatomy.blocks)
    for part in here:
        name = part.unit if part.unit in apart else None
        groups[name or ""] = groups.get(name or "", 0.0) + part.bytes
    probe.known[key] = dict(groups)
    return groups


def _after(probe: ModelProbe, here: Sequence[Part]) -> float:
    """Bytes of the trained weights that follow the blocks, such as a head's."""
    anatomy = probe.anatomy
    last = anatomy.units.index(anatomy.blocks[-1]) if anatomy.blocks else -1
    following = set(anatomy.units[last + 1 :])
    return sum(part.bytes for part in here if part.weight.trainable and part.unit in following)


def _standing(strategy: Strategy, gradients: float, whole: float, accumulated: int) -> float:
    """Bytes of gradients that are held throughout a backward pass; `whole` is what shards are of."""
    if strategy.mesh.pp > 1 and shards_weights(strategy):
        # A schedule has shards reduced after its last micro-batch, and sums whole gradients up to then.
        return whole
    buckets = strategy.data_parallel in ("ddp", "zero1") and not strategy.local_steps
    if buckets and accumulated > 1:
        # DDP's buckets stand beside the sums of the micro-batches before the last.
        return 2 * gradients
    return gradients if accumulated > 1 or buckets or strategy.mesh.pp > 1 else 0.0
