"""The coordinator's audit log beside a silo's own: do the two tell the same story?

What is compared: each update that the silo has a receipt for, and each round that the coordinator says
it took part in, as far as the job's level of privacy lets the log tell. Receipts are signed, so that a
difference is not one word against another. Each names the entry up to which the coordinator had signed its
log by then: a silo's log is a witness of the coordinator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.evidence.audit_log import AuditEntry, Log
from roundtable.core.identity.signing import verify

Step = tuple[str, int, int]
"""Job, round and attempt."""
ACCEPTED = "ACCEPTED"
RECEIPT = ("client", "job", "round", "attempt", "update", "size", "status", "time", "sealed", "sealed_hash")


@dataclass(frozen=True)
class LogComparison:
    """What two logs say of each other, in words.

    contradictions: they cannot both be true. lost: nothing contradicts what the coordinator says, but the
    silo has no proof of it and will get none. pending: the silo is still to get its receipt. absent: archives
    that are not at hand, whose entries were not compared.
    """

    contradictions: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def compare_logs(coordinator: Log, silo: Log, name: str, ca: bytes) -> LogComparison:
    """Lays both logs side by side, as far as both reach."""
    rounds = {
        (entry.object, entry.detail["round"]): entry
        for entry in coordinator.entries
        if entry.action == "round_committed"
    }
    sound, unsound = receipts_of(silo, ca)
    unproven = _unproven(rounds, silo, sound, name)
    return LogComparison(
        (
            *_rewritten(coordinator, sound),
            *_contradicted(rounds, sound, name),
            *unproven.contradictions,
            *_invented(rounds, silo, name),
        ),
        (*(words for step, words in unsound.items() if step not in sound), *unproven.lost),
        unproven.pending,
        (*_not_at_hand(coordinator, "the coordinator's log"), *_not_at_hand(silo, "the silo's log")),
    )


def receipts_of(silo: Log, ca: bytes) -> tuple[dict[Step, AuditEntry], dict[Step, str]]:
    """The silo's receipt of each step, one that says ACCEPTED before others; and those that prove nothing."""
    sound: dict[Step, AuditEntry] = {}
    unsound: dict[Step, str] = {}
    for entry in silo.entries:
        if entry.action != "receipt":
            continue
        step = _step(entry)
        if words := _unsigned(entry, ca):
            unsound[step] = words
        elif step not in sound or entry.detail["status"] == ACCEPTED:
            sound[step] = entry
    return sound, unsound


def witnessed(coordinator: Log, silo: Log, ca: bytes) -> list[int]:
    """Entries of the coordinator's log that a silo has had a receipt about, in what the silo has signed.

    AuditError where a receipt that the coordinator has signed names an entry that its log does not hold.
    """
    receipts = [
        entry for entry in silo.until(silo.sealed) if entry.action == "receipt" and not _unsigned(entry, ca)
    ]
    if contradictions := _rewritten(coordinator, {_step(entry): entry for entry in receipts}):
        raise AuditError("; ".join(contradictions[:3]))
    sealed = (int(entry.detail["sealed"]) for entry in receipts)
    return [sequence for sequence in sealed if coordinator.hash_of(sequence)]


def _step(entry: AuditEntry) -> Step:
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


def _rewritten(coordinator: Log, sent: Mapping[Step, AuditEntry]) -> list[str]:
    """Receipts that name an entry of the coordinator's log which it does not hold, or holds another one."""
    return [
        f"{_words(step)}: when the coordinator gave this receipt it had signed its entry "
        f"{entry.detail['sealed']}, {str(entry.detail['sealed_hash'])[:12]}; "
        + (f"{now[:12]} stands there now" if now else f"this log ends at entry {coordinator.end}")
        + ": history was rewritten, an older backup was restored, or this is an older export"
        for step, entry in sent.items()
        if (now := coordinator.hash_of(int(entry.detail["sealed"]))) != entry.detail["sealed_hash"]
        and (now or not coordinator.is_absent(int(entry.detail["sealed"])))
    ]


def _not_at_hand(log: Log, whose: str) -> list[str]:
    return [
        f"entries {archive.first} to {archive.last} of {whose} are archived, and {archive.name} is not at "
        "hand: what they tell was not compared; name it with --archive"
        for archive in log.absent
    ]


def _unproven(
    rounds: Mapping[tuple[str, int], AuditEntry],
    silo: Log,
    sound: Mapping[Step, AuditEntry],
    name: str,
) -> LogComparison:
    """Updates that the coordinator counts and no receipt accepts, by what the silo's log has in its place."""
    proven = {
        (step[0], item.detail["update"]) for step, item in sound.items() if item.detail["status"] == ACCEPTED
    }
    sent = {(item.object, item.detail["update"]): item for item in silo.entries if item.action == "sent"}
    answered = {(i.object, i.detail["update"]) for i in silo.entries if i.action == "receipt"} - proven
    begins = silo.entries[0].time if silo.entries else inf
    contradictions, lost, pending = [], [], []
    for (job, number), entry in rounds.items():
        update = job, entry.detail.get("updates", {}).get(name)
        if update[1] is None or update in proven:
            continue
        step = _words((job, int(number), int(entry.detail["attempt"])))
        if update in answered:
            lost.append(f"{step}: the coordinator counts the silo's update, and none of its receipts says so")
        elif update in sent and not _followed(sent[update], silo):
            pending.append(f"{step}: no proof yet: the silo has sent its update and waits for the receipt")
        elif update in sent:
            lost.append(f"{step}: the proof was lost at the silo, which sent its update and has no receipt")
        elif silo.absent:
            # What tells of it may be in the archive: that is said, and accuses nobody.
            continue
        elif entry.time < begins:
            lost.append(f"{step}: the proof was lost at the silo, whose log begins only later")
        else:
            contradictions.append(f"{step}: the coordinator counts an update that the silo never sent")
    return LogComparison(tuple(contradictions), tuple(lost), tuple(pending))


def _followed(sent: AuditEntry, silo: Log) -> bool:
    """Whether the silo's job has gone on since; before that its agent still asks for the receipt."""
    return any(entry.object == sent.object for entry in silo.after(sent.sequence))


def _contradicted(
    rounds: Mapping[tuple[str, int], AuditEntry], sent: Mapping[Step, AuditEntry], name: str
) -> list[str]:
    """Receipts for updates that the committed attempt does not know, or knows with another digest."""
    lines = []
    for step, entry in sent.items():
        committed = rounds.get(step[:2])
        if committed is None or entry.detail["status"] != ACCEPTED:
            continue
        detail = committed.detail
        if detail["attempt"] != step[2]:
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


def _invented(rounds: Mapping[tuple[str, int], AuditEntry], silo: Log, name: str) -> list[str]:
    """Rounds whose job was another one at the silo."""
    instructed = {
        entry.object: entry.detail["config"] for entry in silo.entries if entry.action == "instructed"
    }
    return [
        f"job {job}, round {number}: the silo was shown another configuration ({instructed[job][:12]}) than "
        f"the coordinator recorded ({detail['config'][:12]})"
        for (job, number), detail in ((key, entry.detail) for key, entry in rounds.items())
        if name in detail.get("cohort", (name,)) and job in instructed and instructed[job] != detail["config"]
    ]


def _words(step: Step) -> str:
    return f"job {step[0]}, round {step[1]}, attempt {step[2]}"
