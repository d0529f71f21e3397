"""Asks the silo's policy before each step, and keeps the silo's own log.

The first instruction of a job fixes what the job is: its configuration's digest, who submitted it, its
initial model. Every later one is compared with that. A job that is not allowed, or not yet, is answered
with all the reasons.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from roundtable.client.agent.revocations import Revocations
from roundtable.client.agent.silo_log import NAME, SiloLog, noted_sums
from roundtable.client.agent.spool import Finished
from roundtable.client.door.incoming import ExchangeWork, Receipt, StepInstruction
from roundtable.client.door.outgoing import ProgressFigures, UpdateFigures, receipt_statement, sign_update
from roundtable.client.door.submissions import SubmissionProof
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.analysis_rules import asked_in, too_many_today
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJob, KnownJobs, job_read
from roundtable.client.policy.privacy_rules import objections_to_sum
from roundtable.client.policy.region_models import RegionWord, check_region, is_within
from roundtable.client.policy.rules import Metrics
from roundtable.client.prepared_updates import PREPARE, objection_to_phase
from roundtable.client.sharing.line_sharing import LineSharing
from roundtable.client.sharing.silo_report import RecentLines
from roundtable.client.step_key import CHECK, StepKey
from roundtable.client.trainer import TrainedUpdate
from roundtable.core.config import JobConfig
from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import CA_CERTIFICATE, load_silo_identity, verify_identity
from roundtable.core.identity.signing import (
    check_submission,
    job_digest,
    job_identifier,
    job_values,
    signed_request,
    verify,
)
from roundtable.core.job_tables.due_times import MOST_RUNS, came_due
from roundtable.core.observability.released import Tells, Told, tell

_log = logging.getLogger("roundtable.agent")
_TRAIN = "train"
METRICS_SENT = "metrics_sent"
"""The action under which the silo's log keeps which figures of an evaluation have left."""
_SIGNED_SECONDS = 30 * 86400.0
"""How old a signature may be under a job that the silo meets for the first time."""
_SERIES_SECONDS = 366 * 86400.0
"""How old it may be under a run of a series."""
_AHEAD_SECONDS = 3600.0
"""How far the clocks of submitter, coordinator and silo may be apart."""


class Gatekeeper:
    """One for the life of an agent."""

    def __init__(self, config: AgentConfig, name: str) -> None:
        self._config = config
        self.name = name
        self.rules = config.rules()
        self._jobs = KnownJobs(config.state)
        self.silo_log = SiloLog(config.state / NAME, config.credentials, config.archive_days)
        self.sharing = LineSharing(config.log_sharing, name, self.silo_log.note)
        self.recent = RecentLines(name, config.diagnostics.log_lines)
        self.revocations = Revocations(config.credentials, config.state)
        self._coordinator = b""
        self._relay = b""

    def meet(self, identity: bytes, relay: bytes = b"") -> None:
        """The certificate of the identity under which the coordinator signs, and jobs are signed for; and
        that of the relay in between, if there is one."""
        self._coordinator = identity
        self._relay = relay

    def admit(self, step: StepKey, instruction: StepInstruction, job: JobConfig) -> str:
        """The silo's own code for the step; WorkFailed with every reason why the silo does not do it."""
        try:
            known = self._known(step, instruction, job)
            reasons = self._to_job(known, job)
            reasons += self._to_step(step, instruction, job, known)
            region = self._region(instruction, job) if not reasons else {}
            if self._jobs.get(known.id) is None:
                (self._jobs.ask if reasons else self._jobs.remember)(known)
        except IdentityError as error:
            reasons = [str(error)]
        if reasons:
            self.silo_log.note(self.name, "refused", step.job, step=str(step), reasons=reasons)
            raise WorkFailed("refused", "; ".join(reasons))
        self.silo_log.note(
            "coordinator",
            "instructed",
            step.job,
            config=known.digest,
            round=step.round,
            attempt=step.attempt,
            phase=step.phase,
            model=_model(instruction),
            **({"region": region} if region else {}),
            submitter=known.submitter,
        )
        task = self.rules.task_name(job.task.name)
        self.sharing.admit(known.id, job, task)
        self.recent.admit(known.id, job)
        return self.rules.references[task]

    def still_admits(self, step: StepKey, job: JobConfig) -> bool:
        """Whether the silo, by now, would let in the job of a step that it has done."""
        known = self._jobs.get(step.job)
        return known is not None and not self._to_job(known, job)

    def seconds(self, deadline: float) -> float:
        """How long a step may take: as the round says, and no longer than the policy."""
        most = self._config.policy.seconds
        return max(0.0, deadline if most is None else min(deadline, most))

    def evaluated(
        self, step: StepKey, job: JobConfig, metrics: Metrics
    ) -> Told[dict[str, tuple[float, int]]]:
        """What of an evaluation's metrics leaves the silo, written down before it does: none where the job
        hides them; whether the policy lets any, `admit` has decided."""
        told: Told[dict[str, tuple[float, int]]] = tell(
            job.privacy, Tells.EVALUATION, self.rules.leaving(metrics), {}
        )
        self.silo_log.note(
            self.name,
            METRICS_SENT,
            step.job,
            round=step.round,
            attempt=step.attempt,
            metrics=noted_sums(told.value),
        )
        return told

    def trained(self, job: JobConfig, trained: TrainedUpdate) -> Told[UpdateFigures]:
        """What goes with an update: an example count of 1 and nothing else where that may not be told."""
        figures = UpdateFigures(trained.examples, self.rules.leaving(trained.metrics), trained.writing)
        return tell(job.privacy, Tells.SILO, figures, UpdateFigures(1))

    def answered(self, step: StepKey, job: JobConfig, trained: TrainedUpdate) -> None:
        """Writes down what an analysis asked, and as what the answer leaves; nothing for any other job."""
        if (asked := asked_in(job)) is not None:
            left = {"sums": trained.digest, "size": trained.size}
            self.silo_log.note(self.name, "answered", step.job, round=step.round, **asked, **left)

    def working(self, job: JobConfig, seen: ProgressFigures) -> Told[ProgressFigures] | None:
        """How far training or evaluating is; None where it stays here, as it holds counts and the loss."""
        told: Told[ProgressFigures | None] = tell(job.privacy, Tells.SILO, seen, None)
        return None if told.value is None or not self.measures else Told(told.value)

    @property
    def measures(self) -> bool:
        """Whether the policy lets any metric leave, be it inside a sum."""
        return self._config.policy.metrics != "none"

    def summed(self, metrics: Metrics) -> dict[str, tuple[float, int]]:
        """What of a step's metrics may be in a secure sum."""
        return self.rules.leaving(metrics)

    def sign_update(self, header: Any) -> Any:
        """The header of an upload, signed if this silo has an identity: what it then cannot deny."""
        try:
            identity = load_silo_identity(self._config.credentials)
        except IdentityError as error:
            _log.debug("an update is not signed: %s", error)
            return header
        return sign_update(header, self.name, identity, time.time())

    def note(self, action: str, **detail: Any) -> None:
        """Writes down what this silo's own people did; ResourceError where that cannot be written."""
        self.silo_log.note(self.name, action, **detail)

    def sends(self, finished: Finished) -> None:
        """Writes down which update is about to leave: a receipt that never comes is then missed by name."""
        step, content = finished.step, finished.content
        values = {
            "round": step.round,
            "attempt": step.attempt,
            "update": content.digest,
            "size": content.size,
            "encoding": finished.encoding,
        }
        if not finished.announcement:
            figures = finished.told.value
            values |= {"examples": figures.examples, "metrics": noted_sums(figures.metrics)}
        self.silo_log.note(self.name, "sent", step.job, job=step.job, **values)

    def without_proof(self) -> list[Finished]:
        """The newest updates that were sent and have no receipt, as far as the log tells of them.

        An update's own description may be lost; what the log says is enough to ask for its receipt.
        """
        return [
            Finished(StepKey(str(job), int(round), int(attempt), "train"), str(update), int(size), "", "")
            for job, round, attempt, update, size in self.silo_log.unanswered()
        ]

    def received(self, finished: Finished, receipt: Receipt) -> None:
        """Keeps a receipt as it came, and what seems to be wrong with it.

        That may be this machine's clock alone; who checks the log later judges by the times that it states.
        """
        if self._stays_within(finished.step):
            self._prove("relay", "region_receipt", finished, receipt, self._relay)
        else:
            self._prove("coordinator", "receipt", finished, receipt, self._coordinator)

    def held(self, finished: Finished, receipt: Receipt) -> None:
        """Notes that the relay has the update, as it signed that; the coordinator's word is still to come."""
        self._prove("relay", "held", finished, receipt, self._relay)

    def _prove(
        self,
        role: Literal["coordinator", "relay"],
        action: str,
        finished: Finished,
        receipt: Receipt,
        shown: bytes,
    ) -> None:
        values = receipt_statement(self.name, finished.step, finished.content, receipt)
        problem = self._problem_of(values, receipt.signature, role, shown)
        if problem:
            _log.error("%s: the %s's receipt does not hold: %s", finished.step, role, problem)
        proof = {"signature": receipt.signature.hex(), "certificate": shown.decode()}
        wrong = {"problem": problem} if problem else {}
        self.silo_log.note(role, action, finished.step.job, **values, signed=not problem, **proof, **wrong)

    def _problem_of(
        self,
        values: Mapping[str, Any],
        signature: bytes,
        role: Literal["coordinator", "relay"],
        shown: bytes,
    ) -> str:
        if not signature or not shown:
            return "it has no signature"
        try:
            verify(shown, self._authority, role, "receipt", values, signature)
            self.revocations.check(shown, f"the {role}'s identity")
        except IdentityError as error:
            return str(error)
        return ""

    @property
    def _authority(self) -> bytes:
        return (self._config.credentials / CA_CERTIFICATE).read_bytes()

    def _region(self, instruction: StepInstruction, job: JobConfig) -> dict[str, Any]:
        """What the relay has signed of a region's model; IdentityError for one that is not taken here."""
        step, origin = instruction.step, instruction.region
        if step.phase != _TRAIN or (job.regions.rounds == 1 and origin is None):
            return {}
        word = RegionWord(origin.statement, origin.time, origin.signature) if origin else RegionWord()
        trusted = self._config.policy.regional_models
        region = check_region(word, job, step.round, self._relay, self._authority, trusted)
        if region:
            self.revocations.check(self._relay, "the relay's identity")
        return region

    def _stays_within(self, step: StepKey) -> bool:
        """Whether it is a relay that decides about the update."""
        known = self._jobs.get(step.job)
        return known is not None and is_within(job_read(known.config), step.round, step.phase)

    def close(self) -> None:
        """Signs the log up to its end."""
        self.silo_log.seal()

    def _known(self, step: StepKey, instruction: StepInstruction, job: JobConfig) -> KnownJob:
        """The job as this silo knows it from now on; IdentityError for one that has changed."""
        digest = job_digest(instruction.config)
        known = self._jobs.get(step.job)
        if known is None:
            known = self._introduced(step, instruction, digest, job)
        if known.digest != digest:
            raise IdentityError(
                f"the configuration of job {step.job} is another one than it was at first; a changed job "
                "must be submitted as a new one"
            )
        return known

    def _introduced(
        self, step: StepKey, instruction: StepInstruction, digest: str, job: JobConfig
    ) -> KnownJob:
        submission, submitter = instruction.submission, ""
        if submission.signature:
            self._check_submission(step, instruction.config, submission, job)
            submitter = submission.submitter
        return KnownJob(
            step.job,
            digest,
            instruction.config,
            job.task.name,
            submitter,
            submission.request_id if submitter else "",
            submission.initial_model if submitter else "",
            time.time(),
        )

    def _check_submission(
        self, step: StepKey, config: str, submission: SubmissionProof, job: JobConfig
    ) -> None:
        """IdentityError unless this very job was signed, of late, for the coordinator that asks for it.

        Under a series one signature stands for all its runs, each not before it has come due so often.
        """
        ca = self._authority
        request, run = signed_request(submission.request_id, bool(job.queue.repeat))
        values = job_values(
            config,
            submission.initial_model,
            request,
            submitter=submission.submitter,
            coordinator=submission.coordinator,
            time=submission.time,
        )
        check_submission(submission.certificate, ca, values, submission.signature, submission.submitter)
        self.revocations.check(submission.certificate, f"the signer of job {step.job}")
        signed = job_identifier(submission.coordinator, submission.submitter, submission.request_id)
        if signed != step.job:
            raise IdentityError(
                f"job {step.job} shows the signature of {signed}: nobody has submitted it again"
            )
        here = verify_identity(self._coordinator, ca, role="coordinator")[0] if self._coordinator else ""
        if submission.coordinator != here:
            raise IdentityError(
                f"job {step.job} is signed for the coordinator {submission.coordinator!r}; this is {here!r}"
            )
        self._check_age(step, submission.time, job, run)

    def _check_age(self, step: StepKey, signed: float, job: JobConfig, run: int) -> None:
        """IdentityError for a signature that is too old for the job, and for a run that is not due yet."""
        age, queue = time.time() - signed, job.queue
        longest = _SERIES_SECONDS if queue.repeat else _SIGNED_SECONDS
        if not -_AHEAD_SECONDS <= age <= longest:
            raise IdentityError(
                f"job {step.job} was signed {age / 86400:.1f} days ago, and this silo meets it for the first "
                f"time: that must be within {longest / 86400:.0f} days; submit it again"
            )
        if not queue.repeat:
            return
        begun, now = signed - _AHEAD_SECONDS, time.time() + _AHEAD_SECONDS
        if not 1 <= run <= MOST_RUNS or not came_due(queue.repeat, queue.zone, begun, run, now):
            raise IdentityError(
                f"job {step.job} is run {run} of a series that is due at {queue.repeat!r} ({queue.zone}) "
                f"since it was signed, {age / 86400:.1f} days ago: that is more runs than have come due"
            )

    def _to_job(self, known: KnownJob, job: JobConfig) -> list[str]:
        """What is wrong with the job, whatever its step."""
        reasons = self.rules.objections(job, known.submitter or None, datetime.now())
        reasons += self._to_sum(known, job)
        reasons += too_many_today(self._config.policy.analyses, job, known, self._jobs)
        return reasons + self._to_decision(known, bool(reasons))

    def _to_decision(self, known: KnownJob, refused: bool) -> list[str]:
        """What a person here has said against the job, or has not said yet though the policy wants it."""
        decision = self._jobs.decision(known)
        if decision is not None and not decision.approved:
            why = f": {decision.reason}" if decision.reason else ""
            return [f"a person at this silo has refused the job{why}"]
        if self._config.policy.approval and decision is None and not refused:
            how = f"roundtable client approve {known.id}"
            return [f"a person at this silo has to approve the job first: {how}"]
        return []

    def _to_sum(self, known: KnownJob, job: JobConfig) -> list[str]:
        """What is wrong with a job beside those that the silo took part in before."""
        if self._config.policy.stated_epsilon is None:
            return []
        before = [job_read(each.config) for each in self._jobs.taken_part() if each.id != known.id]
        return list(objections_to_sum(self._config.policy, job, before))

    def _to_step(
        self, step: StepKey, instruction: StepInstruction, job: JobConfig, known: KnownJob
    ) -> list[str]:
        """What is wrong with this step of a job that is allowed."""
        reasons = []
        if not 1 <= step.round <= job.rounds:
            reasons.append(f"round {step.round} is none of the job's, which has {job.rounds}")
        if wrong := objection_to_phase(step.phase, instruction.work, job):
            reasons.append(wrong)
        if instruction.work.kind == "evaluate" and step.phase != CHECK:
            reasons += self.rules.to_evaluation(job, step.round)
        first = step.phase in (_TRAIN, PREPARE) and step.round == 1 and known.initial_model
        if first and _model(instruction) != known.initial_model:
            reasons.append("round 1 begins with another model than the one that the submitter signed")
        return reasons


def _model(instruction: StepInstruction) -> str:
    """The digest of the model that a step begins with; an exchange has none."""
    return "" if isinstance(instruction.work, ExchangeWork) else instruction.work.model.digest
