"""What a strategy needs on one device, by term: from the model's anatomy and one traced pass.

Weights, gradients and optimizer state are counted exactly for the fullest pipeline stage; activations are
what autograd keeps in a traced pass, scaled by the micro-batch and divided where tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

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
    `cannot_pipeline` says why the model cannot be cut into stages; empty where it can.
    """

    anatomy: Anatomy
    trace: Trace
    tensor_parallel: TensorParallel
    state_factor: float
    optimizer_temporaries: float
    experts: tuple[str, ...]
    cannot_split: dict[int, str]
    cannot_pipeline: str


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
    activations, working = _activations(survey, strategy, units, rank)
    groups = _groups(survey, strategy, here)
    gathered, reducing = _communication(strategy, groups, split)
    fixed = held + anatomy.buffer_bytes + optimizer
    if strategy.offload:
        fixed = gradients = temporaries = 0
    blocks = max(1, len(groups) - 1)
    buckets = strategy.data_parallel in ("ddp", "zero1")
    standing = gradients if accumulated > 1 or buckets or mesh.pp > 1 else 0
    peak = fixed + max(
        standing + activations + working + gathered,
        # The last block's gradients are reduced when its own activations are gone.
        standing + activations * (blocks - 1) / blocks + working / 2 + reducing,
        gradients + max(temporaries, 0 if standing else working / 2),
    )
    communication = max(gathered, reducing)
    numbers = (held + anatomy.buffer_bytes, gradients, optimizer, activations, working, communication, peak)
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


def _activations(survey: Survey, strategy: Strategy, units: Sequence[str], rank: int) -> tuple[float, float]:
    """(kept for backward, largest temporaries), for all micro-batches under way at once."""
    anatomy, mesh = survey.anatomy, strategy.mesh
    scale = strategy.micro_batch / survey.trace.examples
    by_block: dict[str, float] = dict.fromkeys(anatomy.blocks, 0.0)
    rest = largest = 0.0
    for kept in survey.trace.kept:
        unit = anatomy.unit_of(kept.name)
        if mesh.pp > 1 and unit not in units and not (unit is None and rank == mesh.pp - 1):
            continue
        size = kept.bytes * scale / _divisor(survey, strategy, kept.name, unit)
        if unit in by_block:
            by_block[unit] += size
        else:
            rest += size
            largest = max(largest, size)
    here = [block for block in anatomy.blocks if mesh.pp == 1 or block in units]
    passed = _passed(survey, strategy) * scale
    recomputed = 0.0
    if strategy.checkpointing != "none":
        for index, block in enumerate(here):
            if index % strategy.checkpoint_every == 0:
                whole = by_block[block]
                recomputed = max(recomputed, whole)
                by_block[block] = passed if strategy.checkpointing == "every" else 0.5 * whole
    kept_bytes = sum(by_block[block] for block in here) + rest
    # Gradients of the logits and of their logarithms.
    head = 2.0 * survey.trace.output * scale if mesh.pp == 1 or rank == mesh.pp - 1 else 0.0
    working = max(recomputed, max(head, largest), _widest(survey, strategy) * scale)
    under_way = 1
    if mesh.pp > 1:
        under_way = mesh.pp - rank if strategy.schedule == "1f1b" else mesh.pp
    return kept_bytes * under_way, working


def _divisor(survey: Survey, strategy: Strategy, name: str, unit: str | None) -> int:
    """How many ranks share what this module keeps."""
    plan, degree = survey.tensor_parallel, strategy.mesh.tp
    if degree == 1 or unit not in survey.anatomy.blocks:
        return 1
    if plan.styles.get(name) == "column":
        return 1
    inside = name in plan.inner or plan.styles.get(name) == "row"
    return degree if inside or strategy.sequence_parallel else 1


def _passed(survey: Survey, strategy: Strategy) -> float:
    """Bytes that one block hands to the next, for the traced examples."""
    outputs = [call.output for call in survey.trace.calls if call.name in survey.anatomy.blocks]
    shape = next((shape for shape in outputs if shape), None)
    if shape is None:
        return 0.0
    count = 1
    for size in shape:
        count *= size
    item = 2 if strategy.precision == "bfloat16" else survey.anatomy.weights[0].itemsize
    return count * item / (strategy.mesh.tp if strategy.sequence_parallel else 1)


def _widest(survey: Survey, strategy: Strategy) -> float:
    """Temporaries in the backward pass of a block: gradients of its two widest tensors."""
    blocks = set(survey.anatomy.blocks[:1])
    sizes = [
        kept.bytes / _divisor(survey, strategy, kept.name, survey.anatomy.unit_of(kept.name))
        for kept in survey.trace.kept
        if survey.anatomy.unit_of(kept.name) in blocks
    ]
    return 2.0 * max(sizes, default=0.0)


def _groups(survey: Survey, strategy: Strategy, here: Sequence[Weight]) -> dict[str, float]:
    """Bytes of the weights that are gathered together: each block, and under "" the rest."""
    groups: dict[str, float] = {"": 0.0}
    for weight in here:
        unit = survey.anatomy.unit_of(weight.name)
        key = unit if unit in survey.anatomy.blocks else None
        size = _split(survey, strategy, weight) * weight.itemsize
        groups[key or ""] = groups.get(key or "", 0.0) + size
    return groups


def _communication(strategy: Strategy, groups: dict[str, float], split: float) -> tuple[float, float]:
    """(weights gathered for a pass, the same while gradients are reduced)."""
    if strategy.data_parallel not in ("zero2", "zero3"):
        return 0.0, 0.0
    half = 0.5 if strategy.precision == "bfloat16" else 1.0
    root = groups[""]
    largest = max((size for key, size in groups.items() if key), default=0.0)
    if strategy.data_parallel == "zero2" or strategy.mesh.pp > 1:
        return half * split, half * split + 2.0 * max(largest, root)
    # A block's weights, and those of the next on their way; then its gradients and their copy.
    return half * (root + 2 * largest), half * (root + largest) + 2.0 * max(largest, root)
