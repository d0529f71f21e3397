"""`[cluster]` in agent.toml: the devices of the silo's cluster, and what of the plan is fixed by hand.

[cluster]
nodes = 2
launch = "external"          # Slurm, Kubernetes or torchrun on each node starts the ranks
devices = 8                  # of each node; "auto" counts the GPUs of this machine
memory = "80GiB"             # of one device; "auto" asks it

[cluster.strategy]           # any of these fixes what the planner would choose
tp = 8
micro_batch = 2
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, model_validator

from roundtable.client.policy.gradient_reduction import canonical_reduction
from roundtable.core.config import TrackingTable
from roundtable.core.errors import ConfigError
from roundtable.core.hooks.node_pool import PoolTable
from roundtable.core.quantities import parse_size
from roundtable.core.toml_tables import Names, Seconds, Table

_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]")


def parse_bytes(value: str | int | float) -> int:
    """Parses 80GiB, 500MB or a number of bytes; ConfigError for anything else."""
    if isinstance(value, (int, float)):
        return int(value)
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _memory(value: object) -> object:
    if value == "auto" or not isinstance(value, (str, int, float)):
        return value
    try:
        return parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _places(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not (name.startswith("/") or _ADDRESS.match(name)):
            # It would become a folder of that name wherever the agent was started.
            raise ValueError(f"{name!r} is neither an absolute path nor an address such as s3://bucket/place")
    if len(names) > 2:
        raise ValueError(f"{len(names)} places; two at most get copies")
    return names


def _budget(value: object) -> object:
    return value if isinstance(value, float) and 0 < value < 1 else _memory(value)


Budget = Annotated[int | float, BeforeValidator(_budget), Field(gt=0)]
Memory = Annotated[int | Literal["auto"], BeforeValidator(_memory)]


class StrategyTable(Table):
    """`[cluster.strategy]`: what is set here, the planner keeps; see Strategy."""

    pp: int | None = Field(None, ge=1, description="pipeline stages")
    dp: int | None = Field(None, ge=1, description="replicas")
    fsdp: int | None = Field(None, ge=1, description="shards of one replica")
    tp: int | None = Field(None, ge=1, description="parts of each layer; keep them within a node")
    cp: int | None = Field(None, ge=1, description="parts of each sequence; above 1 is refused for now")
    ep: int | None = Field(None, ge=1, description="ranks that share out experts")
    data_parallel: Literal["none", "ddp", "zero1", "zero2", "zero3"] | None = Field(None, description="kind")
    micro_batch: int | None = Field(None, ge=1, description="examples at once on a rank")
    schedule: Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble"] | None = Field(
        None, description="of the pipeline"
    )
    virtual_stages: int | None = Field(None, ge=1, description="stages of a rank: all but gpipe and 1f1b")
    sequence_parallel: bool | None = Field(None, description="shard norms and residuals over tp too")
    checkpointing: Literal["none", "every", "sqrt", "selective", "budget"] | None = Field(
        None,
        description="of activations: recompute blocks, runs of them, all but matrix products, or as few "
        "blocks as fit",
    )
    checkpoint_every: int | None = Field(None, ge=1, description="every: which blocks; 1 for each")
    checkpoint_blocks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = Field(
        None, description="every and selective: the blocks by number, the first is 0"
    )
    checkpoint_memory: Budget | None = Field(
        None, description="budget: what activations may take: a size, or below 1 a share of a device's memory"
    )
    offload: bool | None = Field(None, description="parameters and optimizer wait in CPU memory")
    offload_optimizer: bool | None = Field(
        None, description="the optimizer's state alone waits in CPU memory, and comes for each step"
    )
    optimizer_bits: Literal[8, 32] | None = Field(
        None, description="of a value of the optimizer's state between steps; 8 trains a little differently"
    )
    offload_activations: bool | None = Field(
        None, description="what a forward pass keeps waits in CPU memory; never chosen by itself"
    )
    reduction: Annotated[str, AfterValidator(canonical_reduction)] | None = Field(
        None,
        description='how gradients travel: exact, bfloat16, "powersgd(rank=4)", or an encoding of '
        '[transfer], such as "topk(ratio=0.05) | int8"',
    )
    batch_norm: Literal["synchronised", "local"] | None = Field(
        None, description="statistics of the whole batch (default), or of each rank's micro-batch"
    )
    local_steps: int | None = Field(None, ge=0, description="replicas of dp meet every so many steps")
    outer_learning_rate: float | None = Field(None, gt=0, description="local_steps: of the outer step")
    outer_momentum: float | None = Field(None, ge=0, lt=1, description="local_steps: Nesterov's")

    @model_validator(mode="after")
    def _agreeing(self) -> StrategyTable:
        if self.offload and self.offload_optimizer:
            raise ValueError("offload takes the optimizer along; leave offload_optimizer out")
        if self.optimizer_bits == 8 and (self.offload or self.offload_optimizer):
            raise ValueError(
                "optimizer_bits = 8 saves a device's memory, and offloaded state takes none of it: leave out "
                "one of the two"
            )
        if self.checkpoint_memory is not None and self.checkpointing != "budget":
            raise ValueError('checkpoint_memory is for checkpointing = "budget"')
        if self.checkpoint_blocks is not None and self.checkpointing not in ("every", "selective"):
            raise ValueError('checkpoint_blocks is for checkpointing = "every" or "selective"')
        if self.checkpoint_blocks is not None and self.checkpoint_every is not None:
            raise ValueError("checkpoint_blocks and checkpoint_every both say which blocks; leave one out")
        return self


class NodePoolTable(PoolTable):
    """`[cluster.pool]`: nodes that a command of the silo's starts for work and ends after it."""

    ready: Seconds = Field(
        1800.0, gt=0, le=86400, description="a step waits for the nodes so long before it has failed"
    )


class ClusterTable(Table):
    """`[cluster]`: the silo trains over several processes."""

    nodes: int = Field(1, ge=1, description="machines")
    devices: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", description="of each node")
    memory: Memory = Field("auto", description="of one device, for example 80GiB")
    host_memory: Memory = Field("auto", description="of one node, which offload uses, for example 2TiB")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl on GPUs, else gloo")
    launch: Literal["torchrun", "external"] = Field(
        "torchrun",
        description="torchrun: the agent starts ranks on its own machine, with torchrun's variables; "
        "external: Slurm or Kubernetes starts them (deploy/cluster)",
    )
    interface: str | None = Field(None, description="network interface of the ranks, for example eth0")
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = Field(
        "auto", description="of forward and backward; auto: bfloat16 or float16 on GPUs that have it"
    )
    compile: Literal["auto", "try", "never"] = Field(
        "auto",
        description="torch.compile of blocks, kept where the first steps get shorter; auto: on GPUs alone",
    )
    peak_flops: float | None = Field(
        None, gt=0, description="of one device, for utilisation; default: what is known of the GPU"
    )
    timeout: Seconds = Field(600.0, gt=0, description="a collective that takes longer is a hang")
    elastic: Literal["restart", "replica"] = Field(
        "restart",
        description="a lost rank: the group starts again, or its replica alone does while the others go on",
    )
    replica_devices: int = Field(1, ge=1, description='elastic = "replica": devices of one replica')
    restarts: int = Field(3, ge=0, description="of the group in a round, before the silo reports a failure")
    checkpoint_steps: int = Field(0, ge=0, description="steps between checkpoints in a round; 0: none")
    checkpoint_minutes: float = Field(
        0.0, ge=0, description="minutes between checkpoints in a round; 0: not by time"
    )
    checkpoint_on: tuple[Literal["loss_jump", "gradient_norm", "milestone"], ...] = Field(
        ("loss_jump", "gradient_norm"),
        description="beside those: before a loss that jumps, before a gradient above 100 or far from the "
        "mean norm, after a loss 5 % better over 20 steps",
    )
    checkpoints: Annotated[Names, AfterValidator(_places)] = Field(
        (),
        description="up to two more places, by path or address, that get a copy of each checkpoint; "
        "removed with the job",
    )
    shares: Literal["equal", "measured"] = Field(
        "equal",
        description="of a batch that ranks get; measured: by each one's speed in the round before, with ddp "
        "and zero1",
    )
    keep: int = Field(2, ge=1, description="checkpoints of a job that are kept")
    pool: NodePoolTable | None = Field(
        None, description="a command that starts the nodes when there is work, and ends them afterwards"
    )
    tracking: TrackingTable = Field(
        default_factory=TrackingTable,
        description="each step's figures, below the agent's state folder; they stay at the silo",
    )
    strategy: StrategyTable = Field(default_factory=StrategyTable)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether any are made within rounds."""
        return bool(self.checkpoint_steps or self.checkpoint_minutes)

    @model_validator(mode="after")
    def _shared(self) -> ClusterTable:
        if self.shares == "equal":
            return self
        for key, plain in (("data_parallel", (None, "none", "ddp", "zero1")), ("local_steps", (None, 0))):
            if (value := getattr(self.strategy, key)) not in plain:
                raise ValueError(
                    f'shares = "measured" and {key} = {value!r}: only the ranks of ddp and zero1 run as many '
                    "micro-batches as each has examples for; leave one of the two out"
                )
        if self.elastic == "replica":
            raise ValueError(
                'shares = "measured" and elastic = "replica": replicas that come and go share equally; leave '
                "one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _started(self) -> ClusterTable:
        if self.nodes > 1 and self.launch == "torchrun":
            raise ValueError(
                f'nodes = {self.nodes} needs launch = "external": the agent starts ranks on its own '
                "machine only; deploy/cluster has the files that start them on every node"
            )
        if self.elastic == "replica":
            self._check_replicas()
        elif self.replica_devices > 1:
            raise ValueError(f'replica_devices = {self.replica_devices} goes with elastic = "replica"')
        return self

    @model_validator(mode="after")
    def _pooled(self) -> ClusterTable:
        if self.pool is None:
            return self
        if self.launch != "external":
            raise ValueError(
                '[cluster.pool] needs launch = "external": where the agent starts the ranks itself, on its '
                "own machine, there is no node to start"
            )
        if self.pool.limit < self.nodes + self.pool.spare:
            raise ValueError(
                f"[cluster.pool] lets at most {self.pool.limit} nodes run, and {self.nodes} at work with "
                f"{self.pool.spare} spare are more: raise most or cost, or lower nodes or spare"
            )
        return self

    def _check_replicas(self) -> None:
        if self.launch != "torchrun":
            raise ValueError(
                'elastic = "replica" needs launch = "torchrun": the agent starts and ends each replica itself'
            )
        if self.devices != "auto" and self.devices % self.replica_devices:
            raise ValueError(
                f"devices = {self.devices} is no multiple of replica_devices = {self.replica_devices}: some "
                "would be idle"
            )
        if self.strategy.reduction not in (None, "exact"):
            raise ValueError(
                f'reduction = {self.strategy.reduction!r} and elastic = "replica": replicas add up their '
                "gradients exactly, and what one keeps back would be lost with it; leave one of the two out"
            )
        if self.strategy.local_steps:
            raise ValueError(
                f'local_steps = {self.strategy.local_steps} and elastic = "replica": what replicas that '
                "train apart have learnt since they met is lost with them; leave one of the two out"
            )
