"""The coordinator's audit log beside a silo's own: do the two tell the same story?

What is compared: each update that the silo has a receipt for, and each round that the coordinator says
it took part in. Receipts are signed, so that a difference is not one word against another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundtable.core.errors import IdentityError
from roundtable.core.evidence.audit_log import Entry, Log
from roundtable.core.identity.signing import verify

RECEIPT = ("client", "job", "round", "attempt", "update", "size", "status", "time")


def differences(coordinator: Log, silo: Log, name: str, ca: bytes) -> list[str]:
    """Every contradiction, in words; empty if the logs agree as far as both reach."""
    rounds = {
        (entry.object, entry.detail["round"]): entry.detail
        for entry in coordinator.entries
        if entry.action == "round_committed"
    }
    sent = {_step(entry): entry for entry in silo.entries if entry.action == "receipt"}
    return [
        *_unsigned(sent, ca),
        *_unacknowledged(rounds, sent, name),
        *_contradicted(rounds, sent, name),
        *_invented(rounds, silo, name),
    ]


def _step(entry: Entry) -> tuple[str, int, int]:
    return str(entry.detail["job"]), int(entry.detail["round"]), int(entry.detail["attempt"])


def _unsigned(sent: Mapping[tuple[str, int, int], Entry], ca: bytes) -> list[str]:
    found = []
    for step, entry in sent.items():
        detail = entry.detail
        values = {key: detail[key] for key in RECEIPT}
        certificate = str(detail.get("certificate", "")).encode()
        try:
            signature = bytes.fromhex(str(detail.get("signature", "")))
            if not signature or not certificate:
                raise IdentityError("it has no signature")
            verify(certificate, ca, "coordinator", "receipt", values, signature)
        except (IdentityError, ValueError) as error:
            found.append(f"{_words(step)}: the silo's receipt proves nothing: {error}")
    return found


def _unacknowledged(
    rounds: Mapping[tuple[str, int], Mapping[str, Any]],
    sent: Mapping[tuple[str, int, int], Entry],
    name: str,
) -> list[str]:
    """Rounds that count an update of the silo which it has no receipt for."""
    found = []
    for (job, number), detail in rounds.items():
        step = (job, int(number), int(detail["attempt"]))
        if name in detail["updates"] and step not in sent:
            found.append(f"{_words(step)}: the coordinator counts an update that the silo never sent")
    return found


def _contradicted(
    rounds: Mapping[tuple[str, int], Mapping[str, Any]],
    sent: Mapping[tuple[str, int, int], Entry],
    name: str,
) -> list[str]:
    """Receipts for updates that the committed attempt does not know, or knows with another digest."""
    found = []
    for step, entry in sent.items():
        detail = rounds.get(step[:2])
        if detail is None or detail["attempt"] != step[2] or entry.detail["status"] != "ACCEPTED":
            continue
        recorded = detail["updates"].get(name)
        if recorded != entry.detail["update"]:
            said = f"another one, {recorded[:12]}" if recorded else "none"
            found.append(
                f"{_words(step)}: the silo sent {entry.detail['update'][:12]} and has a receipt; "
                f"the coordinator's log holds {said}"
            )
    return found


def _invented(rounds: Mapping[tuple[str, int], Mapping[str, Any]], silo: Log, name: str) -> list[str]:
    """Rounds whose job was another one at the silo."""
    told = {entry.object: entry.detail["config"] for entry in silo.entries if entry.action == "instructed"}
    return [
        f"job {job}, round {number}: the silo was shown another configuration ({told[job][:12]}) than the "
        f"coordinator recorded ({detail['config'][:12]})"
        for (job, number), detail in rounds.items()
        if name in detail["cohort"] and job in told and told[job] != detail["config"]
    ]


def _words(step: tuple[str, int, int]) -> str:
    return f"job {step[0]}, round {step[1]}, attempt {step[2]}"
