"""Backups: made of a coordinator that runs, and worth what restoring them gives."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric import ed25519
from postgresql import PostgreSQL
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.administration import Administrator
from roundtable.core.errors import StorageError
from roundtable.core.evidence.audit_log import compare, read_log
from roundtable.core.identity.certificates import load_key
from roundtable.core.identity.credentials import SiloIdentity, issue, load_silo_identity
from roundtable.core.identity.invitation import Secret
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server import ServerConfig
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_proof import NOT_IN_BACKUPS, signed_manifest
from roundtable.server.storage.backup_restore import restore
from roundtable.server.store import Database, tables

Settings = Callable[..., ServerConfig]
TABLE = "[cohort]\nsize = 2\nminimum = 2\n[evaluation]\nevery = 0"


async def half_a_job(config: ServerConfig, certificates: Path, backup: Path) -> tuple[str, Any]:
    """Round 1 is committed; of round 2 alder's update is there at the backup. Then birch's comes."""
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch"))
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            job = await operator.submit(TABLE, rounds=2)
            for agent in (alder, birch):
                await agent.answer(await agent.expect("instruction"), torch.full((4,), 2.0))
            second = [await agent.expect("instruction") for agent in (alder, birch)]
            await alder.answer(second[0], torch.full((4,), 3.0))
            await asyncio.to_thread(back_up, config, backup)
            await birch.answer(second[1], torch.full((4,), 5.0))
            await operator.watch_until(job.id, "finished")
            return job, await operator.job(job.id)


@pytest.mark.parametrize("kinds", [("sqlite", "sqlite"), ("sqlite", "postgresql"), ("postgresql", "sqlite")])
async def test_a_restored_coordinator_goes_on_where_the_backup_was_made(
    settings: Settings,
    certificates: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kinds: tuple[str, str],
) -> None:
    def at(name: str, kind: str) -> ServerConfig:
        if kind == "sqlite":
            return settings(state=str(tmp_path / name))
        server: PostgreSQL = request.getfixturevalue("postgresql")
        return settings(state=str(tmp_path / name), database=server.fresh())

    job, before = await half_a_job(at("old", kinds[0]), certificates, tmp_path / "backup")
    config = at("new", kinds[1])
    await asyncio.to_thread(restore, config, tmp_path / "backup")
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in ("alder", "birch"))
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            detail = await operator.job(job.id)
            assert (detail.job.status, detail.job.rounds_done, detail.round) == ("running", 1, 2)
            # What alder delivered before the backup was made is kept.
            await birch.answer(await birch.expect("instruction"), torch.full((4,), 5.0))
            await operator.watch_until(job.id, "finished")
            after = await operator.job(job.id)
    assert after.job.model.digest == before.job.model.digest
    assert json.loads(after.history[1])["contributors"] == ["alder", "birch"]


async def test_a_backup_older_than_what_an_agent_has_seen_is_refused_until_the_loss_is_accepted(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    old = settings(state=str(tmp_path / "old"))
    async with (
        running(old) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=3)
        first = await alder.expect("instruction")
        await asyncio.to_thread(back_up, old, tmp_path / "backup")
        await alder.answer(first, torch.ones(4))
        seen = (await alder.expect("instruction")).step
        assert (seen.round, job.id) == (2, seen.job)
        identity = alder.welcome.coordinator
    new = settings(state=str(tmp_path / "new"))
    await asyncio.to_thread(restore, new, tmp_path / "backup")
    async with running(new) as coordinator:
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        answer = await agent.connect(coordinator=identity, seen=[seen])
        assert "is older than what this silo has seen" in answer.refused.reason
        assert "--new-identity" in answer.refused.reason
        await agent.close()
        known = common_pb2.Step(job=seen.job, round=1, attempt=1)
        async with ScriptedAgent(coordinator.port, certificates / "birch") as other:
            assert other.welcome.coordinator == identity
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await agent.connect(coordinator=identity, seen=[known])).HasField("welcome")
        await agent.close()
        strange = common_pb2.Step(job="0" * 12, round=1, attempt=1)
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        assert (await agent.connect(coordinator=identity, seen=[strange])).HasField("refused")
        await agent.close()
    accepted = settings(state=str(tmp_path / "accepted"))
    await asyncio.to_thread(restore, accepted, tmp_path / "backup", new_identity=True)
    async with running(accepted) as coordinator:
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        answer = await agent.connect(coordinator=identity, seen=[seen])
        assert answer.HasField("welcome")
        assert answer.welcome.coordinator != identity
        assert isinstance(await agent.expect("instruction"), agent_pb2.Instruction)
        await agent.close()


@pytest.mark.parametrize("damage", ["artifact", "table", "manifest", "half", "format", "newer"])
async def test_a_backup_that_is_not_whole_is_refused_before_anything_is_written(
    settings: Settings, certificates: Path, tmp_path: Path, damage: str
) -> None:
    backup = tmp_path / "backup"
    config = settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE)
        await asyncio.to_thread(back_up, config, backup)
    words = spoil(backup, damage, load_silo_identity(certificates / "coordinator"))
    new = settings(state=str(tmp_path / "new"))
    with pytest.raises(StorageError, match=words):
        restore(new, backup)
    assert not list((tmp_path / "new").glob("artifacts/objects/*/*"))
    with pytest.raises(StorageError, match="is not empty"):
        back_up(config, backup)


def spoil(backup: Path, damage: str, identity: SiloIdentity) -> str:
    """Damages a backup; the words of the complaint."""
    manifest = backup / "manifest.json"
    if damage == "artifact":
        path = next(backup.glob("objects/*/*"))
        path.write_bytes(b"x" + path.read_bytes()[1:])
        return f"the backup is damaged or was altered: {path.name} was changed"
    if damage == "table":
        (backup / "tables" / "jobs.jsonl").write_text("")
        (backup / "tables" / "more.jsonl").touch()
        return r"altered: jobs\.jsonl was changed; tables/more\.jsonl was added"
    if damage == "manifest":
        manifest.write_text("{")
        return "is damaged"
    if damage == "half":
        manifest.unlink()
        return "holds no whole backup"
    found = json.loads(manifest.read_text())["statement"]
    found |= {"format": 3} if damage == "format" else {"revision": "9999"}
    manifest.write_bytes(signed_manifest(identity, found))
    return "has format 3" if damage == "format" else "belong to a newer version"


def an_admin(secret: Secret) -> dict[str, Any]:
    """A row of the table of tokens that nobody was asked for."""
    times = {"created": 1.0, "expires": 1e12, "revoked": False}
    return {
        "name": "eve",
        "identifier": secret.identifier,
        "digest": secret.digest,
        "role": "admin",
        "author": "admin/olga",
        **times,
    }


@pytest.mark.parametrize("how", ["line", "line and digest", "unsigned", "another signer", "ended"])
async def test_what_was_put_into_a_backup_is_not_restored(
    settings: Settings, certificates: Path, tmp_path: Path, how: str
) -> None:
    """One line in the table of tokens would make its author an administrator."""
    config, backup = settings(state=str(tmp_path / "old")), tmp_path / "backup"
    async with running(config):
        await asyncio.to_thread(back_up, config, backup)
    line = json.dumps(an_admin(Secret.fresh())).encode() + b"\n"
    (backup / "tables" / "tokens.jsonl").write_bytes(line)
    path = backup / "manifest.json"
    document = json.loads(path.read_text())
    if how != "line":
        document["statement"]["files"]["tables/tokens.jsonl"] = blake3(line).hexdigest()
        path.write_text(json.dumps(document["statement"] if how == "unsigned" else document))
    words = {
        "line": r"altered: tokens\.jsonl was changed",
        "line and digest": "signature of 'coordinator' under this backup is not right",
        "unsigned": "is not signed",
        "another signer": "is signed by 'other', and this coordinator is 'coordinator'",
        "ended": "a certificate that has ended",
    }
    if how == "another signer":
        other = issue(certificates / "ca", "other", "coordinator", tmp_path / "other", ["localhost"])
        path.write_bytes(signed_manifest(load_silo_identity(other), document["statement"]))
    if how == "ended":
        path.write_bytes(ended_signature(certificates, tmp_path / "ended", document["statement"]))
        (backup / "tables" / "tokens.jsonl").write_bytes(b"")
    with pytest.raises(StorageError, match=words[how]):
        restore(settings(state=str(tmp_path / "new")), backup)
    assert not (tmp_path / "new" / "coordinator.db").exists()


def ended_signature(certificates: Path, folder: Path, manifest: dict[str, Any]) -> bytes:
    """A manifest signed in time with a key whose certificate has ended since."""
    start = datetime.now(UTC) - timedelta(days=40)
    hosts = ["localhost"]
    issue(certificates / "ca", "coordinator", "coordinator", folder, hosts, days=30, start=start)
    key = load_key(folder / "identity.key")
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    identity = SiloIdentity((folder / "identity.crt").read_bytes(), key)
    manifest["files"]["tables/tokens.jsonl"] = blake3(b"").hexdigest()
    return signed_manifest(identity, {**manifest, "time": start.timestamp() + 86400})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            lambda c: c.execute(sa.insert(tables.tokens).values(an_admin(Secret.fresh()))),
            "token 'eve' for the role 'admin' was never created",
        ),
        (
            lambda c: c.execute(sa.update(tables.tokens).values(role="admin")),
            "token 'board' for the role 'admin' was never created",
        ),
        (
            lambda c: c.execute(
                sa.update(tables.tokens).where(tables.tokens.c.revoked).values(revoked=False)
            ),
            "token 'old' was revoked, and is not in the table",
        ),
        (lambda c: c.execute(sa.delete(tables.revoked)), "the revocation of agent 'north'"),
        (
            lambda c: c.execute(
                sa.insert(tables.certificates).values(
                    serial="ff", name="north", key="", invitation="", issued=1e12, expires=2e12
                )
            ),
            "certificate ff of 'north' was never issued",
        ),
    ],
    ids=["token", "role", "unrevoked token", "unrevoked silo", "certificate"],
)
async def test_what_was_put_into_the_database_before_the_backup_contradicts_the_audit_log(
    settings: Settings,
    certificates: Path,
    tmp_path: Path,
    written: Callable[[Any], Any],
    said: str,
) -> None:
    config, backup = settings(state=str(tmp_path / "old")), tmp_path / "backup"
    admin = issue(certificates / "ca", "ada", "admin", tmp_path / "ada")

    def administrate(port: int) -> None:
        with Administrator(f"localhost:{port}", admin) as ada:
            for name in ("board", "old"):
                ada.create_token(name, "viewer", 3600)
            ada.revoke_token("old")
            ada.revoke("north", "left")

    async with running(config) as coordinator:
        await asyncio.to_thread(administrate, coordinator.port)
    sound = settings(state=str(tmp_path / "sound"))
    back_up(config, tmp_path / "good")
    restore(sound, tmp_path / "good")
    database = Database.open(config.database)
    await database.write(written)
    database.close()
    back_up(config, backup)
    with pytest.raises(StorageError, match=f"contradicts its own audit log: .*{said}"):
        restore(settings(state=str(tmp_path / "new")), backup)


CHECKED = {"audit", "seals", "archives", "tokens", "revoked", "certificates"}
"""Whose rows must follow from the audit log."""
NOBODY = {
    "clients",
    "jobs",
    "events",
    "rounds",
    "job_lines",
    "job_clients",
    "job_setups",
    "updates",
    "relayed_sums",
    "artifacts",
    "ledger",
    "budgets",
    "reports",
    "coordinator",
    "installations",
}
"""Whose rows let nobody in who has shown no certificate or token."""


def test_each_table_is_left_out_of_backups_or_proven_or_lets_nobody_in() -> None:
    """Whoever adds one says which it is."""
    assert tables.metadata.tables.keys() | {"alembic_version"} == CHECKED | NOBODY | NOT_IN_BACKUPS


async def test_nobody_is_let_in_by_what_a_backup_brings_back(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    """Neither by rows that somebody has added, nor once more by what was used up since; also from a backup
    that holds such rows."""
    config, identity = settings(state=str(tmp_path / "old")), load_silo_identity(certificates / "coordinator")
    admin = issue(certificates / "ca", "ada", "admin", tmp_path / "ada")

    def ask(port: int) -> None:
        with Administrator(f"localhost:{port}", admin) as ada:
            ada.revoke("bea", "left", role="admin")

    async with running(config) as coordinator:
        await asyncio.to_thread(ask, coordinator.port)
    planted = {
        "page_sessions": {
            "digest": "d" * 64,
            "role": "admin",
            "name": "eve",
            "source": "certificate",
            "credential": "c" * 64,
            "created": 1.0,
            "used": 4e9,
            "expires": 4e9,
        },
        "invitations": {
            "identifier": "i",
            "silo": "alder",
            "digest": "d" * 64,
            "uses": 9,
            "used": 0,
            "author": "x",
            "created": 1.0,
            "expires": 4e9,
        },
    }
    database = Database.open(config.database)
    for name, row in planted.items():
        planting = sa.insert(tables.metadata.tables[name]).values(row)
        await database.write(lambda c, what=planting: c.execute(what))
    database.close()
    back_up(config, tmp_path / "backup")
    manifest = json.loads((tmp_path / "backup" / "manifest.json").read_text())["statement"]
    assert not {f"tables/{name}.jsonl" for name in NOT_IN_BACKUPS} & manifest["files"].keys()
    # One that an earlier version has made holds them.
    for name, row in planted.items():
        line = json.dumps(row).encode() + b"\n"
        (tmp_path / "backup" / "tables" / f"{name}.jsonl").write_bytes(line)
        manifest["files"][f"tables/{name}.jsonl"] = blake3(line).hexdigest()
    (tmp_path / "backup" / "manifest.json").write_bytes(signed_manifest(identity, manifest))
    new = settings(state=str(tmp_path / "new"))
    restore(new, tmp_path / "backup")
    database = Database.open(new.database)
    for name in ("page_sessions", "invitations", "pending"):
        count = sa.select(sa.func.count()).select_from(tables.metadata.tables[name])
        assert await database.read(lambda c, q=count: c.execute(q).scalar_one()) == 0, name
    database.close()


async def test_a_restore_stands_in_the_audit_log_that_it_restored(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    ca, config = (certificates / "ca" / "ca.crt").read_bytes(), settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator:
        lines = [line async for page in coordinator.security.audit.lines(1) for line in page]
    before = read_log(lines, ca)
    manifest = back_up(config, tmp_path / "backup").manifest
    new = settings(state=str(tmp_path / "new"))
    restore(new, tmp_path / "backup", new_identity=True)
    async with running(new) as coordinator:
        after = read_log([line async for page in coordinator.security.audit.lines(1) for line in page], ca)
    compare(before, after)
    entry = after.entries[len(before.entries)]
    assert (entry.action, entry.detail["new_identity"]) == ("restored", True)
    assert entry.detail["audit"] == list(manifest["audit"]) == [1, before.entries[0].hash]
    assert entry.sequence in after.seals
    assert "unsigned" not in after.entries[-1].detail


async def test_neither_a_used_database_nor_used_artifacts_are_overwritten(
    settings: Settings, certificates: Path, tmp_path: Path
) -> None:
    config = settings(state=str(tmp_path / "old"))
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        await operator.submit(TABLE)
        await asyncio.to_thread(back_up, config, tmp_path / "backup")
    with pytest.raises(StorageError, match="holds artifacts already"):
        restore(config, tmp_path / "backup")
    with pytest.raises(StorageError, match="is not empty"):
        restore(settings(state=str(tmp_path / "old"), artifacts=str(tmp_path / "a")), tmp_path / "backup")
    # A restore that was killed has no name yet.
    shutil.copytree(tmp_path / "old" / "artifacts" / "objects", tmp_path / "killed" / "artifacts" / "objects")
    with pytest.raises(StorageError, match="as a restore leaves it that was killed: delete that folder"):
        restore(settings(state=str(tmp_path / "killed")), tmp_path / "backup")
