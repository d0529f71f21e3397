"""What a strategy needs on one device, by term: from the model's anatomy and one traced pass.

Weights, gradients and optimizer state are counted exactly for the fullest pipeline stage; activations are
what autograd keeps in a traced pass, scaled by the micro-batch and divided where tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from roundtable.cluster.parallel.anatomy import Anatomy, Weight
from roundtable.cluster.parallel.forward_trace import Trace
from roundtable.cluster.parallel.pipeline_stages import partition
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.activations import Activations, Pass, activations
from roundtable.cluster.plan.collective_buffers import Buffers, buffers_of, shards_weights
from roundtable.cluster.plan.resources import format_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes on the fullest device.

    `activations` is what one step keeps for its backward pass, `working` the largest temporaries beside
    it, `communication` gathered weights, what is reduced, and the copies of both that the backend makes.
    Gradients grow as activations shrink, so the `peak` is less than the sum where one micro-batch makes a
    step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    communication: int
    peak: int

    def lines(self) -> list[str]:
        """The figures in words, a line each."""
        return [f"{name:<14}{format_bytes(value):>12}" for name, value in asdict(self).items()]


@dataclass(frozen=True)
class ModelProbe:
    """What a plan has to know of a task: its anatomy, one traced pass, and where its layers can be split.

    `state_factor` is the optimizer's state in bytes for each byte of parameters: 2 for Adam, 0 for plain SGD.
    `cannot_split` has a reason by degree, `cannot_pipeline` and `cannot_run` one; empty where the model can
    be split, cut into stages, or its blocks checkpointed in runs. In bfloat16 `trace` is under autocast, and
    `half` the pass of a model in bfloat16 itself, as gathered shards are. `gloo`: collectives are gloo's,
    which work on copies. `flops` are of one example.
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
    flops: float = 0.0


def estimate(probe: ModelProbe, strategy: Strategy, accumulated: int) -> Estimate:
    """Memory of the fullest device; `accumulated` is the number of micro-batches in a step."""
    stages = strategy.mesh.pp * strategy.virtual_stages
    cuts = partition(probe.anatomy, stages) if stages > 1 else [list(probe.anatomy.units)]
    ranks = [
        [unit for stage in strategy.stages_of(rank) for unit in cuts[stage]]
        for rank in range(strategy.mesh.pp)
    ]
    estimates = [_rank(probe, strategy, accumulated, units, rank) for rank, units in enumerate(ranks)]
    return max(estimates, key=lambda one: one.peak)


def _rank(
    probe: ModelProbe, strategy: Strategy, accumulated: int, units: Sequence[str], rank: int
) -> Estimate:
    anatomy, mesh = probe.anatomy, strategy.mesh
    here = [w for w in anatomy.weights if mesh.pp == 1 or anatomy.unit_of(w.name) in units]
    shards = mesh.fsdp if strategy.data_parallel in ("zero2", "zero3") else 1
    held = sum(_part(probe, strategy, weight, shards) * weight.itemsize for weight in here)
    trained = [weight for weight in here if weight.trainable]
    gradients = sum(_part(probe, strategy, weight, shards) * weight.itemsize for weight in trained)
    share = mesh.dp if strategy.data_parallel == "zero1" else 1
    optimizer = gradients * probe.state_factor / share
    if strategy.local_steps:
        # The weights at the last meeting, and the outer optimizer's momentum.
        optimizer += gradients * (2 if strategy.outer_momentum else 1)
    temporaries = gradients * probe.optimizer_temporaries / share
    half = strategy.half is not None and shards_weights(strategy)
    traced = probe.half if half and probe.half is not None else probe.trace
    run = activations(Pass(anatomy, traced, probe.tensor_parallel, strategy), units, rank, accumulated)
    groups = _groups(probe, strategy, here)
    buffers = buffers_of(strategy, groups, _after(probe, strategy, here), shards, probe.gloo)
    fixed = held + anatomy.buffer_bytes + optimizer
    # A float64 copy of one gradient for its norm, or what an optimizer makes of one while it takes a step.
    passing = 8 * max((_part(probe, strategy, weight, shards) for weight in trained), default=0.0)
    if strategy.offload:
        fixed = gradients = temporaries = passing = 0
    step = gradients + max(temporaries, passing)
    standing = _standing(strategy, gradients, accumulated)
    peak = fixed + max(step, _peak(gradients, standing, run, buffers, groups))
    return Estimate(
        parameters=int(held + anatomy.buffer_bytes),
        gradients=int(gradients),
        optimizer=int(optimizer),
        activations=int(run.kept + run.constant),
        working=int(run.working),
        communication=int(buffers.most),
        peak=int(peak),
    )


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


def _split(probe: ModelProbe, strategy: Strategy, weight: Weight) -> float:
    """Elements of a weight on a rank before sharding: its part under tensor and expert parallelism."""
    module, _, kind = weight.name.rpartition(".")
    style = probe.tensor_parallel.styles.get(module)
    divided = style is not None and not (style == "row" and kind == "bias")
    elements = weight.elements / (strategy.mesh.tp if divided else 1)
    return elements / (strategy.mesh.ep if module in probe.experts else 1)


def _part(probe: ModelProbe, strategy: Strategy, weight: Weight, shards: int) -> float:
    """Elements of a weight that a rank holds."""
    if weight.name.rpartition(".")[0] in probe.experts and shards > 1:
        shards //= strategy.mesh.ep
    return _split(probe, strategy, weight) / shards


def _groups(probe: ModelProbe, strategy: Strategy, here: Sequence[Weight]) -> dict[str, float]:
    """Bytes of the weights that are gathered together: each block, and under "" the rest."""
    groups: dict[str, float] = {"": 0.0}
    apart = probe.anatomy.alone if shards_weights(strategy) else probe.anatomy.blocks
    for weight in here:
        unit = probe.anatomy.unit_of(weight.name)
        key = unit if unit in apart else None
        size = _split(probe, strategy, weight) * weight.itemsize
        groups[key or ""] = groups.get(key or "", 0.0) + size
    return groups


def _after(probe: ModelProbe, strategy: Strategy, here: Sequence[Weight]) -> float:
    """Bytes of the trained weights that follow the blocks, such as a head's."""
    anatomy = probe.anatomy
    last = anatomy.units.index(anatomy.blocks[-1]) if anatomy.blocks else -1
    following = set(anatomy.units[last + 1 :])
    heads = (w for w in here if w.trainable and anatomy.unit_of(w.name) in following)
    return sum(_split(probe, strategy, weight) * weight.itemsize for weight in heads)


def _standing(strategy: Strategy, gradients: float, accumulated: int) -> float:
    """Bytes of gradients that are held throughout a backward pass."""
    buckets = strategy.data_parallel in ("ddp", "zero1") and not strategy.local_steps
    if buckets and accumulated > 1:
        # DDP's buckets stand beside the sums of the micro-batches before the last.
        return 2 * gradients
    return gradients if accumulated > 1 or buckets or strategy.mesh.pp > 1 else 0.0
