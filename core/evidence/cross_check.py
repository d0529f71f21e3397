"""The coordinator's audit log beside a silo's own: do the two tell the same story?

What is compared: each update that the silo has a receipt for, and each round that the coordinator says
it took part in, as far as the job's level of privacy lets the log tell. Receipts are signed, so that a
difference is not one word against another. Each names the entry up to which the coordinator had signed its
log by then: a silo's log is a witness of the coordinator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.evidence.audit_log import AuditEntry, Log
from roundtable.core.identity.signing import verify

RECEIPT = ("client", "job", "round", "attempt", "update", "size", "status", "time", "sealed", "sealed_hash")


def differences(coordinator: Log, silo: Log, name: str, ca: bytes) -> list[str]:
    """Every contradiction, in words; empty if the logs agree as far as both reach."""
    rounds = {
        (entry.object, entry.detail["round"]): entry.detail
        for entry in coordinator.entries
        if entry.action == "round_committed"
    }
    sent = {_step(entry): entry for entry in silo.entries if entry.action == "receipt"}
    return [
        *(words for entry in sent.values() if (words := _unsigned(entry, ca))),
        *_rewritten(coordinator, sent),
        *_unacknowledged(rounds, sent, name),
        *_contradicted(rounds, sent, name),
        *_invented(rounds, silo, name),
    ]


def witnessed(coordinator: Log, silo: Log, ca: bytes) -> list[int]:
    """Entries of the coordinator's log that a silo has had a receipt about, in what the silo has signed.

    AuditError where a receipt that the coordinator has signed names an entry that its log does not hold.
    """
    receipts = [
        entry
        for entry in silo.entries[: silo.sealed]
        if entry.action == "receipt" and not _unsigned(entry, ca)
    ]
    if contradictions := _rewritten(coordinator, {_step(entry): entry for entry in receipts}):
        raise AuditError("; ".join(contradictions[:3]))
    return [int(entry.detail["sealed"]) for entry in receipts]


def _step(entry: AuditEntry) -> tuple[str, int, int]:
    return str(entry.detail["job"]), int(entry.detail["round"]), int(entry.detail["attempt"])


def _unsigned(entry: AuditEntry, ca: bytes) -> str:
    """Why a silo's receipt proves nothing; empty for one that the coordinator had signed at its time."""
    detail = entry.detail
    try:
        values = {key: detail[key] for key in RECEIPT}
        certificate = str(detail.get("certificate", "")).encode()
        signature = bytes.fromhex(str(detail.get("signature", "")))
        if not signature or not certificate:
            raise IdentityError("it has no signature")
        verify(certificate, ca, "coordinator", "receipt", values, signature, at=float(detail["time"]))
    except (IdentityError, ValueError, TypeError, KeyError) as error:
        return f"{_words(_step(entry))}: the silo's receipt proves nothing: {error}"
    return ""


def _rewritten(coordinator: Log, sent: Mapping[tuple[str, int, int], AuditEntry]) -> list[str]:
    """Receipts that name an entry of the coordinator's log which it does not hold, or holds another one."""
    return [
        f"{_words(step)}: when the coordinator gave this receipt it had signed its entry "
        f"{entry.detail['sealed']}, {str(entry.detail['sealed_hash'])[:12]}; "
        + (f"{now[:12]} stands there now" if now else f"this log ends at entry {len(coordinator.entries)}")
        + ": history was rewritten, an older backup was restored, or this is an older export"
        for step, entry in sent.items()
        if (now := coordinator.hash_of(int(entry.detail["sealed"]))) != entry.detail["sealed_hash"]
    ]


def _unacknowledged(
    rounds: Mapping[tuple[str, int], Mapping[str, Any]],
    sent: Mapping[tuple[str, int, int], AuditEntry],
    name: str,
) -> list[str]:
    """Rounds that count an update of the silo which it has no receipt for."""
    lines, known = [], {(step[0], entry.detail["update"]) for step, entry in sent.items()}
    for (job, number), detail in rounds.items():
        step = (job, int(number), int(detail["attempt"]))
        found = detail.get("updates", {}).get(name)
        if found is not None and step not in sent and (job, found) not in known:
            lines.append(f"{_words(step)}: the coordinator counts an update that the silo never sent")
    return lines


def _contradicted(
    rounds: Mapping[tuple[str, int], Mapping[str, Any]],
    sent: Mapping[tuple[str, int, int], AuditEntry],
    name: str,
) -> list[str]:
    """Receipts for updates that the committed attempt does not know, or knows with another digest."""
    lines = []
    for step, entry in sent.items():
        detail = rounds.get(step[:2])
        if detail is None or detail["attempt"] != step[2] or entry.detail["status"] != "ACCEPTED":
            continue
        if "updates" not in detail or "asked" in detail:
            # Withheld at the job's level of privacy; or a buffer, which takes an update in when it is full,
            # in whichever round that is.
            continue
        recorded = detail["updates"].get(name)
        if recorded != entry.detail["update"]:
            recorded_digest = f"another one, {recorded[:12]}" if recorded else "none"
            lines.append(
                f"{_words(step)}: the silo sent {entry.detail['update'][:12]} and has a receipt; "
                f"the coordinator's log holds {recorded_digest}"
            )
    return lines


def _invented(rounds: Mapping[tuple[str, int], Mapping[str, Any]], silo: Log, name: str) -> list[str]:
    """Rounds whose job was another one at the silo."""
    instructed = {
        entry.object: entry.detail["config"] for entry in silo.entries if entry.action == "instructed"
    }
    return [
        f"job {job}, round {number}: the silo was shown another configuration ({instructed[job][:12]}) than "
        f"the coordinator recorded ({detail['config'][:12]})"
        for (job, number), detail in rounds.items()
        if name in detail.get("cohort", (name,)) and job in instructed and instructed[job] != detail["config"]
    ]


def _words(step: tuple[str, int, int]) -> str:
    return f"job {step[0]}, round {step[1]}, attempt {step[2]}"
