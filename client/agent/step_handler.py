"""Answers the coordinator's steps: each is done once, however often it is asked for, across reconnects.

asked → accepted → model here → trained → spooled → delivered
                              ↘ evaluated      ↘ (withdrawn, failed: at any point)
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.agent.delivery import Delivery, log_receipt
from roundtable.client.agent.gatekeeper import Gatekeeper
from roundtable.client.agent.model_cache import ModelCache
from roundtable.client.agent.release_ledger import NAME as LEDGER
from roundtable.client.agent.release_ledger import ReleaseLedger
from roundtable.client.agent.secure_attempts import SecureAttempts
from roundtable.client.agent.silo_log import until_written
from roundtable.client.agent.spool import Finished, Spool
from roundtable.client.agent.step_reports import StepReporter
from roundtable.client.agent.step_worker import StepWorker
from roundtable.client.door import incoming, outgoing
from roundtable.client.door.incoming import ExchangeWork, Receipt, StepInstruction
from roundtable.client.durable_files import explained
from roundtable.client.failures import WorkFailed, diagnose
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.health import HealthChecks
from roundtable.client.prepared_updates import PREPARE, PreparedUpdates
from roundtable.client.step_key import StepKey, about
from roundtable.client.trainer import Trainer
from roundtable.core.errors import (
    ProtocolError,
    ResourceError,
    RoundtableError,
    TransferError,
)
from roundtable.core.failpoints import failpoint
from roundtable.privacy.secagg.masks import MASKED

_log = logging.getLogger("roundtable.agent")
_ANSWERS_KEPT = 256


class StepHandler:
    """Takes the coordinator's messages, and answers each step."""

    def __init__(
        self,
        config: AgentConfig,
        observer: AgentObserver,
        link: Link,
        trainer: Trainer,
        models: ModelCache,
        spool: Spool,
    ) -> None:
        self._observer = observer
        self._link = link
        self._trainer = trainer
        self._spool = spool
        ledger = ReleaseLedger(config.state / LEDGER, config.policy.rounds)
        self._secure = SecureAttempts(config, observer.silo, ledger)
        self._prepared = PreparedUpdates(config.state / "prepared")
        self.gate = Gatekeeper(config, observer.silo)
        self.health = HealthChecks(config.health, observer.silo)
        self._working: dict[StepKey, asyncio.Task[None]] = {}
        self._delivering: dict[StepKey, asyncio.Task[None]] = {}
        self._sending: dict[StepKey, Finished] = {}
        self._asking: dict[StepKey, asyncio.Task[None]] = {}
        self._answers: OrderedDict[StepKey, outgoing.FromAgent] = OrderedDict()
        self._reporter = StepReporter(link, observer)
        self._report = self._reporter.report
        self._delivery = Delivery(link, spool, self._reporter, self.gate.sign_update, self._held)
        self._worker = StepWorker(
            gate=self.gate,
            ledger=ledger,
            health=self.health,
            secure=self._secure,
            observer=observer,
            reporter=self._reporter,
            link=link,
            trainer=trainer,
            models=models,
            spool=spool,
            prepared=self._prepared,
        )
        self._asked: dict[StepKey, tuple[StepInstruction, float]] = {}
        self._in_line: dict[StepKey, tuple[float, float]] = {}
        self._met = math.inf

    @property
    def state(self) -> str:
        """The agent's state in a word, for its heartbeat."""
        if self._working:
            return "queued" if self._working.keys() <= self._in_line.keys() else "training"
        return "uploading" if self._delivering else "available"

    @property
    def spooled(self) -> list[StepKey]:
        """Steps whose update is finished and not delivered."""
        return sorted(self._delivering)

    def meet(self, clock: float) -> None:
        """The coordinator's clock at a welcome; the first one is this process's beginning."""
        self._met = min(self._met, clock)

    def drain(self, *, drained: bool) -> None:
        """Whether the silo takes no new round; what is under way goes on."""
        (self._worker.no_more.set if drained else self._worker.no_more.clear)()

    def recover(self) -> None:
        """Delivers what an earlier process of the agent finished."""
        self._secure.recover()
        for step in self._prepared.recover():
            _log.info("%s: trained earlier, and kept until a group masks it", step)
        for finished in self._spool.recover():
            _log.info("%s: finished earlier, to be delivered", finished.step)
            self._start_delivery(finished, fresh=False)
        for finished in self.gate.without_proof():
            if finished.step not in self._delivering:
                _log.info("%s: sent earlier, and without a receipt: it is asked for", finished.step)
                self._spawn(self._asking, finished.step, self._ask(finished))

    def handle(self, message: incoming.Message) -> None:
        """One message from the coordinator; one that did not pass the door is refused to its sender."""
        match message:
            case StepInstruction():
                self._instruct(message)
            case incoming.StandingNews(""):
                _log.info("operators have enabled this silo: jobs may ask it again")
            case incoming.StandingNews(reason):
                _log.warning("operators have disabled this silo, no job asks it for a new round: %s", reason)
            case incoming.Withdrawal():
                self._withdraw(message)
            case incoming.BadMessage(reason, step):
                _log.error("a message is refused: %s", reason)
                if step is not None:
                    self._link.send(outgoing.failure(step, "protocol_violation", reason))

    async def settled(self) -> None:
        """Waits until no step is worked on or delivered."""
        while tasks := [*self._working.values(), *self._delivering.values()]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stops all work; what is finished stays in the spool."""
        tasks = [*self._working.values(), *self._delivering.values(), *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.gate.close()

    def _instruct(self, instruction: StepInstruction) -> None:
        step = instruction.step
        if isinstance(instruction.work, ExchangeWork):
            self._worker.exchange(step, instruction.work.payload)
            return
        if step in self._answers:
            self._link.send(self._answers[step])
            return
        waits = step in self._in_line and _goes_on(self._working.get(step))
        self._link.send(outgoing.accepted(step, queued=waits))
        if _goes_on(self._delivering.get(step)):
            self._asked[step] = (instruction, time.monotonic() + instruction.seconds)
            self._report(step, "uploading")
            return
        if _goes_on(self._working.get(step)):
            self._worker.advertise(step)
            return
        kept = self._delivery.take_back(step)
        if kept is not None:
            _log.info("%s: delivered before, and asked for again", step, extra=about(step))
            self._asked[step] = (instruction, time.monotonic() + instruction.seconds)
            self._start_delivery(kept, fresh=True)
            return
        self._delivery.forget(step.job)
        for other in [key for key in self._working if key.job == step.job and key[:3] < step[:3]]:
            _log.info("%s: given up for a newer step", other, extra=about(other))
            self._working[other].cancel()
            self._asked.pop(other, None)
        if instruction.work.kind == "train" and step.phase != PREPARE:
            self._asked[step] = (instruction, time.monotonic() + instruction.seconds)
        withdrawn = [task for group in (self._working, self._delivering) if (task := group.get(step))]
        self._spawn(self._working, step, self._work(step, instruction, withdrawn))

    def _withdraw(self, withdraw: incoming.Withdrawal) -> None:
        """Forgets one step, or the whole job, which is then over."""
        step = withdraw.step
        if step is None:
            self._end_job(withdraw)
            return
        if step in self._working or step in self._delivering:
            _log.info("%s: withdrawn (%s)", step, withdraw.reason, extra=about(step))
        self._drop(step)

    def _end_job(self, over: incoming.Withdrawal) -> None:
        job = over.job
        _log.info("%s: over (%s)", job, over.reason, extra=about(StepKey(job, 0, 0, "")))
        for step in {key for key in (*self._working, *self._delivering) if key.job == job}:
            self._drop(step)
        self._delivery.forget(job)
        self._trainer.release(job, met=over.ended > self._met)
        self._secure.forget_job(job)
        self._prepared.forget_job(job)

    def _drop(self, step: StepKey) -> None:
        """Stops work and delivery; what it has written is erased once nothing writes there any more."""
        self._asked.pop(step, None)
        self._prepared.remove(step)
        for task in (self._working.get(step), self._delivering.get(step)):
            if task is not None:
                task.add_done_callback(lambda _: self._erase(step))
                task.cancel()
        if finished := self._sending.pop(step, None):
            self._spawn(self._asking, step, self._ask(finished))

    def _erase(self, step: StepKey) -> None:
        self._spool.remove(step)
        self._prepared.remove(step)

    async def _ask(self, finished: Finished) -> None:
        """Fetches the receipt of an update that may have arrived, though its acknowledgement did not."""
        if receipt := await self._delivery.receipt(finished):
            await self._noted(finished.step, partial(self.gate.received, finished, receipt))

    async def _noted(self, step: StepKey, note: Callable[[], None]) -> None:
        """Writes into the silo's log, however long its disk is full: so that no proof is lost."""

        def troubled(error: ResourceError) -> None:
            found = diagnose(error)
            self._reporter.trouble(step, found.kind, found.detail, "waits until it can be written")

        await until_written(note, troubled)

    async def _work(
        self, step: StepKey, instruction: StepInstruction, withdrawn: Sequence[asyncio.Task[None]] = ()
    ) -> None:
        """Answers the step, once what was withdrawn of it has ended: both would write the same files."""
        if withdrawn:
            await asyncio.wait(withdrawn)
        failpoint("accepted", step.round, step.phase)
        try:
            async with asyncio.timeout(self.gate.seconds(instruction.seconds)) as limit:
                in_line = partial(self._stands_in_line, step, limit)
                answer = await self._worker.do(step, instruction, lambda: len(self._working), in_line)
                if isinstance(answer, Finished):
                    self._start_delivery(answer, fresh=True)
                elif step.phase == PREPARE:
                    self._link.send(answer)  # Asked again, what is kept decides, also after a restart.
                else:
                    self._remember(step, answer)
        except TimeoutError:
            reason = f"the silo did not finish within the {instruction.seconds:.0f} s that were left"
            self._fail(step, WorkFailed("slow_node", reason))
        except RoundtableError as error:
            self._fail(step, error)
        except OSError as error:
            self._fail(step, explained(error, Path(error.filename or "a file")))
        finally:
            self._in_line.pop(step, None)

    def _stands_in_line(self, step: StepKey, limit: asyncio.Timeout, waits: bool) -> None:
        """Stops the step's time while others are worked on, and tells the coordinator."""
        now, end = asyncio.get_running_loop().time(), limit.when()
        if waits:
            assert end is not None
            self._in_line[step] = now, end - now
            limit.reschedule(None)
            self._observer.doing(step, "queued")
            _log.info("%s: in line behind other work of this silo", step, extra=about(step))
        else:
            since, left = self._in_line.pop(step)
            limit.reschedule(now + left)
            if step in self._asked:
                instruction, late = self._asked[step]
                self._asked[step] = instruction, late + now - since
        self._link.send(outgoing.accepted(step, queued=waits))

    def _start_delivery(self, finished: Finished, *, fresh: bool) -> None:
        self._spawn(self._delivering, finished.step, self._deliver(finished, fresh))

    async def _deliver(self, finished: Finished, fresh: bool) -> None:
        step = finished.step
        await self._noted(step, partial(self.gate.sends, finished))
        self._sending[step] = finished
        try:
            receipt = await self._delivery.deliver(finished, fresh)
        except ProtocolError as error:
            self._sending.pop(step, None)
            self._fail(step, error)
            return
        except TransferError as error:
            self._sending.pop(step, None)
            self._train_again(step, error)
            return
        asked = self._asked.pop(step, None)
        await self._noted(step, partial(self.gate.received, finished, receipt))
        self._sending.pop(step, None)
        self._observer.receipt(step, receipt)
        log_receipt(step, receipt)
        if step in self._asked:
            # Since then it was asked for again: the coordinator's disk may have spoiled it.
            self._start_delivery(finished, fresh=True)
            return
        arrived = receipt.status in ("accepted", "duplicate")
        if arrived and asked is not None and finished.encoding != MASKED:
            self._delivery.delivered(finished)
        else:
            self._spool.remove(step)

    async def _held(self, finished: Finished, receipt: Receipt) -> None:
        await self._noted(finished.step, partial(self.gate.held, finished, receipt))

    def _train_again(self, step: StepKey, error: TransferError) -> None:
        """Trains once more for an update damaged on this disk; fails where the order is not known."""
        asked = self._asked.pop(step, None)
        self._spool.remove(step)
        if asked is None:
            self._fail(step, error)
            return
        instruction, end = asked
        instruction = replace(instruction, seconds=max(0.0, end - time.monotonic()))
        self._reporter.trouble(step, "data_corruption", str(error), "trains again")
        self._spawn(self._working, step, self._work(step, instruction))

    def _fail(self, step: StepKey, error: Exception) -> None:
        diagnosis = diagnose(error)
        self._observer.ended(step, diagnosis.kind, diagnosis.detail)
        trace = error.trace if isinstance(error, WorkFailed) else ""
        _log.error("%s: failed (%s): %s", step, diagnosis.kind, diagnosis.detail, extra=about(step))
        if trace:
            _log.error("%s: its trace:\n%s", step, trace, extra=about(step, "output"))
        self._remember(step, outgoing.failure(step, diagnosis.kind, diagnosis.detail))
        self._asked.pop(step, None)
        self._spool.remove(step)

    def _remember(self, step: StepKey, answer: outgoing.FromAgent) -> None:
        """Sends the answer, and keeps it for the case that it is asked for again."""
        self._answers[step] = answer
        if len(self._answers) > _ANSWERS_KEPT:
            self._answers.popitem(last=False)
        self._link.send(answer)

    def _spawn(
        self, group: dict[StepKey, asyncio.Task[None]], step: StepKey, work: Coroutine[Any, Any, None]
    ) -> None:
        task = self._observer.task(work, step)
        group[step] = task

        def done(task: asyncio.Task[None]) -> None:
            if group.get(step) is task:
                del group[step]
            self._reporter.forget(step)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.critical("%s: the agent itself failed", step, exc_info=error)
                # The round need not wait for its deadline.
                self._fail(step, WorkFailed("node_failure", "the agent itself failed; its log says why"))

        task.add_done_callback(done)


def _goes_on(task: asyncio.Task[None] | None) -> bool:
    """Whether there is such a task that nobody has cancelled; one that was may take a while to end."""
    return task is not None and not task.cancelling()
