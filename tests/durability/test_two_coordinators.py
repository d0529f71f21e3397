"""Two coordinators on one PostgreSQL database: one active, one that takes over, and nothing twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgresql import PostgreSQL
from processes import SILOS, Federation, free_port

from roundtable.core.errors import StorageError, UnavailableError
from roundtable.operator import OperatorClient
from roundtable.server.leadership.lease import Lease
from roundtable.server.store import Database, tables
from roundtable.server.store.database import LeaseLost

SECONDS = 2.0


@pytest.fixture
def database(postgresql: PostgreSQL) -> Iterator[Database]:
    address = postgresql.fresh()
    Database.open(address).close()  # On a busy machine a migration may stand still for longer.
    opened = Database.connect(address, stalled_seconds=SECONDS)
    opened.prepare()
    yield opened
    opened.close()


def second(database: Database) -> Database:
    return Database.connect(database.address, stalled_seconds=SECONDS)


def test_a_lease_is_one_coordinators(database: Database) -> None:
    other = second(database)
    first, late = Lease(database, "a", "a:1", 60.0), Lease(other, "b", "b:1", 60.0)
    assert first.acquire()
    assert not late.acquire()
    assert (late.holder().name, late.holder().address) == ("a", "a:1")
    first.renew()
    first.release()
    assert late.acquire()
    assert late.token == first.token + 1
    with pytest.raises(LeaseLost):
        first.renew()
    other.close()


async def test_a_write_under_an_old_token_is_refused(database: Database) -> None:
    first = Lease(database, "a", "", 60.0)
    assert first.acquire()
    await database.write(lambda connection: connection.execute(sa.select(sa.literal(1))).scalar())
    first.release()
    other = second(database)
    assert Lease(other, "b", "", 60.0).acquire()

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.delete(tables.coordinator))

    with pytest.raises(LeaseLost, match="has taken the place of this one"):
        await database.write(work)
    assert await database.read(lambda c: c.execute(sa.select(tables.coordinator.c.id)).scalar()) == 1
    other.close()


def test_who_stands_still_in_a_transaction_holds_nobody_up(database: Database) -> None:
    """Between its check and its commit a stopped leader holds a lock; the database ends its session."""
    first = Lease(database, "a", "", 0.5)
    other = second(database)
    late = Lease(other, "b", "", 60.0)
    assert first.acquire()

    def stand_still_and_commit() -> None:
        with database.transaction() as connection:
            first.check(connection)
            connection.execute(sa.delete(tables.coordinator))
            while not late.acquire():
                pass

    with pytest.raises(StorageError):
        stand_still_and_commit()
    assert late.token == first.token + 1
    assert late.holder().name == "b"
    with other.transaction() as connection:
        assert connection.execute(sa.select(tables.coordinator.c.id)).scalar() == 1
    other.close()


@pytest.fixture
def federation(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[Federation]:
    settings = {"database": postgresql.fresh(), "lease": SECONDS}
    made = Federation(tmp_path, settings=settings)
    yield made
    made.close()


@pytest.mark.parametrize(
    "place",
    [
        "2/commit/transition_open:stop",
        pytest.param("2/train/transition_open:stop", marks=pytest.mark.slow),
        pytest.param("2/aggregate/aggregated:stop", marks=pytest.mark.slow),
    ],
)
def test_the_leader_is_stopped_and_wakes_too_late(federation: Federation, place: str) -> None:
    """SIGSTOP in the middle of a transaction: the other takes over; on waking, nothing of it is committed."""
    address = federation.port
    first = federation.coordinator(place)
    standby = free_port()
    federation.coordinator(name="second", listen=f"127.0.0.1:{standby}")
    for name in SILOS:
        federation.agent(name, standbys=[f"127.0.0.1:{standby}"])
    with (
        OperatorClient(f"127.0.0.1:{standby}", federation.folder / "olga") as operator,
        pytest.raises(
            UnavailableError, match=f"standby: the active coordinator is the one at 127.0.0.1:{address}"
        ),
    ):
        operator.jobs()
    job = federation.submit(federation.job(), "once")
    federation.port = standby
    detail = federation.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    first.send_signal(signal.SIGCONT)
    federation.until(lambda: "stands down" in federation.log("hub"))
    federation.until(lambda: "is standing by" in federation.said("hub"))
    again = federation.finish(job)
    assert again.job == detail.job
    records = [json.loads(record) for record in again.history]
    assert [(record["round"], record["contributors"]) for record in records] == [
        (number, sorted(SILOS)) for number in (1, 2, 3)
    ]


@pytest.mark.slow
def test_the_standby_takes_over_from_one_that_is_killed_and_back(federation: Federation) -> None:
    first, standby = federation.port, free_port()
    federation.coordinator("2/train/transition_stored")
    federation.coordinator(name="second", listen=f"127.0.0.1:{standby}")
    for name in SILOS:
        federation.agent(name, standbys=[f"127.0.0.1:{standby}"])
    job = federation.submit(federation.job(rounds=3), "first")
    assert federation.died("hub") == -signal.SIGKILL
    federation.coordinator()
    federation.port = standby
    one = federation.finish(job)
    federation.kill("second")
    federation.port = first
    two = federation.finish(federation.submit(federation.job(rounds=3), "second"))
    assert (one.job.status, two.job.status) == ("finished", "finished")
    assert one.job.model.digest == two.job.model.digest
