"""Processes beside this one that work on blocks: blocks lie in shared memory, the rest passes over sockets.

A process that dies is started again for the next pass. Its blocks are worked on here meanwhile, with the same
bits, so that a round loses nothing but time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.rows.row_passes import ShardOrder
from roundtable.aggregation.shards.shard_worker import block_in
from roundtable.core.workers.frames import Channel, PeerGone
from roundtable.core.workers.shared_vectors import SharedFloats

_LOG = logging.getLogger(__name__)
_DEATHS_IN_A_ROW = 3
_START = 60.0
"""Seconds after which a process that is not ready is ended: rounds wait for it."""
_PAUSE = 600.0
"""Seconds before a process is tried again that was not ready, or died time and again."""
_ANSWER = 300.0
"""Seconds after which a process that has given no answer is ended."""


class _NoAnswer(Exception):
    """Why a process gave none."""


class _Ended(_NoAnswer):
    """It had ended before, which has been told."""


@dataclass(frozen=True)
class ShardCommand:
    """What runs in a process: the module's `main` is called, its arguments begin with the socket."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()

    def start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """The process, to which the socket belongs. OSError where it cannot be started."""
        code = f"from {self.module} import main; main()"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), *self.arguments],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )


class ShardProcess:
    """A process, its connection, and the memory of each of its lanes."""

    def __init__(self, command: ShardCommand) -> None:
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._lanes = 0
        self._answers: dict[int, SimpleQueue[Any]] = {}
        self._memories: dict[int, SharedFloats] = {}
        self._mapped: dict[int, SharedFloats] = {}
        self._deaths = 0
        self._not_before = 0.0

    def begin(self) -> None:
        """Starts the process, unless it runs or is not to be tried now. It is not waited for."""
        if self.process is not None and self.process.poll() is None and self._channel is not None:
            return
        self.end()
        if time.monotonic() < self._not_before:
            return
        ours, theirs = socket.socketpair()
        try:
            self.process = self.command.start(theirs)
        except OSError as error:
            ours.close()
            self._refuse(f"it could not be started: {error}")
            return
        finally:
            theirs.close()
        self._channel = Channel(ours)

    def lanes(self) -> int:
        """How many blocks it takes at a time, once it has begun; 0 where there is none now."""
        if self._channel is None or self._lanes:
            return self._lanes
        if not select.select([self._channel], [], [], _START)[0]:
            self._refuse(f"it was not ready after {_START:.0f} s")
            self.end()
            return 0
        try:
            hello, _, _ = self._channel.receive()
        except PeerGone:
            self._died()
            return 0
        if hello["op"] != "ready":
            self._refuse(hello["detail"])
            self.end()
            return 0
        self._lanes = hello["lanes"]
        self._answers = {lane: SimpleQueue() for lane in range(self._lanes)}
        reading = (self._channel, list(self._answers.values()))
        threading.Thread(target=_hand_out, args=reading, name="shard answers", daemon=True).start()
        return self._lanes

    def block(self, lane: int, values: torch.Tensor) -> torch.Tensor:
        """A copy of the block in the lane's memory. OSError or MemoryError where there is not enough."""
        floats, memory = values.numel() * values.itemsize // 4, self._memories.get(lane)
        if memory is None or memory.columns < floats:
            if memory is not None:
                memory.close()
            memory = self._memories[lane] = SharedFloats.create(1, floats)
        return block_in(memory, _name_of(values.dtype), *values.shape).copy_(values)

    def ask(self, lane: int, order: ShardOrder, block: torch.Tensor) -> np.ndarray:
        """The answer for the block in the lane's memory. Raises _NoAnswer."""
        channel, memory = self._channel, self._memories[lane]
        if channel is None:
            raise _Ended
        plain, arrays = order.to_plain()
        message = {"op": "work", "lane": lane, "dtype": _name_of(block.dtype), "shape": list(block.shape)}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        try:
            with self._sending:
                if self._mapped.get(lane) is not memory:
                    hello = {"op": "memory", "lane": lane, "floats": memory.columns}
                    channel.send(hello, descriptors=[memory.fd])
                    self._mapped[lane] = memory
                channel.send({**message, "order": plain}, [tensors])
            answer, results = self._answers[lane].get(timeout=_ANSWER)
        except (PeerGone, Empty, OSError) as error:
            raise self._died() from error
        if answer["op"] == "gone":
            raise self._died()
        if answer["op"] == "failed":
            raise _NoAnswer(answer["detail"])
        self._deaths = 0
        result: np.ndarray = results[0]["result"].numpy()
        return result

    def end(self) -> str:
        """Ends the process, if there is one; says how it ended."""
        if self.process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.process.kill()
        code = self.process.wait()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.connection.shutdown(socket.SHUT_RDWR)
            self._channel.close()
        self.process = self._channel = None
        self._lanes = 0
        self._mapped = {}
        return f"it died of signal {-code}" if code < 0 else f"it ended with code {code}"

    def close(self) -> None:
        """Ends the process and gives the memory back."""
        if self._channel is not None:
            # The process ends by itself at this, and takes leave of whom it has to.
            with contextlib.suppress(OSError):
                self._channel.connection.shutdown(socket.SHUT_RDWR)
        self.end()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()

    def _died(self) -> _NoAnswer:
        with self._sending:
            if self.process is None:
                return _Ended()
            self._deaths += 1
            how = self.end()
        if self._deaths >= _DEATHS_IN_A_ROW:
            self._refuse(f"{how}, the third time without an answer")
        return _NoAnswer(how)

    def _refuse(self, reason: str) -> None:
        self._deaths = 0
        self._not_before = time.monotonic() + _PAUSE
        _LOG.warning(
            "%s cannot be used, rounds are combined without it for %.0f s: %s",
            self.command.name,
            _PAUSE,
            reason,
        )


class ShardProcesses:
    """Workers that are processes, or that a process speaks for. They start with the first large round."""

    def __init__(self, commands: Sequence[ShardCommand]) -> None:
        self.processes = [ShardProcess(command) for command in commands]
        self._threads: ThreadPoolExecutor | None = None
        self._free: SimpleQueue[tuple[ShardProcess, int]] = SimpleQueue()
        self._lanes = 0

    def ready(self) -> int:
        for process in self.processes:
            process.begin()
        free = [(process, lane) for process in self.processes for lane in range(process.lanes())]
        # In turn, so that every process has one block before any has two.
        free.sort(key=lambda each: each[1])
        if len(free) != self._lanes:
            self._shut()
            self._threads = ThreadPoolExecutor(max(1, len(free)), thread_name_prefix="shards")
        self._lanes = len(free)
        self._free = SimpleQueue()
        for each in free:
            self._free.put(each)
        return self._lanes

    def give(self, order: ShardOrder, values: torch.Tensor) -> Future[np.ndarray]:
        assert self._threads is not None
        process, lane = self._free.get()
        try:
            block = process.block(lane, values)
        except (OSError, MemoryError) as error:
            self._free.put((process, lane))
            _LOG.warning("no memory for a block that workers share, which is worked on here: %s", error)
            answer: Future[np.ndarray] = Future()
            answer.set_result(order.made_of(values))
            return answer
        return self._threads.submit(self._answer, process, lane, order, block)

    def close(self) -> None:
        self._shut()
        for process in self.processes:
            process.close()

    def _answer(self, process: ShardProcess, lane: int, order: ShardOrder, block: torch.Tensor) -> np.ndarray:
        try:
            return process.ask(lane, order, block)
        except _Ended:
            return order.made_of(block)
        except _NoAnswer as error:
            name = process.command.name
            _LOG.warning("%s gave no answer for a block, which is worked on here: %s", name, error)
            return order.made_of(block)
        finally:
            self._free.put((process, lane))

    def _shut(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)


def _hand_out(channel: Channel, lanes: list[SimpleQueue[Any]]) -> None:
    """Gives each answer to who waits for it, and at the end tells all of them."""
    try:
        while True:
            message, results, _ = channel.receive()
            lanes[message["lane"]].put((message, results))
    except (PeerGone, OSError, ValueError):
        for lane in lanes:
            lane.put(({"op": "gone"}, []))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
