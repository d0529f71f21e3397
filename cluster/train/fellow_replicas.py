"""A replica among others that may come and go: it adds up a step's gradients with whoever is there.

Replicas are process groups of their own, and have no torch group in common: ranks in the same place of each
meet in a gloo group that is made anew whenever somebody comes or goes, over a file in the state folder. What
is reduced are copies, so that a reduction that breaks off can be done again with those that are left. The
agent says who they are and when a step is taken (cluster/agent/membership.py). Gradients of a GPU pass
through the CPU's memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.client.training.local_work import Stopped
from roundtable.cluster.parallel.meshes import broadcast_text
from roundtable.cluster.parallel.shards import local_of, plain_name
from roundtable.cluster.stepping.local_parameters import whole_of
from roundtable.cluster.stepping.sharded_optimizer import fill_state
from roundtable.cluster.train.checkpoints import training_state
from roundtable.cluster.train.orders import AgentConnection, Verdict
from roundtable.cluster.train.replica import Replica
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.cluster.train.shared_batches import SharedBatches

PLACES, REPLICA, FIRST_RANK = "meetings", "ROUNDTABLE_REPLICA", "ROUNDTABLE_FIRST_RANK"
_CONNECT_SECONDS = 20.0
_BUCKET = 1 << 23


@dataclass(frozen=True)
class RoundState:
    """What a round's training holds on a rank: all that a replica that joins is given."""

    replica: Replica
    optimizer: torch.optim.Optimizer
    batches: SharedBatches
    done: RoundProgress


@dataclass(frozen=True)
class StepSums:
    """Over the replicas whose gradients a step is taken with: its examples, and the sum of their losses."""

    examples: int
    loss: float
    stop: bool


class FellowReplicas:
    """The replicas that train one batch together, seen from a rank of one of them."""

    def __init__(
        self,
        index: int,
        agent: AgentConnection | None,
        control: dist.ProcessGroup,
        folder: Path,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        """`index` is this replica's; `agent` rank 0's line; `control` a CPU group of its ranks.

        `say` is told what breaks.
        """
        self._index = index
        self._say = say
        self._agent = agent
        self._control = control
        self._folder = folder / PLACES
        self._timeout = timedelta(seconds=timeout)
        self._number = 0
        self._decided: Verdict | None = None
        self._group: dist.ProcessGroup | None = None
        self._kept: Any = None
        self.changes: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        """How many replicas are members."""
        return len(self._members)

    @property
    def place(self) -> int:
        """This one's place among them: it decides the examples that it sees."""
        return self._members.index(self._index)

    @property
    def _members(self) -> tuple[int, ...]:
        return self._decided.members if self._decided is not None else (self._index,)

    def begin(self, number: int) -> None:
        """A new order, of this number; nothing is known of its members yet."""
        self._number, self._decided, self._group, self.changes = number, None, None, []

    def meet(self, state: RoundState) -> None:
        """Waits until the round begins, or this replica may join it; it then has the others' state.

        Raises Stopped where the round is withdrawn. Collective over this replica's ranks.
        """
        self._tell(
            {"ready": state.batches.position, "plan": str(replace(state.replica.strategy, micro_batch=1))}
        )
        self._follow(self._hear())
        self._exchange(state)
        assert self._decided is not None
        if self._decided.stop:
            raise Stopped

    def settle(self, state: RoundState) -> None:
        """After a step: gives this replica's state to whoever joins, and shares the next batches anew."""
        self._exchange(state)

    def reduce(self, parameters: Sequence[nn.Parameter], examples: int, loss: float) -> StepSums:
        """Puts the mean gradient over all members' examples into the parameters, once all members have it.

        This replica's gradients are the mean over its own `examples`, which may be 0; `loss` is their sum.
        Where a member is lost, the mean is that of those that are left, by their examples. Collective.
        """
        own = [None if one.grad is None else local_of(one.grad).detach().cpu() for one in parameters]
        held = torch.tensor([part is not None for part in own], dtype=torch.float64)
        head = torch.cat([torch.tensor([float(examples), loss], dtype=torch.float64), held])
        while True:
            sums = self._sum(head, own, parameters)
            epoch = self._epoch
            whole = self._all(sums is not None)
            self._tell({"reduced": whole, "epoch": epoch})
            decided = self._hear()
            before = self._members
            self._follow(decided)
            if decided.committed:
                break
            self.changes.append({"step": decided.steps + 1, "lost": sorted({*before} - {*decided.members})})
        assert sums is not None, "a step is taken where all members have its gradients"
        total, parts = sums
        _place(parameters, parts, float(total[0]))
        return StepSums(int(total[0]), float(total[1]), decided.stop)

    def delivers(self) -> bool:
        """Whether this replica is the one whose parts become the round's update. Collective."""
        self._tell({"ended": True})
        return bool(self._message()["deliver"])

    @property
    def _epoch(self) -> int:
        return self._decided.epoch if self._decided is not None else 0

    def _tell(self, message: dict[str, Any]) -> None:
        if self._agent is not None:
            self._agent.send({**message, "number": self._number})

    def _message(self) -> dict[str, Any]:
        text = json.dumps(self._agent.verdict(self._number)) if self._agent is not None else ""
        told: dict[str, Any] = json.loads(broadcast_text(text, self._control))
        return told

    def _hear(self) -> Verdict:
        return Verdict.of(self._message()["verdict"])

    def _follow(self, decided: Verdict) -> None:
        """Connects with the members of a new epoch; where that breaks off, the next reduction does too."""
        fresh = decided.epoch != self._epoch
        self._decided = decided
        if not fresh:
            return
        self._group = None
        if len(decided.members) > 1:
            try:
                self._group = self._connected(decided)
            except (RuntimeError, dist.DistError) as error:
                self._say(f"replica {self._index}: no connection with {decided.members}: {_first(error)}")

    def _connected(self, decided: Verdict) -> dist.ProcessGroup:
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / f"{self._number}-{decided.epoch}-{dist.get_rank()}"
        # The group uses the store as long as it lives.
        self._kept = dist.FileStore(str(place), len(decided.members))  # type: ignore[attr-defined]
        patience = min(self._timeout, timedelta(seconds=_CONNECT_SECONDS))
        made: Any = dist.ProcessGroupGloo(self._kept, self.place, len(decided.members), patience)
        group: dist.ProcessGroup = made
        return group

    def _all(self, whole: bool) -> bool:
        said = torch.tensor([int(whole)])
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self._control)
        return bool(said)

    def _sum(
        self, head: Tensor, own: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor, list[Tensor | None]] | None:
        """(sums of the head, of the gradients) in new tensors; None where a member was lost on the way."""
        total = head.clone()
        try:
            self._add_up(total)
            parts = [
                _weighted(parameter, part, float(head[0])) if count else None
                for count, part, parameter in zip(total[2:].tolist(), own, parameters, strict=True)
            ]
            for bucket in _buckets([part for part in parts if part is not None]):
                flat = torch.cat([part.flatten() for part in bucket])
                self._add_up(flat)
                pieces = torch.split(flat, [part.numel() for part in bucket])
                for part, piece in zip(bucket, pieces, strict=True):
                    part.copy_(piece.view_as(part))
        except (RuntimeError, dist.DistError) as error:
            self._say(f"replica {self._index}: the gradients' sum broke off: {_first(error)}")
            return None
        return total, parts

    def _add_up(self, tensor: Tensor) -> None:
        if self.count == 1:
            return
        if self._group is None:
            raise dist.DistError("the replicas are not connected")
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        self._group.allreduce([tensor], options).wait()

    def _exchange(self, state: RoundState) -> None:
        """Hands the donor's state to the members that join; `batches` are shared among all from then on."""
        decided = self._decided
        assert decided is not None
        if decided.joining:
            self.changes.append({"step": decided.steps + 1, "joined": list(decided.joining)})
            if self._index in decided.joining:
                self._receive(decided, state)
            elif self._index == decided.donor:
                self._give(decided, state)
            self._decided = replace(decided, joining=())
        state.batches.share_among(self.place, self.count)

    def _give(self, decided: Verdict, state: RoundState) -> None:
        tensors = sorted(training_state(state.replica, state.optimizer), key=lambda one: one[0])
        about = {
            "steps": decided.steps,
            "done": asdict(state.done),
            "changes": self.changes,
            "names": [name for name, _ in tensors],
            "numbers": _numbers(state.optimizer),
        }
        data = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        parts = [local_of(tensor).detach().cpu().contiguous() for _, tensor in tensors]
        for place in (decided.members.index(one) for one in decided.joining):
            try:
                assert self._group is not None
                for tensor in (torch.tensor([len(data)]), data, *parts):
                    if tensor.numel():
                        self._group.send([tensor], place, 0).wait(self._timeout)
            except (AssertionError, RuntimeError, dist.DistError) as error:
                # It is lost, which the next reduction shows; this replica's own state is whole.
                self._say(f"replica {decided.members[place]} did not get the state: {_first(error)}")

    def _receive(self, decided: Verdict, state: RoundState) -> None:
        """Takes another's state. What breaks here ends this replica: it has no state to train from."""
        place = decided.members.index(decided.donor)
        size = self._received(torch.zeros(1, dtype=torch.int64), place)
        about = json.loads(
            self._received(torch.empty(int(size), dtype=torch.uint8), place).numpy().tobytes().decode()
        )
        fill_state(state.optimizer)
        tensors = dict(training_state(state.replica, state.optimizer))
        if not set(about["names"]) <= set(tensors):
            raise dist.DistError("the other replica's optimizer holds other tensors")
        for name in about["names"]:
            part = local_of(tensors[name])
            if part.numel():
                part.copy_(self._received(torch.empty(part.shape, dtype=part.dtype), place))
        _forget_others(state.replica, state.optimizer, about["names"], about["numbers"])
        state.batches.load_state_dict({"position": about["steps"]})
        for name, value in about["done"].items():
            setattr(state.done, name, value)
        self.changes = about["changes"]

    def _received(self, tensor: Tensor, place: int) -> Tensor:
        if self._group is None:
            raise dist.DistError("the replicas are not connected")
        self._group.recv([tensor], place, 0).wait(self._timeout)
        return tensor


def _weighted(parameter: nn.Parameter, part: Tensor | None, examples: float) -> Tensor:
    """examples · gradient in a new tensor on the CPU, in float32 at least; zeros where there is none."""
    if part is None:
        return torch.zeros(local_of(parameter).shape, dtype=_wide(parameter.dtype))
    return part.to(_wide(part.dtype)) * examples


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cuts into runs of one type and of about 8 million entries, which are reduced at once."""
    bucket: list[Tensor] = []
    size = 0
    for part in parts:
        if bucket and (size + part.numel() > _BUCKET or part.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def _place(parameters: Sequence[nn.Parameter], parts: Sequence[Tensor | None], examples: float) -> None:
    """The mean over so many examples becomes the parameters' gradient."""
    for parameter, part in zip(parameters, parts, strict=True):
        if part is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_of(parameter.grad).copy_(part / max(examples, 1.0))


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What an optimizer keeps of each parameter beside tensors."""
    inner = _inner(optimizer)
    return [
        {key: value for key, value in inner.state.get(one, {}).items() if isinstance(value, (int, float))}
        for group in inner.param_groups
        for one in group["params"]
    ]


def _forget_others(
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    numbers: Sequence[dict[str, float]],
) -> None:
    """Leaves in the optimizer's state what the other replica's holds, and nothing else."""
    known, inner = set(names), _inner(optimizer)
    own = {id(tensor): name for name, tensor in replica.tensors()}
    for parameter, state in inner.state.items():
        place = f"optimizer/{plain_name(own[id(whole_of(parameter))])}"
        for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
            if f"{place}/{key}" not in known:
                del state[key]
    parameters = [one for group in inner.param_groups for one in group["params"]]
    for parameter, kept in zip(parameters, numbers, strict=True):
        if kept:
            inner.state[parameter].update(kept)
        elif parameter in inner.state and not inner.state[parameter]:
            del inner.state[parameter]


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
