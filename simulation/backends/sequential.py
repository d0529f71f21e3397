"""The plain reference: one client after the other, in this process, on one thread."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import preparation
from roundtable.client.training.batches import count_examples
from roundtable.client.training.evaluation import Measure, evaluation
from roundtable.client.training.local_training import module_of, train
from roundtable.client.training.local_work import Execution
from roundtable.client.training.silo_account import Protection
from roundtable.client.training.tuning import tuner
from roundtable.core.errors import ConfigError, InvalidUpdate, RoundtableError
from roundtable.core.plugins.doors import described, foreign_trace
from roundtable.core.privacy_table import OwnNoise
from roundtable.core.task import initial_state, told
from roundtable.privacy import NoiseSource, SeededNoise
from roundtable.simulation.backend import Failed, Measured, Trained, Work, World
from roundtable.simulation.backends.module_condition import ModuleCondition
from roundtable.simulation.backends.precision import mixed, trained_task
from roundtable.simulation.world.simulated_clients import Clients

ROWS_IN_MEMORY = 1 << 30
EVALUATED_TOGETHER = 128

Answer = TypeVar("Answer")


class Sequential:
    """Clients one by one through `client.training`, on one device."""

    name = "sequential"
    chunk = 1

    def __init__(self, world: World, clients: Clients | None = None, device: str = "cpu") -> None:
        self.world = world
        self.clients = clients or Clients(world)
        self.device = device
        self._trained = trained_task(world, torch.device(device))
        self._model: nn.Module | Mapping[str, Tensor] = initial_state(world.task, world.job.seed)
        self._rows = torch.empty(0, world.layout.sent.size)

    @property
    def description(self) -> str:
        how = ", in bfloat16 with float32 weights" if mixed(self.world) else ""
        return f"one client after the other on {self.device}, one thread{how}"

    @property
    def module(self) -> nn.Module:
        """The one in which clients train, to be borrowed. Raises TaskError for arrays."""
        return module_of(self._model)

    def rows(self, count: int) -> Tensor:
        if len(self._rows) < count:
            self._rows = allocate_rows(count, self.world.layout.sent.size)
        return self._rows

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        return [count_examples(self.clients.data(item.index)[0]) for item in work]

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        for item, row in zip(work, rows, strict=True):
            yield answer_of(item, partial(self._train, round, vector, item, row))

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        left = deque(work)
        while left:
            yield from self._evaluate_some(round, vector, left)

    def close(self) -> None:
        self._rows = torch.empty(0, self.world.layout.sent.size)

    def _train(self, round: int, vector: Tensor, item: Work, row: Tensor) -> Trained:
        world = self.world
        update = train(
            self._trained,
            self._model,
            self.clients.data(item.index)[0],
            world.local_work(round, vector, item),
            Execution(device=self.device, out=row, protection=self._protection(round, item)),
        )
        return Trained(item.client, update.examples, update.steps, update.loss, update.metrics, update.local)

    def _protection(self, round: int, item: Work) -> Protection | None:
        """What a silo does for itself, with noise that can be repeated; the simulation keeps the accounts."""
        job = self.world.job
        if not isinstance(job.privacy, OwnNoise):
            return None

        def source(purpose: str) -> NoiseSource:
            return SeededNoise(job.seed, round, item.client, f"own {purpose}")

        return Protection(lambda privacy, charge: None, source, "first")

    def _evaluate_some(self, round: int, vector: Tensor, left: deque[Work]) -> list[Measured | Failed]:
        """The next clients, as many as need nothing else in the model: putting it in place takes longer than
        a small client's test data."""
        first, world = left[0], self.world
        work, device = world.local_work(round, vector, first), torch.device(self.device)
        prepare = preparation(
            work,
            device,
            lambda *how: tuner(world.task, self.clients.data(first.index)[0], work, device)(*how),
        )
        apart = prepare is not None or told(world.task)
        place = evaluation(
            world.task,
            self._model,
            world.layout,
            vector,
            device=self.device,
            local=first.local,
            prepare=prepare,
            context=work.evaluation_context(device),
            batch_size=world.job.evaluation_batch,
        )
        answers: list[Measured | Failed] = []
        with ExitStack() as stack:
            opened = answer_of(first, lambda: (self.clients.data(first.index), self._opened(stack, place)))
            if isinstance(opened, Failed):
                left.popleft()
                return [opened]
            condition = ModuleCondition(self._model) if isinstance(self._model, nn.Module) else None
            while left and len(answers) < EVALUATED_TOGETHER:
                if answers and (apart or not self._fits(left[0], first, condition)):
                    break
                item = left.popleft()
                following = () if apart else islice(left, EVALUATED_TOGETHER - len(answers) - 1)
                answers.append(answer_of(item, partial(self._measured, opened[1], item, following)))
        return answers

    def _opened(self, stack: ExitStack, place: AbstractContextManager[Measure]) -> Measure:
        return stack.enter_context(place)

    def _fits(self, item: Work, first: Work, condition: ModuleCondition | None) -> bool:
        """Whether a client can do with the model as it now is. No data are made where chance is seeded."""
        alike = not (first.local or item.local) and self.clients.hold(item.index)
        return alike and (condition is None or condition.holds())

    def _measured(self, measure: Measure, item: Work, following: Iterable[Work]) -> Measured:
        """What the client measures; those `following` it may be measured in the same condition."""
        return Measured(item.client, measure(self.clients.data(item.index)[1]))


def answer_of(item: Work, run: Callable[[], Answer]) -> Answer | Failed:
    """What `run` gives, or the failure of this client that its error amounts to.

    A ConfigError is no client's failure but the job's, and passes.
    """
    try:
        return run()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a task is foreign code: whatever it raises is its client's failure
        return failure_of(item.client, error)


def failure_of(client: str, error: Exception) -> Failed:
    """An error of a client's work as the record of it."""
    if isinstance(error, InvalidUpdate):
        kind = "invalid_update"
    elif isinstance(error, MemoryError | torch.OutOfMemoryError):
        kind = "out_of_memory"
    else:
        kind = "task_error"
    detail = str(error) if isinstance(error, RoundtableError) else described(error)
    return Failed(client, kind, detail, foreign_trace(error))


def allocate_rows(count: int, columns: int, limit: int = ROWS_IN_MEMORY) -> Tensor:
    """Memory for so many updates, or above `limit` bytes a mapped file that is gone when we are."""
    if 4 * count * columns <= limit:
        return torch.empty(count, columns)
    with tempfile.TemporaryFile(prefix="roundtable-rows-") as file:
        file.truncate(4 * count * columns)
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(count, columns)))


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread inside: the bits of a client's training must not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
