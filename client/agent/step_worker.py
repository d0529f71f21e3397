"""What a silo does for one step: the model is fetched, trained or evaluated, and the answer made.

asked → model here → trained, and masked where the job says so → an update to deliver
                   ↘ measured before, for the round's secure sum ↗
                   ↘ evaluated → a message
                   ↘ trained, and kept → a message; asked again → masked → an update to deliver
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan

from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.agent.gatekeeper import Gatekeeper
from roundtable.client.agent.model_cache import ModelCache
from roundtable.client.agent.release_ledger import ReleaseLedger, model_values, refusing
from roundtable.client.agent.secure_attempts import (
    PHASE,
    MaskingAttempt,
    SecureAttempts,
    is_secure,
)
from roundtable.client.agent.spool import Finished, Spool
from roundtable.client.agent.step_reports import StepReporter
from roundtable.client.door import outgoing
from roundtable.client.door.incoming import ExchangeWork, ModelWork, StepInstruction
from roundtable.client.failures import WorkFailed, diagnose
from roundtable.client.model_route import ModelRoute
from roundtable.client.policy.health import HealthChecks
from roundtable.client.policy.known_jobs import job_read
from roundtable.client.prepared_updates import PREPARE, PreparedUpdate, PreparedUpdates
from roundtable.client.step_key import CHECK, StepKey, about
from roundtable.client.trainer import Ahead, Figures, StepWork, TrainedUpdate, Trainer
from roundtable.client.training.metrics import Metrics, left_out_or_cut, loss_of, summable
from roundtable.core.config import JobConfig
from roundtable.core.errors import ResourceError, RoundtableError
from roundtable.core.failpoints import failpoint
from roundtable.core.foreign_text import printable
from roundtable.core.observability.transfer_figures import ModelArrival
from roundtable.privacy import subject_of, values_masked
from roundtable.privacy.secagg.masks import MASKED

_log = logging.getLogger("roundtable.agent")


class StepWorker:
    """Works on steps: `gate` is asked before anything is done, and `ledger` told before anything leaves.

    `no_more` is set while the silo takes no new round: then none is trained ahead.
    """

    def __init__(
        self,
        gate: Gatekeeper,
        ledger: ReleaseLedger,
        health: HealthChecks,
        secure: SecureAttempts,
        observer: AgentObserver,
        reporter: StepReporter,
        link: Link,
        trainer: Trainer,
        models: ModelCache,
        spool: Spool,
        prepared: PreparedUpdates,
    ) -> None:
        self._gate = gate
        self._ledger = ledger
        self._health = health
        self._secure = secure
        self._observer = observer
        self._reporter = reporter
        self._report = reporter.report
        self._link = link
        self._trainer = trainer
        self._models = models
        self._spool = spool
        self._prepared = prepared
        self._arrivals: dict[str, ModelArrival] = {}
        self.no_more = asyncio.Event()

    async def do(
        self,
        step: StepKey,
        instruction: StepInstruction,
        working: Callable[[], int],
        in_line: Callable[[bool], None],
    ) -> Finished | outgoing.FromAgent:
        """The update that is to be delivered, or the message that answers an evaluation or tells of a kept
        update.

        `working` tells how many steps are worked on now; `in_line` hears whether this one waits for others.
        Raises RoundtableError or OSError for what fails.
        """
        job = job_of(instruction)
        asked = instruction.work
        steps = steps_of_instruction(instruction, job)
        task = self._gate.admit(step, instruction, job)
        if step.phase == PREPARE and self._prepared.find(step) is not None:
            return outgoing.prepared(step)
        assert not isinstance(asked, ExchangeWork), "exchanges are answered at once"
        if asked.prepared is not None:
            return await self._mask_kept(step, instruction.config, job, asked, asked.prepared)
        if reason := await self._health.before(step.job, job.task.name):
            raise WorkFailed("node_failure", f"the silo is not ready: {reason}")
        arriving = partial(self._reporter.transferred, step, "downloading")
        route = ModelRoute.of(job.transfer.down, instruction.hops)
        model = await self._models.obtain(self._link, asked.model, arriving, working, route)
        self._arrivals[step.job] = self._models.arrived(self._arrivals.get(step.job, ModelArrival()))
        failpoint("model_here", step.round, step.phase)
        work = StepWork(
            step=step,
            client=self._observer.silo,
            config=instruction.config,
            job=job,
            task=task,
            model=model,
            layout=asked.layout,
            output=self._spool.bytes_of(step),
            counted=instruction.counted,
            steps=steps,
            encoding=told_encoding(job, asked.encoding) if asked.kind == "train" else "",
            trouble=partial(self._reporter.trouble, step),
            set_up=partial(self._reporter.set_up, step),
            in_line=in_line,
            ahead=Ahead(
                partial(self._may_go_ahead, step, job),
                partial(self._gate.still_admits, step, job),
                self.no_more,
            ),
        )
        if step.phase == CHECK:
            return await self._compare(work)
        if step.phase == PREPARE:
            return await self._prepare(work, asked.model.digest)
        if asked.kind == "train" and is_secure(job):
            layout, values = await asyncio.to_thread(model_values, model)
            columns = values_masked(job, layout, step.round)
            subject = subject_of(instruction.config, asked.model.digest)
            attempt = self._secure.begin(step, job, columns, values, asked.identities, subject)
            self.advertise(step)
            return replace(await self._train_masked(work, attempt), model=asked.model.digest)
        if asked.kind == "train":
            return await self._train(work, asked.model.digest)
        return await self._evaluate(work, asked.model.digest)

    async def _may_go_ahead(self, step: StepKey, job: JobConfig) -> bool:
        """Whether the silo may train the round behind a step before it is asked to."""
        if self.no_more.is_set() or step.round == job.rounds or not self._gate.still_admits(step, job):
            return False
        return not await self._health.before(step.job, job.task.name)

    async def _train(self, work: StepWork, model: str) -> Finished:
        trained = await self._trained(work)
        failpoint("update_written", work.step.round, work.step.phase)
        with refusing():
            await asyncio.to_thread(self._ledger.update, work.step, model, trained.digest)
        return Finished(
            step=work.step,
            digest=trained.digest,
            size=trained.size,
            layout=work.layout,
            encoding=work.encoding,
            told=self._gate.trained(work.job, trained),
            model=model,
            arrival=self._arrivals.pop(work.step.job, ModelArrival()),
        )

    async def _train_masked(self, work: StepWork, attempt: MaskingAttempt) -> Finished:
        """Trains as `_train` does, and masks the update with example count, loss and test metrics."""
        step, plain, masked = work.step, self._spool.plain_of(work.step), work.output
        before = await self._measured(work, attempt.bounds)
        trained = await self._trained(replace(work, output=plain))
        await attempt.ready()
        loss = self._gate.summed(trained.metrics)
        digest, size = await asyncio.to_thread(attempt.mask, plain, masked, trained, loss, before)
        plain.unlink()
        return await self._masked(step, work.layout, attempt, digest, size)

    async def _masked(
        self, step: StepKey, layout: str, attempt: MaskingAttempt, digest: str, size: int
    ) -> Finished:
        """A masked vector that is written, once a restart can go on with it."""
        await asyncio.to_thread(self._secure.keep, step)
        proof = attempt.client.masked().hex()
        arrival = self._arrivals.pop(step.job, ModelArrival())
        return Finished(step, digest, size, layout, encoding=MASKED, announcement=proof, arrival=arrival)

    async def _prepare(self, work: StepWork, model: str) -> outgoing.FromAgent:
        """Trains, and keeps the update until a group is asked to mask it, or the step is withdrawn."""
        step, plain = work.step, self._spool.plain_of(work.step)
        self._prepared.forget_job(step.job)
        layout, values = await asyncio.to_thread(model_values, work.model)
        columns = values_masked(work.job, layout, step.round)
        trained = await self._trained(replace(work, output=plain))
        kept = PreparedUpdate(
            step,
            model,
            values,
            work.layout,
            columns,
            trained.digest,
            trained.size,
            trained.examples,
            trained.metrics.get("loss"),
        )
        await asyncio.to_thread(self._prepared.keep, plain, kept)
        failpoint("update_kept", step.round, step.phase)
        self._observer.ended(step, "done")
        return outgoing.prepared(step)

    async def _mask_kept(
        self, step: StepKey, config: str, job: JobConfig, asked: ModelWork, prepared: StepKey
    ) -> Finished:
        """Masks the update that a step has left, among a group that trained from the same model.

        The subject of the masks is the model that it was trained from here, whatever the coordinator says:
        with silos that trained from another one no sum is made. WorkFailed where the coordinator names
        another model, and where the silo has helped to unmask a sum with this update, or has it no longer.
        """
        kept = self._prepared.find(prepared)
        if kept is None:
            raise WorkFailed(
                "node_failure",
                f"the finished update of {prepared} is no longer at this silo: another one has taken its "
                "place, or its file is lost; the silo can be asked to train again",
            )
        if asked.model.digest != kept.model:
            raise WorkFailed(
                "refused",
                f"the update of {prepared} was trained from model {kept.model[:12]}, and is to be masked as "
                f"one of {asked.model.digest[:12]}: a sum is over updates of one model",
            )
        if spent := [each for each in kept.masked_in if self._ledger.has_unmasked(step.job, each)]:
            raise WorkFailed(
                "refused",
                f"the update of {prepared} is in the sum of round {spent[0]}, which this silo has helped to "
                "unmask: a finished update is in one sum, and no other group masks it",
            )
        subject = subject_of(config, kept.model)
        attempt = self._secure.begin(step, job, kept.columns, kept.values, asked.identities, subject)
        self.advertise(step)
        await attempt.ready()
        plain, out = self._prepared.plain_of(prepared), self._spool.bytes_of(step)
        trained = TrainedUpdate(kept.digest, kept.size, kept.examples, {})
        loss = self._gate.summed({"loss": kept.loss} if kept.loss is not None else {})
        await asyncio.to_thread(self._prepared.masks, kept, step.round)
        digest, size = await asyncio.to_thread(attempt.mask, plain, out, trained, loss, {})
        finished = await self._masked(step, kept.layout, attempt, digest, size)
        return replace(finished, model=kept.model)

    async def _measured(self, work: StepWork, bounds: Mapping[str, float]) -> Metrics:
        """What the model that the round begins with gives, for the round's sum; nothing of it is reported."""
        if not bounds or not self._gate.measures:
            return {}
        step = work.step
        self._report(step, "evaluating")
        metrics = await self._trainer.evaluate(work, partial(self._progressed, work, "evaluating"))
        await asyncio.to_thread(self._models.check, work.model)
        for words in left_out_or_cut(metrics, bounds).values():
            _log.warning("%s: %s", step, words, extra=about(step, "figures"))
        return self._gate.summed(summable(metrics, bounds))

    def advertise(self, step: StepKey) -> None:
        """Sends this silo's first message of a secure aggregation, again if it may have been lost."""
        attempt = self._secure.find(step)
        if attempt is not None and attempt.advert:
            self._reply(step, attempt.advert)

    def exchange(self, step: StepKey, message: bytes) -> None:
        """Answers the coordinator's next message of secure aggregation."""
        try:
            answer = self._secure.handle(step, message)
        except (WorkFailed, ResourceError) as error:
            diagnosis = diagnose(error)
            self._link.send(outgoing.failure(step, diagnosis.kind, diagnosis.detail))
            return
        if answer is not None:
            self._reply(step, answer)

    def _reply(self, step: StepKey, payload: bytes) -> None:
        self._link.send(outgoing.reply(step._replace(phase=PHASE), payload))

    def _progressed(
        self,
        work: StepWork,
        activity: str,
        done: int,
        total: int,
        loss: float = nan,
        figures: Figures | None = None,
    ) -> None:
        seen = outgoing.ProgressFigures(done, total, loss, figures)
        self._report(work.step, activity, self._gate.working(work.job, seen), seen)

    async def _trained(self, work: StepWork) -> TrainedUpdate:
        step, began = work.step, time.monotonic()
        _log.info("%s: training", step, extra=about(step))
        self._report(step, "training")
        trained = await self._trainer.train(work, partial(self._progressed, work, "training"))
        await asyncio.to_thread(self._may_leave, work, trained)
        _log.info(
            "%s: trained on %d examples in %.2f s%s",
            step,
            trained.examples,
            time.monotonic() - began,
            loss_of(trained.metrics),
            extra=about(step, "figures"),
        )
        return trained

    def _may_leave(self, work: StepWork, trained: TrainedUpdate) -> None:
        """What comes before an update leaves: the model that it came of is still whole. Blocks."""
        with refusing():
            self._gate.answered(work.step, work.job, trained)
        self._models.check(work.model)

    async def _compare(self, work: StepWork) -> outgoing.FromAgent:
        """Makes the silo's own model. WorkFailed where that is not the job's; nothing else is told of it."""
        step = work.step
        self._report(step, "comparing")
        await self._trainer.check(work)
        _log.info("%s: the model here is the job's", step, extra=about(step))
        self._observer.ended(step, "done")
        return outgoing.evaluated(step, self._gate.evaluated(step, work.job, {}))

    async def _evaluate(self, work: StepWork, model: str) -> outgoing.FromAgent:
        step = work.step
        self._report(step, "evaluating")
        metrics = await self._trainer.evaluate(work, partial(self._progressed, work, "evaluating"))
        await asyncio.to_thread(self._may_tell, work, model)
        _log.info("%s: evaluated%s", step, loss_of(metrics), extra=about(step, "figures"))
        self._observer.ended(step, "done")
        failpoint("evaluated", step.round, step.phase)
        return outgoing.evaluated(step, self._gate.evaluated(step, work.job, metrics))

    def _may_tell(self, work: StepWork, model: str) -> None:
        """The same before metrics leave, which the ledger then counts. Blocks."""
        self._models.check(work.model)
        with refusing():
            self._ledger.evaluation(work.step, model)


def told_encoding(job: JobConfig, told: str) -> str:
    """The encoding for the update: the job's, or one that it lets the coordinator choose; WorkFailed for
    others."""
    chain = told or job.writes.up
    if not job.writes.allows(chain):
        shown = printable(chain, 60)
        raise WorkFailed(
            "refused", f"the coordinator asks for an update as {shown!r}, which the job's [transfer] does not"
        )
    return chain


def steps_of_instruction(instruction: StepInstruction, job: JobConfig) -> int | None:
    """The steps that the coordinator gives this silo by its speed; None where the job says them for all.

    WorkFailed where it gives more than the job's most, or does so for a job that leaves it no choice.
    """
    work, table = instruction.work, job.algorithm
    if isinstance(work, ExchangeWork) or work.kind != "train":
        return None
    by_speed = table.work == "by_speed"
    if by_speed != (work.steps is not None) or (work.steps or 0) > (table.steps or 0):
        asked = f"{work.steps or 'no number of'} steps"
        raise WorkFailed(
            "protocol_violation",
            f"the coordinator asked for {asked}, and the job says work = {table.work!r} with at most "
            f"{table.steps} steps",
        )
    return work.steps


def job_of(instruction: StepInstruction) -> JobConfig:
    """The job that an instruction belongs to; WorkFailed where its configuration cannot be read."""
    try:
        return job_read(instruction.config)
    except (RoundtableError, ValueError) as error:
        raise WorkFailed(
            "protocol_violation",
            f"the job's configuration cannot be read by this version of the agent: {error}",
        ) from error
