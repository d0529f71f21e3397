"""Describes how a model is spread over a silo's devices; a planner chooses it, and a person may set parts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from typing_extensions import override

from roundtable.client.policy.gradient_reduction import GradientReduction, parse_reduction
from roundtable.core.errors import ConfigError

DataParallel = Literal["none", "ddp", "zero1", "zero2", "zero3"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble"]
# It splits a backward pass in two: of a stage's inputs, and of its weights.
SPLITTING = "zero_bubble"
Checkpointing = Literal["none", "every", "sqrt", "selective"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]
BatchStatistics = Literal["synchronised", "local"]
# Bytes of parameters whose offloaded state is on the device at one time; a larger one comes by itself.
PORTION = 1 << 26
# Of parameters whose state is decoded from 8 bits at one time.
CODED_PORTION = 1 << 24
# Tensors with fewer values keep float32, as bitsandbytes and torchao have it.
CODED_FROM = 4096
# Bytes of a coded state over those in float32: a code for each value, a scale for 256.
CODED_SHARE = (1 + 4 / 256) / 4
# The state that can be in 8 bits, by its name in torch's optimizers: has it both signs?
CODED_STATE = {"exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
_CODED = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}
_BY_ENTRY = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
}
# Their steps do in place what torch's sharded tensors do not.
_WHOLE_ALONE = {torch.optim.Adafactor, torch.optim.Rprop}
# Those with kernels that take the step of many tensors at once.
FUSED = {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW}


@dataclass(frozen=True)
class Mesh:
    """Degrees of the device mesh; their product without `ep` is the world.

    `pp` pipeline stages, `dp` replicas, `fsdp` shards of one replica, `tp` parts of each layer. The `ep`
    ranks that share out experts are neighbours within `fsdp`: ep divides it.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, degree in asdict(self).items():
            if degree < 1:
                raise ConfigError(f"mesh: {name} = {degree}; a degree is at least 1")
        if self.fsdp % self.ep:
            raise ConfigError(
                f"mesh: ep = {self.ep} does not divide fsdp = {self.fsdp}: the ranks that share experts are "
                "ranks that shard the rest"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks that see different examples."""
        return self.dp * self.fsdp

    @override
    def __str__(self) -> str:
        degrees = [f"{name}{degree}" for name, degree in asdict(self).items() if degree > 1]
        return " × ".join(degrees) or "one device"


def cannot_reduce(travel: GradientReduction, kind: DataParallel, mesh: Mesh) -> str:
    """Why gradients cannot travel so under a kind of data parallelism; empty where they can."""
    if travel.kind == "exact" or kind in ("ddp", "zero1"):
        return ""
    if kind == "none":
        return "data_parallel = 'none' reduces no gradients"
    if travel.kind == "bfloat16":
        return ""
    if travel.keeps:
        return (
            f"what is not sent is kept, as much as the whole model's gradients on each rank, which {kind} "
            "shares out; use ddp or zero1, or bfloat16 or an encoding without memory such as int8"
        )
    if mesh.tp > 1 or mesh.pp > 1 or mesh.ep > 1:
        return f"under {kind} encodings stand alone: tp, pp and ep have gradients that do not pass by it"
    if mesh.dp > 1:
        return (
            "shards that are replicated over dp are summed twice, and only the sum over fsdp can be encoded; "
            "use bfloat16, or fsdp over all ranks"
        )
    assert travel.encoding is not None
    if travel.encoding.encoded_size(1) is None:
        return f"under {kind} ranks exchange pieces of known sizes: use block-wise encodings, such as int8"
    return ""


def cannot_offload(pp: int, checkpointing: str) -> str:
    """Why activations cannot wait in the host's memory; empty where they can."""
    if pp > 1:
        return f"pp = {pp}: a schedule runs other micro-batches in between; leave one of the two out"
    if checkpointing != "none":
        return (
            f"checkpointing = {checkpointing!r}: what goes into a block that is computed again is kept past "
            "what offloads; leave one of the two out"
        )
    return ""


def by_entry(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step treats each entry by itself; of torch's own classes only is that known."""
    return type(optimizer) in _BY_ENTRY


def cannot_take_parts(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot step on sharded weights; empty where it can, or its class is not torch's."""
    if type(optimizer) not in _WHOLE_ALONE:
        return ""
    return f"torch's {type(optimizer).__name__} takes no step on sharded weights; use ddp or zero1"


def group_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """With what an optimizer of one group is made anew: what the group holds, as its class names it."""
    accepted = inspect.signature(type(optimizer)).parameters
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if key in accepted and key != "params"}


def cannot_share_out(optimizer: torch.optim.Optimizer) -> str:
    """Why ZeRO-1, whose ranks make the optimizer anew, cannot share it out; empty where it can."""
    count, kind = len(optimizer.param_groups), type(optimizer).__name__
    if count != 1:
        return (
            f"ZeRO-1 takes an optimizer with one group of parameters, and the task's has {count}; set "
            "[cluster.strategy] data_parallel to ddp, zero2 or zero3"
        )
    if type(optimizer).__module__.startswith("torch.optim."):
        return ""
    try:
        made = type(optimizer)(optimizer.param_groups[0]["params"], **group_options(optimizer))
        plain = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float, str))}
        odd = [key for key, value in plain.items() if vars(made).get(key) != value]
    except Exception as error:  # noqa: BLE001 - an optimizer of the task's own may raise anything
        odd = [str(error)]
    if not odd:
        return ""
    return (
        f"ZeRO-1 makes the task's {kind} anew from what its group of parameters holds, which is not all that "
        f"it was made with ({odd[0][:100]}); put all options into its defaults, or use ddp, zero2 or zero3"
    )


def take_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Chooses fused kernels where torch has them, else multi-tensor ones, where the task left it open."""
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        odd = group.get("differentiable") or any(not p.is_floating_point() for p in group["params"])
        if chosen or odd or "foreach" not in group:
            continue
        # That of SGD ends where a first gradient comes late, and on CPUs moves few weights of two bytes.
        halves = any(p.element_size() < 4 and p.device.type == "cpu" for p in group["params"])
        apart = type(optimizer) is torch.optim.SGD and halves
        fused = type(optimizer) in FUSED and not group.get("momentum") and not apart
        group["fused"] = True if fused else group.get("fused")
        group["foreach"] = not fused


def cannot_offload_state(by_entry: bool) -> str:
    """Why an optimizer's state cannot wait in the host's memory; `by_entry`: a step treats entries alone."""
    if by_entry:
        return ""
    return (
        "the state comes to the device in portions, and the task's optimizer is none of torch's that treat "
        "each entry by itself; use one of those (AdamW), or offload = true with zero2 or zero3"
    )


def cannot_code_state(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer's state cannot be kept in 8 bits; empty where it can."""
    if type(optimizer) in _CODED:
        return ""
    return (
        f"the task's optimizer is {type(optimizer).__name__}, and 8 bits are for torch's SGD with momentum, "
        "Adam and AdamW, for which Dettmers et al. (2022) measured what they change; use one of those"
    )


@dataclass(frozen=True)
class Strategy:
    """Everything that decides what each rank holds and computes.

    `micro_batch` is the most examples a rank runs at once; what is left of its share of a batch is
    accumulated. `checkpoint_every` counts blocks (1: each), and `checkpoint_blocks` names those that are
    checkpointed in its place; `sqrt` keeps only what goes into each of about √n runs of n blocks.
    `reduction` is how gradients travel: see GradientReduction;
    `local_steps` above 0 lets the replicas of `dp` train apart and meet every so many steps (Douillard et al.
    2023, DiLoCo, algorithm 1), with `outer_learning_rate` and `outer_momentum`; 1 and 0 average (local SGD).
    `offload` has parameters, gradients and optimizer wait in CPU memory, `offload_optimizer` its state alone,
    `offload_activations` what a forward pass keeps. `optimizer_bits` is 8 where that state is coded between
    steps. `batch_norm` layers take the statistics of the whole
    batch, or of each rank's micro-batch (`local`).
    `unused`: some trained parameters get no gradient, which DDP is to expect.
    """

    mesh: Mesh = field(default_factory=Mesh)
    data_parallel: DataParallel = "none"
    micro_batch: int = 1
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 1
    checkpoint_blocks: tuple[str, ...] = ()
    offload: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False
    optimizer_bits: int = 32
    precision: Precision = "float32"
    reduction: str = "exact"
    local_steps: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    batch_norm: BatchStatistics = "synchronised"
    unused: bool = False

    def __post_init__(self) -> None:
        mesh, kind = self.mesh, self.data_parallel
        sharded = kind in ("zero2", "zero3")
        if mesh.fsdp > 1 and not sharded:
            raise ConfigError(f"data_parallel = {kind!r} does not shard: give fsdp's {mesh.fsdp} ranks to dp")
        if kind in ("ddp", "zero1") and (mesh.tp > 1 or mesh.pp > 1 or mesh.ep > 1):
            raise ConfigError(
                f"data_parallel = {kind!r} stands alone; with tp, pp or ep use zero2 or zero3, which also "
                "replicate (dp) where fsdp = 1"
            )
        if kind == "none" and mesh.data > 1:
            raise ConfigError("data_parallel = 'none' leaves the ranks of dp without a common gradient")
        if reason := cannot_reduce(self.travel, kind, mesh):
            raise ConfigError(f"reduction = {self.reduction!r}: {reason}")
        if self.precision == "float16" and self.travel.keeps:
            raise ConfigError(
                f"precision = 'float16' and reduction = {self.reduction!r}: what it keeps back for later "
                "steps would keep a gradient that overflowed; use exact, bfloat16 or precision = 'bfloat16'"
            )
        if self.local_steps and mesh.dp == 1:
            raise ConfigError("local_steps lets the replicas of dp train apart, and there is only one")
        if self.local_steps:
            self._check_apart()
        if self.offload and not sharded:
            raise ConfigError("offload = true needs zero2 or zero3, which keep parameters in shards")
        if self.offload and self.offload_optimizer:
            raise ConfigError("offload = true takes the optimizer along; leave offload_optimizer out")
        if self.optimizer_bits == 8 and (self.offload or self.offload_optimizer):
            raise ConfigError(
                "optimizer_bits = 8 and state that waits in CPU memory: the device has a portion of it in "
                "both ways, and only one is needed; leave one of the two out"
            )
        if self.offload_activations and (reason := cannot_offload(mesh.pp, self.checkpointing)):
            raise ConfigError(f"offload_activations = true and {reason}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Raises ConfigError for stages that the schedule does not run."""
        if (self.virtual_stages > 1) != (self.schedule not in ("gpipe", "1f1b")):
            raise ConfigError(
                "virtual_stages above 1 belong together with schedule = 'interleaved', 'looped_bfs' or "
                "'zero_bubble'"
            )
        if self.schedule == SPLITTING:
            self._check_splitting()
        if self.checkpoint_blocks and self.checkpointing not in ("every", "selective"):
            raise ConfigError(
                f"checkpoint_blocks with checkpointing = {self.checkpointing!r}: only 'every' and "
                "'selective' take single blocks"
            )

    def _check_splitting(self) -> None:
        """Raises ConfigError for what a backward pass in two parts was not verified with."""
        mesh = self.mesh
        for key, plain in (("checkpointing", "none"), ("precision", "float32"), ("data_parallel", "none")):
            if getattr(self, key) != plain:
                raise ConfigError(
                    f"schedule = {self.schedule!r} and {key} = {getattr(self, key)!r}: it computes gradients "
                    "of inputs and of weights apart, which is verified for plain float32 stages alone; use "
                    "'interleaved'"
                )
        if mesh.tp > 1 or mesh.ep > 1:
            raise ConfigError(f"schedule = {self.schedule!r} stands alone; with tp or ep use 'interleaved'")

    def stages_of(self, rank: int) -> list[int]:
        """The pipeline stages of a rank of `pp`, in the model's order."""
        return list(range(rank, self.mesh.pp * self.virtual_stages, self.mesh.pp))

    def _check_apart(self) -> None:
        """Raises ConfigError for what does not go with replicas that train apart."""
        if self.data_parallel == "zero1":
            raise ConfigError(
                "local_steps and data_parallel = 'zero1': its ranks share one optimizer's state out, and "
                "replicas that train apart each need their own; use ddp, zero2 or zero3"
            )
        if self.reduction != "exact":
            raise ConfigError(
                f"local_steps and reduction = {self.reduction!r}: replicas that train apart reduce no "
                "gradients; leave one of the two out"
            )
        if self.offload:
            raise ConfigError(
                "local_steps and offload = true: the replicas meet over the devices' network, where "
                "parameters in CPU memory are not; leave one of the two out"
            )

    @property
    def travel(self) -> GradientReduction:
        """How gradients travel."""
        return parse_reduction(self.reduction)

    @property
    def state_share(self) -> float:
        """Bytes of the optimizer's state between steps over those in float32."""
        return CODED_SHARE if self.optimizer_bits == 8 else 1.0

    @property
    def half(self) -> torch.dtype | None:
        """The two-byte type of forward and backward; None where those are in float32."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.precision)

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Strategy:
        """The strategy that `to_plain` described."""
        blocks = tuple(values.get("checkpoint_blocks", ()))
        return cls(**{**values, "mesh": Mesh(**values["mesh"]), "checkpoint_blocks": blocks})

    def checkpointed(self, blocks: Sequence[str]) -> list[str]:
        """Which of a rank's `blocks` are computed again one by one, under "every" and "selective"."""
        if self.checkpointing not in ("every", "selective"):
            return []
        if self.checkpoint_blocks:
            listed = set(self.checkpoint_blocks)
            return [block for block in blocks if block in listed]
        return list(blocks[:: self.checkpoint_every])

    def with_checkpointing(self, kind: Checkpointing) -> Strategy:
        """The strategy that computes activations of all blocks again in another way."""
        return replace(self, checkpointing=kind, checkpoint_every=1, checkpoint_blocks=())

    def halved(self) -> Strategy:
        """The strategy with half the micro-batch, after running out of memory."""
        return replace(self, micro_batch=max(1, self.micro_batch // 2))

    @override
    def __str__(self) -> str:
        parts = [str(self.mesh)]
        names = {"none": "", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
        kind = names[self.data_parallel]
        if kind.startswith("ZeRO-") and self.mesh.dp > 1 and self.mesh.fsdp > 1:
            kind += " within, replicated over dp (HSDP)"
        parts.append(kind)
        if self.mesh.pp > 1:
            parts.append(f"pipeline {self.schedule}")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.checkpointing != "none":
            every = f" of every {self.checkpoint_every} blocks" if self.checkpoint_every > 1 else ""
            if self.checkpoint_blocks:
                every = f" of {len(self.checkpoint_blocks)} blocks"
            parts.append(f"checkpointing {self.checkpointing}{every}")
        parts.append("offload to CPU" if self.offload else "")
        parts.append("optimizer in CPU memory" if self.offload_optimizer else "")
        parts.append("optimizer in 8 bits" if self.optimizer_bits == 8 else "")
        parts.append("activations in CPU memory" if self.offload_activations else "")
        parts.append(f"micro-batch {self.micro_batch}")
        parts.append(self.precision)
        parts.append("" if self.reduction == "exact" else f"gradients by {self.reduction}")
        if self.local_steps:
            parts.append(f"replicas meet every {self.local_steps} steps")
        parts.append("batch statistics of each micro-batch" if self.batch_norm == "local" else "")
        return ", ".join(part for part in parts if part)
