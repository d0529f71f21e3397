"""What hostile callers try, over real sockets; the service goes on for everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from scripted_agent import ScriptedAgent, secure_channel
from service import Operator, running
from strange_messages import METHODS, request_for

from roundtable.core.identity.credentials import issue, load_credentials
from roundtable.proto import agent_pb2, operator_pb2
from roundtable.proto.channel import CLIENT_OPTIONS
from roundtable.proto.common_pb2 import Artifact, Chunk, DownloadRequest
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.auth.permissions import PERMISSIONS
from roundtable.server.auth.rate_limit import Lockout, RateLimit

INPUTS = 60
"""Random inputs for each call in the fast suite; the slow one tries fifty times as many."""
WRONG_PATHS = ("../../etc/passwd", "..", "/etc/passwd", "a/b", "\0", "C:\\x", "~", "." * 5000, "%2e%2e%2f")


@contextlib.asynccontextmanager
async def bare(port: int, folder: Path) -> AsyncIterator[Any]:
    """A channel that checks nothing of its own credentials."""
    files = [(folder / name).read_bytes() for name in ("ca.crt", "node.key", "node.crt")]
    secure = grpc.ssl_channel_credentials(*files)
    async with grpc.aio.secure_channel(f"localhost:{port}", secure, options=CLIENT_OPTIONS) as channel:
        yield channel


async def status(channel: Any) -> Any:
    call = channel.unary_unary("/roundtable.v1.Operators/Status")
    return await call(b"", timeout=10)


async def test_a_certificate_that_has_expired(
    coordinator: Coordinator, certificates: Path, tmp_path: Path
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=9)
    old = issue(certificates / "ca", "olga", "operator", tmp_path / "old", days=1, start=long_ago)
    async with bare(coordinator.port, old) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_silo_that_shows_the_identity_of_another(
    coordinator: Coordinator, certificates: Path
) -> None:
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    stolen = (certificates / "birch" / "identity.crt").read_bytes()
    first = await agent.connect(identity=stolen)
    assert "is one of 'birch'" in first.refused.reason
    await agent.close()


@pytest.mark.parametrize("name", WRONG_PATHS)
async def test_names_that_lead_out_of_a_folder(
    coordinator: Coordinator, operator: Operator, certificates: Path, name: str
) -> None:
    for call in (
        operator.fetch(name),
        operator.job(name),
        operator.put(b"x", digest=name),
        operator.stub.CancelJob(operator_pb2.JobRequest(job=name)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        with pytest.raises(grpc.aio.AioRpcError, match="no instruction in force"):
            await agent.download(name)
        header = agent_pb2.UploadHeader(content=Artifact(digest=name, size=1))
        header.step.job, header.step.phase = name, name
        with pytest.raises(grpc.aio.AioRpcError, match="not a valid identifier"):
            await agent.upload(header, b"x")


async def test_giant_messages(coordinator: Coordinator, operator: Operator) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operator.job("x" * (5 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError, match="at most"):
        await operator.stub.SubmitJob(
            operator_pb2.SubmitJobRequest(request_id="r", job_config="x" * (3 << 20))
        )
    with pytest.raises(grpc.aio.AioRpcError, match="does not fit here"):
        await operator.put(b"x", size=1 << 62)


@pytest.mark.parametrize("opening", ["[", '{"a":', "[[[{"])
async def test_deeply_nested_messages(operator: Operator, opening: str) -> None:
    request = operator_pb2.SubmitJobRequest(request_id="r", job_config=opening * 200_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await operator.stub.SubmitJob(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_decompression_bomb(coordinator: Coordinator, certificates: Path) -> None:
    """Half a megabyte on the wire that would be half a gigabyte in memory."""
    own = load_credentials(certificates / "olga")
    secure = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(
        f"localhost:{coordinator.port}", secure, options=options, compression=grpc.Compression.Gzip
    ) as channel:
        call = channel.unary_unary("/roundtable.v1.Operators/GetJob")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(64 << 20), timeout=30)
    assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_connections_that_say_nothing(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    """Slow loris: a hundred sockets without TLS, fifty more with TLS and no word of HTTP/2."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", coordinator.port)))
        await asyncio.to_thread(_silent, stack, coordinator.port, certificates / "alder", 50)
        async with asyncio.timeout(20):
            await operator.stub.Status(operator_pb2.StatusRequest())
            async with ScriptedAgent(coordinator.port, certificates / "birch") as agent:
                assert agent.welcome is not None


def _silent(stack: contextlib.ExitStack, port: int, folder: Path, count: int) -> None:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "node.crt", folder / "node.key")
    context.set_alpn_protocols(["h2"])
    for _ in range(count):
        raw = socket.create_connection(("localhost", port))
        stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))


async def test_a_flood_of_calls_slows_only_its_sender(
    coordinator: Coordinator, operator: Operator, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = coordinator.security.access
    coordinator.security.quotas.rate = RateLimit(0.001, 50, time.monotonic)
    access._lines = RateLimit(0.001, 10, time.monotonic)
    caplog.set_level("INFO", "roundtable.server.auth.access")
    codes = []
    async with Operator(coordinator.port, certificates / "oskar") as flooding:
        for _ in range(300):
            try:
                await flooding.stub.Status(operator_pb2.StatusRequest())
                codes.append(grpc.StatusCode.OK)
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
    assert codes[:50] == [grpc.StatusCode.OK] * 50
    assert set(codes[50:]) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert access.refusals["Operators/Status", "RESOURCE_EXHAUSTED"] == 250
    # Nor can it fill the log.
    lines = [record.message for record in caplog.records if "refused to operator/oskar" in record.message]
    said = "Operators/Status refused to operator/oskar: too many calls in a short time; wait "
    assert len(lines) == 10
    assert all(line.startswith(said) for line in lines)
    await operator.stub.Status(operator_pb2.StatusRequest())


async def test_a_flood_of_messages_ends_the_stream(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundtable.server.services.agents.MESSAGES_AT_ONCE", 50.0)
    monkeypatch.setattr("roundtable.server.services.agents.MESSAGES_A_SECOND", 0.001)
    async with running(settings()) as coordinator:
        agent = ScriptedAgent(coordinator.port, certificates / "alder")
        await agent.connect()
        for _ in range(51):
            await agent.say(heartbeat=agent_pb2.Heartbeat(state="x"))
        kinds = [(await agent.next()).WhichOneof("message") for _ in range(51)]
        assert kinds == ["heartbeat"] * 50 + ["refused"]
        assert await agent.next() is None
        await agent.close()


def test_buckets_fill_again_and_forget_the_oldest() -> None:
    now = 0.0
    limit = RateLimit(2.0, 3.0, lambda: now)
    assert [limit.allows("a") for _ in range(4)] == [True] * 3 + [False]
    assert limit.allows("b")
    now = 1.0
    assert [limit.allows("a") for _ in range(3)] == [True, True, False]
    for number in range(20_000):
        limit.allows(str(number))
    assert len(limit._buckets) == 10_000


def test_a_lockout_doubles_and_ends() -> None:
    now = 0.0
    lockout = Lockout(lambda: now, allowed=3, first=10.0, longest=100.0)
    waits = []
    for _ in range(8):
        lockout.wrong("x")
        waits.append(lockout.seconds("x"))
    assert waits == [0, 0, 10, 20, 40, 80, 100, 100]
    assert lockout.seconds("y") == 0
    now = 100.0
    assert lockout.seconds("x") == 0
    lockout.right("x")
    lockout.wrong("x")
    assert lockout.seconds("x") == 0


async def _attempt(channel: Any, name: str, requests: list[bytes]) -> grpc.StatusCode:
    method = METHODS[name]
    sides = [method.client_streaming, method.server_streaming]
    call = getattr(channel, "_".join("stream" if streams else "unary" for streams in sides))
    request = iter(requests) if method.client_streaming else requests[0]
    answer = call(f"/roundtable.v1.{name}")(request, timeout=5)
    if method.server_streaming:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in answer:
                pass
    code: grpc.StatusCode = await answer.code()
    # A stream that is refused early is "internal" to the client that still writes to it.
    assert "its log says why" not in (await answer.details() or ""), f"{name} {requests!r}"
    return code


async def fuzz(coordinator: Coordinator, certificates: Path, name: str, inputs: int) -> None:
    quotas = coordinator.security.quotas
    quotas.rate = quotas._changes = RateLimit(1e9, 1e9, time.monotonic)
    who = "alder" if name.startswith("Agents/") else "admin"
    chance = random.Random(name)
    async with secure_channel(coordinator.port, certificates / who) as channel:
        for _ in range(inputs):
            requests = [request_for(METHODS[name], chance) for _ in range(chance.randrange(1, 4))]
            await _attempt(channel, name, requests)


@pytest.fixture(scope="session")
def everybody(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates with an administrator's besides."""
    folder = tmp_path_factory.mktemp("everybody")
    for name in ("alder", "birch", "olga", "ca"):
        shutil.copytree(certificates / name, folder / name)
    issue(folder / "ca", "admin", "admin", folder / "admin")
    return folder


@pytest.mark.parametrize("service", sorted({name.partition("/")[0] for name in PERMISSIONS}))
async def test_malformed_messages_to_every_call(
    coordinator: Coordinator, everybody: Path, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a service to one coordinator, which answers after each."""
    for name in sorted(PERMISSIONS):
        if name.startswith(f"{service}/"):
            await fuzz(coordinator, everybody, name, INPUTS)
            assert not [record for record in caplog.records if record.exc_info], name
            async with Operator(coordinator.port, everybody / "admin") as operator:
                await operator.stub.Status(operator_pb2.StatusRequest())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(PERMISSIONS))
async def test_many_malformed_messages_to_every_call(
    coordinator: Coordinator, everybody: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await fuzz(coordinator, everybody, name, 50 * INPUTS)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_job_under_attack_ends_as_one_without(
    coordinator: Coordinator, operator: Operator, everybody: Path
) -> None:
    """Two silos do their work while a third sends noise with a good certificate."""
    import torch

    agents = [ScriptedAgent(coordinator.port, everybody / name) for name in ("alder", "birch")]
    parts = []
    for agent in agents:
        await agent.connect()
        parts.append(asyncio.create_task(agent.take_part(torch.ones(4))))
    issue(everybody / "ca", "mallory", "agent", everybody / "mallory")
    shutil.rmtree(everybody / "admin")
    issue(everybody / "ca", "admin", "admin", everybody / "admin")
    chance = random.Random(7)
    job = await operator.submit(rounds=2)
    async with secure_channel(coordinator.port, everybody / "mallory") as channel:
        for name in ("Agents/Connect", "Agents/Upload", "Agents/UploadStatus", "Agents/Download"):
            for _ in range(20):
                await _attempt(channel, name, [request_for(METHODS[name], chance)])
    await operator.watch_until(job.id, "finished")
    found = await operator.job(job.id)
    assert found.job.rounds_done == 2
    for agent, part in zip(agents, parts, strict=True):
        part.cancel()
        await agent.close()


async def test_a_digest_that_is_right_and_bytes_that_are_not(operator: Operator) -> None:
    data = b"y" * 100
    with pytest.raises(grpc.aio.AioRpcError):
        await operator.put(data, digest=blake3(b"other").hexdigest())
    request = DownloadRequest(digest=blake3(b"other").hexdigest())
    with pytest.raises(grpc.aio.AioRpcError, match="there is no artifact"):
        async for _ in operator.stub.GetArtifact(request):
            pass
    with pytest.raises(grpc.aio.AioRpcError):
        await operator.stub.PutArtifact(iter([operator_pb2.PutPart(chunk=Chunk(data=data))]))
