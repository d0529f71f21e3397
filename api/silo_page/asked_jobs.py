"""What the silo was asked to take part in, as its people are shown it before they say yes or no."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJob, KnownJobs
from roundtable.core.config import JobConfig, job_from_json, parse_job
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.identity.signing import VOUCHED_FOR
from roundtable.core.privacy_table import NoPrivacy, masking_of
from roundtable.privacy.protection import hidden, protection
from roundtable.web.job_settings import settings_of


class AskedJobs:
    """The jobs of one state folder under one file of rules."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._rules = config.rules()
        self._known = KnownJobs(config.state)

    def rows(self) -> list[dict[str, Any]]:
        """Every job, the newest first, with what holds here."""
        ran = {job.id for job in self._known.taken_part()}
        return [self._row(job, job.id in ran) for job in self._known.all()]

    def detail(self, wanted: str) -> dict[str, Any]:
        """One job with all its settings beside those of the newest like it that was allowed here.

        ConfigError for a job that nobody has asked for.
        """
        job = self._find(wanted)
        ran = {each.id for each in self._known.taken_part()}
        before = next((each for each in self._known.all() if self._is_before(each, job, ran)), None)
        old = {row["key"]: row["value"] for row in settings_of(before.config)} if before else None
        settings = settings_of(job.config)
        for row in settings:
            if old is not None:
                row["before"] = old.pop(row["key"], None)
                row["changed"] = row["before"] != row["value"]
        gone = [
            {"key": key, "value": None, "before": value, "changed": True}
            for key, value in (old or {}).items()
        ]
        return {
            **self._row(job, job.id in ran),
            "settings": [*settings, *gone],
            "before": before.id if before else None,
            "protection": _protection(job_from_json(job.config)),
        }

    def approve(self, wanted: str, digest: str) -> None:
        """Says yes to the job as it was shown. ConfigError where it has become another one since."""
        self._known.approve(self._shown(wanted, digest))

    def refuse(self, wanted: str, digest: str, reason: str) -> None:
        """Says no to the job that was shown."""
        self._known.refuse(self._shown(wanted, digest), reason)

    def tried(self, text: str, submitter: str) -> dict[str, Any]:
        """What this silo would say to a job file, which is not run. ConfigError for a file that is no job."""
        job = parse_job(text)
        reasons = self._rules.objections(job, submitter or None, datetime.now())
        return {
            "objections": reasons,
            "approval": self._config.policy.approval,
            "protection": _protection(job),
        }

    def _row(self, job: KnownJob, ran: bool) -> dict[str, Any]:
        try:
            resolved = job_from_json(job.config)
            reasons = self._rules.objections(resolved, job.submitter or None, datetime.now())
            name, rounds, privacy = resolved.name, resolved.rounds, _privacy(resolved)
        except RoundtableError as error:
            reasons, name, rounds, privacy = [str(error)], "", 0, ""
        decision = self._known.decision(job)
        if decision is not None and not decision.approved:
            state = "refused"
        elif reasons:
            state = "against the policy"
        elif decision is not None:
            state = "approved"
        else:
            state = "waits for you" if self._config.policy.approval else "allowed"
        return {
            "id": job.id,
            "name": name,
            "task": job.task,
            "submitter": _submitter(job.submitter),
            "first": job.first,
            "digest": job.digest,
            "rounds": rounds,
            "privacy": privacy,
            "ran": ran,
            "state": state,
            "objections": reasons,
            "by": decision.by if decision else "",
            "decided": decision.time if decision else None,
            "reason": decision.reason if decision else "",
        }

    def _find(self, wanted: str) -> KnownJob:
        found = next((job for job in self._known.all() if job.id == wanted), None)
        if found is None:
            raise ConfigError("the coordinator has asked for no such job")
        return found

    def _shown(self, wanted: str, digest: str) -> KnownJob:
        job = self._find(wanted)
        if job.digest != digest:
            raise ConfigError("the job has become another one since it was shown: look at it again")
        return job

    def _is_before(self, other: KnownJob, job: KnownJob, ran: set[str]) -> bool:
        alike = other.id != job.id and (other.task, other.submitter) == (job.task, job.submitter)
        return alike and other.first <= job.first and (other.id in ran or self._known.is_approved(other))


def _submitter(name: str) -> str:
    if not name:
        return "nobody whose signature proves it"
    return f"{name} by the coordinator's word" if name.startswith(VOUCHED_FOR) else name


def _privacy(job: JobConfig) -> str:
    masked = "only sums over the cohort become known" if masking_of(job.privacy) is not None else ""
    if isinstance(job.privacy, NoPrivacy):
        return masked or "the coordinator sees this silo's bare update"
    epsilon = job.privacy.epsilon
    budget = f", ε at most {epsilon:g}" if epsilon is not None else ""
    return f"hides {hidden(job)}{budget}" + (f"; {masked}" if masked else "")


def _protection(job: JobConfig) -> list[dict[str, Any]]:
    return [
        {"party": line.party, "holds": line.holds, "assumption": line.assumption}
        for line in protection(job.privacy)
    ]
