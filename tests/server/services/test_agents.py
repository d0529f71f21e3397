"""The control stream: who may connect, what is pushed, what a silent or failing agent leads to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
import torch
from scripted_agent import ScriptedAgent, secure_channel
from service import Operator, running

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.proto import agent_pb2, agent_pb2_grpc, common_pb2, operator_pb2, operator_pb2_grpc
from roundtable.server import Coordinator, ServerConfig

ONE = torch.ones(4)


async def test_the_welcome_says_what_the_agent_needs(coordinator: Coordinator, certificates: Path) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        assert agent.welcome.heartbeat_seconds == 10.0
        assert len(agent.welcome.coordinator) == 32
        assert abs(agent.welcome.clock - time.time()) < 60
        await agent.say(heartbeat=agent_pb2.Heartbeat(state="available"))
        await agent.expect("heartbeat")


async def test_a_silo_that_has_seen_the_last_round_is_welcome_while_the_job_s_end_waits_for_the_database(
    coordinator: Coordinator, operator: Operator, certificates: Path, tmp_path: Path
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'state' / 'coordinator.db'}")
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
        instruction = await agent.expect("instruction")
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE UPDATE ON jobs WHEN NEW.status = 'finished' "
                "BEGIN SELECT RAISE(FAIL, 'I/O trouble'); END"
            )
        assert (await agent.answer(instruction, ONE)).status == agent_pb2.UploadReceipt.ACCEPTED
        async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id), timeout=20):
            if "I/O trouble" in update.detail.waiting_for:
                break
        back = ScriptedAgent(coordinator.port, certificates / "alder")
        answer = await back.connect(coordinator=agent.welcome.coordinator, seen=[instruction.step])
        assert answer.HasField("welcome"), answer
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER refuse")
        await operator.watch_until(job.id, "finished")
        await back.close()
    engine.dispose()


async def test_an_agent_of_another_version(coordinator: Coordinator, certificates: Path) -> None:
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    answer = await agent.connect(protocol=99, version="9.9")
    assert "9.9 speaks protocol 99" in answer.refused.reason
    assert await agent.next() is None
    await agent.close()


async def test_a_stream_that_does_not_begin_with_a_hello(
    coordinator: Coordinator, certificates: Path
) -> None:
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    agent.call = agent.stub.Connect()
    await agent.say(heartbeat=agent_pb2.Heartbeat())
    assert "begins with a hello" in (await agent.expect("refused")).reason
    await agent.close()


async def test_a_second_connection_takes_the_place_of_the_first(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as first,
        ScriptedAgent(coordinator.port, certificates / "alder") as second,
    ):
        assert "issue one for each" in (await first.expect("refused")).reason
        assert await first.next() is None
        await operator.submit("[cohort]\nsize = 1")
        await second.expect("instruction")


async def test_an_instruction_is_sent_again_after_a_reconnect(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    job = await operator.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        before = await agent.expect("instruction")
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        again = await agent.expect("instruction")
        assert again.step == before.step
        assert again.train == before.train
        await agent.answer(again, ONE)
        over = await agent.expect("withdraw")
        assert (over.step.job, over.step.round) == (job.id, 0)


async def test_a_failure_is_told_and_the_round_goes_on(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        job = await operator.submit("[cohort]\nsize = 2\nminimum = 1\n[evaluation]\nevery = 0", rounds=1)
        step = (await alder.expect("instruction")).step
        await alder.say(failure=agent_pb2.Failure(step=step, kind="out_of_memory", detail="8 GB\nasked"))
        event = await operator.watch_for(job.id, "client_failed")
        assert event.message == "alder failed in round 1, attempt 1, train: 8 GB asked"
        assert json.loads(event.detail)["kind"] == "out_of_memory"
        await birch.answer(await birch.expect("instruction"), ONE)
        await operator.watch_until(job.id, "finished")


async def test_another_silo_trains_in_the_place_of_one_that_fails(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
        ScriptedAgent(coordinator.port, certificates / "cedar") as cedar,
    ):
        table = '[cohort]\nsize = 2\nstrategy = "round_robin"\n[evaluation]\nevery = 0'
        job = await operator.submit(table, rounds=1)
        asked = await alder.expect("instruction")
        await alder.say(failure=agent_pb2.Failure(step=asked.step, kind="task_error", detail="no column"))
        replaced = await operator.watch_for(job.id, "client_replaced")
        assert (replaced.client, json.loads(replaced.detail)) == ("alder", {"replacement": "cedar"})
        instead = await cedar.expect("instruction")
        assert (instead.step, instead.train) == (asked.step, asked.train)
        assert instead.deadline_seconds <= asked.deadline_seconds, "it has what is left of the time"
        late = await alder.answer(asked, ONE)
        assert late.status == agent_pb2.UploadReceipt.STALE
        assert late.reason.endswith("cedar was asked in its place")
        await cedar.answer(instead, ONE)
        await birch.answer(await birch.expect("instruction"), ONE)
        await operator.watch_until(job.id, "finished")
        (failed,) = (await operator.job(job.id)).incidents
        assert json.loads(failed.detail)["incident"]["action"] == "asked cedar in its place"
        record = json.loads((await operator.job(job.id)).history[0])
        assert (record["attempt"], record["contributors"]) == (1, ["birch", "cedar"])


async def test_an_agent_that_leaves_on_purpose_is_not_waited_for(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        job = await operator.submit("[cohort]\nsize = 2\nminimum = 1\n[evaluation]\nevery = 0", rounds=1)
        await alder.expect("instruction")
        await alder.say(goodbye=agent_pb2.Goodbye(reason="maintenance"))
        await birch.answer(await birch.expect("instruction"), ONE)
        await operator.watch_until(job.id, "finished")
        record = json.loads((await operator.job(job.id)).history[0])
        assert "maintenance" in record["failures"]["alder"]


async def test_an_agent_that_never_answers(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    table = '[cohort]\nsize = 2\nminimum = 1\ndeadline = "500ms"\n[evaluation]\nevery = 0'
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        job = await operator.submit(table, rounds=1)
        await birch.answer(await birch.expect("instruction"), ONE)
        await alder.expect("instruction")
        withdraw = await alder.expect("withdraw")
        assert "deadline" in withdraw.reason
        await operator.watch_until(job.id, "finished")
        event = await operator.watch_for(job.id, "client_failed")
        assert json.loads(event.detail)["kind"] == "slow_node"


async def test_a_silent_agent_loses_its_session(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings(heartbeat=0.05)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        assert await agent.next() is None
        reply = await operator.stub.ListClients(operator_pb2.ListClientsRequest())
        assert [(client.name, client.online) for client in reply.clients] == [("alder", False)]


async def test_progress_is_shown(coordinator: Coordinator, operator: Operator, certificates: Path) -> None:
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        job = await operator.submit("[cohort]\nsize = 1")
        step = (await agent.expect("instruction")).step
        await agent.say(accepted=agent_pb2.Accepted(step=step))
        await agent.say(progress=agent_pb2.Progress(step=step, done=64, total=200, loss=0.5))
        async for update in operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id), timeout=20):
            if update.detail.clients and update.detail.clients[0].total:
                break
        client = update.detail.clients[0]
        assert (client.client, client.state, client.done, client.total, client.loss) == (
            "alder",
            "training",
            64,
            200,
            0.5,
        )
        assert update.detail.waiting_for == "0 of 1 updates; waiting for alder (training)"


async def test_only_agents_that_have_the_task_are_asked(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder", tasks=("other",)),
        ScriptedAgent(coordinator.port, certificates / "birch", tasks=("t",)) as birch,
    ):
        job = await operator.submit("")
        await birch.expect("instruction")
        assert [c.client for c in (await operator.job(job.id)).clients] == ["birch"]


async def test_downloads_are_limited_to_what_was_instructed(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        job = await operator.submit('[cohort]\nsize = 1\nstrategy = "round_robin"')
        instruction = await alder.expect("instruction")
        digest = instruction.train.model.digest
        whole = await alder.download(digest)
        assert len(whole) == instruction.train.model.size
        assert await alder.download(digest, offset=100) == whole[100:]
        assert await alder.download(digest, offset=len(whole)) == b""
        for agent, wanted, offset, code in (
            (alder, digest, len(whole) + 1, grpc.StatusCode.OUT_OF_RANGE),
            (alder, "../../../etc/passwd", 0, grpc.StatusCode.PERMISSION_DENIED),
            (alder, "0" * 64, 0, grpc.StatusCode.PERMISSION_DENIED),
            (birch, digest, 0, grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await agent.download(wanted, offset)
            assert caught.value.code() == code
        assert (await operator.job(job.id)).job.status == "running"


@pytest.mark.parametrize("method", ["Connect", "Download", "UploadStatus", "Upload"])
async def test_operators_may_not_act_as_agents(
    coordinator: Coordinator, certificates: Path, method: str
) -> None:
    async with secure_channel(coordinator.port, certificates / "olga") as channel:
        stub = agent_pb2_grpc.AgentsStub(channel)
        # Streams without a message: grpc's client says INTERNAL if a call ends while it still sends.
        requests = {"Download": common_pb2.DownloadRequest(), "UploadStatus": agent_pb2.UploadHeader()}
        call = getattr(stub, method)(requests.get(method, iter([])))
        assert await _code_of(call) == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Status", operator_pb2.StatusRequest),
        ("GetArtifact", common_pb2.DownloadRequest),
        ("SubmitJob", operator_pb2.SubmitJobRequest),
        ("ListJobs", operator_pb2.ListJobsRequest),
        ("GetJob", operator_pb2.JobRequest),
        ("WatchJob", operator_pb2.WatchJobRequest),
        ("CancelJob", operator_pb2.JobRequest),
        ("PauseJob", operator_pb2.JobRequest),
        ("ResumeJob", operator_pb2.JobRequest),
        ("ListClients", operator_pb2.ListClientsRequest),
    ],
)
async def test_agents_may_not_act_as_operators(
    coordinator: Coordinator, certificates: Path, method: str, request_type: type
) -> None:
    async with secure_channel(coordinator.port, certificates / "alder") as channel:
        stub = operator_pb2_grpc.OperatorsStub(channel)
        assert await _code_of(getattr(stub, method)(request_type())) == grpc.StatusCode.PERMISSION_DENIED


async def test_a_certificate_of_another_authority_and_none_at_all(
    coordinator: Coordinator, certificates: Path, tmp_path: Path
) -> None:
    create_ca(tmp_path / "ca")
    foreign = issue(tmp_path / "ca", "alder", "agent", tmp_path / "alder")
    (foreign / "ca.crt").unlink()
    authority = (certificates / "alder" / "ca.crt").read_bytes()
    secrets = (
        (authority, (foreign / "node.key").read_bytes(), (foreign / "node.crt").read_bytes()),
        (authority, None, None),
    )
    for root, key, certificate in secrets:
        credentials = grpc.ssl_channel_credentials(root, key, certificate)
        async with grpc.aio.secure_channel(f"localhost:{coordinator.port}", credentials) as channel:
            call = agent_pb2_grpc.AgentsStub(channel).UploadStatus(agent_pb2.UploadHeader())
            assert await _code_of(call) == grpc.StatusCode.UNAVAILABLE


async def _code_of(call: object) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        return await call.code()  # type: ignore[attr-defined,no-any-return]
