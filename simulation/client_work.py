"""Clients at work in virtual time: when each answers, and its training once that answer is due.

Clients are trained only when the first answer that the round still wants falls due, as many at once as it
wants: who drops out, comes too late or is withdrawn costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

from torch import Tensor

from roundtable.core.encodings import get_encoding
from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m
from roundtable.simulation.backend import Failed, Trained, World
from roundtable.simulation.client_updates import ClientUpdates
from roundtable.simulation.event_queue import AnswerDue, EventQueue, Leaves
from roundtable.simulation.world.devices import Transfer
from roundtable.simulation.world.dropouts import Dropouts
from roundtable.simulation.world.fleet import Fleet

Progress = Callable[[m.Step, int, int], None]
"""Told (step, done, total) after each of the clients that are run for a step."""


class ClientWork:
    """What clients were asked to do and have not answered, by their numbers.

    `answers` are those that have been trained and whose time has not come, each with the row of its update;
    `prepared` those that keep a finished update until a group is asked to mask.
    """

    def __init__(
        self, world: World, fleet: Fleet, updates: ClientUpdates, queue: EventQueue, progress: Progress
    ) -> None:
        self.answers: dict[int, tuple[int, Trained | Failed]] = {}
        self.prepared: dict[int, tuple[int, Trained]] = {}
        self._world = world
        self._fleet = fleet
        self._updates = updates
        self._queue = queue
        self._progress = progress
        self._due: dict[int, AnswerDue] = {}
        self._running: Iterator[None] = iter(())
        self._dropouts = Dropouts.of(world.job)
        self._sizes: dict[tuple[str, int], int] = {}

    def ask_to_train(self, step: m.Step, indices: Sequence[int], asked: Sequence[float]) -> None:
        """Works out when each client, asked at time `asked`, will answer, or how it will not."""
        for index, examples, at in zip(indices, self._examples(indices), asked, strict=True):
            self._schedule(index, step, examples, at)

    def withdraw(self, index: int, step: m.Step) -> None:
        """The client's answer does not matter any more; what it keeps for a group may matter in another."""
        self._due.pop(index, None)
        self.answers.pop(index, None)
        if step.phase == m.PREPARE:
            self.prepared.pop(index, None)

    def forget_prepared(self, indices: Iterable[int]) -> None:
        """Of the finished updates of these a model was made."""
        for index in indices:
            self.prepared.pop(index, None)

    def mask(self, step: m.Step, index: int) -> None:
        """The client is asked for its finished update, masked, and sends it."""
        seconds = self._fleet.devices.seconds(index, step.round, 0, self._way(index, step, training=False))
        leaves = self._fleet.devices.leaves_at(index, self._queue.now)
        if leaves <= self._queue.now + seconds:
            self._queue.push(leaves, Leaves(index, step))
            return
        row, answer = self.prepared[index]
        update = m.Update(answer.client, m.RowReference(row), answer.examples, answer.loss, answer.metrics)
        self._queue.push(self._queue.now + seconds, m.UpdateArrived(step, update))

    def clear(self) -> None:
        """Nobody's answer matters any more."""
        self._due.clear()
        self.answers.clear()

    def awaits(self, due: AnswerDue) -> bool:
        """Whether the answer still matters."""
        return self._due.get(due.index) == due

    def shared_failure(self) -> Failed | None:
        """A mistake in the task, where all of several clients that were tried have met one; the first's."""
        answers = [answer for _, answer in self.answers.values()]
        failed = [answer for answer in answers if isinstance(answer, Failed) and answer.kind == "task_error"]
        several = len(answers) > 1 or len(self._world.names) == 1
        return failed[0] if several and len(failed) == len(answers) else None

    def take_answer(self, index: int) -> tuple[int, Trained | Failed]:
        """The row of the client's update, and its answer; the client has no work any more."""
        del self._due[index]
        return self.answers.pop(index)

    def train(self, step: m.Step, vector: Tensor, wanted: int, held: Collection[int]) -> None:
        """Begins to train from `vector` up to `wanted` clients that were asked for `step`: those due next.

        `held` are the rows of updates that wait to be combined. The answers come with `go_on`.
        """
        same = (due for due in self._due.values() if due.step == step and due.index not in self.answers)
        due_next = heapq.nsmallest(wanted, same, key=lambda due: (due.at, due.index))
        chosen = sorted(due.index for due in due_next)
        kept = (row for row, _ in (*self.answers.values(), *self.prepared.values()))
        rows = self._updates.free_rows(len(chosen), {*held, *kept})
        self._running = self._run(step, chosen, rows, vector)

    def _run(
        self, step: m.Step, chosen: Sequence[int], rows: Sequence[int], vector: Tensor
    ) -> Iterator[None]:
        answers = self._updates.train(step, vector, chosen, rows)
        for done, (row, answer) in enumerate(answers, start=1):
            index = self._world.names.index_of(answer.client)
            # It may have been withdrawn since.
            if (due := self._due.get(index)) is not None and due.step == step:
                self.answers[index] = (row, answer)
            self._progress(step, done, len(chosen))
            yield

    def go_on(self, index: int) -> bool:
        """Trains on until the client's answer is there, and no longer: others train beside what follows from
        it. Whether it is there."""
        if index not in self.answers:
            for _ in self._running:
                if index in self.answers:
                    break
        return index in self.answers

    def finish(self) -> None:
        """Trains all who have begun: before anything else is asked of clients, or made of their updates."""
        for _ in self._running:
            pass

    def evaluate(self, step: m.Step, vector: Tensor, indices: Sequence[int], used: Container[int]) -> None:
        """Evaluates a model at all these clients; each takes the time of the model's way to it. `used` are
        those whose update is in it."""
        there = []
        for index in indices:
            dropout = self._dropouts.of_evaluation(step, index)
            if dropout is None:
                there.append(index)
            else:
                failed = Failed(self._world.names[index], "node_failure", dropout.detail)
                self._queue.push(self._queue.now, failure_event(failed, step))
        transfer = Transfer(self._updates.down_size(step.round + 1), 0)
        for done, answer in enumerate(self._updates.evaluate(step.round, vector, there, used), start=1):
            index = self._world.names.index_of(answer.client)
            at = self._queue.now + self._fleet.devices.seconds(index, step.round, 0, transfer)
            if isinstance(answer, Failed):
                self._queue.push(at, failure_event(answer, step))
            else:
                self._queue.push(at, m.Evaluated(answer.client, step, answer.metrics))
            self._progress(step, done, len(there))

    def _examples(self, indices: Sequence[int]) -> list[int]:
        """Examples that each client will process; not asked for where it makes no difference."""
        algorithm = self._world.job.algorithm
        if self._fleet.devices.instant:
            return [0] * len(indices)
        if (most := algorithm.steps) is not None:
            given = self._updates.steps
            return [given.get(index, most) * algorithm.batch_size for index in indices]
        return [algorithm.passes * count for count in self._updates.examples(indices)]

    def _bytes_of(self, client: str, round: int) -> int:
        chain = self._updates.chain_of(client)
        if (chain, round) not in self._sizes:
            self._sizes = {(chain, round): self._size(chain, round)}
        return self._sizes[chain, round]

    def _size(self, chain: str, round: int) -> int:
        sent = self._world.layout.sent
        encoding = get_encoding(chain, self._world.folder).over(sent).in_round(round)
        return encoding.encoded_size(sent.size) or min(encoding.size_bound(sent.size), 4 * sent.size)

    def _way(self, index: int, step: m.Step, *, training: bool) -> Transfer:
        """What travels for the step: where an update is kept, the model only, and in its group the update."""
        up = 0 if step.phase == m.PREPARE else self._bytes_of(self._world.names[index], step.round)
        return Transfer(self._updates.down_size(step.round) if training else 0, up)

    def _schedule(self, index: int, step: m.Step, examples: int, asked: float) -> None:
        self.prepared.pop(index, None)
        sizes = self._way(index, step, training=True)
        seconds = self._fleet.devices.seconds(index, step.round, examples, sizes)
        leaves = self._fleet.devices.leaves_at(index, asked)
        dropout = self._dropouts.of_training(step, index)
        if dropout is not None and dropout.kind == "dropout":
            leaves = min(leaves, asked + dropout.share * seconds)
        elif dropout is not None and asked + dropout.share * seconds < leaves:
            failed = Failed(self._world.names[index], "node_failure", dropout.detail)
            self._queue.push(asked + dropout.share * seconds, failure_event(failed, step))
            return
        if leaves <= asked + seconds:
            self._queue.push(leaves, Leaves(index, step))
            return
        self._due[index] = AnswerDue(asked + seconds, index, step)
        self._queue.push(asked + seconds, self._due[index])


def failure_event(answer: Failed, step: m.Step) -> m.ClientFailed:
    """The engine's event of a client that could not do its work."""
    return m.ClientFailed(
        step,
        SiteFailure(
            answer.client, step.round, step.attempt, step.phase, answer.kind, answer.detail, answer.trace
        ),
    )
