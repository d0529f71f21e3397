"""The audit log's rows. `append` belongs into the transaction that does what the entry tells of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from blake3 import blake3
from sqlalchemy.engine import Connection, Row

from roundtable.core.evidence.audit_log import AuditEntry, entry
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import canonical, envelope, job_digest
from roundtable.server.store import tables
from roundtable.server.store.combined import combined_updates
from roundtable.server.store.rows import EventRow, to_json
from roundtable.server.versions import versions

COORDINATOR = "coordinator"
# Built once: each round runs them, and building one takes longer than running it.
_INSERT = sa.insert(tables.audit)
_NEWEST = sa.select(tables.audit).order_by(tables.audit.c.sequence.desc()).limit(1)
_CONFIG = sa.select(tables.jobs.c.config).where(tables.jobs.c.id == sa.bindparam("job"))
_sums = tables.relayed_sums.c
_SUMS = sa.select(_sums.digest, _sums.relay, _sums.statement).where(
    _sums.job == sa.bindparam("job"),
    _sums.round == sa.bindparam("round"),
    _sums.attempt == sa.bindparam("attempt"),
)


def append(connection: Connection, *entries: AuditEntry) -> None:
    """Adds entries to the end of the chain."""
    last = _last(connection)
    for item in entries:
        last = item.after(last)
        connection.execute(_INSERT, {**vars(last), "detail": canonical(last.detail).decode()})


def append_rounds(
    connection: Connection,
    job: str,
    now: float,
    records: list[dict[str, Any]],
    events: list[EventRow],
) -> None:
    """Appends what a job's transition adds to the audit log: committed rounds, and refusals of silos.

    A round's entry holds the versions of the software that committed it.
    """
    entries = [
        entry(now, event.client, "silo_refused", job, {"round": event.round, "reason": event.message[:500]})
        for event in events
        if event.kind == "client_failed" and event.detail.get("kind") == "refused"
    ]
    for record in records:
        detail = _evidence(connection, job, record) | {"versions": versions()}
        entries.append(entry(now, COORDINATOR, "round_committed", job, detail))
    if entries:
        append(connection, *entries)


def lines(connection: Connection, first: int, limit: int) -> tuple[list[str], int]:
    """At most `limit` entries from this number on with their seals, as lines; and the number to go on."""
    table = tables.audit.c
    query = sa.select(tables.audit).where(table.sequence >= first).order_by(table.sequence).limit(limit)
    entries = [_entry(row) for row in connection.execute(query)]
    if not entries:
        return [], first
    seal = tables.seals.c
    between = sa.and_(seal.sequence >= entries[0].sequence, seal.sequence <= entries[-1].sequence)
    seals = {row.sequence: row.document for row in connection.execute(sa.select(tables.seals).where(between))}
    return list(_interleaved(entries, seals)), entries[-1].sequence + 1


def unsigned(connection: Connection) -> tuple[int, int] | None:
    """The first and the last entry that no seal covers; None where all are covered."""
    last = unsealed(connection)
    return (_last_seal(connection) + 1, last.sequence) if last else None


def unsealed(connection: Connection) -> AuditEntry | None:
    """The last entry, if no seal covers it yet."""
    last = _last(connection)
    return last if last is not None and last.sequence > _last_seal(connection) else None


def end(connection: Connection) -> tuple[int, str]:
    """Number and hash of the last entry; 0 and nothing in an empty log."""
    last = _last(connection)
    return (last.sequence, last.hash) if last else (0, "")


def seal(connection: Connection, identity: SiloIdentity, now: float) -> tuple[int, str] | None:
    """Signs the log up to its end, which is returned; None where a seal covers that already."""
    last = unsealed(connection)
    if last is None:
        return None
    values = {"sequence": last.sequence, "hash": last.hash, "time": now}
    document = json.dumps(envelope(identity, "seal", values), separators=(",", ":"))
    connection.execute(sa.insert(tables.seals).values(sequence=last.sequence, document=document, time=now))
    return last.sequence, last.hash


def _evidence(connection: Connection, job: str, record: dict[str, Any]) -> dict[str, Any]:
    """What binds a round: configuration, cohort, every update that was combined, the model, the charge.

    Of buffered rounds also in which round and attempt each of the updates was asked for. Of what may not be
    told (`withheld` names it) nothing: the silos' own receipts are what remains.
    """
    config = connection.execute(_CONFIG, {"job": job}).scalar_one()
    shown = {
        "config": job_digest(config),
        "round": record["round"],
        "attempt": record["attempt"],
        "model": record["model"],
        "optimizer": record["optimizer"],
        "charge": json.loads(to_json(record["charge"])),
        **({"closed": record["closed"]} if record.get("closed") else {}),
    }
    withheld = record["withheld"]
    if withheld:
        shown["withheld"] = list(withheld)
    if "cohort" not in withheld:
        shown |= {"cohort": sorted(record["cohort"]), "contributors": sorted(record["contributors"])}
    if "excluded" in withheld:
        return shown
    combined = combined_updates(connection, job, record)
    if record.get("staleness"):
        shown["asked"] = {update.client: [update.round, update.attempt] for update in combined}
    shown["updates"] = {update.client: update.digest for update in combined}
    here = {"job": job, "round": record["round"], "attempt": record["attempt"]}
    if sums := connection.execute(_SUMS, here).all():
        # Whose updates lie in a sum is in the relay's statement, which this binds.
        shown["sums"] = {
            row.digest: {"relay": row.relay, "statement": blake3(row.statement.encode()).hexdigest()}
            for row in sums
        }
    return shown


def _last_seal(connection: Connection) -> int:
    return connection.execute(sa.select(sa.func.max(tables.seals.c.sequence))).scalar() or 0


def _last(connection: Connection) -> AuditEntry | None:
    row = connection.execute(_NEWEST).first()
    return _entry(row) if row else None


def _entry(row: Row[Any]) -> AuditEntry:
    values = dict(row._mapping)
    return AuditEntry(**{**values, "detail": json.loads(values["detail"])})


def _interleaved(entries: list[AuditEntry], seals: Mapping[int, str]) -> Iterator[str]:
    for item in entries:
        yield item.to_line()
        if item.sequence in seals:
            yield f'{{"seal":{seals[item.sequence]}}}'
