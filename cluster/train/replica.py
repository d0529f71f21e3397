"""Holds one rank's part of the model, and runs its part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from roundtable.client.batch_tensors import give_float32
from roundtable.cluster.parallel.anatomy import Anatomy, dissect
from roundtable.cluster.parallel.apply_strategy import apply_strategy, present_blocks, replicate
from roundtable.cluster.parallel.experts import count_examples_alone
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.meta_init import check_same_tensors, check_shared_memory, model_on_meta
from roundtable.cluster.parallel.pipeline_stages import (
    Pipeline,
    keep_only,
    partition,
    refuse_cut,
)
from roundtable.cluster.parallel.shards import Places, local_of, named_tensors, plain_name, read_shards
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch, batch_norms, share_batch_norms
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.parallel.tensor_randomness import ShardedRegions, TensorRandomness
from roundtable.cluster.parallel.unsaved_constants import set_constants, shared_constants
from roundtable.cluster.stepping.compile_trial import (
    APART,
    STATISTICS,
    CompileTrial,
    TrialMemory,
    begin_trial,
    cannot_compile,
)
from roundtable.cluster.stepping.compiled_blocks import CompiledBlocks
from roundtable.cluster.stepping.encoded_gradients import EncodedGradients, EncodedScatter
from roundtable.cluster.stepping.factored_gradients import FactoredGradients
from roundtable.cluster.stepping.gradient_hooks import GradientHook, reduce_in_bfloat16
from roundtable.cluster.stepping.offloaded_activations import OffloadedActivations
from roundtable.cluster.stepping.rank_shares import ForwardClock
from roundtable.core.errors import LayoutError, TaskError
from roundtable.core.layout import Layout
from roundtable.core.task import Task


class Replica:
    """A rank's part of the model under a strategy; without values until `load`."""

    def __init__(
        self,
        task: Task,
        layout: Layout,
        strategy: Strategy,
        meshes: Meshes,
        device: torch.device,
        tensor_parallel: TensorParallel | None = None,
        *,
        seed: int = 0,
        plain: bool = False,
    ) -> None:
        """`seed` is the job's; `plain`: the model is not wrapped in DDP, as the caller reduces its gradients.

        Raises TaskError for a model that cannot be spread so. Collective.
        """
        self._plain = plain
        self._packed = strategy.mesh.tp > 1 and tensor_parallel is not None and bool(tensor_parallel.packed)
        self._task = task
        self._layout = layout
        self._seed = seed
        self.strategy = strategy
        self._sharded = strategy.data_parallel in ("zero2", "zero3")
        self.meshes = meshes
        self.device = device
        self._current = MicroBatch()
        self._regions: ShardedRegions | None = None
        if strategy.mesh.tp > 1 and tensor_parallel is not None and tensor_parallel.draws:
            self._regions = ShardedRegions(tensor_parallel, sequence=strategy.sequence_parallel)
        self.parts: list[nn.Module] = []
        blocks: list[nn.Module] = []
        for part, names, last in self._cut():
            present = present_blocks(part, names)
            blocks += [part.get_submodule(name) for name in present]
            options = (strategy, meshes, device, tensor_parallel, self._regions)
            self.parts.append(apply_strategy(part, present, *options, last=last))
            if last and strategy.half is not None and not self._sharded:
                # As what the last shards give: a loss that is written by hand is under no autocast rule.
                give_float32(self.parts[-1])
        self.compiled = CompiledBlocks(blocks)
        self.trial: CompileTrial | str = ""
        self._randomness: TensorRandomness | None = None
        if self._regions is not None:
            self._randomness = TensorRandomness(self._regions, meshes.place("tp"), device)
        self.model: nn.Module = self.parts[0]
        self._ddp: DistributedDataParallel | None = None
        self.hook: GradientHook | None = None
        self.clock: ForwardClock | None = None
        self._scatters = self._encode_shards()
        self.pipeline = Pipeline(self.parts, strategy, meshes, device) if strategy.mesh.pp > 1 else None

    def try_compiled(self, mode: str, memory: TrialMemory, *, apart: bool) -> None:
        """Begins a trial of compiled blocks, as `[cluster] compile` wants; collective.

        `apart`: other replicas would decide by themselves.
        """
        refusal = cannot_compile(self.strategy, len(self.compiled), private=self._plain)
        if apart:
            refusal = APART
        elif any(batch_norms(part) for part in self.parts):
            refusal = refusal or STATISTICS
        self.trial = begin_trial(mode, self.device, self.compiled, refusal, memory)

    def _cut(self) -> Iterator[tuple[nn.Module, tuple[str, ...], bool]]:
        """The whole model, or the stages of it that this rank runs: (part, blocks, is it the last)."""
        mesh = self.strategy.mesh
        stages = mesh.pp * self.strategy.virtual_stages
        made = [model_on_meta(self._task, self._seed) for _ in range(self.strategy.virtual_stages)]
        values = shared_constants(self._task, made[0], self._seed, self.device)
        for index, model in enumerate(made):
            set_constants(model, values)
            names = [spec.name for spec in self._layout.model.tensors]
            check_same_tensors(
                model.state_dict(), names, or_else="; or install the task of the job's version"
            )
            check_shared_memory(model, self._layout)
            anatomy: Anatomy = dissect(model)
            if anatomy.batch_norms and not self._plain:
                group = None if self.strategy.batch_norm == "local" else self.meshes.batch()
                share_batch_norms(model, group, self._current)
            count_examples_alone(model, self._current)
            stage = self.strategy.stages_of(self.meshes.place("pp"))[index]
            if mesh.pp > 1:
                if reason := refuse_cut(anatomy, stages):
                    raise TaskError(f"no pipeline: {reason}")
                keep_only(model, anatomy, partition(anatomy, stages)[stage])
            yield model, anatomy.blocks, stage == stages - 1

    @property
    def packed(self) -> bool:
        """Whether layers that hold several parts are split, so that each part is a parameter."""
        return self._packed

    @property
    def differs(self) -> Tensor | None:
        """Whether a pipeline's loss had other inputs on its last stage than on its first, on that stage."""
        return None if self.pipeline is None else self.pipeline.differs

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers of this rank by their names in the whole model."""
        return named_tensors(self.parts)

    @property
    def parted(self) -> int:
        """How many ranks have buffers of their own within a round, statistics of their examples; 0: it is the
        same everywhere, or in each replica.
        """
        ranks = self.strategy.mesh.data
        return ranks if self.strategy.batch_norm == "local" and ranks > 1 else 0

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Its saved buffers alone, likewise."""
        return ((name, each) for name, each in self.tensors() if not isinstance(each, nn.Parameter))

    def parameters(self) -> list[nn.Parameter]:
        """This rank's trainable parameters."""
        return [p for part in self.parts for p in part.parameters() if p.requires_grad]

    def load(self, places: Places, vector: Tensor, others: Mapping[str, Tensor]) -> None:
        """Loads this rank's parts from a mapped vector, and from `others` the tensors that do not travel."""
        missing = read_shards(self.tensors(), places, vector, others)
        if missing:
            raise LayoutError(
                f"{missing[0]!r} has no initial value: it has the rule drop in [model], and the "
                "task has no pretrained(site) whose safetensors file has a tensor of that name; write "
                "one from the model in memory (safetensors.torch.save_model), or use the rule local"
            )
        if (
            self.strategy.data_parallel in ("ddp", "zero1")
            and not self.strategy.local_steps
            and not self._plain
            and not self._ddp
        ):
            self._ddp = replicate(self.model, self.meshes, self.device, unused=self.strategy.unused)
            self._install(self._ddp)
            self.model = self._ddp

    def _install(self, ddp: DistributedDataParallel) -> None:
        """Has gradients travel as the strategy says."""
        travel, group = self.strategy.travel, self.meshes.one("dp").get_group()
        if travel.kind == "bfloat16":
            reduce_in_bfloat16(ddp, group)
            return
        names = {p: name for name, p in self.tensors() if isinstance(p, nn.Parameter) and p.requires_grad}
        if travel.kind == "powersgd":
            self.hook = FactoredGradients(names, group, travel.rank)
        elif travel.encoding is not None:
            self.hook = EncodedGradients(names, group, travel.encoding)
        if self.hook is not None:
            self.hook.install(ddp)

    def _encode_shards(self) -> list[EncodedScatter]:
        """Has the pieces of shards' gradients travel encoded, where the strategy says so."""
        encoding = self.strategy.travel.encoding
        if encoding is None or self.strategy.data_parallel not in ("zero2", "zero3"):
            return []
        scatters = []
        for name, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                scatters.append(EncodedScatter(encoding, plain_name(name)))
                module.set_custom_reduce_scatter(scatters[-1])  # type: ignore[arg-type]
        return scatters

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Averages running statistics over the ranks, whose examples differ."""
        if self.strategy.mesh.data == 1:
            return
        group = self.meshes.hybrid
        for _, tensor in self.tensors():
            if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                for index in range(group.ndim):
                    dist.all_reduce(local_of(tensor), group=group.get_group(index))
                local_of(tensor).div_(self.strategy.mesh.data)

    def begin_step(self, path: Sequence[str | int]) -> None:
        """A step begins: what encodings draw in it follows from `path`, the same on all ranks."""
        for each in (self.hook, *self._scatters):
            if each is not None:
                each.begin(path)

    def train(self, mode: bool = True) -> None:
        """As nn.Module.train, on every part."""
        for part in self.parts:
            part.train(mode)

    def backward(
        self, batches: Sequence[Any], weights: Sequence[float], sizes: Sequence[int] = ()
    ) -> Tensor | None:
        """Gradients of Σ weight · loss over micro-batches; their losses, None off a pipeline's last stage.

        `sizes` are their examples, for a clock that times them.
        """
        with self.precision(), self._randomness or nullcontext():
            if self._randomness is not None:
                self._randomness.begin()
            if self.pipeline is not None:
                return self.pipeline.backward(self._task, batches, weights)
            losses = []
            for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
                self._current.counts = weight > 0
                if self._randomness is not None:
                    self._randomness.begin()
                with self._waiting(index + 1 < len(batches)):
                    timed = self.clock.over(sizes[index]) if self.clock and sizes else nullcontext()
                    with timed, self._offloading():
                        loss = self._task.loss(self.model, batch)
                    (loss * weight).backward()  # type: ignore[no-untyped-call]
                    losses.append(loss.detach())
            return torch.stack(losses)

    def model_for(self, batch: Any) -> nn.Module | None:
        """The model for a batch's loss and metrics; None off a pipeline's last stage."""
        if self.pipeline is None:
            return self.model
        with self.precision():
            return self.pipeline.outputs(self._task, batch)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which losses and metrics are computed."""
        if self.strategy.half is not None and not self._sharded:
            return torch.autocast(self.device.type, self.strategy.half)
        return nullcontext()

    def _offloading(self) -> AbstractContextManager[Any]:
        """Has activations wait in CPU memory, where the strategy says so."""
        if not self.strategy.offload_activations:
            return nullcontext()
        return OffloadedActivations(pinned=self.device.type == "cuda")

    def _waiting(self, more: bool) -> AbstractContextManager[Any]:
        """Delays DDP's reduction to the last micro-batch; shards reduce each time, which saves memory."""
        return self._ddp.no_sync() if self._ddp is not None and more else nullcontext()
