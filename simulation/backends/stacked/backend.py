"""Clients in stacks: many train at once on one device, each as the sequential backend would train it.

On a GPU a client's own kernels are too small to keep it busy; those of hundreds of clients together are
not. Who cannot be stacked, or all where the task cannot, runs by recorded steps instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import AlgorithmRound, trained_slices
from roundtable.client.training.batches import as_tensors, epoch_orders, ordering_of
from roundtable.client.training.local_work import steps_of
from roundtable.client.training.metrics import training_sums
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import InvalidUpdate, RoundtableError
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.task import AnyTask, ArrayTask, initial_state
from roundtable.simulation.backend import Failed, Measured, Trained, Work, World, can_sum
from roundtable.simulation.backends.precision import mixed, trained_task
from roundtable.simulation.backends.sequential import ROWS_IN_MEMORY, allocate_rows, answer_of, failure_of
from roundtable.simulation.backends.stacked.pool import Parts, Pool, kind_of, pinned
from roundtable.simulation.backends.stacked.schedule import Turn, turns
from roundtable.simulation.backends.stacked.stack import Stack, Unstackable, Where
from roundtable.simulation.backends.vectorised import Vectorised, why_not
from roundtable.simulation.backends.vectorised.backend import loss_not_finite, weights_not_finite
from roundtable.simulation.world.simulated_clients import DATA_BUDGET, Clients

log = logging.getLogger("roundtable.simulation")

# On a CPU a stack pays while it is not much larger than the cache.
_CPU_BUDGET = 64 << 20
_CHECKED_CLIENTS = 4
_COLUMNS = 1 << 14

_Kept = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Client:
    """One to train: its work, its number of examples, and the row for its update."""

    work: Work
    examples: int
    row: Tensor


def why_not_stacked(world: World) -> str | None:
    """Why a job's clients cannot be stacked, as far as can be told without running one."""
    if type(world.algorithm).second is not ClientAlgorithm.second:
        return f"algorithm {world.job.algorithm.name!r} trains a second model at each client"
    if (hook := world.algorithm.hooked()) is not None:
        return f"algorithm {world.job.algorithm.name!r} has gradients or weights of its own by its {hook}"
    if world.algorithm.measures:
        name = world.job.algorithm.name
        return f"algorithm {name!r} measures each client's model on all of its data before the first step"
    if world.algorithm.rests():
        return f"algorithm {world.job.algorithm.name!r} lets parameters of each client's model rest"
    return why_not(world, staying=False)


class Stacked:
    """The backend `stacked` in one process, on one device.

    `budget` is the memory for a stack and `data_budget` that for training data on the device, in
    bytes; unless given they follow from what the device has. Where only the mean of the updates is
    wanted, the rows that it gives are empty, and updates stay on the device.
    """

    name = "stacked"
    chunk = 16

    def __init__(
        self,
        world: World,
        clients: Clients | None = None,
        device: str | None = None,
        *,
        budget: int | None = None,
        data_budget: int | None = None,
    ) -> None:
        self.world = world
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.clients = clients or Clients(world)
        self.fallback = Vectorised(world, self.clients, str(self.device))
        self.refused = why_not_stacked(world)
        self.sums_updates = can_sum(world)
        transfer = world.job.transfer
        self._dense = None if transfer.automatic else get_encoding(transfer.up, world.folder).dense_dtype
        self._budget = budget
        self._data_budget = data_budget
        self._pool: Pool | None = None
        self._stack: Stack | None = None
        self._most = 0
        self._kept = torch.empty(0, world.layout.sent.size)
        self._trained: Sequence[slice] = ()
        self._slots: dict[int, int] = {}

    @property
    def description(self) -> str:
        if self.refused is not None:
            fallback = self.fallback.description
            if self.fallback.refused == self.refused:
                return fallback.replace("not recorded because", "neither stacked nor recorded because")
            return f"{fallback}; not stacked because {self.refused}"
        most = f", {self._most} clients at once" if self._most else ""
        how = ", in bfloat16 with float32 weights" if mixed(self.world) else ""
        chance = " (dropout drawn for all of them together)" if self._stack and self._stack.random else ""
        return f"stacked clients on {self.device}{most}{how}{chance}"

    def rows(self, count: int) -> Tensor:
        self._slots = {}
        if len(self._kept) < count:
            self._kept = self._allocate(count)
        return torch.empty(count, 0) if self.sums_updates else self._kept

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        return self.fallback.examples(work)

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        if rows and not len(rows[0]):
            rows = [self._kept[slot] for slot in self._place(work)]
        alone: list[tuple[Work, Tensor]] = []
        together: list[_Client] = []
        for item, row in zip(work, rows, strict=True):
            examples = self._examples(item.index)
            if examples is None:
                alone.append((item, row))
            else:
                together.append(_Client(item, examples, row))
        if together and self._stack is None and self.refused is None:
            self._check(round, vector, together[:_CHECKED_CLIENTS])
        stacked = self._train_together(round, vector, together) if self.refused is None else ()
        if self.refused is not None:
            alone = list(zip(work, rows, strict=True))
        for answer in itertools.chain(stacked, self._train_alone(round, vector, alone)):
            if isinstance(answer, Failed):
                self._slots.pop(self.world.names.index_of(answer.client), None)  # For its replacement.
            yield answer

    def _place(self, work: Sequence[Work]) -> list[int]:
        """Where the clients' updates stay: for each that has no place yet the first that nobody has."""
        taken = set(self._slots.values())
        free = (slot for slot in itertools.count() if slot not in taken)
        for item in work:
            if item.index not in self._slots:
                self._slots[item.index] = next(free)
        return [self._slots[item.index] for item in work]

    def norms(self, indices: Sequence[int]) -> list[float]:
        """Euclidean norms of the updates of clients by number that have trained since `rows`."""
        slots = torch.tensor([self._slots[index] for index in indices], device=self._kept.device)
        squares = torch.zeros(len(slots), dtype=torch.float64, device=self._kept.device)
        for start in range(0, self._kept.shape[1], _COLUMNS):
            block = self._kept[:, start : start + _COLUMNS].index_select(0, slots)
            squares += block.double().square_().sum(1)
        norms: list[float] = squares.sqrt_().tolist()
        return norms

    def total(self, weights: Mapping[int, float]) -> Tensor:
        """Σ weight · update over clients by number that have trained since `rows` [layout.sent.size]."""
        slots = torch.tensor([self._slots[index] for index in weights], device=self._kept.device)
        factors = torch.tensor(list(weights.values()), dtype=torch.float64, device=self._kept.device)
        total = torch.empty(self.world.layout.sent.size, device=self._kept.device)
        for start in range(0, len(total), _COLUMNS):
            block = self._kept[:, start : start + _COLUMNS].index_select(0, slots)
            total[start : start + _COLUMNS] = factors @ block.double()
        return total.cpu()

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        return self.fallback.evaluate(round, vector, work)

    def close(self) -> None:
        self.fallback.close()
        self._pool = self._stack = None
        self._kept = torch.empty(0, self.world.layout.sent.size)

    def _allocate(self, count: int) -> Tensor:
        """Where updates go: a GPU's memory if they stay there, else memory that it can write to by itself."""
        size = 4 * count * self.world.layout.sent.size
        if self.device.type == "cuda" and self.sums_updates and size <= self._free():
            return torch.empty(count, self.world.layout.sent.size, device=self.device)
        if self.device.type == "cuda" and size <= ROWS_IN_MEMORY:
            return torch.empty(count, self.world.layout.sent.size, pin_memory=True)
        return allocate_rows(count, self.world.layout.sent.size)

    def _free(self) -> int:
        """What one thing may take of a GPU's memory: updates, the stack, or half of it data."""
        return int(torch.cuda.mem_get_info(self.device)[0]) // 3

    def _examples(self, index: int) -> int | None:
        """How many examples a client has that can be stacked with the others; None if it cannot."""
        held = self._pool.count(index) if self._pool is not None else None
        if held is not None or self.refused is not None:
            return held
        try:
            parts = self._load(index)
        except RoundtableError:
            return None  # The client fails where it runs alone.
        if not parts or not len(parts[0]):
            return None
        if self._pool is None:
            usual = DATA_BUDGET if self.device.type == "cpu" else self._free() // 2
            self._pool = Pool(parts, self.device, self._data_budget or usual)
        return len(parts[0]) if kind_of(parts) == self._pool.kind else None

    def _load(self, index: int) -> Parts:
        """A client's training data as tensors; none for a data set of another kind."""
        return as_tensors(self.clients.data(index)[0]) or ()

    def _check(self, round: int, vector: Tensor, some: Sequence[_Client]) -> None:
        """Whether the task can be stacked, and how many clients at once; said once if it cannot."""
        model = initial_state(self.world.task, self.world.job.seed)
        assert isinstance(model, nn.Module)
        task = trained_task(self.world, self.device)
        assert not isinstance(task, ArrayTask)
        layout = self.world.layout.model
        stack = Stack(task, model, layout, self.device)
        stack.anchor.copy_(vector[: layout.size])
        self._trained = trained_slices(model, layout)
        first = next(iter(self._turns(round, vector, some)))
        assert self._pool is not None
        batch = self._pool.take(torch.from_numpy(first.rows).to(self.device))
        try:
            with isolated_randomness(derive_seed(self.world.job.seed, "stacks"), self.device):
                stack.check(batch, self.world.algorithm.step())
        except Unstackable as error:
            self.refused = str(error)
            log.warning("clients are not stacked because %s", error)
            return
        usual = _CPU_BUDGET if self.device.type == "cpu" else self._free()
        self._most = max(1, (self._budget or usual) // stack.bytes_each)
        self._stack = stack

    def _train_together(
        self, round: int, vector: Tensor, clients: Sequence[_Client]
    ) -> Iterator[Trained | Failed]:
        # Who has most comes first, so that those who still train lie side by side.
        left = sorted(clients, key=lambda client: -client.examples)
        while left:
            stacks = -(-len(left) // self._most)
            now = left[: -(-len(left) // stacks)]
            try:
                answers = self._train_stack(round, vector, now)
            except torch.OutOfMemoryError:
                self._most = max(1, len(now) // 2)
                log.warning("%s has no memory for %d clients at once", self.device, len(now))
                if len(now) > 1:
                    continue
                answers = list(self._train_alone(round, vector, [(now[0].work, now[0].row)]))
            yield from answers
            left = left[len(now) :]

    def _train_stack(self, round: int, vector: Tensor, clients: Sequence[_Client]) -> list[Trained | Failed]:
        """Nothing waits for the device before the end of the last step."""
        stack, step, size = self._stack, self.world.algorithm.step(), self.world.layout.model.size
        assert stack is not None
        assert self._pool is not None
        plan = list(self._turns(round, vector, clients))
        rows = self._sent(np.concatenate([turn.rows.ravel() for turn in plan]))
        rate = self.world.job.algorithm.rate(round)
        rules = [self._rules(round, vector, client) for client in clients]
        constants = [each.constant for each in rules if each.constant is not None]
        stack.anchor.copy_(pinned(vector[:size], self.device), non_blocking=True)
        stack.begin(len(clients), step, torch.stack(constants) if constants else None)
        seed = derive_seed(self.world.job.seed, round, clients[0].work.client, "training")
        losses = []
        with isolated_randomness(seed, self.device) if stack.random else nullcontext():
            for turn, flat in zip(plan, torch.split(rows, [turn.rows.size for turn in plan]), strict=True):
                batch = self._pool.take(flat.view(turn.rows.shape))
                losses.append(stack.step(self._where(turn.clients), batch, step, rate))
        changes = stack.weights.sub_(stack.anchor)
        finite = changes.sum(1, dtype=torch.float64).isfinite()
        steps = np.bincount(np.concatenate([turn.clients for turn in plan]), minlength=len(clients)).tolist()
        ended = [
            answer_of(client.work, partial(self._put, client, change, own, count))
            for client, change, own, count in zip(clients, changes, rules, steps, strict=True)
        ]
        values = torch.cat(losses).cpu().numpy()
        place = f"round {round}"
        return list(_answers(self.world.task, clients, plan, values, finite.tolist(), ended, place))

    def _rules(self, round: int, vector: Tensor, client: _Client) -> AlgorithmRound:
        """A client's round as the algorithm begins it."""
        work = self.world.local_work(round, vector, client.work)
        steps = steps_of(work.job, client.examples)
        context = Context(self.world.job.title, round, work.client, steps, self.device, self.world.job.seed)
        return AlgorithmRound(work, context, self._trained)

    def _put(self, client: _Client, change: Tensor, rules: AlgorithmRound, steps: int) -> _Kept:
        """Ends a client's round: its update goes to its row; gives what it keeps."""
        if not rules.ends:
            client.row.copy_(self._rounded(change), non_blocking=True)
            return {}
        own = torch.empty(self.world.layout.sent.size)
        own[: len(change)].copy_(change)
        kept = rules.end(own, steps)
        client.row.copy_(self._rounded(own), non_blocking=True)
        return kept

    def _train_alone(
        self, round: int, vector: Tensor, work: Sequence[tuple[Work, Tensor]]
    ) -> Iterator[Trained | Failed]:
        for item, row in work:
            own = row if row.device.type == "cpu" else torch.empty(row.shape)
            for answer in self.fallback.train(round, vector, [item], [own]):
                row.copy_(self._rounded(own))
                yield answer

    def _turns(self, round: int, vector: Tensor, clients: Sequence[_Client]) -> Iterator[Turn]:
        """The steps of these clients, whose data are on the device from here on."""
        assert self._pool is not None
        job = self.world.job
        starts = self._pool.hold([client.work.index for client in clients], self._load)
        orders = []
        for client, start in zip(clients, starts, strict=True):
            work = self.world.local_work(round, vector, client.work)
            epochs = epoch_orders(client.examples, **ordering_of(work.job, round, work.client))
            orders.append([start + order.numpy() for order in epochs])
        return turns(orders, job.algorithm.batch_size)

    def _where(self, places: np.ndarray) -> Where:
        first, last = int(places[0]), int(places[-1])
        return slice(first, last + 1) if last - first + 1 == len(places) else self._sent(places)

    def _sent(self, values: np.ndarray) -> Tensor:
        return pinned(torch.from_numpy(values), self.device).to(self.device, non_blocking=True)

    def _rounded(self, update: Tensor) -> Tensor:
        """As it would have travelled, where nobody else will see it."""
        return update.to(self._dense) if self.sums_updates and self._dense is not None else update


def _answers(
    task: AnyTask,
    clients: Sequence[_Client],
    plan: Sequence[Turn],
    losses: np.ndarray,
    finite: Sequence[bool],
    ended: Sequence[_Kept | Failed],
    place: str,
) -> Iterator[Trained | Failed]:
    """`losses` are those of all turns, one after the other."""
    steps, seen = np.zeros(len(clients), int), np.zeros(len(clients), int)
    sums = np.zeros(len(clients))
    errors: dict[int, InvalidUpdate] = {}
    ends = np.cumsum([len(turn.clients) for turn in plan])
    for turn, values in zip(plan, np.split(losses, ends[:-1]), strict=True):
        size = turn.rows.shape[1]
        steps[turn.clients] += 1
        seen[turn.clients] += size
        sums[turn.clients] += values.astype(np.float64) * size
        for bad in np.flatnonzero(~np.isfinite(values)):
            where = int(turn.clients[bad])
            errors.setdefault(where, loss_not_finite(float(values[bad]), int(steps[where]), place))
    for number, client in enumerate(clients):
        error = errors.get(number) or (None if finite[number] else weights_not_finite())
        if error is not None:
            yield failure_of(client.work.client, error)
            continue
        kept = ended[number]
        if isinstance(kept, Failed):
            yield kept
            continue
        loss, count = float(sums[number]), int(seen[number])
        metrics = training_sums(task, loss, count)
        yield Trained(client.work.client, client.examples, int(steps[number]), loss / count, metrics, kept)
