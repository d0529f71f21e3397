"""The strategies that a plan may choose from, plainest first; what `[cluster.strategy]` sets is kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from roundtable.client.policy.cluster_table import ClusterTable, StrategyTable
from roundtable.client.policy.gradient_reduction import parse_reduction
from roundtable.cluster.parallel.anatomy import of_two_types
from roundtable.cluster.parallel.pipeline_stages import refuse_cut
from roundtable.cluster.parallel.shared_batch_norm import own_way, refuse_parts
from roundtable.cluster.parallel.strategy import (
    SPLITTING,
    Checkpointing,
    DataParallel,
    Mesh,
    Schedule,
    Strategy,
    cannot_reduce,
)
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig

_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "every", "sqrt")
_INTERLEAVED = (2, 3, 4)
_WHOLE: tuple[DataParallel, ...] = ("none", "ddp", "zero1")
_SHARDED: tuple[DataParallel, ...] = ("zero2", "zero3")
# In the host's memory.
Waiting = Literal["nothing", "optimizer", "all"]


def candidates(
    probe: ModelProbe,
    resources: Resources,
    job: JobConfig,
    table: ClusterTable,
    reduction: str,
    reasons: list[str],
    waiting: Waiting,
) -> Iterator[Strategy]:
    """Yields strategies from plain to elaborate, and adds to `reasons` why splits of the model are left out.

    `reduction` is how DDP's gradients travel where the table does not say, `waiting` what is offloaded. With
    checkpointing = "budget" they have none: which blocks do depends on the memory that they need.
    """
    hand = table.strategy
    for tp, pp in _splits(probe, resources, hand, reasons):
        for kind in _kinds(table, waiting, pp):
            for mesh in _meshes(resources, hand, kind, tp, pp):
                # Shards of one rank alone save nothing, unless they are what is offloaded.
                if kind in _SHARDED and mesh.data == 1 and not (hand.data_parallel or waiting == "all"):
                    continue
                if reason := _cannot_apply(probe, hand, kind, mesh):
                    if reason not in reasons:
                        reasons.append(reason)
                    continue
                yield from _whole(
                    probe, job, reasons, _variants(probe, job, table, mesh, kind, waiting, reduction)
                )


def _splits(
    probe: ModelProbe, resources: Resources, hand: StrategyTable, reasons: list[str]
) -> Iterator[tuple[int, int]]:
    """(tp, pp): no split, then layers split within a node, then stages too."""
    world = resources.world
    pairs = [
        (tp, pp)
        for tp in ([hand.tp] if hand.tp else _divisors(resources.devices))
        for pp in ([hand.pp or 1] if hand.pp or hand.offload_activations else _divisors(world // tp))
        if world % (tp * pp) == 0
    ]
    for tp, pp in sorted(pairs, key=lambda pair: (pair[1] > 1, pair[0] * pair[1], pair[1])):
        refusal = _split_refusal(probe, tp, pp, _stages_by_hand(hand))
        if not refusal:
            yield tp, pp
        elif refusal not in reasons:
            reasons.append(refusal)


def _split_refusal(probe: ModelProbe, tp: int, pp: int, virtual_stages: int) -> str:
    """Why the model cannot be split so; empty where it can."""
    if tp > 1 and (reason := probe.cannot_split.get(tp, f"tp = {tp} is not a power of two up to 16")):
        return f"no tensor parallelism over {tp}: {reason}"
    if pp > 1 and (reason := probe.cannot_pipeline or _refuse_cut(probe, pp * virtual_stages)):
        return f"no pipeline: {reason}"
    return ""


def _refuse_cut(probe: ModelProbe, stages: int) -> str:
    """As refuse_cut, remembered."""
    key = "refused", stages
    if key not in probe.known:
        probe.known[key] = refuse_cut(probe.anatomy, stages)
    return str(probe.known[key])


def _kinds(table: ClusterTable, waiting: Waiting, pp: int) -> list[DataParallel]:
    """The kinds of data parallelism to try, in the order of what they cost."""
    hand = table.strategy
    if hand.data_parallel:
        kinds = [hand.data_parallel]
    else:
        # Replicas that train apart cannot share one optimizer's state out, as ZeRO-1 does.
        kinds = [kind for kind in (*_WHOLE, *_SHARDED) if not (hand.local_steps and kind == "zero1")]
        if table.shares == "measured":
            kinds = [kind for kind in kinds if kind in _WHOLE]
        if pp > 1 and "zero3" in kinds:
            # A stage is run many times a step, and keeps its weights gathered: zero3 would be zero2.
            kinds.remove("zero3")
    return [kind for kind in kinds if kind in _SHARDED] if waiting == "all" else kinds


def _meshes(
    resources: Resources, hand: StrategyTable, kind: DataParallel, tp: int, pp: int
) -> Iterator[Mesh]:
    """The meshes on which this kind of data parallelism uses all devices that `tp` and `pp` leave."""
    data, ep = resources.world // (tp * pp), hand.ep or 1
    shapes = (_set_by_hand(shape, data, hand) for shape in _shapes(kind, data, resources.devices // tp))
    for dp, fsdp in dict.fromkeys(shapes):
        if dp * fsdp == data and fsdp % ep == 0 and not (hand.local_steps and dp == 1 < data):
            mesh = Mesh(pp=pp, dp=dp, fsdp=fsdp, tp=tp, ep=ep)
            if kind in _SHARDED or _holds_whole_copies(kind, mesh):
                yield mesh


def _shapes(kind: DataParallel, data: int, within: int) -> Iterator[tuple[int, int]]:
    """(dp, fsdp) over `data` ranks, of which `within` are on a node: shards over one node, two, and so on."""
    if kind in _WHOLE:
        yield data, 1
        return
    for fsdp in _divisors(data):
        if fsdp == data or (1 < within <= fsdp and fsdp % within == 0) or (within == 1 and fsdp > 1):
            yield data // fsdp, fsdp


def _set_by_hand(shape: tuple[int, int], data: int, hand: StrategyTable) -> tuple[int, int]:
    """The shape with what the table sets; a degree that it leaves open takes the ranks that remain."""
    if hand.dp:
        return hand.dp, hand.fsdp or max(1, data // hand.dp)
    if hand.fsdp:
        return max(1, data // hand.fsdp), hand.fsdp
    return shape


def _holds_whole_copies(kind: DataParallel, mesh: Mesh) -> bool:
    """Whether the mesh is one for kinds that do not shard: replicas for ddp and zero1, none for "none"."""
    if kind == "none":
        return mesh.data == 1
    return mesh.fsdp == 1 and mesh.dp > 1 and mesh.tp == mesh.pp == mesh.ep == 1


def _variants(
    probe: ModelProbe,
    job: JobConfig,
    table: ClusterTable,
    mesh: Mesh,
    kind: DataParallel,
    waiting: Waiting,
    reduction: str,
) -> Iterator[Strategy]:
    """Without and with checkpointing, from large micro-batches to single examples."""
    hand, precision = table.strategy, table.precision
    assert precision != "auto", "settled before"
    share = max(1, probe.share(job.algorithm.batch_size, mesh.data))
    sequence_parallel = hand.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = mesh.tp > 1 and not _no_sequence(probe, mesh.tp)
    kinds = [kind for kind in _CHECKPOINTING if kind == "none" or probe.anatomy.blocks]
    if probe.cannot_run and "sqrt" in kinds:
        kinds.remove("sqrt")
    if hand.schedule == SPLITTING or hand.offload_activations:
        kinds = ["none"]
    if hand.checkpointing:
        kinds = ["none" if hand.checkpointing == "budget" else hand.checkpointing]
    sizes = [hand.micro_batch] if hand.micro_batch else list(_halvings(share, mesh.pp))
    for checkpointing in kinds:
        for micro_batch, (schedule, virtual) in product(sizes, _schedules(probe, hand, mesh.pp)):
            yield Strategy(
                mesh=mesh,
                data_parallel=kind,
                micro_batch=micro_batch,
                schedule=schedule,
                virtual_stages=virtual,
                sequence_parallel=sequence_parallel,
                checkpointing=checkpointing,
                checkpoint_every=hand.checkpoint_every or 1,
                checkpoint_blocks=tuple(probe.anatomy.blocks[i] for i in hand.checkpoint_blocks or ()),
                offload=waiting == "all",
                offload_optimizer=waiting == "optimizer",
                offload_activations=bool(hand.offload_activations),
                optimizer_bits=hand.optimizer_bits or 32,
                precision=precision,
                reduction=hand.reduction or _reduction(table, kind, reduction),
                batch_norm=hand.batch_norm or "synchronised",
                local_steps=hand.local_steps or 0,
                outer_learning_rate=hand.outer_learning_rate or 1.0,
                outer_momentum=hand.outer_momentum or 0.0,
                unused=bool(probe.trace.unused or probe.varies)
                and kind in ("ddp", "zero1")
                and not hand.local_steps,
            )


def _reduction(table: ClusterTable, kind: DataParallel, measured: str) -> str:
    """How gradients travel where the links ask for `measured`: low-rank factors keep back what overflows."""
    if kind not in ("ddp", "zero1") or table.strategy.local_steps:
        return "exact"
    return "bfloat16" if table.precision == "float16" and measured == "powersgd" else measured


def _schedules(probe: ModelProbe, hand: StrategyTable, pp: int) -> list[tuple[Schedule, int]]:
    """(schedule, stages of a rank): 1F1B, and interleaved where each rank gets as many blocks for a stage."""
    if hand.schedule or hand.virtual_stages or pp == 1:
        return [(hand.schedule or "1f1b", _stages_by_hand(hand))]
    blocks = len(probe.anatomy.blocks)
    several = [v for v in _INTERLEAVED if blocks % (pp * v) == 0 and not _refuse_cut(probe, pp * v)]
    return [("1f1b", 1), *(("interleaved", v) for v in several)]


def _stages_by_hand(hand: StrategyTable) -> int:
    """Stages of a rank, where the table says anything of them."""
    return hand.virtual_stages or (1 if hand.schedule in (None, "gpipe", "1f1b") else 2)


def _whole(
    probe: ModelProbe, job: JobConfig, reasons: list[str], strategies: Iterator[Strategy]
) -> Iterator[Strategy]:
    """Yields those that run a batch as the model's layers want it: some take statistics over all of it."""
    for strategy in strategies:
        reason = refuse_pieces(probe, strategy, job.algorithm.batch_size)
        reason = reason or refuse_loss(probe, job, strategy) or refuse_evaluations(probe, strategy)
        if not reason:
            yield strategy
        elif reason not in reasons:
            reasons.append(reason)


def refuse_loss(probe: ModelProbe, job: JobConfig, strategy: Strategy) -> str:
    """Why a batch's loss cannot be put together of its pieces' losses; empty where it can, or is not."""
    whole = strategy.mesh.data == strategy.mesh.pp == 1 and strategy.micro_batch >= job.algorithm.batch_size
    if not probe.whole_loss or whole or strategy.batch_norm == "local" or is_example_level(job):
        return ""
    return (
        "the loss of a batch is not the mean of its examples' losses (a sum, a mean over tokens of which "
        "examples have different numbers, weights of classes that it divides by, a comparison of examples in "
        "the loss or the model, the balance of experts over all tokens), so that the losses of ranks and "
        "micro-batches do not make it up; divide by what every example has, as rows × length, or set "
        'batch_norm = "local" in [cluster.strategy], with which each micro-batch has a loss of its own'
    )


def refuse_pieces(probe: ModelProbe, strategy: Strategy, batch_size: int) -> str:
    """Why the model cannot run a batch in the strategy's pieces; empty where it can.

    Layers may take statistics over all of a batch, and a forward pass may change the model, once for each
    piece that it runs and each time that it is run again.
    """
    mesh, rewritten = strategy.mesh, probe.trace.rewritten
    if strategy.local_steps and batch_size < mesh.dp:
        return (
            f"local_steps = {strategy.local_steps}: a batch of {batch_size} has no example for each of the "
            f"{mesh.dp} replicas of dp, which count alike when they meet; use a smaller dp or a larger batch"
        )
    own = [*probe.trace.normalised, *(each.module for each in rewritten if each.by_batch and not each.weight)]
    if own and (mesh.data > 1 or mesh.pp > 1) and strategy.batch_norm != "local":
        return own_way(own[0])
    share = probe.share(batch_size, mesh.data)
    if reason := refuse_parts((*probe.anatomy.batch_norms, *own), strategy, share):
        return reason
    if not rewritten:
        return ""
    name = rewritten[0].name
    if strategy.checkpointing != "none":
        return f"checkpointing: each forward pass changes {name}, and a block that is run again does so twice"
    if mesh.tp > 1 or mesh.pp > 1:
        return f"tp and pp: each forward pass changes {name}, of which ranks would have parts; use ddp"
    if strategy.micro_batch < share and strategy.batch_norm != "local":
        return (
            f"micro_batch = {strategy.micro_batch}: each forward pass changes {name}, so that a "
            f"rank's {share} examples of a batch must run at once; use more devices, a smaller batch, or "
            'batch_norm = "local" in [cluster.strategy]'
        )
    return ""


def refuse_evaluations(probe: ModelProbe, strategy: Strategy) -> str:
    """Why ranks would measure otherwise than one process does; empty where they would not."""
    if not probe.evaluations or strategy.mesh.data == 1 or strategy.batch_norm == "local":
        return ""
    said = f"an evaluation changes {probe.evaluations} and depends on it, and ranks measure each their own"
    return f'{said} batches: leave it as it is there, or set batch_norm = "local" in [cluster.strategy]'


def _no_sequence(probe: ModelProbe, tp: int) -> str:
    """Why the ranks of `tp` cannot share out the sequence between blocks; empty where they can."""
    if reason := probe.tensor_parallel.no_sequence:
        return reason
    block = next(call for call in probe.trace.calls if call.name == probe.anatomy.blocks[0])
    length = block.output[1] if block.output else 0
    return f"the sequence's {length} places do not divide over tp = {tp}" if length % tp else ""


def _cannot_apply(probe: ModelProbe, hand: StrategyTable, kind: DataParallel, mesh: Mesh) -> str:
    """Why the model cannot be trained so; empty where it can."""
    if hand.reduction and (reason := cannot_reduce(parse_reduction(hand.reduction), kind, mesh)):
        return f"reduction = {hand.reduction!r}: {reason}"
    calls, wrapped = probe.trace.whole_calls, kind in ("ddp", "zero1") and not hand.local_steps
    if reason := _cannot_shard(probe, kind, mesh):
        return reason
    if mesh.tp > 1 and hand.sequence_parallel and (reason := _no_sequence(probe, mesh.tp)):
        return f"sequence_parallel = true: {reason}"
    if (hand.checkpointing or "none") != "none" and not probe.anatomy.blocks:
        return f"checkpointing = {hand.checkpointing!r}: the model has no repeated blocks to compute again"
    listed = [number for number in hand.checkpoint_blocks or () if number >= len(probe.anatomy.blocks)]
    if listed:
        return (
            f"checkpoint_blocks = {listed[0]}: the model has {len(probe.anatomy.blocks)} repeated blocks, "
            f"numbers 0 to {len(probe.anatomy.blocks) - 1}"
        )
    if hand.checkpointing == "sqrt" and probe.cannot_run:
        return probe.cannot_run
    if not calls and (wrapped or kind in _SHARDED):
        return (
            f"{kind}: the loss calls parts of the model and never the model, whose call is what gathers "
            "weights and reduces gradients; let the model's forward call its parts"
        )
    unused = probe.trace.unused or ((f"what {probe.varies} has",) if probe.varies else ())
    if unused and calls > 1 and wrapped:
        return (
            f"{kind}: {unused[0]} may get no gradient, and the loss calls the model {calls} times, "
            "so that DDP could not tell which gradients to wait for; use zero2, or freeze or remove it"
        )
    return ""


def _cannot_shard(probe: ModelProbe, kind: DataParallel, mesh: Mesh) -> str:
    """Why ranks cannot have parts of the model's weights, or different copies; empty where they can."""
    weights = [each for each in probe.trace.rewritten if each.weight]
    sharded = kind in _SHARDED or mesh.ep > 1
    if weights and mesh.world > 1 and (weights[0].by_batch or sharded):
        return (
            f"{kind}: the forward pass writes to {weights[0].name}, each rank by its own examples or to a "
            "copy that is gathered for a moment, so that weights would part; leave out max_norm, or let the "
            "forward pass use a changed copy"
        )
    if kind == "zero1" and probe.cannot_share:
        return probe.cannot_share
    if (kind == "zero1" or kind in _SHARDED) and (two := of_two_types(probe.anatomy, whole=kind == "zero1")):
        first, other = two
        return (
            f"{kind}: {first.name} has {first.itemsize} bytes for each value and {other.name} "
            f"{other.itemsize}, and what is shared out together is of one type; use ddp, or one type"
        )
    if probe.cannot_part and (kind in _SHARDED or mesh.tp > 1):
        return f"{kind if kind in _SHARDED else 'tp'}: {probe.cannot_part}"
    if mesh.tp > 1 and probe.tensor_parallel.packed and not probe.by_entry:
        return (
            f"tp: {next(iter(probe.tensor_parallel.packed))} holds several parts, each of which would be a "
            "parameter by itself, and the task's optimizer is none of torch's that treat each entry by itself"
        )
    if probe.trace.outside and probe.trace.whole_calls and (kind in _SHARDED or mesh.tp > 1):
        name, place = next(iter(probe.trace.outside.items()))
        return (
            f"{kind if kind in _SHARDED else 'tp'}: {place or 'the loss'} reads {name} while the part of the "
            "model that has it does not run, when a rank has a shard of it alone; read it in that part's "
            "forward, or use ddp"
        )
    if not sharded:
        return ""
    if probe.varies and mesh.world > 1:
        return (
            f"{kind}: whether {probe.varies} is called depends on values or on chance, and ranks that call "
            "different parts would gather different weights at a time; use ddp or zero1"
        )
    odd = next((each for each in probe.anatomy.weights if not each.shape or not each.elements), None)
    if odd is not None and kind in _SHARDED:
        return (
            f"{kind}: {odd.name} has {'no elements' if odd.shape else 'no dimension'} to share out; use ddp"
        )
    return ""


def _halvings(share: int, stages: int) -> Iterator[int]:
    """The share of a step, and half of it again and again; a pipeline has one for each stage at least."""
    size = max(1, share // stages)
    while size > 1:
        yield size
        size = -(-size // 2)
    yield 1


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
