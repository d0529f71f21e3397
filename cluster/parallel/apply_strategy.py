"""Applies a strategy to a model, in torchtitan's order: split tensors, checkpoint, shard, allocate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from roundtable.cluster.parallel.anatomy import find_blocks, standing_alone
from roundtable.cluster.parallel.checkpointing import checkpoint_blocks
from roundtable.cluster.parallel.experts import Experts, share_experts
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.meta_init import allocate, tie, tied_names
from roundtable.cluster.parallel.packed_layers import pack
from roundtable.cluster.parallel.split_attention import split_attention
from roundtable.cluster.parallel.strategy import Precision, Strategy
from roundtable.cluster.parallel.tensor_parallel import Stream, TensorParallel
from roundtable.cluster.parallel.tensor_randomness import ShardedRegions
from roundtable.core.errors import TaskError


def apply_strategy(
    model: nn.Module,
    blocks: Sequence[str],
    strategy: Strategy,
    meshes: Meshes,
    device: torch.device,
    tensor_parallel: TensorParallel | None = None,
    regions: ShardedRegions | None = None,
    *,
    last: bool = True,
) -> nn.Module:
    """The model, or a pipeline stage of it, as this rank runs it, with memory but without values.

    `blocks` are the names of the repeated parts that it has; `regions` follow its passes; `last`: its output
    is the model's. DDP, which wraps, is applied by `replicate` after the values are in place.
    """
    if strategy.mesh.tp > 1:
        assert tensor_parallel is not None
        split_tensors(model, blocks, tensor_parallel, meshes.one("tp"), strategy.sequence_parallel)
        if regions is not None:
            # Of the layers that are there now: some have taken the place of others.
            regions.follow(model, blocks)
    if strategy.mesh.ep > 1:
        share_experts(model, meshes.one("ep"))
    checkpoint_blocks(model, blocks, strategy)
    if strategy.data_parallel in ("zero2", "zero3"):
        shard(model, blocks, strategy, meshes, last=last)
    offloaded = strategy.offload and device.type != "cpu"
    # Layers read buffers where they run; FSDP2 brings parameters alone there.
    allocate(model, torch.device("cpu") if offloaded else device, buffers=device)
    return model


def split_tensors(
    model: nn.Module, blocks: Sequence[str], plan: TensorParallel, mesh: DeviceMesh, sequence: bool
) -> None:
    """Splits layers over the ranks of `mesh`; with `sequence` also norms and residuals between them."""
    spread = Shard(1) if sequence else Replicate()
    ties = tied_names(model)
    split_attention(model, plan.attentions, mesh.size(), mesh)
    replaced = pack(model, plan.styles, plan.packed, mesh, spread)
    present = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.styles.items():
        if name in present and name not in replaced and style != "attention":
            styles[name] = {
                "column": ColwiseParallel(),
                "row": RowwiseParallel(output_layouts=spread),
                "vocabulary": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            }[style]
    if sequence:
        styles.update({name: SequenceParallel() for name in plan.norms if name in present})
    # A shard of which dimension makes no difference to what treats each vector by itself.
    styles.update(
        {name: SequenceParallel(use_local_output=True) for name in plan.head_norms if name in present}
    )
    parallelize_module(model, mesh, styles)
    _check_ties(model, ties)
    if sequence:
        _spread_sequence(model, blocks, plan, mesh)
    for name, attribute in plan.heads:
        if name in present:
            setattr(present[name], attribute, getattr(present[name], attribute) // mesh.size())
    tie(model, ties)


def _check_ties(model: nn.Module, ties: Sequence[tuple[str, str]]) -> None:
    """Raises TaskError for one parameter that two layers would split in different ways."""
    for first, second in ties:
        places = [getattr(model.get_parameter(name), "placements", None) for name in (first, second)]
        if places[0] != places[1]:
            raise TaskError(
                f"{first} and {second} are one parameter, and tensor parallelism would split it in two ways "
                f"({places[0]}, {places[1]}); use zero3 without tp, or untie them"
            )


def _spread_sequence(model: nn.Module, blocks: Sequence[str], plan: TensorParallel, mesh: DeviceMesh) -> None:
    """Gathers the sequence for attention and feed-forward parts, and leaves shards of it between them."""

    def inputs(stream: Stream, before: Any, after: Any) -> PrepareModuleInput:
        named = {stream.name} if stream.name else set()
        rest = (None,) * (stream.inputs - (not named))
        return PrepareModuleInput(
            input_layouts=rest if named else (before, *rest),
            desired_input_layouts=rest if named else (after, *rest),
            input_kwarg_layouts=dict.fromkeys(named, before),
            desired_input_kwarg_layouts=dict.fromkeys(named, after),
            use_local_output=True,
        )

    present = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {
        name: inputs(stream, Shard(1), Replicate()) for name, stream in plan.inner.items() if name in present
    }
    parallelize_module(model, mesh, styles)
    if blocks:
        parallelize_module(model, mesh, {blocks[0]: inputs(plan.entry, Replicate(), Shard(1))})
        gathered = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(model, mesh, {blocks[-1]: gathered})


def shard(model: nn.Module, blocks: Sequence[str], strategy: Strategy, meshes: Meshes, *, last: bool) -> None:
    """Shards for ZeRO-2 or ZeRO-3: each block is a group of its own, the rest belongs to the root.

    So do blocks that share parameters with others: a parameter can be gathered by one group only. What the
    `last` part gives to the loss is float32.
    """
    half = strategy.half
    options: dict[str, Any] = {
        "mesh": meshes.fsdp if strategy.local_steps or strategy.mesh.dp == 1 else meshes.hybrid,
        # A pipeline runs a stage many times a step: gathering for each would cost more than it saves.
        "reshard_after_forward": strategy.data_parallel == "zero3" and strategy.mesh.pp == 1,
    }
    travels = torch.bfloat16 if strategy.travel.kind == "bfloat16" else torch.float32
    if half is not None or travels is torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(half, travels)
    if strategy.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    if strategy.mesh.ep > 1:
        for module in model.modules():
            if isinstance(module, Experts):
                alone = strategy.local_steps or strategy.mesh.dp == 1
                outer = meshes.one("outer") if alone else meshes.root["dp", "outer"]
                fully_shard(module, **{**options, "mesh": outer})
    for name in standing_alone(model, blocks):
        fully_shard(model.get_submodule(name), **options)
    if half is not None and last:
        # Logits too: a loss computed in bfloat16 has three digits, and so has every gradient after it.
        options["mp_policy"] = MixedPrecisionPolicy(half, travels, torch.float32)
    fully_shard(model, **options)


def set_products(precision: Precision, device: torch.device) -> None:
    """Lets float32 products of a GPU be in TF32, but where float32 was asked for."""
    if device.type == "cuda":
        tf32 = precision != "float32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


class Replicated(DistributedDataParallel):
    """DDP whose attributes are the model's too: losses read a model's configuration, and call its methods."""

    @override
    def __getattr__(self, name: str) -> Any:
        """An attribute of its own, else the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def replicate(
    model: nn.Module, meshes: Meshes, device: torch.device, *, unused: bool = False
) -> DistributedDataParallel:
    """Wraps the model in DDP, which reduces gradients in buckets during the backward pass.

    `unused`: it looks, at each step, for parameters that get no gradient, instead of waiting for theirs.
    """
    with warnings.catch_warnings():
        # Its successor would copy buffers from rank 0 once more.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return Replicated(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=meshes.one("dp").get_group(),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            init_sync=False,
            find_unused_parameters=unused,
        )


def present_blocks(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """The blocks that this part of the model has."""
    names = {name for name, _ in model.named_modules()}
    present = tuple(name for name in blocks if name in names)
    return present or find_blocks(model)
