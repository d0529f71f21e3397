"""Cases of distributed training, run on the ranks of one process group one after the other."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cluster_models import Language, Mixture, Wide
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from roundtable.client.durable_files import digest_of
from roundtable.client.training.evaluation import evaluate
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.cluster.parallel.anatomy import dissect
from roundtable.cluster.parallel.experts import MixtureOfExperts
from roundtable.cluster.parallel.forward_trace import fake_model, trace
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import plain_name, prepare_update, write_deltas
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import find_tensor_parallel
from roundtable.cluster.plan.arithmetic import count_work
from roundtable.cluster.plan.links import Links, known_links
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.stepping.rank_shares import ForwardClock
from roundtable.cluster.train import checkpoints as saving
from roundtable.cluster.train.checkpoint_places import Mirror, Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core import JobConfig, Layout, open_model
from roundtable.core.allocator import tune_for_transfers
from roundtable.core.task import Site, Task, initial_state

_VIEW = DeviceMesh.__getitem__


@dataclass(frozen=True)
class Case:
    """A strategy on a task; `tolerance` bounds max|a − b| / max|b| of any weight's change."""

    name: str
    strategy: Strategy
    task: Task
    algorithm: dict[str, Any]
    tolerance: float = 1e-10


class WithAdam(Language):
    """AdamW, in float64 so that differences mean mistakes."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


def adam(**model: Any) -> WithAdam:
    return WithAdam(dtype=torch.float64, **model)


class Balanced(WithAdam):
    """Experts whose even use is part of the loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"dtype": torch.float64, "block": Mixture, **options})

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss + sum(each.balance_loss for each in model.modules() if isinstance(each, MixtureOfExperts))


def experts() -> WithAdam:
    return adam(block=Mixture)


def wide() -> Wide:
    return Wide()


def job_of(case: Case) -> JobConfig:
    return JobConfig.model_validate({"task": "t", "seed": 7, "algorithm": case.algorithm})


def reference(case: Case) -> tuple[dict[str, Tensor], float, Tensor]:
    """(weights after one round, loss, start) of a single process."""
    job = job_of(case)
    model = initial_state(case.task, job.seed)
    assert isinstance(model, nn.Module)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = case.task.data(Site("silo"))
    update = train(case.task, model, data, LocalWork(job, layout, start, 1, "silo"))
    return {name: value.clone() for name, value in model.state_dict().items()}, update.loss, start


def bench_of(case: Case, meshes: Meshes) -> RankTrainer:
    job = job_of(case)
    mode, fake = fake_model(case.task)
    plan = None
    if case.strategy.mesh.tp > 1:
        data, _ = case.task.data(Site("silo"))
        batch = example_batch(data, 2)
        plan = find_tensor_parallel(fake, dissect(fake), trace(case.task, mode, fake, batch))
    # Fake tensors share their memory with nobody: ties are found on a real model.
    layout = Layout.of(initial_state(case.task, job.seed))
    device = torch.device("cpu")
    return RankTrainer(case.task, job, layout, case.strategy, meshes, device, "silo", plan)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Differences from the single process: of the weights, of the update's file, of the loss."""
    expected, loss, start = reference(case)
    meshes = Meshes(case.strategy.mesh, "cpu", apart=case.strategy.local_steps > 0)
    trainer = bench_of(case, meshes)
    # Counters do not travel.
    trainer.load(start, {name: torch.zeros((), dtype=torch.int64) for name in expected})
    data, _ = case.task.data(Site("silo"))
    done = RoundProgress()
    norms: list[float] = []
    trainer.fit(trainer.batches(data, 1), 1, done, lambda report: norms.append(report.norm))
    path = folder / f"{case.name}.update"
    if dist.get_rank() == 0:
        prepare_update(path, "float32", trainer.layout)
    dist.barrier()
    write_deltas(path, "float32", trainer.replica.tensors(), trainer.places, start, meshes)
    dist.barrier()
    worst = 0.0
    initial = trainer.layout.unflatten(start)
    for name, tensor in trainer.replica.tensors():
        if not tensor.is_floating_point():
            continue
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        change = (expected[name] - initial[name]).abs().max()
        worst = max(worst, float((whole - expected[name]).abs().max() / change))
    written = torch.from_file(str(path), size=trainer.layout.size)
    theirs = trainer.layout.flatten(expected) - start
    return {
        "weights": worst,
        "file": float((written - theirs).abs().max() / theirs.abs().max()),
        "loss": abs(done.loss_sum / done.seen - loss),
        "evaluated": _evaluated(trainer, case, expected, data),
        "norms": norms,
        "tolerance": case.tolerance,
    }


def _evaluated(trainer: RankTrainer, case: Case, expected: dict[str, Tensor], data: Any) -> float:
    """The difference of the metrics from one process's, on batches that no number of ranks divides."""
    test = tuple(part[:23] for part in data)
    size = -(-23 // (2 * trainer.strategy.mesh.data + 1))
    found = trainer.evaluate(test, size)
    alone = evaluate(
        case.task,
        initial_state(case.task, job_of(case).seed),
        test,
        trainer.layout,
        trainer.layout.flatten(expected).clone(),
        batch_size=size,
    )
    assert {name: count for name, (_, count) in found.items()} == {
        name: count for name, (_, count) in alone.items()
    }
    # A count of right answers jumps where a logit is rounded.
    names = ["loss"] if trainer.strategy.precision == "bfloat16" else list(alone)
    return max(abs(found[name][0] - alone[name][0]) / max(abs(alone[name][0]), 1.0) for name in names)


def fit_unevenly(rank: int, cases: list[Case], folder: Path) -> dict[str, dict[str, Any] | str]:
    """As run_cases, where rank 0 gets three of four examples."""
    made = bench_of

    def uneven(case: Case, meshes: Meshes) -> RankTrainer:
        trainer = made(case, meshes)
        trainer.shares = (0.75, 0.25)
        return trainer

    with mock.patch.dict(globals(), {"bench_of": uneven}):
        return run_cases(rank, cases, folder)


def shares_of_rounds(rank: int, case: Case, seconds: list[list[float]]) -> list[tuple[Any, list[int]]]:
    """(the next round's shares, this rank's examples of each step), where a forward pass of a rank takes so
    many seconds an example in each round.
    """
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    trainer.uneven = True
    data, _ = case.task.data(Site("silo"))
    now, found = [0.0], []
    trainer.replica.clock = ForwardClock(torch.device("cpu"), lambda: now[0])
    for number, each in enumerate(seconds, 1):
        loss, own = case.task.loss, each[rank]

        def slow(model: nn.Module, batch: Any, loss: Any = loss, own: float = own) -> Tensor:
            now[0] += own * len(batch[0])
            out: Tensor = loss(model, batch)
            return out

        taken = [sum(share.sizes) for share in trainer.batches(data, number)]
        with mock.patch.object(case.task, "loss", slow):
            trainer.fit(trainer.batches(data, number), number, RoundProgress(), lambda report: None)
        found.append((trainer.shares, taken))
    return found


def fit_and_report(rank: int, case: Case, peak: float) -> list[dict[str, Any]]:
    """What each step reports, of devices that could do `peak` operations a second."""
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    data, _ = case.task.data(Site("silo"))
    trainer.work, trainer.peak = count_work(case.task, example_batch(data, 2)), peak
    reports: list[dict[str, Any]] = []
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: reports.append(asdict(report)))
    return reports


def views_of_meshes(rank: int, case: Case, counts: list[int]) -> list[int]:
    """How many views of a device mesh are worked out in rounds of so many steps."""
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    data, _ = case.task.data(Site("silo"))
    found = []
    for number, steps in enumerate(counts, 1):
        trainer.job = job_of(replace(case, algorithm={**case.algorithm, "steps": steps}))
        with mock.patch.object(DeviceMesh, "__getitem__", autospec=True, side_effect=_VIEW) as asked:
            trainer.fit(trainer.batches(data, number), number, RoundProgress(), lambda report: None)
        found.append(asked.call_count)
    return found


def probe_twice(rank: int, folder: Path, per_node: int) -> tuple[Links, Links]:
    """The links of this rank's group, and what is kept of them."""
    control, device = _cpu_group(), torch.device("cpu")
    return known_links(folder, device, per_node, control), known_links(folder, device, per_node, control)


def save_midway(rank: int, case: Case, folder: Path) -> None:
    """Trains to the end, with a checkpoint after half of the steps that training goes on beside."""
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    data, _ = case.task.data(Site("silo"))
    batches, done = trainer.batches(data, 1), RoundProgress()
    checkpoints = Checkpoints(folder / "first", [Mirror(str(folder / "second"), "")], 2, _cpu_group())

    def watch(report: StepReport) -> None:
        if report.step == report.steps // 2:
            assert trainer.optimizer is not None
            position = Position(1, "m", report.step, done.seen, done.loss_sum)
            checkpoints.save(trainer.replica, trainer.optimizer, position)

    trainer.fit(batches, 1, done, watch)
    checkpoints.finish()


def save_and_stop(rank: int, case: Case, folder: Path) -> bool:
    """Trains some steps beyond a checkpoint, and stops without waiting; was it hashed by another thread?"""
    _, _, start = reference(case)
    trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
    trainer.load(start, {})
    data, _ = case.task.data(Site("silo"))
    batches, done = trainer.batches(data, 1), RoundProgress()
    checkpoints = Checkpoints(folder / "first", [Mirror(str(folder / "second"), "")], 2, _cpu_group())
    hashing: set[int] = set()

    def watch(report: StepReport) -> None:
        if report.step == 2:
            assert trainer.optimizer is not None
            position = Position(1, "m", report.step, done.seen, done.loss_sum)
            checkpoints.save(trainer.replica, trainer.optimizer, position)
        if report.step == 3:
            if checkpoints.sealing is not None:
                checkpoints.sealing.result(60)
            raise KeyboardInterrupt

    def hashed(path: Path) -> str:
        hashing.add(threading.get_ident())
        return digest_of(path)

    with mock.patch.object(saving, "digest_of", hashed), contextlib.suppress(KeyboardInterrupt):
        trainer.fit(batches, 1, done, watch)
    # A rank's process group ends with it, and not while another rank still writes.
    dist.barrier()
    return threading.get_ident() not in hashing and (rank > 0 or bool(hashing))


def resume(rank: int, cases: list[Case], folder: Path) -> dict[str, float]:
    """Goes on from the checkpoint under each strategy; differences from the single process at the end."""
    differences = {}
    for case in cases:
        expected, _, start = reference(case)
        trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
        trainer.load(torch.zeros_like(start), {})
        data, _ = case.task.data(Site("silo"))
        batches = trainer.batches(data, 1)
        checkpoints = Checkpoints(folder / "first", [Mirror(str(folder / "second"), "")], 2, _cpu_group())
        newest = checkpoints.newest(1, "m")
        assert newest is not None
        path, position = newest
        trainer.begin(1)
        assert trainer.optimizer is not None
        checkpoints.load(path, trainer.replica, trainer.optimizer)
        batches.load_state_dict({"position": position.step})
        trainer.fit(batches, 1, RoundProgress(position.seen, position.loss_sum), lambda report: None)
        worst = 0.0
        initial = trainer.layout.unflatten(start)
        for name, tensor in trainer.replica.tensors():
            whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            change = (expected[name] - initial[name]).abs().max()
            worst = max(worst, float((whole - expected[name]).abs().max() / change))
        differences[case.name] = worst
    return differences


def peak_memory(rank: int, case: Case, model: Path, folder: Path) -> dict[str, int]:
    """The most memory of this rank above its start while it loads, trains and writes, in bytes."""
    peaks = {}

    def phase(name: str) -> None:
        peaks[name] = max(seen) - before
        seen[:] = [_status("RssAnon")]

    tune_for_transfers()
    start = open_model(model)
    trainer = RankTrainer(
        case.task,
        job_of(case),
        start.layout,
        case.strategy,
        Meshes(case.strategy.mesh, "cpu"),
        torch.device("cpu"),
        "silo",
    )
    data, _ = case.task.data(Site("silo"))
    dist.barrier()
    # Pages of files that are mapped can go at any time; what counts is the process's own memory.
    before = _status("RssAnon")
    seen, ended = [before], threading.Event()
    watching = threading.Thread(target=_sample, args=(seen, ended))
    watching.start()
    trainer.load(start.vector, start.local)
    phase("load")
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
    phase("fit")
    path = folder / "update"
    if rank == 0:
        prepare_update(path, "float32", trainer.layout)
    dist.barrier()
    write_deltas(path, "float32", trainer.replica.tensors(), trainer.places, start.vector, trainer.meshes)
    phase("write")
    ended.set()
    watching.join()
    dist.barrier()
    return peaks


def _sample(seen: list[int], ended: threading.Event) -> None:
    while not ended.wait(0.001):
        seen.append(_status("RssAnon"))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def _cpu_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_cases(rank: int, cases: list[Case], folder: Path) -> dict[str, dict[str, Any] | str]:
    """All cases on this rank."""
    return {case.name: run_case(case, folder) for case in cases}


__all__ = [
    "Case",
    "adam",
    "bench_of",
    "experts",
    "job_of",
    "plain_name",
    "reference",
    "run_case",
    "run_cases",
]
