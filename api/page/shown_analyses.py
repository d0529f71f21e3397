"""What an analysis has found, as a browser shows it: tables, and the values that pictures are drawn of."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from roundtable.core.config import job_from_json
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.models import open_model
from roundtable.proto import operator_pb2
from roundtable.proto.pieces import Piece
from roundtable.surveys import findings_of, plain

ANALYSIS = "analysis"
MOST_BYTES = 64 << 20
"""Of an analysis's numbers; one of 200 questions has less than a megabyte."""


def check_answered(detail: operator_pb2.JobDetail) -> None:
    """ConfigError for a job that is no analysis or is not finished, ResourceError for too large a one."""
    job = detail.job
    if job.algorithm != ANALYSIS:
        raise ConfigError(f"job {job.id} trains; an analysis answers questions")
    if job.status != "finished":
        raise ConfigError(f"analysis {job.id} is {job.status}: {job.reason or 'its answers come at its end'}")
    if job.model.size > MOST_BYTES:
        raise ResourceError(f"the numbers of analysis {job.id} are more than the page takes; use the command")


async def bytes_of(parts: AsyncIterator[object]) -> bytes:
    """An artifact whose chunks come one after the other; ResourceError for more than the page takes."""
    found, taken = list[bytes](), 0
    async for part in parts:
        assert isinstance(part, Piece)
        taken += len(part.data)
        if taken > MOST_BYTES:
            raise ResourceError("the numbers of this analysis are more than the page takes; use the command")
        found.append(bytes(part.data))
    return b"".join(found)


def answers_in(model: bytes, detail: operator_pb2.JobDetail) -> dict[str, Any]:
    """The answers that a finished analysis's model holds: `SurveyAnswers.to_dict` with header and rows."""
    with tempfile.TemporaryDirectory(prefix="roundtable-") as folder:
        file = Path(folder) / "analysis.safetensors"
        file.write_bytes(model)
        vector = open_model(file).vector.clone()
    findings = findings_of(job_from_json(detail.job_config), vector, detail.job.rounds_done)
    shown = findings.to_dict()
    for answer, told in zip(findings.answers, shown["answers"], strict=True):
        told["header"] = [str(name) for name in answer.header]
        told["rows"] = plain([list(row) for row in answer.rows])
    return shown
