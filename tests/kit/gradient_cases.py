"""Ranks whose gradients travel otherwise than exactly, beside naive oracles of what should come of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cluster_cases import Case, bench_of, reference
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.stepping.encoded_gradients import EncodedGradients
from roundtable.cluster.stepping.factored_gradients import FactoredGradients
from roundtable.cluster.train.checkpoint_places import Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core.encodings.assembly import get_encoding
from roundtable.core.task import Site


def low_rank(rank: int, matrices: Any, start: Any, columns: int, steps: int) -> list[list[list[float]]]:
    """What PowerSGD makes of the mean of the ranks' matrices [rows, columns], the same in each step."""
    weight = nn.Parameter(torch.zeros(torch.tensor(matrices[0]).shape, dtype=torch.float64))
    group: Any = dist.group.WORLD
    hook = FactoredGradients({weight: "w"}, group, columns)
    dict(hook.state(rank))["all/w"].copy_(torch.tensor(start, dtype=torch.float64))
    found = []
    for _ in range(steps):
        gradient = torch.tensor(matrices[rank], dtype=torch.float64)
        hook.reduce([(weight, gradient)])
        found.append(gradient.tolist())
    return found


def power_oracle(matrices: np.ndarray, start: np.ndarray, steps: int) -> list[np.ndarray]:
    """Vogels et al. 2019, algorithms 1 and 2, of matrices [ranks, rows, columns], in NumPy."""
    left, factor, found = np.zeros_like(matrices), start, []
    for _ in range(steps):
        total = matrices + left
        basis = np.linalg.qr((total @ factor).mean(0))[0]
        factor = (total.transpose(0, 2, 1) @ basis).mean(0)
        found.append(basis @ factor.T)
        left = total - found[-1]
    return found


class Net(nn.Module):
    """Several parameters of different shapes, in more than one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 200)
        self.second = nn.Linear(200, 100)

    def forward(self, x: Tensor) -> Tensor:
        """[examples, 300] → [examples, 100]."""
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def encoded(rank: int, chain: str, steps: int) -> dict[str, Any]:
    """The steps' gradients under DDP, those of an oracle, and whether other threads reduced."""
    torch.manual_seed(1)
    plain, wrapped = Net(), Net()
    wrapped.load_state_dict(plain.state_dict())
    # Buckets of a few KiB, which DDP makes anew after the first step.
    ddp = DistributedDataParallel(wrapped, bucket_cap_mb=0.1)
    names = {parameter: name for name, parameter in wrapped.named_parameters()}
    group: Any = dist.group.WORLD
    hook = EncodedGradients(names, group, get_encoding(chain))
    hook.install(ddp)
    encoding, world = get_encoding(chain), dist.get_world_size()
    left = [{name: torch.zeros(p.shape) for name, p in plain.named_parameters()} for _ in range(world)]
    of = {name: parameter for parameter, name in names.items()}
    equal: list[bool] = []
    threads: set[int] = set()

    with mock.patch.object(EncodedGradients, "reduce", autospec=True, side_effect=_passing(threads)):
        for step in range(steps):
            inputs = [
                torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + r))
                for r in range(world)
            ]
            hook.begin(("s", step))
            ddp.zero_grad()
            ddp(inputs[rank]).square().mean().backward()
            means = {name: torch.zeros(p.numel()) for name, p in plain.named_parameters()}
            for place in range(world):
                plain.zero_grad()
                plain(inputs[place]).square().mean().backward()
                for name, parameter in plain.named_parameters():
                    assert parameter.grad is not None
                    total = parameter.grad + left[place][name]
                    key = hook._key(of[name], place)
                    data, out = b"".join(map(bytes, encoding.encode(total.reshape(-1), key))), means[name]
                    one = torch.empty_like(out)
                    encoding.decode(data, one, key)
                    out += one
                    if encoding.traits.feedback:
                        left[place][name] = total - one.view_as(total)
            for name, parameter in wrapped.named_parameters():
                assert parameter.grad is not None
                equal.append(torch.equal(parameter.grad.reshape(-1), means[name] / world))
    return {"equal": equal, "elsewhere": threading.get_ident() not in threads and bool(threads)}


def _passing(threads: set[int]) -> Any:
    """Notes the thread that reduces, and reduces."""
    reduce = EncodedGradients.reduce

    def noted(self: EncodedGradients, pieces: Any) -> None:
        threads.add(threading.get_ident())
        reduce(self, pieces)

    return noted


def one_not_finite(rank: int, chain: str) -> list[bool]:
    """Whether all entries are NaN on this rank where rank 1's gradient has one."""
    weight = nn.Parameter(torch.zeros(20, 10))
    group: Any = dist.group.WORLD
    hook = EncodedGradients({weight: "w"}, group, get_encoding(chain))
    gradient = torch.ones(20, 10)
    if rank == 1:
        gradient[3, 4] = float("nan")
    hook.reduce([(weight, gradient)])
    return [bool(gradient.isnan().all())]


def _weights(trainer: RankTrainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.replica.tensors()}


def broken_off(rank: int, case: Case, folder: Path) -> dict[str, bool]:
    """Is a round the same that goes on from a checkpoint; and is it another one if nothing is remembered?"""
    control: Any = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(folder, [], 2, control)
    whole = _trainer(case)
    data, _ = case.task.data(Site("silo"))

    def watch(report: StepReport) -> None:
        if report.step == 2:
            assert whole.optimizer is not None
            checkpoints.save(whole.replica, whole.optimizer, Position(1, "m", 2, 0, 0.0))

    whole.fit(whole.batches(data, 1), 1, RoundProgress(), watch)
    checkpoints.finish()
    expected = _weights(whole)
    ends = []
    for remembers in (True, False):
        trainer = _trainer(case)
        trainer.begin(1)
        newest = checkpoints.newest(1, "m")
        assert newest is not None
        assert trainer.optimizer is not None
        checkpoints.load(newest[0], trainer.replica, trainer.optimizer)
        hook = trainer.replica.hook
        if not remembers and hook is not None:
            hook.reset()
        batches = trainer.batches(data, 1)
        batches.load_state_dict({"position": 2})
        trainer.fit(batches, 1, RoundProgress(), lambda report: None)
        ends.append(all(torch.equal(expected[name], each) for name, each in _weights(trainer).items()))
    return {"same": ends[0], "without memory": ends[1]}


def keep_unsent(rank: int, case: Case, folder: Path) -> None:
    """Saves what each rank has not sent: its place + 1, everywhere."""
    trainer = _trainer(case)
    trainer.begin(1)
    control: Any = dist.new_group(backend="gloo")
    assert trainer.replica.hook is not None
    assert trainer.optimizer is not None
    for _, tensor in trainer.replica.hook.state(rank):
        tensor.fill_(rank + 1.0)
    checkpoints = Checkpoints(folder, [], 2, control)
    checkpoints.save(trainer.replica, trainer.optimizer, Position(1, "m", 2, 0, 0.0))
    checkpoints.finish()


def load_unsent(rank: int, case: Case, folder: Path) -> set[float]:
    """What a rank of another number has not sent then."""
    trainer = _trainer(case)
    trainer.begin(1)
    control: Any = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(folder, [], 2, control)
    newest = checkpoints.newest(1, "m")
    assert newest is not None
    assert trainer.optimizer is not None
    assert trainer.replica.hook is not None
    checkpoints.load(newest[0], trainer.replica, trainer.optimizer)
    return {value for _, each in trainer.replica.hook.state(rank) for value in each.unique().tolist()}


def _trainer(case: Case) -> RankTrainer:
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    return trainer
