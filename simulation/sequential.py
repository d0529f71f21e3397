"""The plain reference: one client after the other, in this process, on one thread."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.client.batches import count_examples
from roundtable.client.silo_account import Protection
from roundtable.client.training import SILO_LEVELS, evaluate, train
from roundtable.core.errors import ConfigError, InvalidUpdate, RoundtableError
from roundtable.core.task import initial_state
from roundtable.privacy import NoiseSource, SeededNoise
from roundtable.simulation.backend import Failed, Measured, Trained, Work, World
from roundtable.simulation.clients import Clients

ROWS_IN_MEMORY = 1 << 30

Answer = TypeVar("Answer")


class Sequential:
    """Clients one by one through `client.training`, on one device."""

    name = "sequential"
    chunk = 1

    def __init__(self, world: World, clients: Clients | None = None, device: str = "cpu") -> None:
        self.world = world
        self.clients = clients or Clients(world)
        self.device = device
        self._model: nn.Module | Mapping[str, Tensor] = initial_state(world.task, world.job.seed)
        self._rows = torch.empty(0, world.layout.size)

    @property
    def description(self) -> str:
        return f"one client after the other on {self.device}, one thread"

    def rows(self, count: int) -> Tensor:
        if len(self._rows) < count:
            self._rows = allocate_rows(count, self.world.layout.size)
        return self._rows

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        return [count_examples(self.clients.data(item.index)[0]) for item in work]

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        for item, row in zip(work, rows, strict=True):
            yield answer_of(item, partial(self._train, round, vector, item, row))

    def evaluate(self, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        for item in work:
            yield answer_of(item, partial(self._evaluate, vector, item))

    def close(self) -> None:
        self._rows = torch.empty(0, self.world.layout.size)

    def _train(self, round: int, vector: Tensor, item: Work, row: Tensor) -> Trained:
        world = self.world
        update = train(
            world.task,
            self._model,
            self.clients.data(item.index)[0],
            world.job,
            world.layout,
            vector,
            round=round,
            client=item.client,
            device=self.device,
            local=item.local,
            out=row,
            protection=self._protection(round, item),
        )
        return Trained(item.client, update.examples, update.steps, update.loss, update.metrics, update.local)

    def _protection(self, round: int, item: Work) -> Protection | None:
        """What a silo does for itself, with noise that can be repeated; the simulation keeps the accounts."""
        job = self.world.job
        if job.privacy.get("level") not in SILO_LEVELS:
            return None

        def source(purpose: str) -> NoiseSource:
            return SeededNoise(job.seed, round, item.client, f"own {purpose}")

        return Protection(lambda privacy, charge: None, source, "first")

    def _evaluate(self, vector: Tensor, item: Work) -> Measured:
        world = self.world
        test = self.clients.data(item.index)[1]
        return Measured(
            item.client,
            evaluate(
                world.task, self._model, test, world.layout, vector, device=self.device, local=item.local
            ),
        )


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
    detail = str(error) if isinstance(error, RoundtableError) else f"{type(error).__name__}: {error}"
    return Failed(client, kind, detail, "".join(traceback.format_exception(error)))


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
