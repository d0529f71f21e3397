"""What operators learn of artifacts that are not theirs to read: nothing, not even that they are there."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import Operator

from roundtable.core import parse_job
from roundtable.proto import operator_pb2
from roundtable.proto.common_pb2 import Artifact
from roundtable.server import Coordinator


async def answers(operator: Operator, digest: str, size: int) -> list[str]:
    """What every call that takes a digest says of one, without the digest."""
    config = parse_job('task = "t"').to_json()
    header = operator_pb2.PutPart(header=operator_pb2.PutHeader(content=Artifact(digest=digest, size=size)))
    wrong_size = operator_pb2.PutPart(
        header=operator_pb2.PutHeader(content=Artifact(digest=digest, size=size + 1))
    )
    calls: list[Any] = [
        lambda: operator.stub.PutArtifact(iter([header])),
        lambda: operator.stub.PutArtifact(iter([wrong_size])),
        lambda: operator.fetch(digest),
        lambda: operator.stub.SubmitJob(
            operator_pb2.SubmitJobRequest(
                request_id=digest, job_config=config, model=Artifact(digest=digest, size=size)
            )
        ),
    ]
    found = []
    for call in calls:
        try:
            said = str(await call())
        except grpc.aio.AioRpcError as error:
            said = f"{error.code()} {error.details()}"
        found.append(said.replace(digest, "D").replace(digest[:12], "D"))
    return found


async def test_an_update_is_there_for_nobody(
    coordinator: Coordinator, operator: Operator, pair: list[ScriptedAgent]
) -> None:
    job = await operator.submit(rounds=1)
    instruction = await pair[0].expect("instruction")
    await pair[1].expect("instruction")
    await pair[0].answer(instruction, torch.ones(4))
    update = torch.ones(4).numpy().tobytes()
    digest = blake3(update).hexdigest()
    assert coordinator.jobs.runner(job.id) is not None
    path = coordinator.jobs._services.artifacts.path(digest)
    assert path.read_bytes() == update

    assert await answers(operator, digest, 16) == await answers(operator, "0" * 64, 16)
    # Who has all its bytes stores them as if nobody had, and may read what was stored.
    assert (await operator.put(update)).complete
    assert await operator.fetch(digest) == update


async def test_bytes_that_no_row_mentions_yet_are_not_there(
    coordinator: Coordinator, operator: Operator
) -> None:
    """An update has its name on the disk a moment before its row is in the database."""
    digest, _ = coordinator.jobs._services.artifacts.create([b"an update"])
    assert await answers(operator, digest, 9) == await answers(operator, "0" * 64, 9)


@pytest.mark.parametrize("name", ["oidc:a/../../b", "oidc:" + "x" * 400])
async def test_whoever_stores_an_artifact_names_no_file(
    coordinator: Coordinator, operator: Operator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundtable.server.auth.principals import Principal

    stranger = Principal(name, "operator", "oidc")
    monkeypatch.setattr("roundtable.server.services.storing.principal", lambda: stranger)
    data = b"d" * 100
    await operator.put(data[:50], digest=blake3(data).hexdigest(), size=100)
    assert (await operator.put(data, offset=50)).complete
