"""Whether what went into a round is what was signed: the job by its submitter, each update by its silo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from roundtable.core.config import job_from_json
from roundtable.core.errors import IdentityError, RoundtableError
from roundtable.core.identity.signing import (
    check_submission,
    job_digest,
    job_identifier,
    job_values,
    open_envelope,
    signed_request,
)
from roundtable.engine.verification.bundle import BundledJob, BundledRound, BundledUpdate
from roundtable.engine.verification.committed import CommittedRound
from roundtable.engine.verification.findings import Findings


def check_job(job: BundledJob, ca: bytes) -> Findings:
    """Whether the submitter has signed this very job: configuration, initial model and identifier."""
    if not job.signature:
        return Findings(
            unproven=("nobody has signed the job: the coordinator alone says what was asked for",)
        )
    try:
        repeats = bool(job_from_json(job.config).queue.repeat)
    except RoundtableError as error:
        return Findings(refuted=(f"the job's configuration cannot be read: {error}",))
    values = job_values(
        job.config,
        job.initial_model,
        signed_request(job.request_id, repeats)[0],
        submitter=job.submitter,
        coordinator=job.coordinator,
        time=job.time,
    )
    try:
        certificate, signature = job.certificate.encode(), bytes.fromhex(job.signature)
        check_submission(certificate, ca, values, signature, job.submitter, at=job.time)
    except (IdentityError, ValueError) as error:
        return Findings(refuted=(f"the job is not what {job.submitter} has signed: {error}",))
    signed = job_identifier(job.coordinator, job.submitter, job.request_id)
    if signed != job.id:
        return Findings(refuted=(f"{job.submitter} has signed the job {signed}, not {job.id}",))
    return Findings()


def check_updates(
    found: BundledRound, committed: CommittedRound, job: BundledJob, bases: Mapping[int, str], ca: bytes
) -> Findings:
    """Whether the bundle's updates are those of the log, each once, and each as its silo has signed it.

    `bases` maps a round to the model that silos were asked to train from in it.
    """
    refuted = []
    if committed.config != job_digest(job.config):
        refuted.append("the round was made under another configuration than the job's")
    for name, count in Counter(update.client for update in found.updates).items():
        if count > 1:
            refuted.append(f"{name} is counted {count} times")
        if name not in committed.updates:
            refuted.append(f"{name} is counted, and the log knows no update of it")
        asked = committed.asked.get(name, (committed.round, committed.attempt))[0]
        if name not in committed.cohort and asked == committed.round:
            refuted.append(f"{name} is counted, and was not asked")
    present = {update.client for update in found.updates}
    refuted += [f"the update of {name} is left out" for name in committed.updates if name not in present]
    findings = Findings(refuted=tuple(refuted))
    for update in found.updates:
        if update.client in committed.updates:
            findings += _check_update(update, committed, job, bases, ca)
    return findings


def _check_update(
    update: BundledUpdate, committed: CommittedRound, job: BundledJob, bases: Mapping[int, str], ca: bytes
) -> Findings:
    name = update.client
    if update.digest != committed.updates[name]:
        logged = committed.updates[name][:12]
        return Findings(refuted=(f"the update of {name} is {update.digest[:12]}, and the log has {logged}",))
    if update.statement is None:
        return Findings(
            unproven=(f"{name} signs nothing: that it sent its update is the coordinator's word",)
        )
    try:
        signed = open_envelope(update.statement, ca, "agent", "update")
    except IdentityError as error:
        return Findings(refuted=(f"the signature under the update of {name} does not hold: {error}",))
    if signed.signer != name:
        return Findings(refuted=(f"the update of {name} is signed by {signed.signer}",))
    step = committed.asked.get(name, (committed.round, committed.attempt))
    expected: dict[str, Any] = {
        "client": name,
        "job": job.id,
        "round": step[0],
        "attempt": step[1],
        "model": bases.get(step[0]),
        "update": update.digest,
        "examples": update.examples,
    }
    wrong = [
        f"{name} has signed its update with {key} {str(signed.values.get(key))[:12]}, and the round took it "
        f"with {str(value)[:12]}"
        for key, value in expected.items()
        if signed.values.get(key) != value
    ]
    if update.loss != _loss(signed.values.get("metrics")):
        wrong.append(f"{name} has signed another training loss than the round took its update with")
    return Findings(refuted=tuple(wrong))


def _loss(metrics: Any) -> float | None:
    """The mean training loss of signed metrics; None where there is none."""
    try:
        total, count = metrics["loss"]
        return float(total / count) if count else None
    except (KeyError, TypeError, ValueError):
        return None
