"""Old entries of the audit log, taken out into archives: all is still provable, and nothing else may go."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from service import Operator, running

from roundtable.cli.coordinator.audit import UNPROVEN
from roundtable.cli.main import cli
from roundtable.core.errors import AuditError, ConfigError
from roundtable.core.evidence.archive_shelf import ArchiveShelf, keep_archive
from roundtable.core.evidence.audit_archive import pack, unpack
from roundtable.core.evidence.audit_log import check_signed, compare, entry, read_log
from roundtable.engine.verification.bundle import LOG
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.storage import audit_archiving
from roundtable.server.storage.audit_archiving import GATHERED_SECONDS, AuditArchiving
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_drill import rehearse
from roundtable.server.storage.backup_restore import restore
from roundtable.server.storage.round_bundle import write_bundle
from roundtable.server.store import audit as store
from roundtable.server.store import tables
from roundtable.server.store.audit_archives import archives, take_out
from roundtable.server.store.database import LeaseLost

Settings = Callable[..., ServerConfig]
DAY = 86400.0
KEPT = 10.0


@pytest.fixture
def ca(certificates: Path) -> Path:
    return certificates / "ca" / "ca.crt"


@pytest.fixture
def root(ca: Path) -> bytes:
    return ca.read_bytes()


def archiving(coordinator: Coordinator) -> AuditArchiving:
    """As the coordinator itself does it each hour."""
    services, security = coordinator.jobs._services, coordinator.security
    return AuditArchiving(
        services.database,
        services.artifacts,
        services.retention.replicas,
        security.identity,
        security._credentials.ca,
        KEPT * DAY,
    )


def ahead(times: int = 1) -> float:
    """A time at which all is due that is written now, or was at such a time before."""
    return time.time() + times * (KEPT * DAY + GATHERED_SECONDS + 60)


async def lines(coordinator: Coordinator, live: bool = False) -> list[str]:
    return [line async for page in coordinator.security.audit.lines(1, live) for line in page]


async def write_old(coordinator: Coordinator, count: int, age: float) -> None:
    """Entries that are so many days old, under one seal."""

    def add(connection: sa.Connection) -> None:
        made = time.time() - age * DAY
        store.append(connection, *(entry(made, "olga", "looked", str(n)) for n in range(count)))

    await coordinator._database.write(add)
    await coordinator.security.audit.seal()


async def two_archives(coordinator: Coordinator) -> list[str]:
    """A log of which two parts are archived, one after the other; the lines of before."""
    before = await lines(coordinator)
    for times in (1, 2):
        await write_old(coordinator, 3, 100.0)
        assert await archiving(coordinator).run(ahead(times)) > 0
    assert len(await coordinator._database.read(archives)) == 2
    return before


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def verified(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["audit", "verify", *map(str, words)], standalone_mode=False)


async def test_an_archived_log_is_whole_and_its_live_part_says_what_is_not_at_hand(
    settings: Settings, certificates: Path, ca: Path, root: bytes, tmp_path: Path
) -> None:
    async with running(settings()) as coordinator:
        before = await two_archives(coordinator)
        whole, live = await lines(coordinator), await lines(coordinator, live=True)
        rows = await coordinator._database.read(lambda c: c.execute(sa.select(tables.audit)).all())
        me = ["--coordinator", f"localhost:{coordinator.port}", "--credentials", str(certificates / "olga")]

        def run(*words: str) -> Result:
            return CliRunner().invoke(cli, ["audit", *words, *me], standalone_mode=False)

        folder, file = tmp_path / "kept", tmp_path / "live.jsonl"
        for _ in range(2):
            said = await asyncio.to_thread(run, "archive", "-o", str(folder), "--ca", str(ca))
            assert said.exception is None, said.exception
        assert "; 0 are new" in said.output
        (folder / sorted(path.name for path in folder.iterdir())[1]).unlink()
        said = await asyncio.to_thread(run, "archive", "-o", str(folder), "--ca", str(ca))
        assert "2 archives" in said.output
        assert "; 1 are new" in said.output
        await asyncio.to_thread(run, "export", "-o", str(file), "--live")
    log = read_log(whole, root)
    check_signed(log)
    assert len(log.entries) == log.end == log.sealed
    assert log.entries[-1].action == "audit_archived"
    compare(read_log(before, root), log)
    assert [item.object for item in log.entries if item.action == "looked"] == ["0", "1", "2"] * 2
    short = read_log(live, root)
    assert len(short.entries) == len(rows) < log.end == short.end
    compare(log, short)
    assert [short.hash_of(one.last) for one in short.absent] == [
        log.hash_of(one.last) for one in short.absent
    ]

    alone = verified(file, "--ca", ca)
    assert alone.return_value == UNPROVEN
    assert f"ARCHIVED: of these {log.end - len(rows)} entries are archived" in alone.output
    beside = verified(file, "--ca", ca, "--archive", folder)
    assert beside.return_value == 0, beside.output
    assert f"{log.end} entries, signed by coordinator up to entry {log.end}" in beside.output
    half = verified(file, "--ca", ca, "--archive", sorted(folder.iterdir())[1], "--json")
    assert json.loads(half.output)["not_at_hand"] == short.absent[0].last
    assert half.return_value == UNPROVEN


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> tuple[Path, list[str]]:
    """A folder of two archives, and the lines of the live log."""
    folder = tmp_path_factory.mktemp("archives")
    config = {"listen": "127.0.0.1:0", "state": str(folder / "state")}
    from roundtable.server import load_server_config

    settings = load_server_config(None, {**config, "credentials": str(certificates / "coordinator")})

    async def make() -> list[str]:
        async with running(settings) as coordinator:
            await two_archives(coordinator)
            part: list[str] = []
            for line in await lines(coordinator):
                part.append(line)
                if line.startswith('{"archive"'):
                    keep_archive(folder / "kept", part, (certificates / "ca" / "ca.crt").read_bytes())
                    part = []
            return await lines(coordinator, live=True)

    return folder / "kept", asyncio.run(make())


def attacks() -> Iterator[tuple[str, Callable[[list[str], list[Path]], list[str]], str]]:
    """Name, what somebody does to the live log's lines and to the archives' files, and what is said."""

    def rewrite(path: Path, change: Callable[[list[str]], list[str]]) -> None:
        path.write_bytes(b"".join(pack(change(list(unpack(path))))))

    def altered(live: list[str], files: list[Path]) -> list[str]:
        rewrite(
            files[0],
            lambda found: [found[0].replace("coordinator_started", "coordinator_stopped"), *found[1:]],
        )
        return live

    def cut(live: list[str], files: list[Path]) -> list[str]:
        rewrite(files[1], lambda found: found[1:])
        return live

    def unsealed(live: list[str], files: list[Path]) -> list[str]:
        rewrite(files[0], lambda found: [line for line in found if not line.startswith('{"seal"')])
        return live

    def torn(live: list[str], files: list[Path]) -> list[str]:
        files[0].write_bytes(files[0].read_bytes()[:-20])
        return live

    def doubled(live: list[str], files: list[Path]) -> list[str]:
        shutil.copy(files[0], files[0].with_name("audit-0000000001-0000000002.jsonl.gz"))
        return live

    def exchanged(live: list[str], files: list[Path]) -> list[str]:
        statement = list(unpack(files[1]))[-1]
        rewrite(files[0], lambda found: [*found[:-1], statement])
        return live

    yield "altered", altered, "was changed"
    yield "cut", cut, "is missing"
    yield "unsealed", unsealed, "signed with other lines"
    yield "torn", torn, "not a whole archive"
    yield "doubled", doubled, "the same entries as"
    yield "exchanged", exchanged, "audit-0000000001"
    yield "no statement", lambda live, files: live[1:], "entry 1 is missing"
    yield "no statements", lambda live, files: live[2:], "entry 1 is missing"
    yield "reordered", lambda live, files: [live[1], live[0], *live[2:]], "entry 1 is missing"
    yield "stated twice", lambda live, files: [live[0], *live], "out of its place"
    yield "of another log", lambda live, files: live[:0], "one of another log"


@pytest.mark.parametrize(("change", "said"), [pytest.param(*each[1:], id=each[0]) for each in attacks()])
def test_what_somebody_does_to_archives_is_found(
    kept: tuple[Path, list[str]],
    root: bytes,
    tmp_path: Path,
    change: Callable[[list[str], list[Path]], list[str]],
    said: str,
) -> None:
    folder, live = tmp_path / "copy", kept[1]
    shutil.copytree(kept[0], folder)
    assert ArchiveShelf([folder], root, "coordinator").read(live).absent == []
    changed = change(live, sorted(folder.iterdir()))

    def verify() -> None:
        shelf = ArchiveShelf([folder], root, "coordinator")
        shelf.read(changed)
        shelf.check_all_used("log.jsonl")

    with pytest.raises(AuditError, match=said):
        verify()


async def test_nothing_is_archived_before_its_time_or_unsigned_or_last(
    settings: Settings, root: bytes
) -> None:
    async with running(settings()) as coordinator:
        await write_old(coordinator, 3, KEPT + 1)
        # Older than it must be, but not by the days in which one archive gathers.
        assert await archiving(coordinator).run(time.time()) == 0
        await coordinator.security.audit.note("olga", "unsealed")
        count = len(read_log(await lines(coordinator, True), root).entries)
        assert await archiving(coordinator).run(ahead()) == count
        assert await archiving(coordinator).run(ahead()) == 0


async def test_archives_need_a_signature_also_where_a_coordinator_only_stands_by(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    shutil.copytree(certificates / "coordinator", tmp_path / "unsigned")
    (tmp_path / "unsigned" / "identity.key").unlink()
    config = settings(credentials=str(tmp_path / "unsigned"), retention={"audit": 365})
    async with running(settings()):
        with pytest.raises(ConfigError, match=r"has no identity\.key"):
            await Coordinator(config).start()


async def test_the_database_lets_only_archived_entries_go(settings: Settings, database: str) -> None:
    async with running(settings(database=database)) as coordinator:
        await two_archives(coordinator)
        whole = await lines(coordinator)
        for statement in (
            "DELETE FROM audit",
            "DELETE FROM seals",
            "DELETE FROM archives",
            "UPDATE archives SET last = last + 100",
            "INSERT INTO archives SELECT 1, 2, document, artifact, time FROM archives WHERE first = 1",
            "INSERT INTO archives SELECT first + 500, last + 900, document, artifact, time FROM archives",
            "INSERT INTO audit SELECT 1, time, actor, action, object, detail, previous, hash FROM audit",
        ):
            with pytest.raises(Exception, match="append-only"):
                await coordinator._database.write(lambda c, s=statement: c.execute(sa.text(s)))  # type: ignore[misc]
        assert await lines(coordinator) == whole
        await coordinator.security.audit.note("olga", "looked again")


@pytest.mark.parametrize("when", ["before the transaction", "at its end"])
async def test_one_who_is_stopped_between_file_and_rows_has_lost_and_doubled_nothing(
    settings: Settings, root: bytes, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """As one whose place another coordinator has taken: its archive is a file that nothing mentions."""
    async with running(settings()) as coordinator:
        await write_old(coordinator, 5, 100.0)
        before, services = await lines(coordinator), coordinator.jobs._services

        def stop(*_: object) -> None:
            raise LeaseLost("another one is active")

        def at_the_end(connection: sa.Connection, *values: Any) -> None:
            take_out(connection, *values)
            stop()

        with monkeypatch.context() as patch:
            if when == "at its end":
                patch.setattr(audit_archiving, "take_out", at_the_end)
            else:
                patch.setattr(coordinator._database, "fence", stop)
            assert await archiving(coordinator).run(ahead()) == 0
        assert await lines(coordinator) == before
        assert services.artifacts.digests() != []
        assert await services.retention.sweep(time.time()) == 1
        assert services.artifacts.digests() == []
        assert await archiving(coordinator).run(ahead()) == read_log(before, root).end
        log = read_log(await lines(coordinator), root)
        compare(read_log(before, root), log)
        assert (len(log.entries), len(services.artifacts.digests())) == (log.end, 1)


async def test_archives_stay_and_are_in_backups_and_bundles(
    settings: Settings, certificates: Path, root: bytes, tmp_path: Path
) -> None:
    config = settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator:
        async with Operator(coordinator.port, certificates / "olga") as operator:
            job = await operator.submit()
        before = await two_archives(coordinator)
        await asyncio.to_thread(write_bundle, config, job.id, tmp_path / "bundle")
        services, rows = coordinator.jobs._services, await coordinator._database.read(archives)
        await services.retention.sweep(time.time() + 1000 * DAY)
        assert {row.artifact for row in rows} <= set(await asyncio.to_thread(services.artifacts.digests))
        await asyncio.to_thread(back_up, config, tmp_path / "backup")
    bundled = read_log(await asyncio.to_thread(read_lines, tmp_path / "bundle" / LOG), root)
    assert len(bundled.entries) == bundled.end == bundled.sealed
    assert "Operators/SubmitJob" in {item.action for item in bundled.entries}
    drill = await asyncio.to_thread(rehearse, config, tmp_path / "backup")
    assert drill.audit_signed == drill.audit_entries > rows[-1].last
    new = settings(state=str(tmp_path / "new"))
    await asyncio.to_thread(restore, new, tmp_path / "backup")
    async with running(new) as coordinator:
        log = read_log(await lines(coordinator), root)
        compare(read_log(before, root), log)
        assert len(log.entries) == log.end
        await write_old(coordinator, 1, 1.0)
        assert await archiving(coordinator).run(ahead(3)) > 0
