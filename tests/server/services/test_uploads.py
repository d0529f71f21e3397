"""What an agent may and may not send as its update."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from definite import definite
from scripted_agent import ScriptedAgent, header_for
from service import Operator

from roundtable.core.encodings import get_encoding
from roundtable.core.identity.credentials import SiloIdentity, load_silo_identity
from roundtable.core.identity.signing import open_envelope, sign
from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.receipts import update_values
from roundtable.server import Coordinator
from roundtable.server.store.combined import combined_updates

Status = agent_pb2.UploadReceipt
ONE = torch.ones(4)
PAIR = '[cohort]\nsize = 2\nminimum = 1\nwait = "60s"\n[evaluation]\nevery = 0'


async def train(agent: ScriptedAgent) -> agent_pb2.Instruction:
    """The training instruction that comes next."""
    return await agent.expect("instruction")


def payload(vector: torch.Tensor = ONE) -> bytes:
    return vector.numpy().tobytes()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that this call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert "Traceback" not in (caught.value.details() or "")
    return caught.value


async def test_an_update_counts_once(pair: list[ScriptedAgent], operator: Operator) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await train(agent) for agent in pair]
    assert (await pair[0].answer(first, ONE)).status == Status.ACCEPTED
    assert (await pair[0].answer(first, ONE)).status == Status.ACCEPTED
    assert (await pair[0].answer(first, 7 * ONE)).status == Status.DUPLICATE
    assert (await pair[1].answer(second, 3 * ONE)).status == Status.ACCEPTED
    await operator.watch_until(job.id, "finished")
    assert (await pair[1].answer(second, 3 * ONE)).status == Status.ACCEPTED
    record = json.loads((await operator.job(job.id)).history[0])
    assert record["weights"] == {"alder": 0.5, "birch": 0.5}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
async def test_an_update_that_is_not_finite(
    pair: list[ScriptedAgent], operator: Operator, bad: float
) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await train(agent) for agent in pair]
    vector = torch.tensor([1.0, 2.0, bad, 4.0])
    receipt = await pair[0].answer(first, vector)
    assert receipt.status == Status.REJECTED
    assert "element 2 is NaN or infinite" in receipt.reason
    assert (await pair[0].answer(first, vector)).status == Status.REJECTED
    event = await operator.watch_for(job.id, "client_failed")
    assert event.client == "alder"
    assert event.message.startswith("alder failed in round 1, attempt 1, train: the update is not finite")
    assert json.loads(event.detail)["kind"] == "invalid_update"
    assert (await pair[1].answer(second, ONE)).status == Status.ACCEPTED
    await operator.watch_until(job.id, "finished")
    assert json.loads((await operator.job(job.id)).history[0])["contributors"] == ["birch"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"examples": 0}, "0 examples"),
        ({"examples": (1 << 53) + 1}, "2^53"),
        ({"layout": "f" * 64}, "another model than the one that was submitted"),
        ({"encoding": "bfloat16"}, "the job says 'float32'"),
        ({"content": common_pb2.Artifact(digest="a" * 64, size=12)}, "are 16"),
        ({"content": common_pb2.Artifact(digest="../../etc/passwd", size=16)}, "no BLAKE3 digest"),
    ],
)
async def test_a_header_that_cannot_be_right(
    pair: list[ScriptedAgent], operator: Operator, change: dict[str, Any], words: str
) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await train(agent) for agent in pair]
    header = header_for(first, payload())
    for name, value in change.items():
        if isinstance(value, common_pb2.Artifact):
            header.content.CopyFrom(value)
        else:
            setattr(header, name, value)
    state = await pair[0].stub.UploadStatus(header)
    assert not state.wanted
    assert state.receipt.status == Status.REJECTED
    assert words in state.receipt.reason
    await pair[1].answer(second, ONE)
    await operator.watch_until(job.id, "finished")


async def test_a_step_that_was_never_asked_for(
    pair: list[ScriptedAgent], operator: Operator, certificates: Path
) -> None:
    job = await operator.submit('[cohort]\nsize = 1\nstrategy = "round_robin"', rounds=1)
    first = await train(pair[0])
    for changes in ({"round": 2}, {"attempt": 2}, {"phase": "evaluate"}, {"job": "0" * 12}):
        header = header_for(first, payload())
        for name, value in changes.items():
            setattr(header.step, name, value)
        assert (await pair[0].upload(header, payload())).status == Status.STALE
    # Selected was alder only.
    assert (await pair[1].upload(header_for(first, payload()), payload())).status == Status.STALE
    assert (await operator.job(job.id)).phase == "train"


async def test_more_bytes_than_announced(pair: list[ScriptedAgent], operator: Operator) -> None:
    await operator.submit(PAIR, rounds=1)
    first = await train(pair[0])
    header = header_for(first, payload())
    error = await refused(pair[0].upload(header, payload() + b"more"))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "16 were announced" in error.details()
    assert (await pair[0].upload(header, payload())).status == Status.ACCEPTED


async def test_an_upload_that_stops_goes_on_where_it_stopped(
    pair: list[ScriptedAgent], operator: Operator
) -> None:
    vector = torch.arange(1000.0)
    await operator.submit(PAIR, rounds=1, vector=torch.zeros(1000))
    first = await train(pair[0])
    data = payload(vector)
    error = await refused(pair[0].upload(header_for(first, data), data[:1001]))
    assert error.code() == grpc.StatusCode.ABORTED
    assert "ended at byte 1001 of 4000" in error.details()
    state = await pair[0].stub.UploadStatus(header_for(first, data))
    assert (state.wanted, state.offset) == (True, 1001)
    error = await refused(pair[0].upload(header_for(first, data, offset=1500), data))
    assert error.code() == grpc.StatusCode.OUT_OF_RANGE
    receipt = await pair[0].upload(header_for(first, data, offset=1001), data)
    assert receipt.status == Status.ACCEPTED


async def test_a_resumed_upload_is_checked_as_a_whole(pair: list[ScriptedAgent], operator: Operator) -> None:
    await operator.submit(PAIR, rounds=1)
    first = await train(pair[0])
    data = payload(torch.tensor([float("nan"), 1.0, 2.0, 3.0]))
    await refused(pair[0].upload(header_for(first, data), data[:7]))
    receipt = await pair[0].upload(header_for(first, data, offset=7), data)
    assert receipt.status == Status.REJECTED
    assert "element 0" in receipt.reason


async def test_bytes_that_are_not_what_was_announced(pair: list[ScriptedAgent], operator: Operator) -> None:
    job = await operator.submit(PAIR, rounds=1)
    first, second = [await train(agent) for agent in pair]
    header = header_for(first, payload())
    damaged = payload(2 * ONE)
    for _ in range(2):
        error = await refused(pair[0].upload(header, damaged))
        assert error.code() == grpc.StatusCode.DATA_LOSS
        assert "send it again from the start" in error.details()
        assert (await pair[0].stub.UploadStatus(header)).offset == 0
    receipt = await pair[0].upload(header, damaged)
    assert receipt.status == Status.REJECTED
    await pair[1].answer(second, ONE)
    events = await operator.watch_until(job.id, "finished")
    told = [event for event in events if event.client == "alder"]
    assert [event.kind for event in told] == ["client_troubled", "client_troubled", "client_failed"]
    incidents = [json.loads(event.detail)["incident"] for event in told]
    assert {incident["kind"] for incident in incidents} == {"data_corruption"}
    assert [incident["action"] for incident in incidents] == [
        *2 * ["asked the silo to send it again"],
        "excluded the update",
    ]
    assert told[2].message.endswith("it was sent 3 times")


@pytest.mark.parametrize("kind", ["nothing", "chunk", "two headers"])
async def test_parts_out_of_order(pair: list[ScriptedAgent], operator: Operator, kind: str) -> None:
    await operator.submit(PAIR, rounds=1)
    first = await train(pair[0])
    header = agent_pb2.UploadPart(header=header_for(first, payload()))
    chunk = agent_pb2.UploadPart(chunk=common_pb2.Chunk(data=b"1234"))
    parts = {"nothing": [], "chunk": [chunk], "two headers": [header, header]}[kind]
    error = await refused(definite(lambda: pair[0].stub.Upload(iter(parts))))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_new_upload_takes_the_place_of_a_stalled_one(
    pair: list[ScriptedAgent], operator: Operator
) -> None:
    await operator.submit(PAIR, rounds=1)
    first = await train(pair[0])
    data = payload()
    arrived = asyncio.Event()

    async def stalled() -> AsyncIterator[agent_pb2.UploadPart]:
        yield agent_pb2.UploadPart(header=header_for(first, data))
        yield agent_pb2.UploadPart(chunk=common_pb2.Chunk(data=data[:8]))
        arrived.set()
        await asyncio.Event().wait()

    async def call() -> Any:
        return await pair[0].stub.Upload(stalled())

    stuck = asyncio.create_task(call())
    await arrived.wait()
    assert (await pair[0].upload(header_for(first, data), data)).status == Status.ACCEPTED
    error = await refused(stuck)
    assert error.code() == grpc.StatusCode.ABORTED


async def test_a_bfloat16_update(pair: list[ScriptedAgent], operator: Operator) -> None:
    job = await operator.submit(PAIR + '\n[transfer]\nup = "bfloat16"', rounds=1)
    instructions = [await train(agent) for agent in pair]
    for agent, instruction, value in zip(pair, instructions, (1.0, 2.0), strict=True):
        data = torch.full((4,), value, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        header = header_for(instruction, data)
        header.encoding = "bfloat16"
        assert (await agent.upload(header, data)).status == Status.ACCEPTED
    await operator.watch_until(job.id, "finished")
    model = await operator.fetch((await operator.job(job.id)).job.model.digest)
    assert torch.frombuffer(bytearray(model[-16:]), dtype=torch.float32).tolist() == [1.5] * 4


async def test_encoded_updates_are_decoded_to_be_checked_and_for_the_rule(
    pair: list[ScriptedAgent], operator: Operator
) -> None:
    """A silo that claims a place beyond the end, or a value that is NaN, is refused; the others go on."""
    up = "topk(ratio=0.5)"
    job = await operator.submit(PAIR + f'\n[transfer]\nup = "{up}"', rounds=1)
    instructions = [await train(agent) for agent in pair]
    sound = b"".join(get_encoding(up).encode(torch.tensor([0.0, 3.0, 0.0, -1.0])))
    nan = sound[:-4] + b"\0\0\xc0\x7f"
    header = header_for(instructions[0], nan)
    header.encoding = up
    receipt = await pair[0].upload(header, nan)
    assert receipt.status == Status.REJECTED
    assert "cannot be decoded" in receipt.reason
    header = header_for(instructions[1], sound)
    header.encoding = up
    assert (await pair[1].upload(header, sound)).status == Status.ACCEPTED
    assert job.id


async def test_a_silo_with_an_identity_signs_its_updates(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    """Whoever has taken its connection alone uploads nothing in its name, and spoils nothing of it."""
    own, other = (load_silo_identity(certificates / name) for name in ("alder", "birch"))
    agent = ScriptedAgent(coordinator.port, certificates / "alder")
    await agent.connect(identity=own.certificate)
    job = await operator.submit("[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0", rounds=1)
    asked = await train(agent)
    data, model = payload(), asked.train.model.digest

    def header(identity: SiloIdentity | None, **changes: Any) -> agent_pb2.UploadHeader:
        made = header_for(asked, data, loss=1.0)
        made.model, made.time = changes.pop("model", model), changes.pop("time", time.time())
        if identity is not None:
            made.signature = sign(identity, "update", update_values("alder", made))
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    for forged in (
        header(None),
        header(other),
        header(own, examples=1000),
        header(own, model="0" * 64),
        header(own, time=1.0),
    ):
        error = await refused(agent.upload(forged, data))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    error = await refused(agent.upload(header(None, time=float("nan")), data))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await agent.upload(header(own), data)).status == Status.ACCEPTED
    await operator.watch_until(job.id, "finished")
    record = json.loads((await operator.job(job.id)).history[0])
    (row,) = await coordinator._database.read(lambda found: combined_updates(found, job.id, record))
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    kept = open_envelope(json.loads(row.statement), ca, "agent", "update")
    assert (kept.signer, kept.values["model"], kept.values["examples"]) == ("alder", model, 10)
    await agent.close()
