"""A model far larger than any message: nothing on its way has a limit of its own."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scripted_agent
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent

from roundtable.core import Layout, Model, open_model, parse_job, save_model
from roundtable.operator import OperatorClient
from roundtable.proto import common_pb2

ELEMENTS = 3 << 28
SIZE = 4 * ELEMENTS


def sparse(path: Path, marks: dict[int, float]) -> np.memmap:
    """A file of float32 zeros that takes no room, but for a few values."""
    with path.open("wb") as file:
        file.truncate(SIZE)
    values = np.memmap(path, dtype=np.float32, mode="r+", shape=(ELEMENTS,))
    for place, value in marks.items():
        values[place] = value
    values.flush()
    return values


@contextmanager
def server(folder: Path, credentials: Path) -> Iterator[tuple[int, int]]:
    """A coordinator's process: its port and its number."""
    command = [sys.executable, "-m", "roundtable", "server", "--listen", "127.0.0.1:0"]
    command += ["--state", str(folder / "state"), "--credentials", str(credentials)]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert child.stdout is not None
        said = child.stdout.readline()
        assert "is listening" in said, (folder / "log").read_text()
        yield int(said.split("127.0.0.1:")[1].split()[0].rstrip(".,;")), child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)


def memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


async def digest_of_download(agent: ScriptedAgent, digest: str) -> str:
    found = blake3()
    async for chunk in agent.stub.Download(common_pb2.DownloadRequest(digest=digest)):
        found.update(chunk.data)
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.bigmem
@pytest.mark.timeout(900)
async def test_three_gibibytes_go_down_and_up_and_become_the_next_model(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_agent, "PATIENCE", 300.0)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free < 6 * SIZE:
        pytest.skip(f"needs {6 * SIZE >> 30} GiB of disk, {free >> 30} GiB are free")
    weights = sparse(tmp_path / "weights", {0: 1.0, ELEMENTS - 1: 2.0})
    layout = Layout.of({"w": torch.empty(ELEMENTS, device="meta")})
    model = tmp_path / "model.safetensors"
    save_model(model, Model(layout, torch.from_numpy(weights)))
    sparse(tmp_path / "update", {0: 0.5, ELEMENTS // 2: 8.0})
    job = parse_job('task = "t"\nrounds = 1\n[cohort]\nsize = 1\ndeadline = 600\n[evaluation]\nevery = 0')

    with server(tmp_path, certificates / "coordinator") as (port, pid):
        idle = memory(pid, "VmRSS")
        async with ScriptedAgent(port, certificates / "alder") as agent:
            with OperatorClient(f"localhost:{port}", certificates / "olga") as operator:
                submitted = await asyncio.to_thread(operator.submit, job, model)
                instruction = await agent.expect("instruction")
                asked = instruction.train.model
                assert asked.size == model.stat().st_size > SIZE
                assert await digest_of_download(agent, asked.digest) == asked.digest
                with (tmp_path / "update").open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    header = scripted_agent.header_for(instruction, data)  # type: ignore[arg-type]
                    receipt = await agent.upload(header, data)  # type: ignore[arg-type]
                    data.close()
                assert receipt.status == receipt.ACCEPTED, receipt.reason
                await asyncio.to_thread(lambda: list(operator.watch(submitted.id, patience=300.0)))
                found = operator.job(submitted.id).job
                assert found.status == "finished", found.reason
                out = tmp_path / "new.safetensors"
                await asyncio.to_thread(operator.get_artifact, found.model.digest, found.model.size, out)
        peak = memory(pid, "VmHWM")

    new = open_model(out).vector
    marks = [new[place].item() for place in (0, 1, ELEMENTS // 2, ELEMENTS - 1)]
    assert marks == [1.5, 0.0, 8.0, 2.0]
    assert peak - idle < 2.5 * SIZE, f"the coordinator took {(peak - idle) / SIZE:.2f} models"
