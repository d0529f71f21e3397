"""Verifies a job's rounds offline: who signed what went in, and whether the model is what comes out.

For each round: the log's entry is signed, the job is the submitter's, each update is its silo's, for this
step and this model, no silo is counted twice or left out, and the job's rule makes, bit for bit, the model
that the log names. What no bundle can show is said by `why_not_repeatable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import AuditError, RoundtableError
from roundtable.core.evidence.audit_log import Log
from roundtable.core.models import open_model
from roundtable.engine.validation.repeatable import why_not_repeatable
from roundtable.engine.validation.round_plan import Plan, make_plan
from roundtable.engine.verification.bundle import Bundle, MissingObject
from roundtable.engine.verification.committed import CommittedRound, committed_rounds
from roundtable.engine.verification.findings import Findings, RoundVerdict
from roundtable.engine.verification.reexecution import check_model
from roundtable.engine.verification.signed_inputs import check_job, check_updates


class JobAudit:
    """One bundle beside the log in it. Raises AuditError where the two do not belong together."""

    def __init__(
        self,
        bundle: Bundle,
        log: Log,
        ca: bytes,
        proven: int,
        versions: Mapping[str, str],
        unapproved: Callable[[JobConfig], str] = lambda job: "",
    ) -> None:
        """`proven` is the last entry of the log that is proven, `versions` names what computes here.

        `unapproved` says why code of others that the job names does not run here, "" where it may.
        """
        self._bundle = bundle
        self._ca = ca
        self._proven = proven
        self._versions = versions
        self._job = job_from_json(bundle.job.config)
        self.rounds = committed_rounds(log, bundle.job.id, bundle.job.initial_model, self._job)
        if not self.rounds:
            raise AuditError(f"the log knows no round of job {bundle.job.id}")
        self._submitted = check_job(bundle.job, ca)
        self._why_not = why_not_repeatable(self._job) or unapproved(self._job)
        self._bases = {item.round: item.base for item in self.rounds}
        self._plan: Plan | None = None

    @property
    def job(self) -> JobConfig:
        """The job's configuration."""
        return self._job

    def verdicts(self, wanted: Iterable[int]) -> Iterator[RoundVerdict]:
        """The verdict on each of these rounds, in turn."""
        for number in wanted:
            committed = next(each for each in self.rounds if each.round == number)
            findings = self._submitted + self._round(committed)
            yield RoundVerdict(number, committed.attempt, committed.model, len(committed.updates), findings)

    def _round(self, committed: CommittedRound) -> Findings:
        findings = Findings()
        if committed.sequence > self._proven:
            findings += Findings(unproven=(f"nothing proves the log's entry {committed.sequence}",))
        if committed.closed:
            kept = committed.model == committed.base
            wrong = () if kept else ("the round was closed without a model, and names a new one",)
            return findings + Findings(refuted=wrong)
        if self._why_not:
            return findings + Findings(unproven=(self._why_not,))
        try:
            return findings + self._made_again(committed)
        except MissingObject as error:
            return findings + Findings(unproven=(str(error),))
        except RoundtableError as error:
            return findings + Findings(refuted=(str(error),))

    def _made_again(self, committed: CommittedRound) -> Findings:
        found = self._bundle.round(committed.round)
        if found is None:
            return Findings(unproven=("the bundle holds no updates of it",))
        findings = check_updates(found, committed, self._bundle.job, self._bases, self._ca)
        if findings.refuted:
            return findings
        return findings + check_model(
            self._bundle, self._job, self._planned(), found, committed, self._versions
        )

    def _planned(self) -> Plan:
        if self._plan is None:
            layout = open_model(self._bundle.object(self._bundle.job.initial_model)).layout
            slices = tuple(slice(spec.offset, spec.offset + spec.size) for spec in layout.averaged)
            self._plan = make_plan(self._job, self._bundle.job.population, slices).over(layout)
        return self._plan
