"""The database, on both kinds: migrations, transitions that happen once, and errors that say what to do."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from roundtable.core.errors import ConfigError, StorageError
from roundtable.core.observability.released import public
from roundtable.server.store import (
    AgentRow,
    ArtifactRow,
    Database,
    EventRow,
    JobRow,
    LedgerRow,
    Transition,
    UpdateRow,
    history_rows,
    tables,
)
from roundtable.server.store import jobs as store
from roundtable.server.store.agent_rows import all_clients, remember
from roundtable.server.store.artifacts import (
    Keep,
    all_digests,
    forget_unused,
    left_behind,
    left_over,
    note_artifact,
)
from roundtable.server.store.group_commit import GroupedWrites
from roundtable.server.store.job_silo_rows import clients_of
from roundtable.server.store.ledger import add, entries, reserve
from roundtable.server.store.migrate import alembic_config


@pytest.fixture
async def opened(database: str) -> AsyncIterator[Database]:
    """A database with its tables."""
    found = Database.open(database)
    yield found
    found.close()


def job_row(name: str = "a", **changes: Any) -> JobRow:
    values: dict[str, Any] = {
        "id": name * 12,
        "name": "spring",
        "request_id": f"request-{name}",
        "submitter": "olga",
        "config": "{}",
        "initial_model": "0" * 64,
        "model": "0" * 64,
        "optimizer": "",
        "status": "running",
        "reason": "",
        "rounds": 5,
        "rounds_done": 0,
        "snapshot": {"engine": {}, "population": 3},
        "version": 1,
        "writer": "w",
        "submitted": 1.0,
        "updated": 1.0,
    }
    return JobRow(**{**values, **changes})


def transition(version: int, **changes: Any) -> Transition:
    values: dict[str, Any] = {
        "job": "a" * 12,
        "version": version,
        "writer": "w",
        "time": 2.0,
        "updated": 2.0,
        "snapshot": {"engine": {"at": version}},
        "status": "running",
        "reason": "",
    }
    changes["records"] = [public(each) for each in changes.get("records", ())]
    return Transition(**{**values, **changes})


def record(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "round": number,
        "attempt": 1,
        "model": f"{number:064d}",
        "optimizer": "",
        "cohort": ["alder", "birch"],
        "contributors": ["alder"],
        "charge": {},
        "withheld": [],
        "ended": 3.0,
    }
    return {**values, **changes}


def update(client: str = "alder", number: int = 1, digest: str = "d" * 64) -> UpdateRow:
    return UpdateRow(number, 1, client, digest, 16, 10, 0.5, {"acc": (1.0, 2)}, "accepted", "", 2.0)


async def write(database: Database, work: Callable[..., Any], *values: Any) -> Any:
    return await database.write(lambda connection: work(connection, *values))


OLGA = ("operator", "olga")


async def with_job(database: Database, **changes: Any) -> JobRow:
    row = job_row(**changes)
    first = public(EventRow(1, 1.0, "job_submitted", "here"))
    await write(database, store.insert_job, row, ArtifactRow("0" * 64, 10, "model", 1.0), [first])
    return row


@pytest.mark.parametrize(
    ("privacy", "before", "after"),
    [
        ({"level": "none"}, None, {}),
        ({"level": "client"}, 2.5, {"noise_multiplier": 2.5}),
        (
            {"level": "dp_ftrl", "bands": 3},
            1.5,
            {"noise_multiplier": 1.5, "bands": None, "coefficients": [1.0, 0.5, 0.375]},
        ),
    ],
)
async def test_jobs_of_older_versions_keep_their_noise(
    database: str, privacy: dict[str, Any], before: float | None, after: dict[str, Any]
) -> None:
    found = Database.open(database)
    config, snapshot = {"rounds": 5, "privacy": privacy}, {"engine": {}, "noise_multiplier": before}
    await with_job(found, config=json.dumps(config), snapshot=snapshot)

    def tenth(connection: sa.Connection) -> None:
        script = ScriptDirectory.from_config(alembic_config(connection)).get_revision("0010")
        with Operations.context(MigrationContext.configure(connection)):
            script.module.upgrade()

    await found.write(tenth)
    row = await found.read(lambda c: store.stored_job(c, "a" * 12))
    found.close()
    assert row.snapshot == {"engine": {}, "noise": after}


async def test_the_migrations_make_the_tables(opened: Database) -> None:
    def differences(connection: sa.Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, tables.metadata)

    assert await opened.read(differences) == []


async def test_opening_again_finds_the_same_coordinator(opened: Database, database: str) -> None:
    again = Database.open(database)
    assert again.identity == opened.identity
    assert len(again.identity) == 32
    again.close()


async def test_a_newer_database_is_refused(opened: Database, database: str) -> None:
    await opened.write(
        lambda connection: connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    )
    with pytest.raises(StorageError, match="written by a newer version"):
        Database.open(database)


async def test_a_transition_is_made_once(opened: Database) -> None:
    row = await with_job(opened)
    step = transition(
        2,
        events=[public(EventRow(2, 2.0, "k", "m", 1, 1, "alder", {"x": 1}))],
        updates=[update()],
        artifacts=[ArtifactRow("d" * 64, 16, "update", 2.0)],
        records=[record(1)],
    )
    for _ in range(3):
        await write(opened, store.apply, step)
    found = await opened.read(lambda connection: store.stored_job(connection, row.id))
    assert (found.version, found.rounds_done, found.model) == (2, 1, f"{1:064d}")
    assert found.snapshot == {"engine": {"at": 2}}
    events = await opened.read(lambda connection: store.events_from(connection, row.id, 1))
    assert [event.sequence for event in events] == [1, 2]
    assert events[1].detail == {"x": 1}
    assert len(await opened.read(lambda connection: store.history(connection, row.id))) == 1
    receipt = await opened.read(lambda connection: store.receipt_of(connection, row.id, 1, 1, "alder"))
    assert receipt == ("accepted", "", "d" * 64, 16)


async def test_the_newest_rounds_are_read_a_page_at_a_time(
    opened: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_rows, "HISTORY_PAGE", 3)
    row = await with_job(opened)
    for number in range(1, 8):
        await write(opened, store.apply, transition(1 + number, records=[record(number)]))
    whole = await opened.read(lambda connection: store.history(connection, row.id))
    length = len(whole[0])
    assert [len(each) for each in whole] == [length] * 7
    for count in range(9):
        found = await opened.read(lambda c, n=count: history_rows.newest_history(c, row.id, n * length))
        assert found == whole[max(0, 7 - count) :]
    assert await opened.read(lambda c: history_rows.newest_history(c, row.id, length - 1)) == []


async def test_a_long_history_is_read_spread_evenly_within_a_bound(opened: Database) -> None:
    row = await with_job(opened)
    for number in range(1, 41):
        heavy = {"note": "x" * (1000 if number % 7 == 0 else 10)}
        await write(
            opened, store.apply, transition(1 + number, records=[{**record(number), "diagnosis": heavy}])
        )

    async def rounds(between: tuple[int, int], count: int, most: int = 10**6) -> list[int]:
        found = await opened.read(lambda c: history_rows.spread_history(c, row.id, between, count, most))
        assert sum(map(len, found)) <= most
        return [json.loads(each)["round"] for each in found]

    assert await rounds((0, 0), 100) == list(range(1, 41))
    assert await rounds((0, 0), 4) == [1, 14, 27, 40]
    assert await rounds((11, 13), 100) == [11, 12, 13]
    assert await rounds((39, 0), 2) == [39, 40]
    assert await rounds((50, 60), 2) == []
    for most in (200, 1000, 5000, 9000):
        found = await rounds((0, 0), 40, most)
        if len(found) > 1:
            assert (found[0], found[-1]) == (1, 40)
            gaps = [after - before for before, after in itertools.pairwise(found)]
            assert max(gaps) - min(gaps) <= 1
    assert len(await rounds((0, 0), 40, 9000)) > 5


async def test_a_job_that_another_coordinator_has_taken_further(opened: Database) -> None:
    row = await with_job(opened)
    await write(opened, store.apply, transition(2, writer="other"))
    with pytest.raises(StorageError, match="another coordinator"):
        await write(opened, store.apply, transition(2, records=[record(1)]))
    assert await opened.read(lambda connection: store.history(connection, row.id)) == []


async def test_a_transition_that_fails_leaves_nothing(opened: Database) -> None:
    row = await with_job(opened)
    twice = transition(2, updates=[update(), update()], records=[record(1)])
    with pytest.raises(StorageError):
        await write(opened, store.apply, twice)
    found = await opened.read(lambda connection: store.stored_job(connection, row.id))
    assert (found.version, found.rounds_done) == (1, 0)
    assert await opened.read(lambda connection: store.history(connection, row.id)) == []


async def test_a_file_is_written_over_one_connection_until_something_fails(tmp_path: Path) -> None:
    database, taken = Database.open(f"sqlite:///{tmp_path}/coordinator.db"), []
    sa.event.listen(database._writer, "checkout", lambda *_: taken.append(1))

    def spoil(connection: sa.Connection) -> None:
        note_artifact(connection, ArtifactRow("e" * 64, 1, "model", 1.0))
        raise ConfigError("no")

    for _ in range(3):
        await database.write(all_digests)
    assert len(taken) == 1
    with pytest.raises(ConfigError):
        await database.write(spoil)
    assert await database.write(all_digests) == []
    assert len(taken) == 2
    pool = database._writer.pool
    database.close()
    assert pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_what_an_engine_remembers_of_clients_takes_the_place_of_what_it_did(opened: Database) -> None:
    await with_job(opened)
    first = {"alder": {"selected": 1}, "birch": {"selected": 1}}
    await write(opened, store.apply, replace(transition(2), clients=first))
    again = {"birch": {"selected": 2}, "cedar": {"selected": 1}}
    await write(opened, store.apply, replace(transition(3), clients=again))
    assert await opened.read(lambda c: clients_of(c, "a" * 12)) == first | again


async def test_jobs_are_found(opened: Database) -> None:
    await with_job(opened)
    await with_job(opened, name="ab", id="ab" * 6, request_id="2", submitted=2.0)

    async def find(wanted: str) -> str:
        return (await opened.read(lambda connection: store.find_job(connection, wanted, OLGA))).id

    assert await find("aa") == "a" * 12
    with pytest.raises(store.UnknownJob, match="several"):
        await find("a")
    with pytest.raises(store.UnknownJob):
        await find("_")
    with pytest.raises(store.UnknownJob, match=f"{'ab' * 6} of olga .running., {'a' * 12} of olga"):
        await find("spring")
    await write(opened, store.mark, "a" * 12, "cancelled", "by olga", 3.0)
    assert await find("spring") == "ab" * 6
    assert [row.id for row in await opened.read(store.jobs_in_order)] == ["ab" * 6, "a" * 12]


async def test_clients_keep_their_counters(opened: Database) -> None:
    alder = AgentRow("alder", "1", ("t",), {"region": "north"}, ("cpu",), 1.0, 1.0)
    await write(opened, remember, [alder])
    await with_job(opened)
    await write(opened, store.apply, transition(2, records=[record(1)]))
    await write(opened, remember, [replace(alder, version="2", last_seen=5.0, first_seen=5.0)])
    (found,) = await opened.read(all_clients)
    assert (found.selected, found.completed) == (1, 1)
    assert (found.version, found.first_seen, found.last_seen) == ("2", 1.0, 5.0)
    assert found.metadata == {"region": "north"}


async def test_retention_keeps_what_anything_needs(opened: Database) -> None:
    await with_job(opened)
    for number in range(1, 5):
        digest = f"{number:01d}" * 64
        rows = [ArtifactRow(f"{number:064d}", 1, "model", 1.0), ArtifactRow(digest, 1, "update", 1.0)]
        step = transition(
            number + 1, records=[record(number)], updates=[update("alder", number, digest)], artifacts=rows
        )
        await write(opened, store.apply, step)
    shared = job_row("b", id="b" * 12, request_id="2", initial_model=f"{1:064d}", model=f"{1:064d}")
    await write(opened, store.insert_job, shared, ArtifactRow(f"{1:064d}", 1, "model", 1.0), [])

    def retire(connection: sa.Connection) -> list[str]:
        found = left_behind(connection, "a" * 12, 3, Keep(2))
        return forget_unused(connection, found, Keep(2))

    gone = await opened.write(retire)
    # Model 1 is another job's initial one; the update of round 4 was not asked about.
    assert sorted(gone) == sorted([f"{2:064d}", "1" * 64, "2" * 64, "3" * 64])
    assert await opened.write(retire) == []


async def test_bytes_that_were_sent_in_many_rounds_stay_as_long_as_one_of_these_is_kept(
    opened: Database,
) -> None:
    await with_job(opened, config=json.dumps({"task": "t", "rounds": 5, "privacy": {"level": "none"}}))
    keep, same = Keep(1, updates=2), "9" * 64
    for number in range(1, 5):
        rows = [ArtifactRow(f"{number:064d}", 1, "model", 1.0), ArtifactRow(same, 1, "update", 1.0)]
        made = {**record(number), "model": f"{number:064d}"}
        sent = [update("alder", number, same if number < 4 else "8" * 64)]
        await write(opened, store.apply, transition(number + 1, records=[made], updates=sent, artifacts=rows))
    assert same in await opened.read(lambda c: left_behind(c, "a" * 12, 4, keep))
    assert await opened.write(lambda c: forget_unused(c, [same], keep)) == []
    assert await opened.write(lambda c: forget_unused(c, [same], Keep(1, updates=1))) == [same]


@pytest.mark.parametrize(
    ("privacy", "kept"),
    [
        (None, 2),
        ({"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}, 0),
        ({"level": "none", "secure_aggregation": True, "clip_norm": 1.0}, 0),
        ({"level": "of another version"}, 0),
    ],
    ids=["none", "bare", "masked", "unreadable"],
)
async def test_what_it_takes_to_make_rounds_again_is_kept_where_it_may_be(
    opened: Database, privacy: dict[str, Any] | None, kept: int
) -> None:
    await with_job(
        opened, config=json.dumps({"task": "t", "rounds": 5, "privacy": privacy or {"level": "none"}})
    )
    keep = Keep(1, updates=2)
    for number in range(1, 5):
        model, state, sent = f"{number:064d}", f"{10 + number:064d}", f"{20 + number:064d}"
        rows = [ArtifactRow(model, 1, "model", 1.0), ArtifactRow(state, 1, "optimizer", 1.0)]
        rows.append(ArtifactRow(sent, 1, "update", 1.0))
        made = {**record(number), "model": model, "optimizer": state}
        sent_update = update("alder", number, sent)
        await write(
            opened, store.apply, transition(number + 1, records=[made], updates=[sent_update], artifacts=rows)
        )

    def retire(connection: sa.Connection) -> None:
        forget_unused(connection, left_behind(connection, "a" * 12, 4, keep), keep)
        assert forget_unused(connection, left_over(connection, 2.0), keep) == []

    await opened.write(retire)
    left = set(await opened.read(all_digests)) - {"0" * 64}
    newest = range(4 - kept, 5) if kept else (4,)
    assert left == {
        *(f"{number:064d}" for number in newest),
        *(f"{10 + number:064d}" for number in newest),
        *(f"{20 + number:064d}" for number in range(5 - kept, 5)),
    }


async def test_the_ledger_reserves_and_settles(opened: Database) -> None:
    row = await with_job(opened)
    for attempt in (1, 2):
        await write(opened, reserve, LedgerRow(row.id, "", row.id, 1, attempt, "{}", False, 1.0))
    (reserved,) = await opened.read(lambda connection: entries(connection, row.id))
    assert (reserved.attempt, reserved.released) == (2, False)
    await write(
        opened, store.apply, transition(2, records=[record(1, attempt=2, charge={"level": "client"})])
    )
    await write(opened, reserve, LedgerRow(row.id, "", row.id, 2, 1, "{}", False, 1.0))
    await write(opened, store.apply, transition(3, status="finished"))
    (left,) = await opened.read(lambda connection: entries(connection, row.id))
    assert (left.round, left.attempt, left.released) == (1, 2, True)


async def test_an_update_pays_once_in_an_attempt_and_another_one_again(opened: Database) -> None:
    row = await with_job(opened)
    paid = LedgerRow(row.id, "alder", row.id, 1, 1, "{}", True, 1.0, "a" * 64)
    others = (
        replace(paid, digest="b" * 64),
        replace(paid, attempt=2),
        replace(paid, round=2),
        replace(paid, silo="birch"),
    )
    for each in (paid, replace(paid, time=2.0), *others):
        await write(opened, add, each)
    assert await opened.read(lambda connection: entries(connection, row.id)) == [paid, *others]


async def test_sqlite_survives_a_loss_of_power(tmp_path: Path) -> None:
    opened = Database.open(f"sqlite:///{tmp_path}/deep/inside/c.db")

    def pragmas(connection: sa.Connection) -> list[Any]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [connection.execute(sa.text(f"PRAGMA {name}")).scalar() for name in names]

    assert await opened.write(pragmas) == ["wal", 2, 1]
    opened.close()


async def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    opened = Database.open(f"sqlite:///{tmp_path}/c.db")
    await with_job(opened)

    def fill(connection: sa.Connection) -> None:
        pages = connection.execute(sa.text("PRAGMA page_count")).scalar()
        connection.execute(sa.text(f"PRAGMA max_page_count = {pages}"))
        store.apply(connection, transition(2, reason="x" * 1_000_000, records=[record(1)]))

    with pytest.raises(StorageError, match="free some space"):
        await opened.write(fill)
    found = await opened.read(lambda connection: store.stored_job(connection, "a" * 12))
    assert (found.version, found.rounds_done) == (1, 0)
    opened.close()


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database at all, but long enough to be looked at as one")
    for address, kind, words in (
        ("", ConfigError, "must be an address"),
        ("mysql://x/y", ConfigError, "use sqlite or postgresql"),
        ("sqlite://", ConfigError, "needs a file"),
        (f"sqlite:///{tmp_path}/file", StorageError, "damaged or is none of ours"),
        (f"sqlite:///{tmp_path}/file/c.db", StorageError, "cannot be made"),
        ("postgresql://u:secret@127.0.0.1:1/x", StorageError, "is PostgreSQL running there"),
    ):
        with pytest.raises(kind, match=words) as caught:
            Database.open(address)
        assert "secret" not in str(caught.value)


async def test_a_locked_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundtable.server.store.database.BUSY_SECONDS", 0.05)
    opened = Database.open(f"sqlite:///{tmp_path}/c.db")
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with pytest.raises(StorageError, match="second coordinator"):
        await with_job(opened)
    assert time.monotonic() - started < 10
    other.execute("ROLLBACK")
    await with_job(opened)
    other.close()
    opened.close()


async def test_small_writes_share_a_transaction_and_its_failure(opened: Database) -> None:
    together = GroupedWrites(opened)
    turns: list[int] = []

    def note(number: int) -> Callable[[sa.Connection], None]:
        def work(connection: sa.Connection) -> None:
            turns.append(number)
            if number == 7:
                raise sa.exc.OperationalError("INSERT", None, Exception("no luck"))

        return work

    await asyncio.gather(*(together.write(note(number)) for number in range(5)))
    assert turns == list(range(5))
    results = await asyncio.gather(*(together.write(note(n)) for n in (6, 7, 8)), return_exceptions=True)
    assert [isinstance(result, StorageError) for result in results] == [True, True, True]
    await together.write(note(9))
    assert turns == [0, 1, 2, 3, 4, 6, 7, 9]
