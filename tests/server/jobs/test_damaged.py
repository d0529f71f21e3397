"""An update that rots at the coordinator after it was accepted is asked for again; only the same counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import Operator

from roundtable.proto import agent_pb2
from roundtable.server.storage.artifact_store import ArtifactStore

Status = agent_pb2.UploadReceipt
ONE = torch.ones(4)
PAIR = '[cohort]\nsize = 2\nminimum = 1\nwait = "60s"\n[evaluation]\nevery = 0'


def digest_of(vector: torch.Tensor) -> str:
    return blake3(vector.numpy().tobytes()).hexdigest()


def rot(tmp_path: Path, vector: torch.Tensor) -> None:
    """Spoils the artifact of an update on the coordinator's disk."""
    digest = digest_of(vector)
    path = tmp_path / "state" / "artifacts" / "objects" / digest[:2] / digest
    path.write_bytes(bytes(len(path.read_bytes())))


def stored(tmp_path: Path) -> list[Any]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'state' / 'coordinator.db'}")
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT client, receipt FROM updates ORDER BY client").all()
    engine.dispose()
    return [tuple(row) for row in found]


async def test_it_is_asked_for_again_and_counts_once(
    pair: list[ScriptedAgent], operator: Operator, tmp_path: Path
) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await agent.expect("instruction") for agent in pair]
    assert (await pair[0].answer(first, ONE)).status == Status.ACCEPTED
    rot(tmp_path, ONE)
    assert (await pair[1].answer(second, 3 * ONE)).status == Status.ACCEPTED
    again = await pair[0].expect("instruction")
    assert (again.step, again.train) == (first.step, first.train)
    assert (await pair[1].answer(second, 3 * ONE)).status == Status.ACCEPTED
    assert (await pair[0].answer(again, ONE, examples=77)).status == Status.ACCEPTED
    events = await operator.watch_until(job.id, "finished")
    detail = await operator.job(job.id)
    record = json.loads(detail.history[0])
    assert record["attempt"] == 1
    assert record["weights"] == {"alder": 0.5, "birch": 0.5}, "what was acknowledged first counts"
    assert stored(tmp_path) == [("alder", "accepted"), ("birch", "accepted")]
    (trouble,) = [event for event in events if event.kind == "client_troubled"]
    incident = json.loads(trouble.detail)["incident"]
    assert (incident["kind"], incident["site"], incident["action"]) == (
        "data_corruption",
        "alder",
        "asked the silo to send it again",
    )
    assert "is damaged" in trouble.message
    assert [event.kind for event in detail.incidents] == ["client_troubled"]


async def test_another_one_does_not_take_its_place(
    pair: list[ScriptedAgent], operator: Operator, tmp_path: Path
) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await agent.expect("instruction") for agent in pair]
    await pair[0].answer(first, ONE)
    rot(tmp_path, ONE)
    await pair[1].answer(second, 3 * ONE)
    receipt = await pair[0].answer(await pair[0].expect("instruction"), 2 * ONE)
    assert receipt.status == Status.REJECTED
    assert "what was acknowledged is not replaced" in receipt.reason
    await operator.watch_until(job.id, "finished")
    record = json.loads((await operator.job(job.id)).history[0])
    assert (record["attempt"], record["contributors"]) == (1, ["birch"])
    assert "was accepted and damaged since" in record["failures"]["alder"]
    assert stored(tmp_path) == [("alder", "accepted"), ("birch", "accepted")]


async def test_a_disk_that_spoils_it_every_time(
    pair: list[ScriptedAgent], operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await operator.submit(PAIR.replace("minimum = 1", "minimum = 2\nretries = 0"), rounds=1)
    first, second = [await agent.expect("instruction") for agent in pair]
    await pair[1].answer(second, 3 * ONE)
    sound = ArtifactStore.path

    def spoiled(self: ArtifactStore, digest: str) -> Path:
        if digest == digest_of(ONE):
            rot(tmp_path, ONE)
        return sound(self, digest)

    monkeypatch.setattr(ArtifactStore, "path", spoiled)
    assert (await pair[0].answer(first, ONE)).status == Status.ACCEPTED
    for _ in range(2):
        again = await pair[0].expect("instruction")
        assert (await pair[0].answer(again, ONE)).status == Status.ACCEPTED
    events = await operator.watch_until(job.id, "paused")
    (failed,) = [event for event in events if event.kind == "client_failed"]
    incident = json.loads(failed.detail)["incident"]
    assert incident["action"] == "asked the silo 2 times to send it again, then excluded the update"
    assert "1 of at least 2 updates" in (await operator.job(job.id)).job.reason


async def test_what_a_silo_deals_with_itself_is_in_the_history(
    pair: list[ScriptedAgent], operator: Operator
) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await agent.expect("instruction") for agent in pair]
    await pair[0].say(
        trouble=agent_pb2.Trouble(
            step=first.step, kind="out_of_memory", detail="too\nmuch", action="reduced the batch size"
        )
    )
    event = await operator.watch_for(job.id, "client_troubled")
    incident = json.loads(event.detail)["incident"]
    assert event.message == "alder, train: too much; reduced the batch size"
    assert (incident["kind"], incident["severity"], incident["action"]) == (
        "out_of_memory",
        "warning",
        "reduced the batch size",
    )
    await pair[0].answer(first, ONE)
    await pair[1].answer(second, ONE)
    await operator.watch_until(job.id, "finished")
