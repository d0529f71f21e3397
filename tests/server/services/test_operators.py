"""What operators ask for: submission, look-up, following, changing a job, artifacts, status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.core import parse_job
from roundtable.core.identity.certificates import certificates_in
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.proto.common_pb2 import Artifact
from roundtable.server import Coordinator, ServerConfig

ONE = torch.ones(4)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that this call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def ask(job: str) -> operator_pb2.JobRequest:
    return operator_pb2.JobRequest(job=job)


async def test_submitting_twice_gives_the_same_job(operator: Operator) -> None:
    first = await operator.submit("", request="once")
    again = await operator.submit("", request="once")
    other = await operator.submit("", request="twice")
    assert first.id == again.id != other.id
    assert (first.status, first.submitter, first.rounds) == ("waiting", "olga", 2)
    listed = await operator.stub.ListJobs(operator_pb2.ListJobsRequest())
    assert [job.id for job in listed.jobs] == [other.id, first.id]


async def test_a_request_of_another_operator_is_not_taken_over(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    await operator.submit("", request="once")
    async with Operator(coordinator.port, certificates / "oskar") as other:
        error = await refused(other.submit("", request="once"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_jobs_are_found_by_identifier_prefix_and_name(operator: Operator) -> None:
    job = await operator.submit('name = "spring"', request="a")
    newer = await operator.submit('name = "spring"', request="b")
    assert (await operator.job(job.id)).job.id == job.id
    assert (await operator.job(job.id[:8])).job.id == job.id
    error = await refused(operator.job("spring"))
    assert (
        f"can mean several jobs, {newer.id} of olga (waiting), {job.id} of olga (waiting)" in error.details()
    )
    await operator.stub.CancelJob(operator_pb2.JobRequest(job=newer.id))
    assert (await operator.job("spring")).job.id == job.id
    assert (await operator.job(job.id)).job_config == parse_job('task="t"\nname="spring"\nrounds=2').to_json()
    for unknown in ("summer", "%", job.id + "0"):
        error = await refused(operator.job(unknown))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert "roundtable job list" in error.details()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "should be a table"),
        ("[" * 100_000, "not valid JSON"),
        ('{"task": "t", "rouns": 3}', "did you mean 'rounds'"),
        ('{"task": "t", "aggregation": {"rule": "medain"}}', "medain"),
        ('{"task": "t", "privacy": {"level": "distributed"}}', "privacy"),
        (json.dumps({"task": "t" * (1 << 20)}), "characters long"),
    ],
)
async def test_a_job_that_cannot_work(
    operator: Operator, saved_model: bytes, config: str, words: str
) -> None:
    await operator.put(saved_model)
    request = operator_pb2.SubmitJobRequest(
        request_id="r", job_config=config, model=Artifact(digest=blake3(saved_model).hexdigest())
    )
    error = await refused(operator.stub.SubmitJob(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert "Traceback" not in error.details()
    assert not (await operator.stub.ListJobs(operator_pb2.ListJobsRequest())).jobs


async def test_a_job_whose_model_is_missing_or_none(operator: Operator) -> None:
    config = parse_job('task = "t"').to_json()
    await operator.put(b"this is no model")
    for digest, words in (
        (blake3(b"this is no model").hexdigest(), "is not a whole safetensors file"),
        ("0" * 64, "not stored here"),
        ("../secret", "is no BLAKE3 digest"),
    ):
        request = operator_pb2.SubmitJobRequest(
            request_id="r", job_config=config, model=Artifact(digest=digest)
        )
        error = await refused(operator.stub.SubmitJob(request))
        assert words in error.details()
        assert "artifacts/objects" not in error.details()
    error = await refused(operator.stub.SubmitJob(operator_pb2.SubmitJobRequest(job_config=config)))
    assert "request_id" in error.details()


async def test_artifacts_resume_and_are_verified(operator: Operator) -> None:
    data = bytes(range(256)) * 20
    whole = Artifact(digest=blake3(data).hexdigest(), size=len(data))
    asking = operator_pb2.PutPart(header=operator_pb2.PutHeader(content=whole))
    reply = await operator.stub.PutArtifact(iter([asking]))
    assert (reply.offset, reply.complete) == (0, False)
    reply = await operator.put(data[:1000], digest=whole.digest, size=whole.size)
    assert (reply.offset, reply.complete) == (1000, False)
    reply = await operator.put(data, offset=1000)
    assert (reply.offset, reply.complete) == (len(data), True)
    assert (await operator.put(data)).complete
    assert await operator.fetch(whole.digest) == data
    assert await operator.fetch(whole.digest, offset=5000) == data[5000:]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"digest": "0" * 64}, grpc.StatusCode.DATA_LOSS, "announced was 0000"),
        ({"digest": "../../x"}, grpc.StatusCode.INVALID_ARGUMENT, "BLAKE3"),
        ({"size": 3}, grpc.StatusCode.INVALID_ARGUMENT, "3 were announced"),
        ({"size": 1 << 60}, grpc.StatusCode.RESOURCE_EXHAUSTED, "does not fit here"),
        ({"offset": 2}, grpc.StatusCode.OUT_OF_RANGE, "0 was expected"),
    ],
)
async def test_artifacts_that_are_refused(
    operator: Operator, changes: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    error = await refused(operator.put(b"12345678", **changes))
    assert error.code() == code
    assert words in error.details()


async def test_an_artifact_that_is_not_there(operator: Operator) -> None:
    for digest in ("0" * 64, "../../../etc/passwd", ""):
        error = await refused(operator.fetch(digest))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_following_begins_anywhere_and_ends_with_the_job(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        work = asyncio.create_task(agent.take_part(ONE))
        job = await operator.submit("[cohort]\nsize = 1", rounds=3)
        live = [
            event
            async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id))
            for event in update.events
        ]
        work.cancel()
    assert [event.sequence for event in live] == list(range(1, len(live) + 1))
    assert live[-1].kind == "job_finished"
    assert [event.kind for event in live].count("job_finished") == 1
    updates = [
        update
        async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id, from_sequence=5))
    ]
    assert [event for update in updates for event in update.events] == live[4:]
    assert updates[-1].detail.job.status == "finished"


async def test_following_with_the_clients_that_have_changed_alone(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    alder = ScriptedAgent(coordinator.port, certificates / "alder")
    async with alder, ScriptedAgent(coordinator.port, certificates / "birch"):
        job = await operator.submit("[cohort]\nsize = 2")
        step = (await alder.expect("instruction")).step
        request = operator_pb2.WatchJobRequest(job=job.id, clients=operator_pb2.CHANGED_CLIENTS)
        shown: dict[str, operator_pb2.ClientActivity] = {}
        listed: list[int] = []
        async for update in operator.stub.WatchJob(request, timeout=20):
            shown |= {client.client: client for client in update.detail.clients}
            listed.append(len(update.detail.clients))
            if len(listed) == 1:
                await alder.say(progress=agent_pb2.Progress(step=step, done=64, total=200, loss=0.5))
            if shown["alder"].done == 64:
                break
        whole = (await operator.job(job.id)).clients
    assert listed[0] == 2
    assert max(listed[1:]) == 1
    assert [shown[client.client] for client in whole] == list(whole)


async def test_cancelling(coordinator: Coordinator, operator: Operator, certificates: Path) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1")
        step = (await agent.expect("instruction")).step
        cancelled = await operator.stub.CancelJob(ask(job.id))
        assert (cancelled.status, cancelled.reason) == ("cancelled", "cancelled by olga")
        assert (await agent.expect("withdraw")).step == step
        assert (await agent.expect("withdraw")).step.round == 0
        error = await refused(operator.stub.CancelJob(ask(job.id)))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "cancelled already" in error.details()


async def test_pausing_and_resuming(coordinator: Coordinator, operator: Operator, certificates: Path) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
        first = await agent.expect("instruction")
        assert (await operator.stub.PauseJob(ask(job.id))).status == "paused"
        await agent.expect("withdraw")
        receipt = await agent.answer(first, ONE)
        assert receipt.status == agent_pb2.UploadReceipt.STALE
        assert (await operator.stub.ResumeJob(ask(job.id))).status in ("waiting", "running")
        second = await agent.expect("instruction")
        assert second.step.attempt == 2
        await agent.answer(second, ONE)
        await operator.watch_until(job.id, "finished")


async def test_status_and_clients(coordinator: Coordinator, operator: Operator, certificates: Path) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "birch", region="north") as agent:
        work = asyncio.create_task(agent.take_part(ONE))
        job = await operator.submit("[cohort]\nsize = 1", rounds=2)
        await operator.watch_until(job.id, "finished")
        status = await operator.stub.Status(operator_pb2.StatusRequest())
        assert (status.clients_online, status.jobs_running) == (1, 0)
        assert status.disk_free > 0
        assert status.database.startswith("sqlite:///")
        (client,) = (await operator.stub.ListClients(operator_pb2.ListClientsRequest())).clients
        assert (client.name, client.online, client.metadata["region"]) == ("birch", True, "north")
        assert (client.selected, client.completed, list(client.tasks)) == (2, 2, ["t"])
        own = certificates_in((certificates / "birch" / "node.crt").read_bytes(), "birch")[0]
        assert client.certificate_ends == own.not_valid_after_utc.timestamp()
        work.cancel()


async def test_old_models_and_spent_updates_are_deleted(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    async with (
        running(settings(keep_models=2)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        work = asyncio.create_task(agent.take_part(ONE))
        job = await operator.submit("[cohort]\nsize = 1", rounds=6)
        await operator.watch_until(job.id, "finished")
        work.cancel()
        history = [json.loads(record) for record in (await operator.job(job.id)).history]
    left = {path.name for path in (tmp_path / "state" / "artifacts" / "objects").glob("*/*")}
    assert {record["model"] for record in history[-2:]} <= left
    assert not {record["model"] for record in history[:-2]} & left
    # The initial model, and nothing else.
    assert len(left) == 3
    assert not list((tmp_path / "state" / "artifacts" / "partial").iterdir())


async def test_two_jobs_at_once(coordinator: Coordinator, operator: Operator, certificates: Path) -> None:
    agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
    async with agents[0], agents[1], agents[2]:
        work = [asyncio.create_task(agent.take_part(ONE)) for agent in agents]
        jobs = [await operator.submit("[cohort]\nsize = 3", rounds=3, request=f"r{n}") for n in range(2)]
        await asyncio.gather(*(operator.watch_until(job.id, "finished") for job in jobs))
        for task in work:
            task.cancel()
