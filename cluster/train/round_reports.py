"""What is told of a round's steps as they are taken, and what is wished of them from outside."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roundtable.client.durable_files import append_synced, replace_synced
from roundtable.client.training.local_work import Stopped
from roundtable.client.training.metrics import Metrics, training_sums
from roundtable.client.worker.worker_order import Order
from roundtable.cluster.parallel.meshes import gather_text
from roundtable.cluster.parallel.routing import ExpertShares
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.stepping.compile_trial import CompileTrial
from roundtable.core.machine.process_facts import peak_memory
from roundtable.core.task import Task


@dataclass(frozen=True)
class StepReport:
    """One step as the whole group saw it.

    `norm` is the gradient's before clipping; `seconds` the step's, of which `waiting` for data and
    `communicating` with a collective under way, overlapped or not (None before it is first sampled).
    `memory` is the most bytes that this rank's device held so far; on a CPU, that its process did. `tokens`
    of the step's examples, 0 where they are none. `utilisation` is the share of all devices' peak that the
    model's own operations came to; None where the peak is not known. `skipped` counts the round's steps so
    far that were not taken, as float16 overflowed: their `norm` is infinite. `experts` is None where the
    model has none, or a pipeline shares its layers out.
    """

    step: int
    steps: int
    examples: int
    loss: float
    norm: float
    learning_rate: float
    seconds: float
    waiting: float
    memory: int
    tokens: int = 0
    communicating: float | None = None
    utilisation: float | None = None
    skipped: int = 0
    experts: ExpertShares | None = None


@dataclass
class Spread:
    """Mean, least, most and standard deviation of a figure over steps, as they come (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Takes one step's value."""
        self.count += 1
        away = value - self.mean
        self.mean += away / self.count
        self.squares += away * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    def to_plain(self) -> dict[str, float] | None:
        """As JSON; None where no step had the figure."""
        if not self.count:
            return None
        deviation = math.sqrt(self.squares / self.count)
        figures = {"mean": self.mean, "least": self.least, "most": self.most, "deviation": deviation}
        return {**figures, "steps": self.count}


REPORTS = "rounds"
_ROUNDS_KEPT = 1000
_JOBS_KEPT = 100
FIGURES = (
    *("seconds", "communicating", "waiting", "utilisation", "tokens_per_second", "examples_per_second"),
    *("expert_least", "expert_mean", "expert_most"),
)
"""What a round's report has a `Spread` of."""


@dataclass
class RoundFigures:
    """A round's steps in figures, on this rank; what crosses from rank to rank is texts of JSON.

    `trial` of compiled blocks goes on with each step, or says why there is none.
    """

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    memory: int = 0
    skipped: int = 0
    spreads: dict[str, Spread] = field(default_factory=lambda: {name: Spread() for name in FIGURES})
    trial: CompileTrial | str = ""

    def add(self, step: StepReport) -> None:
        """Takes one step."""
        self.steps += 1
        self.examples += step.examples
        self.tokens += step.tokens
        self.memory = max(self.memory, step.memory)
        self.skipped = step.skipped
        speed = 1 / max(step.seconds, 1e-9)
        for name, value in {
            "seconds": step.seconds,
            "communicating": step.communicating,
            "waiting": step.waiting,
            "utilisation": step.utilisation,
            "tokens_per_second": step.tokens * speed if step.tokens else None,
            "examples_per_second": step.examples * speed if step.examples else None,
            "expert_least": None if step.experts is None else step.experts.least,
            "expert_mean": None if step.experts is None else step.experts.mean,
            "expert_most": None if step.experts is None else step.experts.most,
        }.items():
            if value is not None:
                self.spreads[name].add(value)

    def seen_by(self, watch: Watch) -> Watch:
        """What takes each step here, and then shows it to `watch`."""

        def see(step: StepReport) -> None:
            self.add(step)
            if isinstance(self.trial, CompileTrial):
                self.trial.note(step.seconds - step.waiting)
            watch(step)

        return see

    def alone(self, memory_limit: float) -> dict[str, Any]:
        """The report where this is the only rank; `memory_limit` in bytes, 0 where it is not known."""
        return self._report([self._own()], memory_limit)

    def gathered(self, control: dist.ProcessGroup, memory_limit: float) -> dict[str, Any]:
        """The report of the round: this rank's figures, and each rank's memory, waiting and seconds a step.

        Collective. `memory_limit` is one device's, in bytes; 0 where it is not known.
        """
        ranks = [json.loads(text) for text in gather_text(json.dumps(self._own()), control)]
        return self._report(ranks, memory_limit)

    def _own(self) -> dict[str, float]:
        return {
            "memory": self.memory,
            "waiting": self.spreads["waiting"].mean,
            "seconds": self.spreads["seconds"].mean,
        }

    def _report(self, ranks: list[dict[str, float]], memory_limit: float) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "examples": self.examples,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "memory": max(rank["memory"] for rank in ranks),
            "memory_limit": memory_limit,
            **{name: spread.to_plain() for name, spread in self.spreads.items()},
            "compile": self.trial if isinstance(self.trial, str) else self.trial.said,
            "ranks": ranks,
        }


def report_round(
    figures: RoundFigures,
    order: Order,
    strategy: Strategy,
    folder: Path,
    control: dist.ProcessGroup,
    memory_limit: float,
    changes: list[dict[str, Any]] | None = None,
) -> None:
    """Keeps a round's figures at the silo, where `roundtable client report` reads them. Collective.

    `changes`: at which steps replicas were lost and joined, where they may. Raises OSError or ResourceError,
    on rank 0, where they cannot be written.
    """
    report = figures.gathered(control, memory_limit)
    if dist.get_rank() == 0:
        about = {"round": order.round, "attempt": order.attempt, "at": time.time()}
        plan = {"plan": str(strategy), "strategy": strategy.to_plain()}
        replicas = {} if changes is None else {"replicas": changes}
        keep_report(folder, order.job, {**about, **plan, **report, **replicas})


def keep_report(folder: Path, job: str, report: Mapping[str, Any]) -> None:
    """Appends a round's report to the job's, in the cluster's state folder; old jobs' and rounds' go."""
    place = folder / REPORTS
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{job}.jsonl"
    append_synced(file, json.dumps(report).encode() + b"\n")
    lines = file.read_bytes().splitlines(keepends=True)
    if len(lines) >= 2 * _ROUNDS_KEPT:
        replace_synced(file, lines[-_ROUNDS_KEPT:])
    files = sorted(place.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_JOBS_KEPT]:
        path.unlink(missing_ok=True)


def kept_reports(folder: Path, job: str) -> list[dict[str, Any]]:
    """The job's reports, oldest first; a line that a power cut left half written is passed over."""
    file = folder / REPORTS / f"{job}.jsonl"
    reports = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            reports.append(json.loads(line))
    return reports


@dataclass
class RoundProgress:
    """How far a round is: sums over the examples seen; float16 overflowed in `skipped` steps, not taken.

    The rest is of the steps since the ranks started, as a checkpoint does not hold it: `timed` examples took
    so many `seconds`, and `steps` of them were taken, whose norms are added up.
    """

    seen: int = 0
    loss_sum: float = 0.0
    skipped: int = 0
    timed: int = 0
    seconds: float = 0.0
    norm_sum: float = 0.0
    steps: int = 0


Watch = Callable[[StepReport], None]


@dataclass
class Wishes:
    """What is wished of a step from outside, as rank 0 knows it; all ranks hear of it with the step's loss.

    `stop`: the round is withdrawn. `due`: it is time for a checkpoint.
    """

    stop: Callable[[], bool] = lambda: False
    due: Callable[[], bool] = lambda: False

    def told(self) -> list[float]:
        """Both as numbers: rank 0's own, 0 on other ranks."""
        first = dist.get_rank() == 0
        return [float(first and self.stop()), float(first and self.due())]

    def obey(self, device: torch.device) -> None:
        """Raises Stopped, on every rank, where rank 0 wishes that; collective."""
        told = torch.tensor(self.told(), device=device)
        dist.all_reduce(told)
        if told[0].item():
            raise Stopped


def round_metrics(task: Task, done: RoundProgress, *, private: bool) -> Metrics:
    """What any silo tells, the gradient's norm and the speed; under privacy only the former.

    Norm and speed are means over the steps that the ranks took since they started.
    """
    metrics = training_sums(task, done.loss_sum, done.seen)
    if not private and done.steps:
        metrics["gradient_norm"] = (done.norm_sum, done.steps)
        metrics["examples_per_second"] = (done.timed / max(done.seconds, 1e-9), 1)
    return metrics


def most_memory(device: torch.device) -> int:
    """The most bytes held so far by the device, or by this process where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory() or 0
