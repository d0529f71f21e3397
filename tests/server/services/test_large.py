"""A model far larger than any message: nothing on its way has a limit of its own."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
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
from roundtable.core.encodings import StreamKey, get_encoding
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
    # A scripted agent says nothing while a round takes long.
    (folder / "coordinator.toml").write_text("heartbeat = 600\n")
    command.append(str(folder / "coordinator.toml"))
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


def written(path: Path, chain: str) -> None:
    """Writes an update of the model's length, about as heavy-tailed as real ones, as `chain` encodes it."""
    values = torch.from_file(str(path.with_name("delta")), shared=True, size=ELEMENTS)
    for number, piece in enumerate(torch.split(values, 1 << 22)):
        piece.normal_(generator=torch.Generator().manual_seed(number)).pow_(3).mul_(1e-4)
    encoding, key = get_encoding(chain), StreamKey(0, "alder", 1, 1)
    with path.open("wb") as file:
        for block in encoding.encode(values, key):
            file.write(block)
    path.with_name("delta").unlink()


@pytest.mark.slow
@pytest.mark.bigmem
@pytest.mark.timeout(1800)
async def test_small_updates_of_a_large_model_take_no_more_of_the_coordinators_memory(
    tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-5 % int8 up and int4 down: for 1.3 B parameters at most 800 MB a silo and round."""
    monkeypatch.setattr(scripted_agent, "PATIENCE", 600.0)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free < 9 * SIZE:
        pytest.skip(f"needs {9 * SIZE >> 30} GiB of disk, {free >> 30} GiB are free")
    up, down = "topk(ratio=0.05) | int8", "int4(block=256)"
    written(tmp_path / "update", up)
    model = tmp_path / "model.safetensors"
    layout = Layout.of({"w": torch.empty(ELEMENTS, device="meta")})
    save_model(model, Model(layout, torch.from_numpy(sparse(tmp_path / "weights", {}))))
    job = parse_job(
        'task = "t"\nrounds = 2\n[cohort]\nsize = 1\ndeadline = 1200\n[evaluation]\nevery = 0\n'
        f'[transfer]\nup = "{up}"\ndown = "{down}"\n'
    )
    data = (tmp_path / "update").read_bytes()
    with server(tmp_path, certificates / "coordinator") as (port, pid):
        idle = memory(pid, "VmRSS")
        async with ScriptedAgent(port, certificates / "alder") as agent:
            with OperatorClient(f"localhost:{port}", certificates / "olga") as operator:
                submitted = await asyncio.to_thread(operator.submit, job, model)
                for _ in range(2):
                    instruction = await agent.expect("instruction")
                    header = scripted_agent.header_for(instruction, data)
                    header.encoding = up
                    receipt = await agent.upload(header, data)
                    assert receipt.status == receipt.ACCEPTED, receipt.reason
                (hop,) = instruction.hops
                await asyncio.to_thread(lambda: list(operator.watch(submitted.id, patience=600.0)))
                found = operator.job(submitted.id).job
                assert found.status == "finished", found.reason
        peak = memory(pid, "VmHWM")
    each_way = [size / ELEMENTS * 1.3e9 for size in (len(data), hop.delta.size)]
    assert sum(each_way) <= 800e6, f"{each_way} bytes up and down"
    print(
        f"{each_way[0] / 1e6:.0f} MB up, {each_way[1] / 1e6:.0f} MB down, {(peak - idle) / SIZE:.2f} models"
    )
    assert peak - idle < 2.5 * SIZE, f"the coordinator took {(peak - idle) / SIZE:.2f} models"


@pytest.mark.slow
@pytest.mark.bigmem
@pytest.mark.timeout(3600)
def test_a_coordinator_killed_with_a_large_model_goes_on_in_some_blocks_of_memory(tmp_path: Path) -> None:
    """1.3 B parameters, killed in an upload and as it combines; the script looks at the model at the end."""
    script = Path(__file__).parents[3] / "benchmarks" / "large_models.py"
    if shutil.disk_usage(tmp_path).free < 30 << 30:
        pytest.skip("needs 30 GiB of disk")
    command = [sys.executable, script, "--billions", "1.3", "--json", "--folder", tmp_path]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    (found,) = json.loads(said.stdout)
    assert found["kept_of_half"] > 0.98
    assert found["most_in_blocks"] < 64
