"""A bit flips in a file, and no time stamp shows it: the undisturbed run's models are made, or none.

Each case is one whole job over real connections, with one flip in one kind of file at one stage.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from bit_rot import flip
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.aggregation import FileMatrix
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.proto import operator_pb2
from roundtable.server import ServerConfig, load_server_config
from roundtable.server.jobs import combiner
from roundtable.server.operations.alerts import Alerts
from roundtable.server.services import transfer
from roundtable.server.storage import bucket, replicas
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact

Settings = Callable[..., ServerConfig]
ROUNDS = 3
AT_END, IN_HEADER = -2, 40
DONE = "all 3 rounds are done"
JOB = """
[cohort]
size = 2
wait = "60s"
retries = 0
[aggregation.server_optimizer]
name = "fedadam"
[evaluation]
every = 0
"""
KINDS = {"update": lambda data: len(data) == 16, "state": lambda data: b"optimizer." in data}
KINDS["model"] = lambda data: b"privacy" in data or (b"__metadata__" in data and not KINDS["state"](data))


class Rot:
    """Flips a bit once, in a file of a kind that comes by, after so many others."""

    def __init__(self, kind: str, place: int, skip: int) -> None:
        self.kind, self.place, self.left = kind, place, skip + 1
        self.done = ""

    def look(self, path: Path) -> None:
        if not self.done and path.is_file() and KINDS[self.kind](data := path.read_bytes()):
            self.left -= 1
            if self.left == 0:
                self.done = blake3(data).hexdigest()
                flip(path, self.place)


def at(stage: str, rot: Rot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `rot` look at the files that pass a stage of the coordinator."""
    adopt, name, combine = ArtifactStore._adopt, ArtifactStore._name, combiner.combine
    send, put = transfer.send, replicas.Replicas._do
    objects: list[Path] = []

    def arrived(self: ArtifactStore, partial: Path, digest: str) -> None:
        rot.look(partial)
        adopt(self, partial, digest)

    def named(self: ArtifactStore, partial: Path, digest: str) -> None:
        name(self, partial, digest)
        objects.append(self._place(digest))
        if stage == "named":
            rot.look(objects[-1])

    def look_at_newest() -> None:
        mine = [path for path in objects if path.is_file() and KINDS[rot.kind](path.read_bytes())]
        rot.look(mine[-1]) if mine else None

    def combining(*arguments: Any, **options: Any) -> Any:
        if stage == "combining":
            look_at_newest()
        made = combine(*arguments, **options)
        if stage == "combined":
            look_at_newest()
        return made

    async def sending(context: Any, path: Path, *rest: Any) -> int:
        rot.look(path)
        return await send(context, path, *rest)

    def copying(self: replicas.Replicas, location: Any, digest: str, keep: bool) -> None:
        rot.look(self._artifacts._place(digest))
        put(self, location, digest, keep)

    monkeypatch.setattr(ArtifactStore, "_name", named)
    monkeypatch.setattr(combiner, "combine", combining)
    more: dict[str, tuple[Any, str, Any]] = {
        "arrived": (ArtifactStore, "_adopt", arrived),
        "sent": (transfer, "send", sending),
        "copied": (replicas.Replicas, "_do", copying),
    }
    if stage in more:
        monkeypatch.setattr(*more[stage])


async def silo(agent: ScriptedAgent, change: float) -> None:
    """Downloads each model, makes sure of it as agents do, and answers with what follows from it."""
    while (message := await agent.call.read()) is not grpc.aio.EOF:
        if message.WhichOneof("message") != "instruction":
            continue
        told = message.instruction
        data = b""
        while blake3(data).hexdigest() != told.train.model.digest:
            try:
                data = await agent.download(told.train.model.digest)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    return
        await agent.answer(told, change + torch.frombuffer(bytearray(data[-16:]), dtype=torch.float32))


async def models(config: ServerConfig, certificates: Path) -> tuple[list[str], str]:
    """The digest of each round's model, and why the job ended before its last round, if it did."""
    names = {"alder": 1.0, "birch": 3.0}
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        agents = [ScriptedAgent(coordinator.port, certificates / name) for name in names]
        async with agents[0], agents[1], asyncio.TaskGroup() as group:
            work = [
                group.create_task(silo(agent, change))
                for agent, change in zip(agents, names.values(), strict=True)
            ]
            try:
                job = (await operator.submit(JOB, rounds=ROUNDS)).id
            except grpc.aio.AioRpcError as error:
                for task in work:
                    task.cancel()
                return [], error.details() or ""
            async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job), timeout=60):
                if update.detail.job.status in ("finished", "paused"):
                    break
            for task in work:
                task.cancel()
        detail = await operator.job(job)
        return [json.loads(record)["model"] for record in detail.history], detail.job.reason


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> list[str]:
    """The models of the run in which nothing happens."""
    values = {"listen": "127.0.0.1:0", "state": str(tmp_path_factory.mktemp("undisturbed"))}
    config = load_server_config(None, {**values, "credentials": str(certificates / "coordinator")})
    found, reason = asyncio.run(models(config, certificates))
    assert (len(set(found)), reason) == (ROUNDS, DONE)
    return found


@pytest.mark.parametrize("stage", ["arrived", "named", "combining"])
async def test_an_update_is_asked_for_again(
    stage: str,
    settings: Settings,
    certificates: Path,
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rot = Rot("update", AT_END, 1)
    at(stage, rot, monkeypatch)
    assert await models(settings(), certificates) == (undisturbed, DONE)
    assert rot.done


@pytest.mark.parametrize(
    ("kind", "place", "stage"),
    [
        ("model", IN_HEADER, "named"),
        ("model", AT_END, "sent"),
        ("model", AT_END, "combining"),
        ("model", AT_END, "combined"),
        ("model", AT_END, "copied"),
        ("state", AT_END, "named"),
        ("state", IN_HEADER, "combining"),
        ("update", AT_END, "named"),
    ],
)
async def test_what_lies_elsewhere_too_is_fetched(
    kind: str,
    place: int,
    stage: str,
    settings: Settings,
    certificates: Path,
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (bucket, replicas):
        monkeypatch.setattr(module, "LONGEST_PAUSE", 0.05)
    told: list[str] = []
    monkeypatch.setattr(Alerts, "tell", lambda self, incident, *_: told.append(incident.kind))
    rot = Rot(kind, place, 1)
    at(stage, rot, monkeypatch)
    address = f"memory://{secrets.token_hex(4)}"
    config = settings(bucket=f"{address}/home", copies=[f"{address}/copy"])
    assert await models(config, certificates) == (undisturbed, DONE)
    assert rot.done
    if stage in ("combining", "combined"):
        assert told == ["data_corruption"], "an operator hears of a disk that forgets"


@pytest.mark.parametrize(
    ("kind", "place", "stage"),
    [
        ("model", AT_END, "arrived"),
        ("model", AT_END, "sent"),
        ("model", IN_HEADER, "combining"),
        ("model", AT_END, "combined"),
        ("state", IN_HEADER, "arrived"),
        ("state", AT_END, "combining"),
    ],
)
async def test_without_another_copy_no_model_is_made(
    kind: str,
    place: int,
    stage: str,
    settings: Settings,
    certificates: Path,
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rot = Rot(kind, place, 1)
    at(stage, rot, monkeypatch)
    found, reason = await models(settings(), certificates)
    assert rot.done[:12] in reason
    assert "is damaged" in reason
    assert len(found) < ROUNDS
    assert found == undisturbed[: len(found)]


def test_bytes_that_change_while_they_are_read_spoil_the_pass_and_nothing_else(tmp_path: Path) -> None:
    rows = torch.randn(3, 5 * 8192)
    paths = [tmp_path / str(index) for index in range(3)]
    for path, row in zip(paths, rows, strict=True):
        path.write_bytes(row.numpy().tobytes())
    digests = [blake3(path.read_bytes()).hexdigest() for path in paths]
    matrix = FileMatrix(paths, rows.shape[1], digests=digests)
    assert torch.equal(torch.cat([values.clone() for _, _, values in matrix.blocks(1)], dim=1), rows)
    reading = matrix.blocks(1)
    next(reading)
    flip(paths[1], -1)
    with pytest.raises(DamagedRows) as raised:
        list(reading)
    assert raised.value.digests == (digests[1],)
    # Rows that are not read are not judged; reads that go through in order are, whatever their width.
    assert torch.equal(matrix.subset([2, 0]).block(0, rows.shape[1]), rows[[2, 0]])
    matrix.block(0, 100)
    matrix.block(200, 300)
    matrix.block(0, 20000)
    with pytest.raises(DamagedRows):
        matrix.block(20000, rows.shape[1])


def test_a_file_that_is_replaced_while_it_is_mapped_does_not_vouch_for_the_old_one(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path, "1" * 32)
    digest, _ = artifacts.create([b"abc"])
    flip(shutil.copy(artifacts.path(digest), tmp_path / "other"), 0)
    with pytest.raises(DamagedArtifact, match="is damaged"), artifacts.using(digest) as path:
        (tmp_path / "other").replace(path)
    artifacts.create([b"abc"])
    with pytest.raises(DamagedArtifact, match="was removed"), artifacts.using(digest) as path:
        path.unlink()
    artifacts.create([b"abc"])
    with artifacts.using(digest):
        artifacts.create([b"abc"])  # A server's state that a round leaves as it was.
    with artifacts.using(digest) as path:
        assert path.read_bytes() == b"abc" == artifacts.load(digest)
    flip(path, 0)
    assert artifacts.path(digest) == path, "no time stamp shows it"
    with pytest.raises(DamagedArtifact, match="is damaged"):
        artifacts.load(digest)
