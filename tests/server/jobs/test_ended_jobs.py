"""What one does with jobs that are over: fetch, archive, clone and delete them, or let them be forgotten."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.cli.main import run
from roundtable.core.errors import AuditError
from roundtable.core.evidence.job_archive_check import check_archive
from roundtable.core.identity.credentials import issue
from roundtable.proto import common_pb2, operator_pb2
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_drill import rehearse
from roundtable.server.store.audit import lines
from roundtable.server.store.jobs import jobs_in_order
from roundtable.server.store.ledger import entries

Settings = Callable[..., ServerConfig]
PLAIN = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"
PRIVATE = """
[cohort]
size = 1
strategy = "round_robin"
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
clip_norm = 1.0
delta = 1e-3
population = 20
noise_multiplier = 2.0
"""


@dataclass
class Stage:
    """A coordinator with a silo that answers everything, an operator, and the command line."""

    coordinator: Coordinator
    operator: Operator
    credentials: Path
    capsys: pytest.CaptureFixture[str]

    async def finish(
        self, text: str = PLAIN, rounds: int = 3, request: str = "r1", start: float = 0.0
    ) -> str:
        job = await self.operator.submit(text, rounds, torch.full((4,), start), request)
        await self.operator.watch_until(job.id, "finished")
        return str(job.id)

    async def roundtable(self, *words: object, code: int = 0, who: str = "olga") -> str:
        self.capsys.readouterr()
        place = [
            "--coordinator",
            f"localhost:{self.coordinator.port}",
            "--credentials",
            self.credentials / who,
        ]
        found = await asyncio.to_thread(run, [str(word) for word in ("job", *words, *place)])
        out, err = self.capsys.readouterr()
        assert found == code, err
        return err if code else out

    async def read(self, query: Callable[[Any], Any]) -> Any:
        return await self.coordinator.jobs._services.database.read(query)

    def stored(self) -> set[str]:
        return set(self.coordinator.jobs._services.artifacts.digests())

    async def audited(self) -> list[dict[str, Any]]:
        page = (await self.read(lambda connection: lines(connection, 1, 1000)))[0]
        return [entry["entry"] for line in page if "entry" in (entry := json.loads(line))]


async def train(agent: ScriptedAgent) -> None:
    while (message := await agent.next()) is not None:
        if message.WhichOneof("message") == "instruction":
            await agent.answer(message.instruction, torch.rand(4))


@asynccontextmanager
async def staged(
    config: ServerConfig, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Stage]:
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        training = asyncio.create_task(train(agent))
        yield Stage(coordinator, operator, certificates, capsys)
        training.cancel()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_deleted_job_leaves_its_charges_and_the_audit_log_and_no_file(
    settings: Settings,
    certificates: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    database = {} if kind == "sqlite" else {"database": request.getfixturevalue("postgresql").fresh()}
    async with staged(settings(**database), certificates, capsys) as stage:
        job = await stage.finish(PRIVATE)
        charged = await stage.read(entries)
        own = {json.loads(record)["model"] for record in (await stage.operator.job(job)).history}
        other = await stage.finish(request="r2")
        shared = (await stage.operator.job(other)).initial_model.digest
        assert own <= stage.stored()
        said = await stage.roundtable("delete", job, "--yes")
        assert "was deleted. Its charges and the audit log stay" in said
        assert not own & stage.stored()
        assert shared in stage.stored(), "the other job began with the same model"
        assert await stage.read(entries) == charged != []
        assert [each["id"] for each in json.loads(await stage.roundtable("list", "--json"))] == [other]
        for words in (("show", job), ("show", job[:8]), ("delete", job, "--yes"), ("clone", job)):
            assert "was deleted by operator/olga; what it has spent" in await stage.roundtable(*words, code=2)
        noted = [entry for entry in await stage.audited() if entry["action"] == "job_deleted"]
        assert [(entry["object"], entry["actor"]) for entry in noted] == [(job, "operator/olga")]
        with pytest.raises(Exception, match=f"has made job {job}, which was deleted by"):
            await stage.operator.submit(PRIVATE, request="r1")


async def test_what_goes_on_is_not_deleted_nor_what_is_anothers_and_silos_that_know_it_come_back(
    settings: Settings, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issue(certificates / "ca", "sam", "data-scientist", tmp_path / "sam")
    async with staged(settings(), certificates, capsys) as stage:
        job = await stage.finish()
        waiting = (await stage.operator.submit("[cohort]\nsize = 3\n", request="r2")).id
        assert "what goes on is cancelled first" in await stage.roundtable("delete", waiting, "--yes", code=2)
        assert "is not yours" in await stage.roundtable("delete", job, "--yes", code=1, who=tmp_path / "sam")
        wish = operator_pb2.JobRequest(job=job)
        both = await asyncio.gather(
            *(stage.operator.stub.DeleteJob(wish) for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(each).__name__ for each in both) == ["AioRpcError", "Job"]
        async with ScriptedAgent(stage.coordinator.port, certificates / "birch") as birch:
            identity = birch.welcome.coordinator
        agent = ScriptedAgent(stage.coordinator.port, certificates / "birch")
        seen = common_pb2.Step(job=job, round=3, attempt=1)
        assert (await agent.connect(coordinator=identity, seen=[seen])).HasField("welcome")
        await agent.close()


async def test_a_deleted_job_is_not_taken_up_again_and_a_backup_holds_what_is_left_of_it(
    settings: Settings, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    async with staged(config, certificates, capsys) as stage:
        job = await stage.finish(PRIVATE)
        await stage.roundtable("delete", job, "--yes")
    async with running(config) as again:
        assert again.jobs.runners() == []
        rows = await again.jobs._services.database.read(jobs_in_order)
        events = [entry async for page in again.security.audit.lines(1) for entry in page]
        assert (rows, any("job_paused" in entry for entry in events)) == ([], False)
    await asyncio.to_thread(back_up, config, tmp_path / "backup")
    found = await asyncio.to_thread(rehearse, config, tmp_path / "backup")
    assert (found.artifacts, found.jobs) == (0, {})


async def test_a_job_is_downloaded_once_and_a_clone_begins_where_it_began(
    settings: Settings, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with staged(settings(keep_models=2), certificates, capsys) as stage:
        job, folder = await stage.finish(), tmp_path / "job"
        found = json.loads(await stage.roundtable("download", job, "-o", folder, "--all-models", "--json"))
        assert found["not_kept"] == ["model-round-000001.safetensors"]
        assert found["files"] == {
            path.name: blake3(path.read_bytes()).hexdigest() for path in folder.iterdir()
        }
        assert len((folder / "events.jsonl").read_text().splitlines()) > 3
        assert "log.jsonl" in found["files"]
        model = folder / "model.safetensors"
        kept = model.stat().st_mtime_ns
        second = folder / "model-round-000002.safetensors"
        digest, whole = found["files"][second.name], second.read_bytes()
        second.unlink()
        (folder / f"{second.name}.{digest[:12]}.partial").write_bytes(whole[:100])
        await stage.roundtable("download", job, "-o", folder, "--all-models")
        assert (model.stat().st_mtime_ns, second.read_bytes()) == (kept, whole)
        other = await stage.finish(request="r2", start=5.0)
        assert f"holds job '{job}' already" in await stage.roundtable("download", other, "-o", folder, code=2)
        words = ("clone", job, "--set", "rounds=1", "--set", "name=again", "--request-id", "c", "--json")
        clone = json.loads(await stage.roundtable(*words))
        assert json.loads(await stage.roundtable(*words))["id"] == clone["id"]
        await stage.operator.watch_until(clone["id"], "finished")
        cloned, first = await stage.operator.job(clone["id"]), await stage.operator.job(job)
        assert (cloned.job.name, cloned.job.rounds_done) == ("again", 1)
        assert cloned.initial_model == first.initial_model
        for other in ("seed=7", "algorithm.name=scaffold", "algorithm.name=fedper"):
            refused = await stage.roundtable("clone", job, "--set", other, code=2)
            assert "begins with another model" in refused
        assert "algorithm.epochs" in await stage.roundtable(
            "clone", job, "--set", "algorithm.epochs=-1", code=2
        )
        table = (
            "--set",
            "algorithm.name=fedprox",
            "--set",
            "algorithm.mu=0.1",
            "--set",
            "algorithm.epochs=2",
        )
        words = ("clone", job, *table, "--set", "rounds=1", "--request-id", "d", "--json")
        changed = json.loads(await stage.roundtable(*words))
        await stage.operator.watch_until(changed["id"], "finished")
        asked = json.loads((await stage.operator.job(changed["id"])).job_config)["algorithm"]
        assert (asked["name"], asked["mu"], asked["epochs"]) == ("fedprox", 0.1, 2)


async def test_an_archive_is_checked_offline_and_shows_what_was_done_to_it(
    settings: Settings, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, ca = tmp_path / "job.tar", certificates / "ca" / "ca.crt"
    async with staged(settings(), certificates, capsys) as stage:
        job = await stage.finish()
        going = (await stage.operator.submit("[cohort]\nsize = 3\n", request="r2")).id
        assert "is archived once it is over" in await stage.roundtable("archive", going, "-o", path, code=2)
        await stage.roundtable("archive", job, "-o", path)
        assert "is there already" in await stage.roundtable("archive", job, "-o", path, code=2)
        checked = json.loads(await stage.roundtable("archive", path, "--verify", "--ca", ca, "--json"))
    assert (checked["job"], checked["rounds"], checked["models"], checked["proven"]) == (job, 3, 4, True)
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    config = files["job.json"].replace(b'"rounds":3', b'"rounds":4')
    records = files["rounds.jsonl"].splitlines(keepends=True)
    first = json.loads(records[0])["model"].encode()
    swapped = blake3(files["model-round-000002.safetensors"]).hexdigest().encode()
    attacks: dict[str, dict[str, bytes | None]] = {
        "'job.json' was changed": {"job.json": config, "manifest.json": files["manifest.json"]},
        "'more.txt' was added": {"more.txt": b"", "manifest.json": files["manifest.json"]},
        "'events.jsonl' is missing": {"events.jsonl": None, "manifest.json": files["manifest.json"]},
        "signed: configuration": {"job.json": config},
        "signed: rounds": {
            "rounds.jsonl": files["rounds.jsonl"].replace(first, swapped),
            "model-round-000001.safetensors": files["model-round-000002.safetensors"],
        },
        "is not the model": {"model-round-000001.safetensors": files["model-round-000002.safetensors"]},
        "no signed statement": {"provenance.json": None},
        "proves nothing": {"provenance.json": files["provenance.json"].replace(job.encode(), b"0" * 12)},
        "not a file of its own": {"manifest.json": files["manifest.json"], "model.safetensors": b"link"},
    }
    for words, changes in attacks.items():
        forged = forge({**files, **changes}, tmp_path / "forged.tar", keep="manifest.json" in changes)
        with pytest.raises(AuditError, match=words):
            check_archive(forged, ca.read_bytes())
    forge(dict(files), tmp_path / "forged.tar", keep=False)
    assert check_archive(tmp_path / "forged.tar", ca.read_bytes()).models == 4


def forge(files: dict[str, bytes | None], path: Path, keep: bool) -> Path:
    """An archive of these files, with a manifest that fits them unless the old one is kept."""
    there = {name: data for name, data in files.items() if data is not None}
    if not keep:
        digests = {name: blake3(data).hexdigest() for name, data in there.items() if name != "manifest.json"}
        manifest = {**json.loads(there["manifest.json"]), "files": digests}
        there["manifest.json"] = json.dumps(manifest).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in there.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if data == b"link":
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(data))
    return path


async def test_jobs_that_are_over_are_forgotten_after_their_days_and_no_sooner(
    settings: Settings, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(retention={"artifacts": 10, "events": 20})
    async with staged(config, certificates, capsys) as stage:
        job = await stage.finish()
        models = {json.loads(record)["model"] for record in (await stage.operator.job(job)).history}
        running_job = (
            await stage.operator.submit("[cohort]\nsize = 3\n", request="r2", vector=torch.ones(4))
        ).id
        needed = (await stage.operator.job(running_job)).initial_model.digest
        services = stage.coordinator.jobs._services
        now, day = services.clock(), 86400.0
        assert await services.retention.sweep(now + 9 * day) == 0
        assert models <= stage.stored()
        await services.retention.sweep(now + 11 * day)
        assert stage.stored() == {needed}
        assert await stage.operator.watch_until(job, "finished") != []
        await services.retention.sweep(now + 21 * day)
        assert await stage.operator.watch_until(job, "finished") == []
        assert await services.retention.sweep(now + 22 * day) == 0
        retired = [entry for entry in await stage.audited() if entry["action"].endswith("_retired")]
        assert [(entry["action"], entry["object"]) for entry in retired] == [
            ("artifacts_retired", job),
            ("events_retired", job),
        ]
        assert len((await stage.operator.job(job)).history) == 3
        assert "not kept any more" in await stage.roundtable("clone", job, code=2)
        assert (await stage.operator.job(running_job)).job.status == "waiting"
