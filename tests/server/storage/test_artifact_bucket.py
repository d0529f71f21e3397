"""Artifacts whose home is a bucket: there before they are named, fetched on demand, deleted there too."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import grpc
import pytest
import torch
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem
from scripted_agent import ScriptedAgent, header_for
from service import AGENTS, Operator, running

from roundtable.core.errors import ConfigError, StorageError
from roundtable.doctor.doctor_coordinator import examine_coordinator
from roundtable.doctor.inquiries import answers
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig, load_server_config
from roundtable.server.jobs import aggregate_action
from roundtable.server.storage import bucket
from roundtable.server.storage import replicas as copies
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_restore import restore
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.location import Location, Unreachable, blob_name
from roundtable.server.store import Database

Settings = Callable[..., ServerConfig]
ACCEPTED = agent_pb2.UploadReceipt.ACCEPTED
TABLE = "[cohort]\nsize = 2\nminimum = 2\n[evaluation]\nevery = 0"
ONE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"


class Moody(MemoryFileSystem):  # type: ignore[misc]
    """An object store in memory that can be away; its errors, like those of real ones, are no OSError."""

    protocol = "moody"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    away = False
    spoils = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("moody://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._answer()
        file = super()._open(path, mode, **options)
        if self.spoils and "w" in mode:
            file.write(b"?")
        return file

    def find(self, path: str, **options: Any) -> Any:
        self._answer()
        return super().find(path, **options)

    def exists(self, path: str, **options: Any) -> Any:
        self._answer()
        return super().exists(path, **options)

    def rm_file(self, path: str) -> None:
        self._answer()
        super().rm_file(path)

    def _answer(self) -> None:
        if type(self).away:
            raise RuntimeError("no route to the store")


@pytest.fixture(autouse=True)
def moody() -> Iterator[type[Moody]]:
    fsspec.register_implementation("moody", Moody, clobber=True)
    yield Moody
    Moody.away = Moody.spoils = False
    Moody.store.clear()


@pytest.fixture
def address() -> str:
    return f"moody://{secrets.token_hex(4)}/roundtable"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bucket, aggregate_action, copies):
        for name in ("PURGE_SECONDS", "FIRST_PAUSE", "LONGEST_PAUSE"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 0.02)


def lies_there(address: str) -> list[str]:
    return sorted(Location(address, "test").contents())


async def until(condition: Callable[[], object]) -> None:
    """Looks now and then until another task, or a thread, has done what is waited for."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("kind", ["object store", "file system"])
def test_a_blob_is_in_the_bucket_before_it_has_its_name_and_comes_back_from_there(
    tmp_path: Path, address: str, kind: str
) -> None:
    address = address if kind == "object store" else f"file://{tmp_path}/bucket"
    first = ArtifactStore(tmp_path / "first", "me", Bucket(address))
    digest, size = first.create([b"a model", b" or an update"])
    assert lies_there(address) == sorted(["coordinator", blob_name(digest)])
    second = ArtifactStore(tmp_path / "second", "me", Bucket(address))
    assert (second.size(digest), second.digests()) == (size, [digest])
    assert second.path(digest).read_bytes() == b"a model or an update"
    second.path(digest).write_bytes(b"rotten")
    assert second.path(digest).read_bytes() == b"a model or an update"
    second.path(digest).unlink()
    assert second.path(digest).read_bytes() == b"a model or an update"
    assert not list((tmp_path / "second" / "partial").iterdir())


def test_what_is_damaged_or_missing_everywhere_is_named_and_comes_back_when_it_is_sent_again(
    tmp_path: Path, address: str
) -> None:
    first = ArtifactStore(tmp_path / "first", "me", Bucket(address))
    digest, _ = first.create([b"an update"])
    place = f"{address}/{blob_name(digest)}"
    with fsspec.open(place, "wb") as file:
        file.write(b"an upd4te")
    second = ArtifactStore(tmp_path / "second", "me", Bucket(address))
    with pytest.raises(DamagedArtifact, match=f"is missing from .*second and {address}"):
        second.path(digest)
    assert second.create([b"an update"])[0] == digest
    with fsspec.open(place, "rb") as file:
        assert file.read() == b"an update"


def test_a_store_that_is_away_or_gives_back_other_bytes_gives_no_blob_its_name(
    tmp_path: Path, address: str, moody: type[Moody]
) -> None:
    artifacts = ArtifactStore(tmp_path / "first", "me", Bucket(address))
    data = b"an update"
    digest = blake3(data).hexdigest()
    writer = artifacts.receive("job.1.1.alder", digest, len(data)).open()
    writer.write(data)
    moody.spoils = True
    with pytest.raises(Unreachable, match="came back from"):
        writer.finish()
    moody.spoils, moody.away = False, True
    with pytest.raises(Unreachable, match=f"{address} does not do .*: no route to the store"):
        writer.finish()
    writer.close()
    assert artifacts.size(digest) is None
    assert artifacts.received("job.1.1.alder", digest) == len(data)
    moody.away = False
    again = artifacts.receive("job.1.1.alder", digest, len(data)).open()
    assert again.finish() == (digest, len(data))
    again.close()
    artifacts.unpin([digest])
    assert artifacts.delete([digest]) == 1, "failures have left no pin behind"


async def test_what_is_deleted_goes_from_the_bucket_too_unless_it_is_pinned_or_stored_anew(
    tmp_path: Path,
    address: str,
    moody: type[Moody],
    quick: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home = Bucket(address)
    artifacts = ArtifactStore(tmp_path / "first", "me", home)
    stays, goes, returns = (artifacts.create([name])[0] for name in (b"stays", b"goes", b"returns"))
    artifacts.unpin([goes, returns])
    assert artifacts.delete([stays, goes, returns]) == 2
    assert [artifacts.size(digest) is None for digest in (stays, goes, returns)] == [False, True, True]
    artifacts.create([b"returns"])
    moody.away = True
    work = asyncio.create_task(home.run())
    await until(lambda: "stays for now" in caplog.text)
    moody.away = False
    await until(lambda: blob_name(goes) not in lies_there(address))
    work.cancel()
    assert lies_there(address) == sorted(["coordinator", blob_name(stays), blob_name(returns)])


def test_half_a_file_that_a_crash_left_behind_is_no_blob_and_goes(tmp_path: Path) -> None:
    left = tmp_path / "bucket" / "ab" / f"{'ab' * 32}.0a1b2c3d.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    home = Bucket(f"file://{tmp_path}/bucket")
    artifacts = ArtifactStore(tmp_path / "first", "me", home)
    assert artifacts.digests() == []
    home._purge()
    assert not left.exists()


async def test_a_bucket_of_another_coordinator_is_refused_before_anything_is_written(
    settings: Settings, address: str, tmp_path: Path
) -> None:
    async with running(settings(bucket=address)):
        pass
    before = lies_there(address)
    other = settings(bucket=address, state=str(tmp_path / "other"))
    with pytest.raises(StorageError, match=r"bucket .* belongs to coordinator .* to none yet"):
        await Coordinator(other).start()
    database = Database.connect(other.database)
    assert database.look() == ("", False)
    database.close()
    assert lies_there(address) == before


async def test_a_bucket_that_is_away_at_the_start_is_named(
    settings: Settings, address: str, moody: type[Moody]
) -> None:
    moody.away = True
    with pytest.raises(StorageError, match=f"{address} does not do what it is asked to"):
        await Coordinator(settings(bucket=address)).start()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bucket": "/mnt/shared"}, "a folder is what `artifacts` is for"),
        ({"bucket": "s3://a/b", "copies": ["s3://a/b/"]}, "not a place for copies"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Settings, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


async def test_an_address_that_nobody_understands_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="bucket: 'strange://x' cannot be used"):
        await Coordinator(settings(bucket="strange://x")).start()


async def half_a_round(config: ServerConfig, certificates: Path) -> tuple[str, Any]:
    """Round 1 is committed; of round 2 alder's update is acknowledged."""
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS[:2])
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            job = await operator.submit(TABLE, rounds=2, vector=torch.zeros(3000))
            for agent, value in ((alder, 2.0), (birch, 3.0)):
                await agent.answer(await agent.expect("instruction"), torch.full((3000,), value))
            told = [await agent.expect("instruction") for agent in (alder, birch)]
            receipt = await alder.answer(told[0], torch.full((3000,), 3.0))
            assert receipt.status == ACCEPTED
    return job.id, told[0]


async def the_other_half(config: ServerConfig, certificates: Path, job: str, held: Any) -> list[str]:
    """Birch answers, and nobody else is asked; the digests of both models."""
    async with running(config) as coordinator:
        alder, birch = (ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS[:2])
        async with Operator(coordinator.port, certificates / "olga") as operator, alder, birch:
            again = await alder.answer(held, torch.full((3000,), 3.0))
            assert again.status == agent_pb2.UploadReceipt.ACCEPTED
            told = await birch.expect("instruction")
            assert told.step == held.step
            data = await birch.download(told.train.model.digest)
            assert blake3(data).hexdigest() == told.train.model.digest
            await birch.answer(told, torch.full((3000,), 5.0))
            await operator.watch_until(job, "finished")
            records = [json.loads(record) for record in (await operator.job(job)).history]
    assert [record["attempt"] for record in records] == [1, 1]
    assert records[1]["contributors"] == ["alder", "birch"]
    return [record["model"] for record in records]


async def test_another_machine_goes_on_with_acknowledged_updates_and_an_empty_folder(
    settings: Settings, certificates: Path, address: str, tmp_path: Path
) -> None:
    alone = settings(state=str(tmp_path / "undisturbed"))
    undisturbed = await the_other_half(alone, certificates, *await half_a_round(alone, certificates))
    first = settings(bucket=address, artifacts=str(tmp_path / "first"))
    second = settings(bucket=address, artifacts=str(tmp_path / "second"))
    half = await half_a_round(first, certificates)
    assert await the_other_half(second, certificates, *half) == undisturbed


async def test_a_coordinator_that_gets_a_bucket_puts_all_that_it_has_there_first(
    settings: Settings, certificates: Path, address: str, tmp_path: Path
) -> None:
    folder = settings(artifacts=str(tmp_path / "first"))
    half = await half_a_round(folder, certificates)
    async with running(settings(bucket=address, artifacts=str(tmp_path / "first"))):
        pass
    await the_other_half(settings(bucket=address, artifacts=str(tmp_path / "second")), certificates, *half)


async def test_an_outage_is_waited_out_shown_and_nothing_is_acknowledged_meanwhile(
    settings: Settings, certificates: Path, address: str, moody: type[Moody], quick: None
) -> None:
    async with (
        running(settings(bucket=address, keep_models=1)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE, rounds=2)
        told = await agent.expect("instruction")
        moody.away = True
        with pytest.raises(grpc.aio.AioRpcError, match="no route to the store") as caught:
            await agent.answer(told, torch.ones(4))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        moody.away = False
        data = torch.ones(4).numpy().tobytes()
        state = await agent.stub.UploadStatus(header_for(told, data))
        assert (state.wanted, state.offset) == (True, len(data)), "the bytes are here already"
        # The update is taken, the new model is not: the round waits.
        put = Bucket.put

        def away_afterwards(home: Bucket, source: Path, digest: str) -> None:
            put(home, source, digest)
            moody.away = True

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(Bucket, "put", away_afterwards)
            assert (await agent.answer(told, torch.ones(4))).status == ACCEPTED
            async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id), timeout=60):
                if "no route to the store" in update.detail.waiting_for:
                    break
        assert (await operator.job(job.id)).job.rounds_done == 0
        moody.away = False
        second = await agent.expect("instruction")
        assert (second.step.round, second.step.attempt) == (2, 1)
        await agent.answer(second, torch.ones(4))
        await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
        assert not detail.waiting_for
        initial, last = json.loads(detail.history[0])["model"], detail.job.model.digest
        # The updates and the model of round 1 are not kept: what is left is the initial model and the last.
        await until(lambda: len(lies_there(address)) == 3)
        assert blob_name(last) in lies_there(address)
        assert blob_name(initial) not in lies_there(address)


async def test_a_backup_of_a_bucket_is_restored_into_another(
    settings: Settings, certificates: Path, address: str, tmp_path: Path
) -> None:
    old = settings(bucket=address, state=str(tmp_path / "old"))
    half = await half_a_round(old, certificates)
    elsewhere = old.model_copy(update={"artifacts": str(tmp_path / "nothing is here")})
    await asyncio.to_thread(back_up, elsewhere, tmp_path / "backup")
    new = settings(bucket=f"{address}-2", state=str(tmp_path / "new"))
    await asyncio.to_thread(restore, new, tmp_path / "backup")
    await the_other_half(new, certificates, *half)
    over = settings(bucket=f"{address}-2", state=str(tmp_path / "over"))
    with pytest.raises(StorageError, match="restore into an empty bucket"):
        restore(over, tmp_path / "backup")
    manifest = json.loads((tmp_path / "backup" / "manifest.json").read_text())
    place = blob_name(manifest["statement"]["artifacts"][0])
    Location(address, "test").forget(place)
    with pytest.raises(StorageError, match=f"missing from {address}"):
        back_up(old, tmp_path / "not whole")


def test_what_the_database_names_and_nobody_has_is_counted(tmp_path: Path, address: str) -> None:
    artifacts = ArtifactStore(tmp_path / "first", "me", Bucket(address))
    digest, _ = artifacts.create([b"here"])
    assert artifacts.settle([digest, "0" * 64]) == 1


async def test_the_doctor_tries_the_bucket(
    certificates: Path, tmp_path: Path, address: str, moody: type[Moody]
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text(f"bucket = {json.dumps(address)}\ncredentials = '{certificates / 'coordinator'}'\n")

    def said() -> tuple[str, str]:
        (check,) = [check for check in answers(examine_coordinator(file)) if check.name == "bucket"]
        return check.state, check.message

    assert said()[0] == "ok"
    assert lies_there(address) == []
    moody.away = True
    state, text = said()
    assert (state, "no route to the store" in text) == ("fail", True)
    assert load_server_config(file).bucket == address


async def test_copies_go_on_after_an_outage_whatever_the_error(
    settings: Settings, certificates: Path, address: str, moody: type[Moody], quick: None
) -> None:
    async with (
        running(settings(copies=[address])) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE, rounds=1)
        moody.away = True
        await agent.answer(await agent.expect("instruction"), torch.ones(4))
        await operator.watch_until(job.id, "finished")
        digest = (await operator.job(job.id)).job.model.digest
        moody.away = False
        await until(lambda: blob_name(digest) in lies_there(address))
