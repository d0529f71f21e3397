"""Trains in a child process: whatever happens there is reported, and the agent lives on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import Ahead, ProgressListener, StepWork, TrainedUpdate, its_turn
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.own_model import forget_unused
from roundtable.client.worker.process_settings import settings_of
from roundtable.client.worker.rehearsal import Rehearsed
from roundtable.client.worker.step_room import MOST_HALVINGS, part_of_batch
from roundtable.client.worker.torch_devices import choose_device
from roundtable.client.worker.training_process import EndedAhead, TrainingProcess
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.factors.own_ranks import RankTable
from roundtable.core.errors import RoundtableError
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import Writing
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import hash_of_task

_log = logging.getLogger("roundtable.agent")
_LOOK_SECONDS = 5.0
_MOST_LOST = 2


class WorkerTrainer:
    """Keeps one training process running; where it dies, the next order starts another."""

    def __init__(self, config: AgentConfig, client: str, jobs: Path) -> None:
        self._config = config
        settings = settings_of(config, client, jobs)
        self._settings = asdict(settings)
        self._turn = asyncio.Lock()
        self._child: TrainingProcess | None = None
        self._rehearsal: asyncio.Task[Rehearsed] | None = None
        self._halvings: dict[tuple[str, str], int] = {}
        self._whole: set[tuple[str, str]] = set()
        self._code: dict[str, str] = {}
        self._jobs = jobs
        self._releasing: set[asyncio.Task[None]] = set()
        self._ahead: asyncio.Task[None] | None = None
        self._lost: Counter[str] = Counter()

    async def start(self) -> None:
        """Spawns the process; it imports torch while the agent connects."""
        self._child = await TrainingProcess.spawn(self._config, self._settings)

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        """See Trainer."""
        answer = await self._do("train", work, progress)
        update = answer["trained"]
        metrics = {name: (value, count) for name, (value, count) in update["metrics"].items()}
        writing = Writing.from_plain(update["writing"])
        kept_up = self._lost[work.step.job] < _MOST_LOST
        if answer["next"] and work.ahead is not None and self._child is not None and kept_up:
            halvings = self._halvings.get((work.step.job, "train"), 0)
            order = replace(order_of_work(work), halvings=halvings)
            going = self._go_ahead(order, work.ahead, self._child)
            self._ahead = asyncio.create_task(going, name=work.step.job)
        return TrainedUpdate(update["digest"], update["size"], update["examples"], metrics, writing)

    async def _go_ahead(self, done: Order, ahead: Ahead, child: TrainingProcess) -> None:
        """Has the process train the round behind one that it has done, while the silo lets it; cancelled once
        it gets other work."""
        try:
            allowed = await ahead.now()
        except (RoundtableError, OSError) as error:
            _log.warning("%s, round %d: nothing is trained ahead: %s", done.job, done.round + 1, error)
            return
        if allowed:
            child.go_ahead(done)
            why = await self._while_let(ahead)
            child.rest()
            if why:
                _log.warning("%s, round %d: is not trained ahead any more: %s", done.job, done.round + 1, why)

    async def _while_let(self, ahead: Ahead) -> str:
        """Returns once the silo takes no more rounds, with "", or lets the job in no longer: why."""
        try:
            while ahead.still():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await ahead.no_more.wait()
                        return ""
        except (RoundtableError, OSError) as error:
            return str(error)
        return "the silo does not let the job in any more"

    async def check(self, work: StepWork) -> None:
        """See Trainer."""
        await self._do("check", work, lambda *seen: None)

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
        self._lost.pop(job, None)
        releasing = asyncio.create_task(self._release(job))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, job: str) -> None:
        async with self._turn:
            ours = self._ahead is not None and self._ahead.get_name() == job
            if ours:
                self._end_ahead()
            if self._child is not None:
                if ours:
                    self._child.rest()
                await self._child.gone()  # A step that was called off writes no more.
            await asyncio.to_thread(forget_unused, self._jobs, job)

    async def close(self) -> None:
        """See Trainer."""
        self._end_ahead()
        await asyncio.gather(*self._releasing)
        await self._end()

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    @property
    def _goes_ahead(self) -> str:
        """The job of which a round is trained ahead, or is about to be; "" for none."""
        task = self._ahead
        return "" if task is None or task.done() or task.cancelling() else task.get_name()

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
                if verb == "evaluate" and self._goes_ahead == work.step.job:
                    # What is trained ahead holds memory too, and the process ends with it.
                    self._end_ahead()
                    self._lost[work.step.job] = _MOST_LOST
                    action = "evaluates again, and trains no round of the job ahead from now on"
                    work.trouble(failure.kind, failure.detail, action)
                    continue
                if failure.whole or halvings >= self._most_halvings(verb, work):
                    raise
                first = failure
                self._halvings[key] = parts = failure.halvings or halvings + 1
                count = part_of_batch(work.job, parts, evaluation=verb == "evaluate")
                action = (
                    f"reduced the batch size: no more than {count} examples in memory at once, from now on"
                )
                work.trouble(failure.kind, failure.detail, action)

    def _most_halvings(self, verb: str, work: StepWork) -> int:
        """How often a batch can be halved; 0 where parts of a batch would not be the same training."""
        batch = part_of_batch(work.job, 0, evaluation=verb == "evaluate")
        # The silo has paid for a round of DP-SGD when it begins, and DP-SGD takes parts of batches anyway.
        paid = verb == "train" and isinstance(work.job.privacy, ExampleLevel)
        if paid or verb == "check" or (work.step.job, verb) in self._whole:
            return 0
        return min(MOST_HALVINGS, batch.bit_length() - 1)

    def _not_in_parts(self, key: tuple[str, str], first: WorkFailed, failure: WorkFailed) -> WorkFailed:
        """The failure to report where half a batch failed for another reason than the whole batch."""
        del self._halvings[key]
        self._whole.add(key)
        detail = f"{first.detail}; with parts of a batch: {failure.detail}"
        return WorkFailed("out_of_memory", detail, failure.trace)

    async def rehearse(self, order: Order, progress: ProgressListener) -> Rehearsed | None:
        """Tries a task in a process of its own, of which nothing stays for rounds; WorkFailed as for work.

        None where a step is worked on, or trained ahead, or comes meanwhile: that goes first, and tries the
        same.
        """
        if self._turn.locked() or self._goes_ahead:
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
        child = await TrainingProcess.spawn(self._config, self._settings)
        try:
            return Rehearsed(**(await child.do("rehearse", order, progress))["rehearsed"])
        finally:
            await child.end()

    async def _order(
        self, verb: str, work: StepWork, halvings: int, progress: ProgressListener
    ) -> dict[str, Any]:
        order = replace(order_of_work(work), halvings=halvings)
        async with its_turn(self._turn, work):
            ahead = self._goes_ahead
            if self._ahead is not None and (verb == "train" or self._ahead.get_name() != work.step.job):
                self._end_ahead()
            if (rehearsal := self._rehearsal) is not None:
                rehearsal.cancel()
                await asyncio.wait([rehearsal])
            while True:
                if self._child is not None and await self._child.gone():
                    self._lose(ahead)
                    await self._end()
                await self._follow_code(order.task)
                if self._child is None:
                    await self.start()
                assert self._child is not None
                setup = TrainingSetup(device=str(choose_device(self._config.device)))
                if verb == "train" and not _by_memory(work):
                    work.set_up(setup)
                try:
                    return await self._child.do(
                        verb, order, progress, work.trouble, partial(_set_up, work, setup)
                    )
                except EndedAhead as ended:
                    _log.warning("%s: %s", work.step.job, ended.detail)

    def _lose(self, job: str) -> None:
        """Notes that the process has ended while it trained a round of this job ahead, if it did."""
        if not job:
            return
        self._end_ahead()
        self._lost[job] += 1
        over = self._lost[job] >= _MOST_LOST
        _log.warning(
            "%s: the training process ended while it trained a round ahead; another one does the step%s",
            job,
            ", and none of the job is trained ahead from now on" if over else "",
        )

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


def _by_memory(work: StepWork) -> bool:
    """Whether the silo's memory chooses the rank of its factors."""
    table = work.job.algorithm
    return isinstance(table, RankTable) and bool(table.choices(work.client))


def _set_up(work: StepWork, setup: TrainingSetup, rank: int) -> None:
    work.set_up(replace(setup, factor_rank=rank))


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
