"""What a strategy needs on one device, by term: from the model's anatomy and one traced pass.

Weights, gradients and optimizer state are counted exactly for the fullest pipeline stage; activations are
what autograd keeps in a traced pass, scaled by the micro-batch and divided where tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from roundtable.client.cluster.activations import Pass, activations
from roundtable.client.cluster.anatomy import Anatomy, Weight
from roundtable.client.cluster.pipeline import partition
from roundtable.client.cluster.resources import format_bytes
from roundtable.client.cluster.strategy import Strategy
from roundtable.client.cluster.tensor_parallel import TensorParallel
from roundtable.client.cluster.tracing import Trace


@dataclass(frozen=True)
class Estimate:
    """Bytes on the fullest device.

    `activations` is what one step keeps for its backward pass, `working` the largest temporaries beside
    it, `communication` gathered weights and reduction buffers. Gradients grow as activations shrink, so the
    `peak` is less than the sum where one micro-batch makes a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    communication: int
    peak: int

    def lines(self) -> list[str]:
        """For people."""
        return [f"{name:<14}{format_bytes(value):>12}" for name, value in asdict(self).items()]


@dataclass(frozen=True)
class Survey:
    """What is known of a task: anatomy, one traced pass, where its layers can be split.

    `state_factor` is the optimizer's state in bytes for each byte of parameters: 2 for Adam, 0 for plain SGD.
    `cannot_pipeline` says why the model cannot be cut into stages; empty where it can. In bfloat16 `trace` is
    under autocast, and `half` the pass of a model that is in it itself, as shards are when they are gathered.
    """

    anatomy: Anatomy
    trace: Trace
    tensor_parallel: TensorParallel
    state_factor: float
    optimizer_temporaries: float
    experts: tuple[str, ...]
    cannot_split: dict[int, str]
    cannot_pipeline: str
    half: Trace | None = None


def estimate(survey: Survey, strategy: Strategy, accumulated: int) -> Estimate:
    """Memory of the fullest device; `accumulated` is the number of micro-batches in a step."""
    stages = strategy.mesh.pp * strategy.virtual_stages
    cuts = partition(survey.anatomy, stages) if stages > 1 else [list(survey.anatomy.units)]
    ranks = [
        [unit for i in range(rank, stages, strategy.mesh.pp) for unit in cuts[i]]
        for rank in range(strategy.mesh.pp)
    ]
    found = [_rank(survey, strategy, accumulated, units, rank) for rank, units in enumerate(ranks)]
    return max(found, key=lambda one: one.peak)


def _rank(survey: Survey, strategy: Strategy, accumulated: int, units: Sequence[str], rank: int) -> Estimate:
    anatomy, mesh = survey.anatomy, strategy.mesh
    here = [w for w in anatomy.weights if mesh.pp == 1 or anatomy.unit_of(w.name) in units]
    shards = mesh.fsdp if strategy.data_parallel in ("zero2", "zero3") else 1
    split = sum(_split(survey, strategy, weight) * weight.itemsize for weight in here)
    held = sum(_part(survey, strategy, weight, shards) * weight.itemsize for weight in here)
    trained = [weight for weight in here if weight.trainable]
    gradients = sum(_part(survey, strategy, weight, shards) * weight.itemsize for weight in trained)
    share = mesh.dp if strategy.data_parallel == "zero1" else 1
    optimizer = gradients * survey.state_factor / share
    temporaries = gradients * survey.optimizer_temporaries / share
    half = strategy.precision == "bfloat16" and shards_weights(strategy)
    traced = survey.half if half and survey.half is not None else survey.trace
    run = activations(Pass(anatomy, traced, survey.tensor_parallel, strategy), units, rank, accumulated)
    groups = _groups(survey, strategy, here)
    gathered, reducing, of_block = _communication(strategy, groups, split)
    fixed = held + anatomy.buffer_bytes + optimizer
    if strategy.offload:
        fixed = gradients = temporaries = 0
    blocks = max(1, len(groups) - 1)
    standing = _standing(strategy, gradients, accumulated)
    working = max(run.head, run.block)
    # A checkpointed block, computed again at the beginning of the backward pass or at its end.
    again = run.again + run.block + of_block if run.again else 0.0
    block_held = max((size for key, size in groups.items() if key), default=0.0) / shards
    peak = fixed + max(
        standing + run.constant + run.kept + working + gathered,
        # The last block's gradients are reduced when its own activations are gone.
        standing + run.constant + run.kept * (blocks - 1) / blocks + working / 2 + reducing,
        standing + run.constant + run.kept + again,
        (standing or gradients - block_held) + run.constant + run.first + again,
        gradients + max(temporaries, 0 if standing else working / 2),
    )
    communication = max(gathered, reducing)
    kept = run.kept + run.constant
    numbers = (held + anatomy.buffer_bytes, gradients, optimizer, kept, run.working, communication, peak)
    return Estimate(*(int(number) for number in numbers))


def _split(survey: Survey, strategy: Strategy, weight: Weight) -> float:
    """Elements of a weight on a rank before sharding: its part under tensor and expert parallelism."""
    module, _, kind = weight.name.rpartition(".")
    style = survey.tensor_parallel.styles.get(module)
    divided = style is not None and not (style == "row" and kind == "bias")
    elements = weight.elements / (strategy.mesh.tp if divided else 1)
    return elements / (strategy.mesh.ep if module in survey.experts else 1)


def _part(survey: Survey, strategy: Strategy, weight: Weight, shards: int) -> float:
    """Elements of a weight that a rank holds."""
    if weight.name.rpartition(".")[0] in survey.experts and shards > 1:
        shards //= strategy.mesh.ep
    return _split(survey, strategy, weight) / shards


def _groups(survey: Survey, strategy: Strategy, here: Sequence[Weight]) -> dict[str, float]:
    """Bytes of the weights that are gathered together: each block, and under "" the rest."""
    groups: dict[str, float] = {"": 0.0}
    for weight in here:
        unit = survey.anatomy.unit_of(weight.name)
        key = unit if unit in survey.anatomy.blocks else None
        size = _split(survey, strategy, weight) * weight.itemsize
        groups[key or ""] = groups.get(key or "", 0.0) + size
    return groups


def _standing(strategy: Strategy, gradients: float, accumulated: int) -> float:
    """Gradients that are there while a backward pass goes on, whatever it has come to."""
    buckets = strategy.data_parallel in ("ddp", "zero1")
    if buckets and accumulated > 1:
        # DDP's buckets stand beside the sums of the micro-batches before the last.
        return 2 * gradients
    return gradients if accumulated > 1 or buckets or strategy.mesh.pp > 1 else 0.0


def _communication(strategy: Strategy, groups: dict[str, float], split: float) -> tuple[float, float, float]:
    """(weights gathered for a pass, the same while gradients are reduced, while one block's are)."""
    if not shards_weights(strategy):
        return 0.0, 0.0, 0.0
    # In bfloat16 a gradient is half as large, and is copied to float32 to be reduced.
    half, copies = (0.5, 1.5) if strategy.precision == "bfloat16" else (1.0, 2.0)
    root = groups[""]
    largest = max((size for key, size in groups.items() if key), default=0.0)
    if strategy.data_parallel == "zero2" or strategy.mesh.pp > 1:
        gathered, while_reducing = split, split
    else:
        # A block's weights, and those of the next on their way; then its gradients and their copy.
        gathered, while_reducing = root + 2 * largest, root + largest
    return (
        half * gathered,
        half * while_reducing + copies * max(largest, root),
        half * while_reducing + copies * largest,
    )


def shards_weights(strategy: Strategy) -> bool:
    """Whether weights lie in shards and are gathered to be used."""
    return strategy.data_parallel in ("zero2", "zero3")
