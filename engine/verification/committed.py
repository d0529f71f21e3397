"""What the audit log says of a job's rounds, in order: each begins where the one before ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundtable.core.bounds import is_digest
from roundtable.core.config import JobConfig
from roundtable.core.errors import AuditError
from roundtable.core.evidence.audit_log import AuditEntry, Log


@dataclass(frozen=True)
class CommittedRound:
    """One entry of the log. `base` and `state` are model and optimizer state before it, "" for no state.

    `updates` maps each silo to its update's digest, `asked` to the (round, attempt) that it answers: they and
    the cohort are empty where privacy withholds them. `closed` says why the round made no model.
    """

    sequence: int
    round: int
    attempt: int
    config: str
    cohort: tuple[str, ...]
    updates: Mapping[str, str]
    asked: Mapping[str, tuple[int, int]]
    base: str
    state: str
    model: str
    optimizer: str
    closed: str
    versions: Mapping[str, str]


def committed_rounds(log: Log, job: str, initial_model: str, config: JobConfig) -> list[CommittedRound]:
    """The rounds of a job that go up, from the first. AuditError where one is missing, stands twice, or
    cannot be read."""
    rounds: list[CommittedRound] = []
    base, state = initial_model, ""
    for entry in log.entries:
        if entry.action != "round_committed" or entry.object != job:
            continue
        made = _round(entry, base, state)
        following = config.regions.goes_up(rounds[-1].round if rounds else 0, config.rounds)
        if made.round != following or (rounds and made.round == rounds[-1].round):
            raise AuditError(
                f"entry {entry.sequence} of the log commits round {made.round} of job {job}, where round "
                f"{following} should follow"
            )
        rounds.append(made)
        base, state = made.model, made.optimizer
    return rounds


def _round(entry: AuditEntry, base: str, state: str) -> CommittedRound:
    detail = entry.detail
    try:
        number, attempt = int(detail["round"]), int(detail["attempt"])
        updates = {str(name): _digest(value) for name, value in dict(detail.get("updates") or {}).items()}
        steps = dict(detail.get("asked") or dict.fromkeys(updates, (number, attempt)))
        return CommittedRound(
            sequence=entry.sequence,
            round=number,
            attempt=attempt,
            config=_digest(detail["config"]),
            cohort=tuple(str(name) for name in detail.get("cohort") or ()),
            updates=updates,
            asked={str(name): (int(step[0]), int(step[1])) for name, step in steps.items()},
            base=base,
            state=state,
            model=_digest(detail["model"]),
            optimizer=_digest(detail["optimizer"]) if detail["optimizer"] else "",
            closed=str(detail.get("closed") or ""),
            versions={str(name): str(value) for name, value in dict(detail.get("versions") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        said = f"entry {entry.sequence} of the log tells of no round that can be read: {error}"
        raise AuditError(said) from error


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not is_digest(value):
        raise ValueError(f"{str(value)[:80]!r} is no BLAKE3 digest")
    return value
