"""The training process: `python -m roundtable.client.worker.worker`.

JSON lines on its standard input are settings, orders and stops; JSON lines on its standard output
are progress and results. Vectors are files. What a task prints goes to standard error. The process
ends when its input does, and on Linux it dies with the agent.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from roundtable.core.allocator import importing
from roundtable.core.machine.stop_signals import leave_signals_to_owner

with importing():
    from roundtable.client.failures import Role, diagnose
    from roundtable.client.trainer import TrainedUpdate
    from roundtable.client.training.local_work import Stopped
    from roundtable.client.worker.executor import Executor, Settings
    from roundtable.client.worker.ranks_update import RanksUpdate
    from roundtable.client.worker.rehearsal import ACTS, BATCHES, rehearse
    from roundtable.client.worker.worker_order import Order
    from roundtable.core.machine.process_facts import die_with_parent, held_memory
    from roundtable.core.seeds import isolated_randomness

_log = logging.getLogger("roundtable.worker")
_PROGRESS_SECONDS = 0.5
_MEMORY_SECONDS = 0.1
_FATAL = ("out_of_memory", "gpu_error")


_SAYING = threading.Lock()


class _Commands:
    """Reads the agent's lines in a thread, so that a stop arrives while an order is worked on."""

    def __init__(self, source: TextIO) -> None:
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._returned: list[dict[str, Any]] = []
        self.withdrawn = 0
        self._source = source
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._source:
            command = json.loads(line)
            if command["do"] == "stop":
                self.withdrawn = command["number"]
            else:
                self._orders.put(command)
        # The agent is gone; training for nobody would only hold the device.
        os._exit(0)

    def take(self) -> dict[str, Any]:
        """The next one, once it is there."""
        return self._returned.pop() if self._returned else self._orders.get()

    def waiting(self) -> bool:
        """Whether there is one."""
        return bool(self._returned) or not self._orders.empty()

    def give_back(self, command: dict[str, Any]) -> None:
        """It is taken next."""
        self._returned.append(command)


def main() -> None:
    """Serves orders until the input ends."""
    leave_signals_to_owner()
    die_with_parent(int(sys.argv[1]))
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # A DataLoader's workers close their standard input, and would wait for the thread that reads it here.
    source = os.fdopen(os.dup(0))
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    os.dup2(sys.stdin.fileno(), 0)
    commands = _Commands(source)
    begin = commands.take()
    if (most := begin["settings"].get("memory")) is not None:
        role = Role(*begin["role"])
        threading.Thread(target=_watch_memory, args=(most, role, answers), daemon=True).start()
    executor = _attempt(answers, lambda: Executor(Settings(**begin["settings"])))
    if executor is None:
        return
    _say(answers, {"ready": str(executor.device)})
    while True:
        _serve(executor, commands.take(), commands, answers)


class _OrderInHand:
    """What the agent is told while an order is worked on; `begun` is whether batches are by now."""

    def __init__(self, number: int, commands: _Commands, answers: TextIO) -> None:
        self.begun = False
        self._number = number
        self._commands = commands
        self._answers = answers
        self._reported = 0.0

    def progress(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self._say({"progress": [done, total, loss if math.isfinite(loss) else None]})

    def before_batch(self) -> None:
        """Raises Stopped once the order is withdrawn."""
        if not self.begun:
            self.begun = True
            self._say({"begun": True})
        if self._commands.withdrawn == self._number:
            raise Stopped

    def trouble(self, kind: str, detail: str, action: str) -> None:
        self._say({"trouble": [kind, detail, action]})

    def ranked(self, rank: int) -> None:
        """What the silo's memory has chosen."""
        self._say({"rank": rank})

    def begins(self, act: int) -> None:
        """One of ACTS."""
        if ACTS[act] in BATCHES:
            self.before_batch()
        self._say({"progress": [act, len(ACTS), None]})

    def _say(self, message: dict[str, Any]) -> None:
        _say(self._answers, message)


class _Ahead:
    """The next round's training while its order is on the way: a guess, until the order says the same.

    Orders to evaluate the job's models are done in between. Any other order than the one that was guessed
    ends it, and is done as if nothing had been trained; so is that one where what the silo goes on from is
    lost meanwhile.
    """

    def __init__(self, executor: Executor, done: Order, commands: _Commands, answers: TextIO) -> None:
        self.order = done.next()
        self.told: _OrderInHand | None = None
        self._executor = executor
        self._commands = commands
        self._answers = answers
        self._batches = 0

    def progress(self, done: int, total: int, loss: float) -> None:
        if self.told is not None:
            self.told.progress(done, total, loss)

    def before_batch(self) -> None:
        """Raises Stopped once the guess is wrong, or its order is withdrawn."""
        if self.told is None and self._commands.waiting():
            self._look()
        if self.told is None:
            self._batches += 1
        else:
            self.told.before_batch()

    def arrives(self) -> Order:
        """The real order."""
        while self.told is None:
            self._look()
        return self.order

    def _look(self) -> None:
        command = self._commands.take()
        order = Order.of(command["order"]) if "order" in command else None
        if order is not None and command["do"] == "train" and self._foretold(order):
            self.order = order
            self.told = _OrderInHand(command["number"], self._commands, self._answers)
            _say(self._answers, {"ahead": self._batches})
        elif order is not None and command["do"] == "evaluate" and order.job == self.order.job:
            # Training goes on with the weights and the numbers that it would have had.
            with isolated_randomness(0, self._executor.device), self._executor.evaluate_between():
                _serve(self._executor, command, self._commands, self._answers)
        else:
            self._commands.give_back(command)
            raise Stopped

    def _foretold(self, order: Order) -> bool:
        return self.order.foretold(order) and self._executor.has_kept(order)


def _go_ahead(executor: Executor, done: Order, commands: _Commands, answers: TextIO) -> None:
    """Trains the round behind the order `done`; what fails before its own is here fails again with it."""
    ahead = _Ahead(executor, done, commands, answers)
    try:
        trained = executor.train(
            ahead.order, ahead.progress, ahead.before_batch, lambda *said: None, ahead.arrives
        )
        _say(answers, _trained(executor, ahead.order, trained))
    except Stopped:
        if ahead.told is not None:
            _say(answers, {"stopped": True})
    except Exception as error:  # noqa: BLE001 - a task may raise anything
        if ahead.told is not None:
            _fail(answers, error, begun=ahead.told.begun)
            return
        found = diagnose(error, begun=True)
        _log.warning("round %d was begun ahead, and is given up: %s", ahead.order.round, found.detail)
        if found.kind in _FATAL:
            os._exit(1)


def _trained(executor: Executor, order: Order, update: TrainedUpdate) -> dict[str, Any]:
    """`next`: whether the round behind it can be trained before its order is here."""
    return {"trained": asdict(update), "next": executor.can_go_ahead(order)}


def _serve(executor: Executor, command: dict[str, Any], commands: _Commands, answers: TextIO) -> None:
    if command["do"] == "rest":
        return
    if command["do"] == "ahead":
        _go_ahead(executor, Order.of(command["order"]), commands, answers)
        return
    order, told = Order.of(command["order"]), _OrderInHand(command["number"], commands, answers)

    def work() -> dict[str, Any]:
        if command["do"] == "begin":
            RanksUpdate(executor.settings, order).begin(told.trouble)
            return {"done": True}
        if command["do"] == "shape":
            shaped = RanksUpdate(executor.settings, order).shape()
            return {"shaped": [shaped.digest, shaped.size, asdict(shaped.writing)]}
        if command["do"] == "rehearse":
            tried = rehearse(executor.settings, order, executor.device, told.begins)
            return {"rehearsed": asdict(tried)}
        if command["do"] == "check":
            executor.check(order)
            return {"done": True}
        if command["do"] == "train":
            return _trained(
                executor,
                order,
                executor.train(order, told.progress, told.before_batch, told.trouble, ranked=told.ranked),
            )
        return {"evaluated": executor.evaluate(order, told.before_batch)}

    try:
        result = _attempt(answers, work, lambda: told.begun)
    except Stopped:
        result = {"stopped": True}
    if result is not None:
        _say(answers, result)


def _attempt(answers: TextIO, work: Any, begun: Callable[[], bool] = lambda: False) -> Any:
    """Does an order and returns the result; reports whatever the task raises, and returns None then.

    `begun`: whether batches have been worked on.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a task may raise anything, and the agent must hear of it
        _fail(answers, error, begun=begun())
        return None


def _fail(answers: TextIO, error: Exception, *, begun: bool) -> None:
    diagnosis = diagnose(error, begun=begun)
    # Memory stays fragmented and a CUDA context broken: the next order gets a fresh process, but where it was
    # known before.
    leaving = diagnosis.kind in _FATAL and not diagnosis.halvings
    _say(answers, {"failed": asdict(diagnosis), "leaving": leaving})
    if leaving:
        os._exit(1)


def _watch_memory(most: int, role: Role, answers: TextIO) -> None:
    """Ends the process as out_of_memory once it holds more than `most` bytes of main memory.

    What is resident counts, not the address space: a CUDA context maps far more than it holds. Pages of files
    do not: the system takes them back.
    """
    while (held := held_memory()) is not None:
        if held > most:
            detail = (
                f"{role.name} holds {held >> 20} MiB, and this silo allows {most >> 20} MiB "
                f"([policy] max_memory); {role.remedy}"
            )
            failed = {"kind": "out_of_memory", "detail": detail, "trace": "", "whole": False}
            _say(answers, {"failed": failed, "leaving": True})
            os._exit(1)
        time.sleep(_MEMORY_SECONDS)


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    with _SAYING:
        answers.write(json.dumps(message) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
