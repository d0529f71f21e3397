"""Trains in a child process: whatever happens there is reported, and the agent lives on."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roundtable.client.failures import UNBEGUN, WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.gpus import shown_gpus
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, its_turn
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.executor import choose_device, part_of_batch
from roundtable.client.worker.lost_state import Trouble
from roundtable.client.worker.own_model import forget_unused
from roundtable.client.worker.process_settings import bases_of, settings_of
from roundtable.client.worker.rehearsal import Rehearsed
from roundtable.client.worker.worker_order import Order
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.process_facts import memory_kills
from roundtable.core.observability.logs import shareable
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import Writing
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import hash_of_task

_log = logging.getLogger("roundtable.agent")
_LINE_LIMIT = 16 << 20
_STOP_SECONDS = 5.0
_MOST_HALVINGS = 6
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP"}


class WorkerTrainer:
    """Keeps one training process running; where it dies, the next order starts another."""

    def __init__(self, config: AgentConfig, client: str, jobs: Path) -> None:
        self._config = config
        settings = settings_of(config, client, jobs)
        self._settings = asdict(settings)
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._rehearsal: asyncio.Task[Rehearsed] | None = None
        self._halvings: dict[tuple[str, str], int] = {}
        self._whole: set[tuple[str, str]] = set()
        self._code: dict[str, str] = {}
        self._jobs = jobs
        self._releasing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Spawns the process; it imports torch while the agent connects."""
        self._child = await _Child.spawn(self._config, self._settings)

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        """See Trainer."""
        answer = await self._do("train", work, progress)
        update = answer["trained"]
        metrics = {name: (value, count) for name, (value, count) in update["metrics"].items()}
        writing = Writing.from_plain(update["writing"])
        return TrainedUpdate(update["digest"], update["size"], update["examples"], metrics, writing)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        """See Trainer."""
        answer = await self._do("evaluate", work, progress)
        return {name: (value, count) for name, (value, count) in answer["evaluated"].items()}

    def release(self, job: str, *, met: bool) -> None:
        """See Trainer: what a job keeps here between rounds is removed, but for a model of the silo's own.

        The process drops a job when it is given another one.
        """
        for verb in ("train", "evaluate"):
            self._halvings.pop((job, verb), None)
            self._whole.discard((job, verb))
        releasing = asyncio.create_task(self._release(job))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, job: str) -> None:
        async with self._turn:
            if self._child is not None:
                await self._child.gone()  # A step that was called off writes no more.
            await asyncio.to_thread(forget_unused, self._jobs, job)

    async def close(self) -> None:
        """See Trainer."""
        await asyncio.gather(*self._releasing)
        await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            await self._child.end()
            self._child = None

    async def _do(self, verb: str, work: StepWork, progress: ProgressListener) -> dict[str, Any]:
        """Does the order; out of memory, does it again with half as many examples at once, and so on."""
        key = (work.step.job, verb)
        first: WorkFailed | None = None
        while True:
            halvings = self._halvings.get(key, 0)
            try:
                return await self._order(verb, work, halvings, progress)
            except WorkFailed as failure:
                if failure.kind != "out_of_memory":
                    raise self._not_in_parts(key, first, failure) if first else failure from None
                if failure.whole or halvings >= self._most_halvings(verb, work):
                    raise
                first = failure
                self._halvings[key] = halvings + 1
                count = part_of_batch(work.job, halvings + 1, evaluation=verb == "evaluate")
                action = (
                    f"reduced the batch size: no more than {count} examples in memory at once, from now on"
                )
                work.trouble(failure.kind, failure.detail, action)

    def _most_halvings(self, verb: str, work: StepWork) -> int:
        """How often a batch can be halved; 0 where parts of a batch would not be the same training."""
        batch = part_of_batch(work.job, 0, evaluation=verb == "evaluate")
        # The silo has paid for a round of DP-SGD when it begins, and DP-SGD takes parts of batches anyway.
        paid = verb == "train" and isinstance(work.job.privacy, ExampleLevel)
        if paid or (work.step.job, verb) in self._whole:
            return 0
        return min(_MOST_HALVINGS, batch.bit_length() - 1)

    def _not_in_parts(self, key: tuple[str, str], first: WorkFailed, failure: WorkFailed) -> WorkFailed:
        """The failure to report where half a batch failed for another reason than the whole batch."""
        del self._halvings[key]
        self._whole.add(key)
        detail = f"{first.detail}; with parts of a batch: {failure.detail}"
        return WorkFailed("out_of_memory", detail, failure.trace)

    async def rehearse(self, order: Order, progress: ProgressListener) -> Rehearsed | None:
        """Tries a task in a process of its own, of which nothing stays for rounds; WorkFailed as for work.

        None where a step is worked on, or comes meanwhile: that goes first, and tries the same.
        """
        if self._turn.locked():
            return None
        rehearsal = self._rehearsal = asyncio.create_task(self._rehearse(order, progress))
        try:
            return await rehearsal
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            return None
        finally:
            self._rehearsal = None

    async def _rehearse(self, order: Order, progress: ProgressListener) -> Rehearsed:
        child = await _Child.spawn(self._config, self._settings)
        try:
            return Rehearsed(**(await child.do("rehearse", order, progress))["rehearsed"])
        finally:
            await child.end()

    async def _order(
        self, verb: str, work: StepWork, halvings: int, progress: ProgressListener
    ) -> dict[str, Any]:
        order = replace(order_of_work(work), halvings=halvings)
        async with its_turn(self._turn, work):
            if (rehearsal := self._rehearsal) is not None:
                rehearsal.cancel()
                await asyncio.wait([rehearsal])
            if self._child is not None and await self._child.gone():
                await self._end()
            await self._follow_code(order.task)
            if self._child is None:
                await self.start()
            assert self._child is not None
            if verb == "train":
                work.set_up(TrainingSetup(device=str(choose_device(self._config.device))))
            return await self._child.do(verb, order, progress, work.trouble)

    async def _follow_code(self, task: str) -> None:
        """Ends a process that has loaded other code of the task than its files hold: it imports once."""
        try:
            code = await asyncio.to_thread(hash_of_task, task, self._config.folder)
        except RoundtableError:
            return  # The process says what is wrong with it.
        if self._child is not None and self._code.get(task, code) != code:
            _log.info("the code of task %s has changed: it is loaded anew", task)
            await self._end()
        if self._child is None:
            self._code.clear()
        self._code[task] = code


class _Child:
    """One training process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._number = 0
        self._begun = False
        self._kills_before = memory_kills()
        self._output: deque[str] = deque(maxlen=20)
        self._doing: dict[str, Any] = {}
        self._listener = asyncio.create_task(self._listen())
        self._leaving = False
        self._withdrawing: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, config: AgentConfig, settings: dict[str, Any]) -> _Child:
        # A task needs no secrets of the agent's.
        environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        environment |= shown_gpus(config.policy.max_gpus, config.device, os.environ)[0]
        environment |= bases_of(config)
        if config.threads is not None:
            environment["OMP_NUM_THREADS"] = str(config.threads)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # No file in the silo's folder may stand in for a module of the same name.
            "-P",
            "-m",
            "roundtable.client.worker.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            cwd=config.folder,
            env=environment,
        )
        child = cls(process)
        child._write({"do": "begin", "settings": settings})
        return child

    async def gone(self) -> bool:
        """Whether the process has ended or announced its end; waits until a withdrawn order is over."""
        if self._withdrawing is not None:
            await asyncio.shield(self._withdrawing)
            self._withdrawing = None
        return self._leaving or self._process.returncode is not None

    async def do(
        self, verb: str, order: Order, progress: ProgressListener, trouble: Trouble | None = None
    ) -> dict[str, Any]:
        """Sends an order, and returns the answer; WorkFailed for a failure or the end of the process.

        `trouble` hears of incidents that do not end it.
        Cancelled, it asks the process to stop and kills it if it does not within a few seconds.
        """
        self._number += 1
        self._begun = False
        names = ("job", "round", "attempt", "phase")
        self._doing = {name: getattr(order, name) for name in names} if verb in ("train", "evaluate") else {}
        self._write({"do": verb, "number": self._number, "order": asdict(order)})
        try:
            return await self._answer(progress, trouble)
        except asyncio.CancelledError:
            self._withdrawing = asyncio.create_task(self._withdraw())
            raise

    async def end(self) -> None:
        """Closes the pipe, which ends the process; kills it if it lingers."""
        if self._withdrawing is not None:
            self._withdrawing.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        await self._listener

    async def _answer(self, progress: ProgressListener, trouble: Trouble | None = None) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if "progress" in message:
                done, total, loss = message["progress"]
                progress(done, total, math.nan if loss is None else loss)
            elif "trouble" in message:
                if trouble is not None:
                    trouble(*message["trouble"])
            elif "failed" in message:
                failure = message["failed"]
                self._leaving = message["leaving"]
                raise WorkFailed(failure["kind"], failure["detail"], failure["trace"], whole=failure["whole"])
            elif "begun" in message:
                self._begun = True
            elif "ready" in message:
                _log.debug("the training process is ready on %s", message["ready"])
            else:
                return message
        code = await self._process.wait()
        await self._listener
        raise _post_mortem(code, self._kills_before, list(self._output), begun=self._begun)

    async def _withdraw(self) -> None:
        self._write({"do": "stop", "number": self._number})
        try:
            await asyncio.wait_for(self._answer(lambda *seen: None), _STOP_SECONDS)
        except WorkFailed:
            pass
        except TimeoutError:
            _log.warning("the training process did not stop in time and is killed")
            self._kill()
            await self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _listen(self) -> None:
        """Copies what the task prints into the silo's log."""
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            _log.info("task: %s", text, extra={**self._doing, **shareable("output")})


def order_of_work(work: StepWork) -> Order:
    """The order for another process that this work is."""
    return Order(
        job=work.step.job,
        round=work.step.round,
        phase=work.step.phase,
        config=work.config,
        task=work.task,
        model=str(work.model),
        layout=work.layout,
        output=str(work.output),
        attempt=work.step.attempt,
        counted=work.kept,
        steps=work.steps,
        encoding=work.encoding,
    )


def _post_mortem(code: int, kills_before: int | None, output: list[str], *, begun: bool = True) -> WorkFailed:
    """The failure to report for a process that ended, by its status and the kernel's out-of-memory kills.

    `begun`: it had worked on batches.
    """
    trace = "\n".join(output)
    remedy = "a smaller batch_size needs less" if begun else UNBEGUN
    if code >= 0:
        return WorkFailed("node_failure", f"the training process ended with status {code}", trace)
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        kills = memory_kills()
        if kills is None or kills_before is None:
            guess = f"most likely by the system for want of memory; {remedy}"
            return WorkFailed(
                "out_of_memory",
                f"the training process was killed (SIGKILL), {guess}",
                trace,
                whole=not begun,
            )
        if kills > kills_before:
            return WorkFailed(
                "out_of_memory",
                "the system killed the training process for want of memory (its counter of such kills rose "
                f"from {kills_before} to {kills}); {remedy}",
                trace,
                whole=not begun,
            )
        return WorkFailed(
            "node_failure",
            "the training process was killed (SIGKILL); the system records no kill for want of memory, "
            "so a person or a service at the silo did it",
            trace,
        )
    if name in _CRASHES:
        return WorkFailed("task_error", f"the training process crashed ({name})", trace)
    return WorkFailed("node_failure", f"the training process was ended by {name}", trace)
