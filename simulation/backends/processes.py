"""Clients in several processes: this one and persistent workers beside it.

The model and the updates lie in shared memory; what passes between processes is JSON. A client is
sent to the worker that has its data already, as far as that leaves everyone with equal work; who
has nothing left takes over what others have not begun. A worker that dies is replaced and its
clients run again; a client that kills two workers has failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundtable.core.errors import ConfigError, ResourceError, TaskError
from roundtable.core.machine.stop_signals import KILL
from roundtable.core.workers.frames import Channel, PeerGone
from roundtable.core.workers.shared_vectors import SharedFloats, share_bytes
from roundtable.simulation.backend import Backend, Failed, Measured, Trained, Work, World
from roundtable.simulation.backends.local import make_local
from roundtable.simulation.backends.precision import mixed
from roundtable.simulation.backends.process_worker import WORKER, Answer, decode, start_message
from roundtable.simulation.backends.sequential import EVALUATED_TOGETHER
from roundtable.simulation.world.simulated_clients import DATA_BUDGET, Clients

_LOG = logging.getLogger(__name__)
_DEATHS_OF_A_CLIENT = 2
_DEATHS_IN_A_ROW = 6
_AHEAD = 2
_COMMAND = "from roundtable.simulation.backends.process_worker import main; main()"


@dataclass
class _Order:
    """What everyone works at now. `queues` hold places in `work` that nobody was given yet, one queue for
    this process and one for each worker; `left` counts the answers that are still to come."""

    op: str
    work: Sequence[Work]
    round: int = 0
    rows: Sequence[Tensor] = ()
    queues: list[deque[int]] = field(default_factory=list)
    left: int = 0


@dataclass
class _Worker:
    """A process, and the places that it was given and has not answered, in order, by message."""

    number: int
    process: subprocess.Popen[bytes]
    channel: Channel
    ready: bool = False
    given: deque[deque[int]] = field(default_factory=deque)


class Processes:
    """`workers` processes in all, each with an `inner` backend."""

    def __init__(
        self,
        world: World,
        workers: int,
        inner: str = "sequential",
        device: str = "cpu",
        packed: bytes | None = None,
    ) -> None:
        """Workers find the task by the world's `reference`, or are given it as `packed` bytes."""
        self.world = world
        self._packed = None if packed is None else share_bytes(packed)
        self._inner = inner
        self._device = device
        self._budget = DATA_BUDGET // workers
        self._own: Backend = make_local(inner, world, Clients(world, self._budget), self._device_of(0))
        self._vector = SharedFloats.create(1, world.layout.size)
        self._shared_rows: SharedFloats | None = None
        self._deaths: Counter[int] = Counter()
        self._deaths_in_a_row = 0
        self._workers = [self._start(number) for number in range(1, workers)]

    @property
    def name(self) -> str:
        return "processes" if self._inner == "sequential" else self._inner

    @property
    def count(self) -> int:
        """Of the processes, this one among them."""
        return len(self._workers) + 1

    @property
    def chunk(self) -> int:
        return self._own.chunk * self.count

    @property
    def description(self) -> str:
        count = self.count
        if getattr(self._own, "refused", None):
            return f"{count} processes, in each {self._own.description}"
        how = ", in bfloat16 with float32 weights" if mixed(self.world) else ""
        return f"{count} processes with one thread each on {self._device}{how}"

    def rows(self, count: int) -> Tensor:
        if self._shared_rows is None or self._shared_rows.rows < count:
            if self._shared_rows is not None:
                self._shared_rows.close()
            self._shared_rows = SharedFloats.create(count, self.world.layout.sent.size)
            for worker in self._workers:
                self._send_memory(worker)
        return self._shared_rows.tensor

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        answers = dict(answer for answer in self._run("examples", work) if isinstance(answer, tuple))
        return [answers.get(item.client) for item in work]

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        self._vector.tensor[0].copy_(vector)
        for answer in self._run("train", work, round, rows):
            assert isinstance(answer, Trained | Failed)
            yield answer

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        self._vector.tensor[0].copy_(vector)
        for answer in self._run("evaluate", work, round):
            assert isinstance(answer, Measured | Failed)
            yield answer

    def wait(self) -> None:
        """Until every worker is ready; without it this process begins alone while they start."""
        nothing = _Order("examples", ())
        nothing.queues = self._shares(())
        while not all(worker.ready for worker in self._workers):
            for worker in self._readable(wait=True):
                list(self._read(worker, nothing))

    def close(self) -> None:
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            # A worker ends when its socket does; one that is deep in a client's training is ended.
            worker.process.kill()
            worker.process.wait()
        self._workers = []
        self._own.close()
        for shared in (self._vector, self._shared_rows):
            if shared is not None:
                shared.close()
        if self._packed is not None:
            os.close(self._packed)
            self._packed = None

    def _run(
        self, op: str, work: Sequence[Work], round: int = 0, rows: Sequence[Tensor] = ()
    ) -> Iterator[Answer]:
        order = _Order(op, work, round, rows, self._shares(work), len(work))
        while order.left:
            for worker in self._workers:
                self._feed(worker, order)
            mine = self._take(0, order, self._chunk(order))
            for answer in self._run_here(order, mine):
                order.left -= 1
                yield answer
            ready = self._readable(wait=not mine)
            while ready:
                for worker in ready:
                    yield from self._read(worker, order)
                # All that has come: a worker whose answers wait here is given nothing new.
                ready = self._readable(wait=False)

    def _chunk(self, order: _Order) -> int:
        return self._own.chunk if order.op == "train" else EVALUATED_TOGETHER

    def _least(self, order: _Order) -> int:
        """Of many clients that evaluate several go together: to put the model in place takes longer."""
        return max(1, min(8, len(order.work) // (8 * len(order.queues)))) if order.op == "evaluate" else 1

    def _shares(self, work: Sequence[Work]) -> list[deque[int]]:
        """Places for each process: where the client's data is, or would be, unless that is out of balance."""
        count = len(self._workers) + 1
        most = -(-len(work) // count)
        queues: list[deque[int]] = [deque() for _ in range(count)]
        homeless: list[int] = []
        for place, item in enumerate(work):
            home = queues[item.index % count]
            (home if len(home) < most else homeless).append(place)
        for place in homeless:
            min(queues, key=len).append(place)
        return queues

    def _take(self, number: int, order: _Order, most: int, busy: int = 0) -> list[int]:
        """The next places for a process: its own, or else up to half of the longest queue, from its end.

        Who still has `busy` clients to run leaves others what they will have begun by then. What a worker
        died of is never tried in this process.
        """
        own = order.queues[number]
        queue = own or max(order.queues, key=len)
        if not own and busy >= len(queue):
            return []
        # Towards the end in small bites, so that all are done at the same time.
        left = sum(map(len, order.queues))
        bite = max(self._least(order), left // (2 * len(order.queues)))
        most = min(most, len(own) or -(-len(queue) // 2), bite)
        taken: list[int] = []
        while len(taken) < most:
            place = self._next(queue, not own, here=number == 0, order=order)
            if place is None:
                break
            suspect = self._deaths[order.work[place].index] > 0
            if suspect and taken:
                queue.appendleft(place)
                break
            taken.append(place)
            if suspect:
                # Alone, so that if it happens again we know who it was.
                break
        return taken

    def _next(self, queue: deque[int], last: bool, here: bool, order: _Order) -> int | None:
        """Takes the first or last place of a queue that may be run here."""
        for _ in range(len(queue)):
            place = queue.pop() if last else queue.popleft()
            if not (here and self._deaths[order.work[place].index]):
                return place
            (queue.appendleft if last else queue.append)(place)
        return None

    def _run_here(self, order: _Order, places: Sequence[int]) -> Iterator[Answer]:
        work = [order.work[place] for place in places]
        vector = self._vector.tensor[0]
        if not work:
            return
        if order.op == "train":
            yield from self._own.train(order.round, vector, work, [order.rows[place] for place in places])
        elif order.op == "evaluate":
            yield from self._own.evaluate(order.round, vector, work)
        else:
            counts = self._own.examples(work)
            yield from ((item.client, count) for item, count in zip(work, counts, strict=True))

    def _feed(self, worker: _Worker, order: _Order) -> None:
        """Gives a worker enough that it need not wait for the next message."""
        while worker.ready and len(worker.given) < _AHEAD:
            places = self._take(worker.number, order, self._chunk(order), sum(map(len, worker.given)))
            if not places:
                return
            worker.given.append(deque(places))
            work: list[tuple[int, int | None, int | None]] = []
            tensors: list[dict[str, Tensor]] = []
            for place in places:
                item = order.work[place]
                work.append((item.index, len(tensors) if item.local else None, item.steps))
                if item.local:
                    tensors.append(dict(item.local))
            rows = [
                order.rows[place].storage_offset() // self.world.layout.sent.size
                for place in places
                if order.rows
            ]
            message = {"op": order.op, "round": order.round, "work": work, "rows": rows}
            try:
                worker.channel.send(message, tensors)
            except PeerGone:
                # The end of its stream tells the same, and is read where the dead are replaced.
                return

    def _readable(self, wait: bool) -> list[_Worker]:
        if not self._workers:
            return []
        if kept := [worker for worker in self._workers if worker.channel.keeps]:
            return kept
        channels = {worker.channel.fileno(): worker for worker in self._workers}
        ready, _, _ = select.select(channels, [], [], None if wait else 0)
        return [channels[number] for number in ready]

    def _read(self, worker: _Worker, order: _Order) -> Iterator[Answer]:
        """One message of a worker."""
        try:
            message, tensors, _ = worker.channel.receive()
        except PeerGone:
            yield from self._bury(worker, order)
            return
        if message["op"] == "ready":
            worker.ready = True
            self._send_memory(worker)
        elif message["op"] == "broken":
            raise TaskError(
                f"a worker process could not start: {message['detail']}; mend that, "
                "or set simulation.workers = 1"
            )
        elif message["op"] == "refused":
            raise ConfigError(message["detail"])
        else:
            order.left -= len(worker.given.popleft())
            self._deaths_in_a_row = 0
            yield from decode(message["answers"], tensors)

    def _bury(self, worker: _Worker, order: _Order) -> Iterator[Answer]:
        """Replaces a dead worker; what it had goes back, and what it was at is watched."""
        how = _cause_of_death(worker.process.wait())
        worker.channel.close()
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _DEATHS_IN_A_ROW:
            raise ResourceError(
                f"worker processes keep dying before they have done anything; the last one {how}. "
                'Lower simulation.workers, or see with simulation.backend = "sequential" what happens'
            )
        for number, chunk in enumerate(worker.given):
            for place in reversed(chunk):
                item = order.work[place]
                self._deaths[item.index] += number == 0
                if self._deaths[item.index] < _DEATHS_OF_A_CLIENT:
                    order.queues[worker.number].appendleft(place)
                    continue
                order.left -= 1
                kind = "out_of_memory" if worker.process.returncode == -KILL else "node_failure"
                yield Failed(
                    item.client, kind, f"two worker processes died while they ran it; the last one {how}"
                )
        names = ", ".join(order.work[place].client for place in (worker.given[0] if worker.given else ()))
        _LOG.warning("worker %d %s while it ran %s; it is replaced", worker.number, how, names or "nothing")
        self._workers[worker.number - 1] = self._start(worker.number)

    def _start(self, number: int) -> _Worker:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno())]
        environment = {**os.environ, WORKER: str(number), "OMP_NUM_THREADS": "1"}
        inherited = [fd for fd in (theirs.fileno(), self._packed) if fd is not None]
        try:
            process = subprocess.Popen(command, pass_fds=inherited, env=environment, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ResourceError(f"no worker process could be started: {error}") from error
        finally:
            theirs.close()
        worker = _Worker(number, process, Channel(ours, yields=True))
        with contextlib.suppress(PeerGone):
            device = self._device_of(number)
            worker.channel.send(start_message(self.world, self._packed, self._inner, device, self._budget))
        return worker

    def _device_of(self, number: int) -> str:
        """Workers take the devices in turn, several on one where there are fewer."""
        return f"cuda:{number % torch.cuda.device_count()}" if self._device == "cuda" else self._device

    def _send_memory(self, worker: _Worker) -> None:
        """Hands over the memory that the worker reads the model from and writes updates to."""
        for op, shared in (("vector", self._vector), ("rows", self._shared_rows)):
            if shared is not None and worker.ready:
                message = {"op": op, "rows": shared.rows, "columns": shared.columns}
                with contextlib.suppress(PeerGone):
                    worker.channel.send(message, descriptors=[shared.fd])


def _cause_of_death(code: int) -> str:
    if code == -KILL:
        return "was killed (signal 9, which is what the out-of-memory killer sends)"
    return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
