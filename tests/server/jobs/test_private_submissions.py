"""`roundtable job submit` of private jobs that make no sense: refused with the reason, and nothing starts."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from private_jobs import WRONG_FIGURES, write_job
from service import Operator

from roundtable.cli.main import run
from roundtable.proto import operator_pb2
from roundtable.proto.common_pb2 import Artifact
from roundtable.server import Coordinator

WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"level": level, **wrong}, said) for level in ("client", "example") for wrong, said in WRONG_FIGURES),
    *(({"level": level, "delta": 0.05}, "not below 1 / 20") for level in ("client", "client_local")),
    ({"level": "example", "task": "Normed"}, "nn.GroupNorm"),
    ({"level": "example", "task": "Script"}, "needs a Task with a model, data and a loss"),
    *(({"level": level, "task": "Normed"}, "nn.GroupNorm") for level in ("client", "client_local")),
    ({"level": "distributed", "task": "Normed"}, "nn.GroupNorm"),
]


async def test_the_command_refuses_what_cannot_be_private(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--coordinator", f"localhost:{coordinator.port}", "--credentials", str(certificates / "olga")]

    async def submit(**changes: Any) -> tuple[int, str]:
        path = write_job(tmp_path, **changes)
        code = await asyncio.to_thread(run, ["job", "submit", str(path), *words])
        return code, capsys.readouterr().err

    for wrong, complaint in WRONG:
        code, err = await submit(**wrong)
        assert code != 0, wrong
        assert complaint in err, wrong
        assert err.startswith("Error: ")
    assert not (await operator.stub.ListJobs(operator_pb2.ListJobsRequest())).jobs
    code, err = await submit(spend="noise_multiplier = 5000.0")
    assert code == 0
    assert "warning: The noise drowns everything" in err


@pytest.mark.parametrize("level", ["client", "example", "client_local", "dp_ftrl"])
async def test_the_coordinator_refuses_it_from_whomever_it_comes(
    operator: Operator, saved_model: bytes, tmp_path: Path, level: str
) -> None:
    """Whoever does without the command line is told the same."""
    await operator.put(saved_model)
    model = Artifact(digest=blake3(saved_model).hexdigest(), size=len(saved_model))
    for wrong, complaint in WRONG_FIGURES:
        job = tomllib.loads(write_job(tmp_path, **{"level": level, **wrong}).read_text())
        config = json.dumps(job | {"task": "t"})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operator.stub.SubmitJob(
                operator_pb2.SubmitJobRequest(request_id="r", job_config=config, model=model)
            )
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert complaint in str(refused.value.details())
    assert not (await operator.stub.ListJobs(operator_pb2.ListJobsRequest())).jobs
