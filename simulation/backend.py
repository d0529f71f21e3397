"""What runs simulated clients: one small protocol, so that every way to run them plugs in alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from roundtable.client.training.local_work import LocalWork
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.factors.factor_pairs import factor_pairs
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.layout import Layout
from roundtable.core.models import Model
from roundtable.core.privacy_table import hides_figures
from roundtable.core.task import AnyTask
from roundtable.engine import NumberedNames

Metrics = Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class World:
    """What every backend needs to know: the job, its task and the model that it starts from.

    `reference` is how another process finds the task (see `load_task`), with the folder that it is
    relative to; None where the task is an object that only this process has. `folder` is the job's, where an
    algorithm or an encoding in a file lies.
    """

    job: JobConfig
    task: AnyTask
    initial: Model
    reference: tuple[str, Path] | None = None
    folder: Path | None = None

    @cached_property
    def algorithm(self) -> ClientAlgorithm:
        """The algorithm that the job names."""
        return make_algorithm(self.job.algorithm, self.folder)

    def local_work(self, round: int, vector: Tensor, item: Work) -> LocalWork:
        """A client's part of a round, as `client.training` takes it."""
        work = LocalWork(self.job, self.layout, vector, round, item.client, item.local, self.algorithm)
        return work.of_steps(item.steps)

    @property
    def layout(self) -> Layout:
        """The layout of the vectors."""
        return self.initial.layout

    @cached_property
    def names(self) -> NumberedNames:
        """The clients' names by number, held nowhere."""
        return NumberedNames(self.job.simulation.clients)


@dataclass(frozen=True)
class Work:
    """One client to run: its number, and its own tensors (rule `local`) from earlier rounds.

    `steps`: those that it was given by its speed; None where the job says them.
    """

    client: str
    index: int
    local: Mapping[str, Tensor] | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Trained:
    """A client has trained; its delta is in its row. `metrics` are named (sum, count)."""

    client: str
    examples: int
    steps: int
    loss: float
    metrics: Metrics = field(default_factory=dict)
    local: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A client has evaluated the model on its test data; empty where it has none."""

    client: str
    metrics: Metrics


@dataclass(frozen=True)
class Failed:
    """A client cannot answer: `kind` is one of FAILURE_KINDS, `detail` for people."""

    client: str
    kind: str
    detail: str
    trace: str = ""


class Backend(Protocol):
    """Runs clients. Answers come in any order, one for each piece of work.

    Every backend gives the result of `client/training/local_training.py`, whatever it does to be faster:
    the sequential one to the last bit, or equal to within float32 rounding where it says so
    (stacks draw dropout's masks otherwise).
    """

    @property
    def name(self) -> str:
        """Its name in the job file."""

    @property
    def description(self) -> str:
        """What it runs on, for people: "2 processes", "vectorised on cuda:0"."""

    @property
    def chunk(self) -> int:
        """How many clients it likes to be given at once, where the work is divided among several of it."""

    def rows(self, count: int) -> Tensor:
        """A float32 tensor [at least count, layout.sent.size] for updates, where this backend writes best.

        It may be on a GPU, in shared memory or a mapped file. Its contents are not initialised, and
        a later call may give the same memory again.
        """

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        """How many training examples each client has; None where only iterating would tell."""

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        """Trains each client from `vector`; the delta of `work[i]` goes to `rows[i]`.

        `vector` is float32 [layout.size] on CPU; each of `rows` is one row of what `rows()` gave
        last. The row of a client that failed has no meaning.
        """

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        """Evaluates the model `vector` of this round on each client's test data."""

    def close(self) -> None:
        """Ends processes and gives memory back; calling it twice is harmless."""


@runtime_checkable
class Summing(Protocol):
    """What a backend has in addition that can keep the updates where they were made."""

    @property
    def sums_updates(self) -> bool:
        """Whether it does so for this job; `rows` then has no columns."""

    def norms(self, indices: Sequence[int]) -> list[float]:
        """Euclidean norms of the updates of clients by number that have trained since `rows`."""

    def total(self, weights: Mapping[int, float]) -> Tensor:
        """Σ weight · update over clients by number that have trained since `rows` [layout.sent.size]."""


def can_sum(world: World) -> bool:
    """Whether the aggregate is a weighted mean that nobody has to see single updates for.

    What averaging low-rank factors loses, and the job's diagnosis, are figures of single updates.
    """
    job = world.job
    table, attack = job.aggregation, job.simulation.attack
    server = world.algorithm.server()
    return (
        not (server is not None and server.merges())
        and table.rule == "mean"
        and not job.transfer.automatic
        and get_encoding(job.transfer.up, world.folder).dense_dtype is not None
        and not table.pre
        and table.weighting in ("examples", "uniform")
        and table.validation.max_norm is None
        and not table.diagnosis
        and not factor_pairs(world.layout)
        and not hides_figures(job.privacy)
        and job.round.mode == "synchronous"
        and attack.get("name", "label_flip") == "label_flip"
        and not job.simulation.regions
        and job.cohort.balance != "directions"
    )
