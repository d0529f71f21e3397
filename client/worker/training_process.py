"""A training process as its agent holds it: orders in, answers out, and what its end tells."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from roundtable.client.failures import TRAINING, Role, WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.gpus import shown_gpus
from roundtable.client.trainer import ProgressListener
from roundtable.client.worker.lost_state import Trouble
from roundtable.client.worker.process_settings import bases_of
from roundtable.client.worker.worker_order import Order
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.process_facts import memory_kills
from roundtable.core.observability.logs import shareable

_log = logging.getLogger("roundtable.agent")
_LINE_LIMIT = 16 << 20
_STOP_SECONDS = 5.0
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP"}


class EndedAhead(WorkFailed):
    """The process has ended while it trained ahead, before it took up the order: another one can do that."""


class TrainingProcess:
    """One training process."""

    def __init__(self, process: asyncio.subprocess.Process, role: Role) -> None:
        self._process = process
        self._role = role
        self._number = 0
        self._begun = False
        self._kills_before = memory_kills()
        self._output: deque[str] = deque(maxlen=20)
        self._doing: dict[str, Any] = {}
        self._listener = asyncio.create_task(self._listen())
        self._leaving = False
        self._goes_ahead = False
        self._heard = False
        self._withdrawing: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, config: AgentConfig, settings: dict[str, Any], role: Role = TRAINING
    ) -> TrainingProcess:
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
        child = cls(process, role)
        child._write({"do": "begin", "settings": settings, "role": role})
        return child

    async def gone(self) -> bool:
        """Whether the process has ended or announced its end; waits until a withdrawn order is over."""
        if self._withdrawing is not None:
            await asyncio.shield(self._withdrawing)
            self._withdrawing = None
        return self._leaving or self._process.returncode is not None

    async def do(
        self,
        verb: str,
        order: Order,
        progress: ProgressListener,
        trouble: Trouble | None = None,
        ranked: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Sends an order, and returns the answer; WorkFailed for a failure or the end of the process,
        EndedAhead where that was not the order's.

        `trouble` hears of incidents that do not end it, `ranked` of the rank that the silo's memory chooses.
        Cancelled, it asks the process to stop and kills it if it does not within a few seconds.
        """
        self._number += 1
        self._begun = self._heard = False
        names = ("job", "round", "attempt", "phase")
        self._doing = {name: getattr(order, name) for name in names} if verb in ("train", "evaluate") else {}
        self._write({"do": verb, "number": self._number, "order": asdict(order)})
        try:
            return await self._answer(progress, trouble, ranked)
        except asyncio.CancelledError:
            self._withdrawing = asyncio.create_task(self._withdraw())
            raise

    def go_ahead(self, order: Order) -> None:
        """Has the process train what comes behind an order that it has done, until it gets another one."""
        self._goes_ahead = True
        self._write({"do": "ahead", "order": asdict(order)})

    def rest(self) -> None:
        """Has it give that up."""
        self._write({"do": "rest"})

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

    async def _answer(
        self,
        progress: ProgressListener,
        trouble: Trouble | None = None,
        ranked: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            self._heard = True
            if "progress" in message:
                done, total, loss = message["progress"]
                progress(done, total, math.nan if loss is None else loss)
            elif "trouble" in message:
                if trouble is not None:
                    trouble(*message["trouble"])
            elif "rank" in message:
                if ranked is not None:
                    ranked(message["rank"])
            elif "failed" in message:
                failure = message["failed"]
                self._leaving = message["leaving"]
                raise WorkFailed(
                    failure["kind"],
                    failure["detail"],
                    failure["trace"],
                    whole=failure["whole"],
                    halvings=failure.get("halvings", 0),
                )
            elif "begun" in message:
                self._begun = True
            elif "ahead" in message:
                job, round = self._doing["job"], self._doing["round"]
                _log.info(
                    "%s, round %d: began %d batches ahead", job, round, message["ahead"], extra=self._doing
                )
            elif "ready" in message:
                _log.debug("%s is ready on %s", self._role.name, message["ready"])
            else:
                return message
        code = await self._process.wait()
        await self._listener
        output = list(self._output)
        found = post_mortem(code, self._kills_before, output, begun=self._begun, role=self._role)
        if self._goes_ahead and not self._heard:
            raise EndedAhead(found.kind, found.detail, found.trace, whole=found.whole)
        raise found

    async def _withdraw(self) -> None:
        self._write({"do": "stop", "number": self._number})
        try:
            await asyncio.wait_for(self._answer(lambda *seen: None), _STOP_SECONDS)
        except WorkFailed:
            pass
        except TimeoutError:
            _log.warning("%s did not stop in time and is killed", self._role.name)
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


def post_mortem(
    code: int,
    kills_before: int | None,
    output: list[str],
    *,
    begun: bool = True,
    role: Role = TRAINING,
) -> WorkFailed:
    """The failure to report for a process that ended, by its status and the kernel's out-of-memory kills.

    `begun`: it had worked on batches.
    """
    trace = "\n".join(output)
    remedy = role.remedy if begun else role.unbegun
    if code >= 0:
        return WorkFailed("node_failure", f"{role.name} ended with status {code}", trace)
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        kills = memory_kills()
        if kills is None or kills_before is None:
            guess = f"most likely by the system for want of memory; {remedy}"
            return WorkFailed(
                "out_of_memory",
                f"{role.name} was killed (SIGKILL), {guess}",
                trace,
                whole=not begun,
            )
        if kills > kills_before:
            return WorkFailed(
                "out_of_memory",
                f"the system killed {role.name} for want of memory (its counter of such kills rose "
                f"from {kills_before} to {kills}); {remedy}",
                trace,
                whole=not begun,
            )
        return WorkFailed(
            "node_failure",
            f"{role.name} was killed (SIGKILL); the system records no kill for want of memory, so a person "
            "or a service at the silo did it",
            trace,
        )
    if name in _CRASHES:
        return WorkFailed("task_error", f"{role.name} crashed ({name})", trace)
    return WorkFailed("node_failure", f"{role.name} was ended by {name}", trace)
