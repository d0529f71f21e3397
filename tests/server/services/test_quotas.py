"""What one caller can hold and use up: each quota is attacked over real connections, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent, header_for, secure_channel
from service import Operator, running
from sqlalchemy import func, select

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.identity.invitation import Secret
from roundtable.proto import administration_pb2, administration_pb2_grpc, agent_pb2, common_pb2, operator_pb2
from roundtable.proto.channel import SERVER_OPTIONS
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.auth.quotas import QuotaTable
from roundtable.server.auth.rate_limit import RateLimit
from roundtable.server.store import tables
from roundtable.server.store.jobs import positions_of

Settings = Callable[..., ServerConfig]
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


def quotas(**changes: Any) -> dict[str, Any]:
    return {"quotas": QuotaTable(**changes).model_dump()}


def partials(coordinator: Coordinator) -> list[Path]:
    """Half uploads; the coordinator's own files beside them come and go."""
    here = (Path(coordinator.config.artifacts) / "partial").iterdir()
    return sorted(path for path in here if not path.name.startswith("own."))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


async def rows_of_the_log(coordinator: Coordinator) -> int:
    query = select(func.count()).select_from(tables.audit)
    return await coordinator._database.read(lambda connection: connection.execute(query).scalar_one())


async def never_ending() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("who", "name", "kind"),
    [
        ("alder", "Agents/Upload", "stream_unary"),
        ("alder", "Agents/Download", "stream_stream"),
        ("oskar", "Operators/PutArtifact", "stream_unary"),
        ("oskar", "Operators/Status", "stream_unary"),
        ("oskar", "Operators/PauseJob", "stream_unary"),
    ],
)
async def test_calls_that_never_say_anything(
    settings: Settings, certificates: Path, who: str, name: str, kind: str
) -> None:
    """Only so many stand open, and none for ever; unary calls, too, whose one message does not come."""
    config = settings(metrics="127.0.0.1:0", **quotas(calls=8, idle=1.0))
    async with running(config) as coordinator:
        async with secure_channel(coordinator.port, certificates / who) as channel:
            call = getattr(channel, kind)(f"/roundtable.v1.{name}")
            calls = [call(never_ending()) for _ in range(60)]
            codes = [await each.code() for each in calls]
            refused = [each for each in calls if await each.code() is FULL]
            assert len(refused) == 52
            assert set(codes) == {FULL, grpc.StatusCode.DEADLINE_EXCEEDED}
            problem = await refused[0].details()
            assert "has 8 calls open, the most that one caller may have" in problem
            assert "[quotas] calls" in problem
        assert not coordinator.security.quotas._open
        assert 'roundtable_quota_refusals_total{quota="calls"} 52.0' in await asyncio.to_thread(
            page, coordinator.metrics_port
        )


async def test_one_caller_with_all_its_calls_open_holds_up_nobody_else(
    settings: Settings, certificates: Path
) -> None:
    async with (
        running(settings(**quotas(calls=4))) as coordinator,
        Operator(coordinator.port, certificates / "oskar") as oskar,
        Operator(coordinator.port, certificates / "olga") as olga,
    ):
        calls = [oskar.stub.PutArtifact(never_ending()) for _ in range(4)]
        await until(lambda: coordinator.security.quotas._open["operator/oskar"] == 4)
        with pytest.raises(grpc.aio.AioRpcError, match="has 4 calls open"):
            await oskar.stub.Status(operator_pb2.StatusRequest())
        await olga.stub.Status(operator_pb2.StatusRequest())
        async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
            assert agent.welcome is not None
        for call in calls:
            call.cancel()


async def test_who_reads_nothing_of_an_answer_is_not_waited_for(
    settings: Settings, certificates: Path
) -> None:
    async with (
        running(settings(**quotas(idle=1.0))) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        data = bytes(16 << 20)
        await operator.stub.PutArtifact(iter(parts_of(data)))
        call = operator.stub.GetArtifact(common_pb2.DownloadRequest(digest=blake3(data).hexdigest()))
        await call.read()
        await until(lambda: not coordinator.security.quotas._open)
        with pytest.raises(grpc.aio.AioRpcError, match="was read within 1 s"):
            await read_up(call)


async def read_up(call: Any) -> None:
    async with asyncio.timeout(20):
        while await call.read() is not grpc.aio.EOF:
            pass


def parts_of(data: bytes) -> list[operator_pb2.PutPart]:
    content = common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data))
    return [
        operator_pb2.PutPart(header=operator_pb2.PutHeader(content=content)),
        *(
            operator_pb2.PutPart(chunk=common_pb2.Chunk(offset=at, data=data[at : at + (1 << 20)]))
            for at in range(0, len(data), 1 << 20)
        ),
    ]


async def test_connections_are_counted_and_do_not_outlive_their_use(
    settings: Settings, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(SERVER_OPTIONS) | {"grpc.max_connection_idle_ms": 500}
    monkeypatch.setattr("roundtable.server.open_doors.SERVER_OPTIONS", tuple(options.items()))
    async with running(settings(**quotas(connections=8))) as coordinator:
        with contextlib.ExitStack() as stack:
            found = await asyncio.to_thread(_greeted, stack, coordinator.port, certificates / "oskar", 20)
            assert found.count(True) <= 8
        async with secure_channel(coordinator.port, certificates / "oskar") as channel:
            # gRPC's own client answers every ping: what ends this connection is that it makes no call.
            await channel.channel_ready()
            async with asyncio.timeout(20):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            call = channel.unary_unary("/roundtable.v1.Operators/Status")
            await call(b"", timeout=20)


def _greeted(stack: contextlib.ExitStack, port: int, folder: Path, count: int) -> list[bool]:
    """Whether each of so many connections, all kept open, comes to a TLS session."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "node.crt", folder / "node.key")
    context.set_alpn_protocols(["h2"])
    found = []
    for _ in range(count):
        raw = socket.create_connection(("localhost", port))
        try:
            stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
            found.append(True)
        except (ssl.SSLError, ConnectionError):
            raw.close()
            found.append(False)
    return found


async def test_halves_of_artifacts_do_not_pile_up(settings: Settings, certificates: Path) -> None:
    async with running(settings(**quotas(unfinished=3))) as coordinator:
        async with Operator(coordinator.port, certificates / "oskar") as oskar:
            for number in range(61):
                data = number.to_bytes(4) * 1000
                await oskar.put(data[:1000], digest=blake3(data).hexdigest(), size=len(data))
            assert len(partials(coordinator)) == 3
            # The newest is still there to be gone on with.
            assert (await oskar.put(data, offset=1000)).complete
            assert len(partials(coordinator)) == 2
        async with Operator(coordinator.port, certificates / "olga") as olga:
            await olga.put(b"a", digest="0" * 64, size=10)
            assert len(partials(coordinator)) == 3


async def test_more_artifacts_at_once_than_may_be_unfinished(settings: Settings, certificates: Path) -> None:
    async def half(number: int) -> AsyncIterator[operator_pb2.PutPart]:
        content = common_pb2.Artifact(digest=f"{number:064x}", size=100)
        yield operator_pb2.PutPart(header=operator_pb2.PutHeader(content=content))
        yield operator_pb2.PutPart(chunk=common_pb2.Chunk(data=b"x"))
        await asyncio.Event().wait()

    async with (
        running(settings(**quotas(unfinished=2))) as coordinator,
        Operator(coordinator.port, certificates / "oskar") as oskar,
    ):
        calls = [oskar.stub.PutArtifact(half(number)) for number in range(2)]
        await until(lambda: len(partials(coordinator)) == 2)
        with pytest.raises(grpc.aio.AioRpcError, match="stores 2 artifacts at this moment"):
            await oskar.stub.PutArtifact(half(2))
        with pytest.raises(grpc.aio.AioRpcError, match="over another call already"):
            await oskar.stub.PutArtifact(half(1))
        for call in calls:
            call.cancel()


async def test_a_silo_keeps_one_half_of_an_update_for_a_step(
    coordinator: Coordinator, operator: Operator, pair: list[ScriptedAgent]
) -> None:
    await operator.submit(rounds=1)
    instructions = [await agent.expect("instruction") for agent in pair]
    data = torch.ones(4).numpy().tobytes()
    for number in range(30):
        header = header_for(instructions[0], data)
        header.content.digest = blake3(number.to_bytes(4)).hexdigest()
        with pytest.raises(grpc.aio.AioRpcError, match="ended at byte 8 of 16"):
            await pair[0].upload(header, data[:8])
        assert len(partials(coordinator)) == 1
    for agent, own in zip(pair, instructions, strict=True):
        assert (await agent.answer(own, torch.ones(4))).status == agent_pb2.UploadReceipt.ACCEPTED
    assert partials(coordinator) == []


async def test_bytes_that_an_operator_stores(settings: Settings, certificates: Path) -> None:
    async with running(settings(**quotas(stored=1_000_000))) as coordinator:
        async with Operator(coordinator.port, certificates / "oskar") as oskar:
            await oskar.put(b"a" * 600_000)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await oskar.put(b"b" * 600_000)
        assert caught.value.code() is FULL
        assert "bytes as one operator may within a day, 1000000" in caught.value.details()
        async with Operator(coordinator.port, certificates / "olga") as olga:
            assert (await olga.put(b"b" * 600_000)).complete


async def test_chunks_without_bytes_are_no_way_to_go_on_for_ever(operator: Operator) -> None:
    content = common_pb2.Artifact(digest="0" * 64, size=10)
    parts = [
        operator_pb2.PutPart(header=operator_pb2.PutHeader(content=content)),
        *[operator_pb2.PutPart(chunk=common_pb2.Chunk())] * 10,
    ]
    with pytest.raises(grpc.aio.AioRpcError, match="chunks hold between 1 and"):
        await operator.stub.PutArtifact(iter(parts))


async def test_a_hello_that_remembers_too_much(
    coordinator: Coordinator, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty thousand jobs are refused unread; a thousand cost one query."""
    queries = []

    def counted(connection: Any, jobs: Any) -> Any:
        queries.append(len(jobs))
        return positions_of(connection, jobs)

    steps = [common_pb2.Step(job=f"{n:064x}", round=1) for n in range(20_000)]
    monkeypatch.setattr("roundtable.server.services.arrivals.positions_of", counted)
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    first = await agent.connect(coordinator=coordinator._database.identity, seen=steps)
    assert "names 20000 jobs that it remembers; at most 1000 can be" in first.refused.reason
    assert queries == []
    first = await agent.connect(coordinator=coordinator._database.identity, seen=steps[:1000])
    assert "older than what this silo has seen" in first.refused.reason
    assert queries == [1000]
    await agent.close()


async def test_changes_that_fail_do_not_fill_the_audit_log(settings: Settings, certificates: Path) -> None:
    async with running(settings(**quotas(changes=40))) as coordinator:
        before = await rows_of_the_log(coordinator)
        async with Operator(coordinator.port, certificates / "oskar") as oskar:
            names = [operator_pb2.JobRequest(job=f"no-such-job-{number}") for number in range(800)]
            for start in range(0, 800, 40):
                # Many at once fail no more often than one after the other.
                calls = [oskar.stub.PauseJob(name) for name in names[start : start + 40]]
                codes = [await call.code() for call in calls]
                if not start:
                    assert codes.count(grpc.StatusCode.NOT_FOUND) == 10
            assert set(codes) == {FULL}
            said = await calls[-1].details()
        assert "those that failed counted 4 times; the next one may come in" in said
        await coordinator.security.audit.seal()
        # Ten that were noted, ten refusals, a line for those that were only counted; a few as time goes by.
        assert await rows_of_the_log(coordinator) - before < 30
        async with Operator(coordinator.port, certificates / "olga") as olga:
            job = await olga.submit()
            assert (await olga.stub.PauseJob(operator_pb2.JobRequest(job=job.id))).status == "paused"


async def test_jobs_of_one_submitter(settings: Settings, certificates: Path) -> None:
    async with running(settings(**quotas(jobs=2))) as coordinator:
        async with Operator(coordinator.port, certificates / "oskar") as oskar:
            first = await oskar.submit(request="r0")
            await oskar.submit(request="r1")
            with pytest.raises(grpc.aio.AioRpcError, match="has 2 jobs that are not over"):
                await oskar.submit(request="r2")
            # What was asked before is no new job, and one that is over makes room.
            assert (await oskar.submit(request="r0")).id == first.id
            await oskar.stub.CancelJob(operator_pb2.JobRequest(job=first.id))
            assert (await oskar.submit(request="r2")).status == "waiting"
        async with Operator(coordinator.port, certificates / "olga") as olga:
            assert (await olga.submit(request="r3")).status == "waiting"


async def test_troubles_do_not_fill_a_jobs_history(
    coordinator: Coordinator,
    operator: Operator,
    pair: list[ScriptedAgent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = await operator.submit(rounds=1)
    instruction = await pair[0].expect("instruction")
    for number in range(300):
        trouble = agent_pb2.Trouble(step=instruction.step, kind="out_of_memory", detail=f"{number}")
        await pair[0].say(trouble=trouble)
    await pair[0].say(heartbeat=agent_pb2.Heartbeat(state="training"))
    await pair[0].expect("heartbeat")
    # Behind all of them.
    await operator.stub.PauseJob(operator_pb2.JobRequest(job=job.id))
    events = [
        event
        for event in (await operator.stub.WatchJob(operator_pb2.WatchJobRequest(job=job.id)).read()).events
        if event.kind == "client_troubled"
    ]
    assert 0 < len(events) <= 30
    lines = [record for record in caplog.records if "more troubles than are kept" in record.getMessage()]
    assert 0 < len(lines) <= 70


async def test_an_answer_repeats_little_of_what_a_caller_sent(operator: Operator) -> None:
    request = operator_pb2.PrivacyRequest(population="\x1b" + "p" * 3_000_000)
    for call in (operator.stub.RemovePrivacyBudget(request), operator.job("x" * 3_000_000)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert len(caught.value.details()) < 3000
        assert "\x1b" not in caught.value.details()


async def test_operators_leave_room_on_the_disk_for_jobs(
    coordinator: Coordinator, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = coordinator.jobs._services.artifacts
    monkeypatch.setattr(artifacts, "disk_bytes", lambda: 100_000)
    monkeypatch.setattr(artifacts, "free_bytes", lambda: 10_000)
    await operator.put(b"a" * 4_000)
    with pytest.raises(grpc.aio.AioRpcError, match="there is room for 5000; a twentieth"):
        await operator.put(b"a" * 5_001)


async def test_certificates_for_the_same_keys(settings: Settings, tmp_path: Path) -> None:
    """An invitation's answer may be asked for again, but not without end; it goes by keys, over restarts."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    from roundtable.core.identity.certificates import signing_request

    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", ("localhost", "127.0.0.1"), enrols=True)
    shutil.copy(tmp_path / "ca" / "ca.crt", tmp_path / "ca.crt")
    config = settings(credentials=str(tmp_path / "hub"), enrolment="127.0.0.1:0", **quotas(certificates=3))
    made: list[common_pb2.CertificateRequests] = []
    for _ in range(2):
        node, identity = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
        made.append(
            common_pb2.CertificateRequests(
                node=signing_request(node, "north"), identity=signing_request(identity, "north")
            )
        )
    invited: list[Secret] = []

    async def ask(coordinator: Coordinator, keys: int) -> str:
        """The name that was certified, or why it was not."""
        request = administration_pb2.EnrollRequest(
            identifier=invited[0].identifier, secret=invited[0].secret, requests=made[keys]
        )
        secure = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        door = f"localhost:{coordinator.security.enrolment_port}"
        async with grpc.aio.secure_channel(door, secure) as channel:
            stub: Any = administration_pb2_grpc.EnrolmentStub(channel)
            call = stub.Enroll(request)
            if await call.code() is grpc.StatusCode.OK:
                return str((await call).name)
            assert await call.code() is FULL
            return str(await call.details())

    for start in range(2):
        async with running(config) as coordinator:
            coordinator.security.quotas._strangers = RateLimit(1e9, 1e9, coordinator.clock)
            if not invited:
                found, _ = await coordinator.security.enrolment.invite("north", 3600, 3, "olga")
                invited.append(found.secret)
            said = [await ask(coordinator, 0) for _ in range(10)]
            assert said.count("north") == (0 if start else 3)
            assert "certified 3 times within a day; the next time can be after" in said[-1]
            # Nobody who has the silo's old keys can keep it from new ones.
            assert await ask(coordinator, 1) == "north"


async def test_one_refused_caller_does_not_crowd_out_the_refusals_of_others(
    coordinator: Coordinator,
) -> None:
    audit = coordinator.security.audit
    for number in range(500):
        audit.refused("agent/eve", "Operators/Status", str(number), "ipv4:192.0.2.1")
    audit.refused("agent/mallory", "Operators/Status", "x", "ipv4:192.0.2.2")
    actors = [item.actor for item in audit._waiting]
    assert actors.count("agent/eve") == 10
    assert actors.count("agent/mallory") == 1


def test_quotas_are_told_once_an_hour_and_leave_nothing_behind() -> None:
    from roundtable.server.auth.quotas import QuotaExceeded, Quotas

    now, told = 0.0, list[str]()
    kept = Quotas(
        QuotaTable(changes=10), lambda: now, lambda who, quota, problem: told.append(f"{who} {quota}")
    )
    for _ in range(30):
        with contextlib.suppress(QuotaExceeded, ValueError), kept.change("operator/oskar"):
            raise ValueError
    assert told == ["operator/oskar changes"]
    now = 2 * 3600.0
    for _ in range(10):
        with kept.change("operator/oskar"):
            pass
    with (
        pytest.raises(QuotaExceeded, match=r"in an hour, 10.*may come in 7 min.*\[quotas\] changes"),
        kept.change("operator/oskar"),
    ):
        pass
    assert len(told) == 2
    with kept.open_call("agent/alder"):
        assert kept._open["agent/alder"] == 1
    assert not kept._open
