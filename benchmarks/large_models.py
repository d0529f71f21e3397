"""A round over billions of parameters whose coordinator is killed, in the uploads and as it combines.

    python benchmarks/large_models.py                      # 0.4 and 1.3 B, 27 GB of disk, ten minutes
    python benchmarks/large_models.py --billions 0.05      # a minute

The coordinator is the real one, `roundtable server` over mTLS, on SQLite. Two scripted silos download the
model, hash it, and upload float32 updates of the same length, which are zeros but for a few values, out of
sparse files; what the coordinator keeps is written in full. It is killed (SIGKILL) when one update is there
and half of the other, started again on the same state, killed once half of the new model is written, and
started again. How long it is until work goes on is counted from each start: until it listens; until it takes
new bytes of the upload; until it reads the updates to combine them; and, behind the pass that measures them,
until it writes the new model anew. Memory is the peak of each process beyond what the first one takes
without a job.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from load import free_port

from roundtable.core import Layout, Model, open_model, parse_job, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient
from roundtable.proto import CHUNK_BYTES, common_pb2
from roundtable.proto.pieces import Piece, agents_stub

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import scripted_agent
from scripted_agent import ScriptedAgent

BLOCK_BYTES = 4 << 20
"""Of a block of 2^20 columns, as rounds are combined in."""
SILOS = ("alder", "birch")
PATIENCE = 1800.0
TARGET = 60.0


def sparse(path: Path, elements: int, marks: dict[int, float]) -> Path:
    """A file of float32 zeros that takes no room, but for a few values."""
    with path.open("wb") as file:
        file.truncate(4 * elements)
        for place, value in marks.items():
            file.seek(4 * place)
            file.write(np.float32(value).tobytes())
    return path


def pieces(path: Path, offset: int, stop: int) -> Iterator[Piece]:
    """The file's bytes between two places."""
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(min(CHUNK_BYTES, stop - offset)):
            yield Piece(offset, data)
            offset += len(data)


class Lives:
    """One coordinator on one state folder, as often as it is started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.artifacts = folder / "state" / "artifacts"
        # A scripted silo says nothing while a round takes long.
        (folder / "coordinator.toml").write_text("heartbeat = 600\n")
        self._child: subprocess.Popen[str] | None = None
        self.started = 0.0
        self.peaks: list[int] = []
        self.cpu: list[float] = []
        self.cpu_to_listen: list[float] = []

    def start(self) -> float:
        """Starts it; seconds until it listens."""
        command = [sys.executable, "-m", "roundtable", "server", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--state", str(self._folder / "state")]
        command += [
            "--credentials",
            str(self._folder / "coordinator"),
            str(self._folder / "coordinator.toml"),
        ]
        self.started = time.monotonic()
        with (self._folder / "coordinator.log").open("a") as log:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._child.stdout is not None
        said = self._child.stdout.readline()
        assert "is listening" in said, (self._folder / "coordinator.log").read_text()[-2000:]
        self.cpu_to_listen.append(self._cpu())
        return self.since()

    def _cpu(self) -> float:
        """Seconds of user and system time."""
        assert self._child is not None
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def since(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    def memory(self, name: str) -> int:
        assert self._child is not None
        lines = Path(f"/proc/{self._child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it, and notes what it has taken."""
        if self._child is None:
            return
        self.peaks.append(self.memory("VmHWM"))
        self.cpu.append(self._cpu())
        self._child.send_signal(how)
        self._child.wait(60)
        self._child = None

    def read_bytes(self) -> int:
        """What it has read so far, of files and connections."""
        assert self._child is not None
        lines = Path(f"/proc/{self._child.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))

    def partial(self, prefix: str) -> int:
        """Bytes of the longest unfinished file whose name begins so or has it between dots."""
        sizes = [0]
        for path in (self.artifacts / "partial").iterdir():
            if path.name.startswith(prefix) or f".{prefix}." in path.name:
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
        return max(sizes)


async def until(there: Callable[[], bool]) -> None:
    """Looks every few milliseconds."""
    end = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.005)


@contextmanager
def lives(folder: Path) -> Iterator[Lives]:
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost", "127.0.0.1"))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    for name in SILOS:
        issue(folder / "ca", name, "agent", folder / name)
    coordinator = Lives(folder)
    try:
        yield coordinator
    finally:
        coordinator.end()


async def download(agent: ScriptedAgent, digest: str) -> None:
    """Fetches the model, hashes it, and lets it go."""
    found = blake3()
    async for piece in agents_stub(agent.channel).Download(common_pb2.DownloadRequest(digest=digest)):
        found.update(piece.data)
    assert found.hexdigest() == digest


def header_of(instruction: Any, path: Path, digest: str, offset: int = 0) -> Any:
    header = scripted_agent.header_for(instruction, b"", offset=offset)
    header.content.CopyFrom(common_pb2.Artifact(digest=digest, size=path.stat().st_size))
    return header


async def upload(agent: ScriptedAgent, header: Any, path: Path, stop: int | None = None) -> Any:
    """Uploads from the header's offset on; up to `stop` and then nothing more, for ever."""

    async def parts() -> AsyncIterator[Any]:
        yield header
        for piece in pieces(path, header.offset, header.content.size if stop is None else stop):
            yield piece
        if stop is not None:
            await asyncio.Event().wait()

    return await agents_stub(agent.channel).Upload(parts())


async def measure(folder: Path, elements: int) -> dict[str, Any]:
    """One round, with both kills."""
    scripted_agent.PATIENCE = PATIENCE
    size = 4 * elements
    layout = Layout.of({"w": torch.empty(elements, device="meta")})
    weights = sparse(folder / "weights", elements, {0: 1.0, elements - 1: 2.0})
    vector = torch.from_numpy(np.memmap(weights, dtype=np.float32, mode="r+", shape=(elements,)))
    save_model(folder / "model.safetensors", Model(layout, vector))
    del vector
    weights.unlink()
    updates = {
        "alder": sparse(folder / "alder-update", elements, {0: 0.5, elements // 2: 8.0}),
        "birch": sparse(folder / "birch-update", elements, {0: 1.5, elements // 2: 4.0}),
    }
    digests = {name: blake3().update_mmap(path).hexdigest() for name, path in updates.items()}
    job = parse_job('task = "t"\nrounds = 1\n[cohort]\nsize = 2\ndeadline = 7200\n[evaluation]\nevery = 0')
    found: dict[str, Any] = {"elements": elements}
    with lives(folder) as coordinator, ExitStack() as stack:
        found["first_start_s"] = coordinator.start()
        idle = coordinator.memory("VmRSS")
        operator = stack.enter_context(OperatorClient(f"localhost:{coordinator.port}", folder / "operator"))
        agents = {name: ScriptedAgent(coordinator.port, folder / name) for name in SILOS}
        for agent in agents.values():
            await agent.connect()
        began = time.monotonic()
        submitted = await asyncio.to_thread(operator.submit, job, folder / "model.safetensors")
        found["submit_s"] = time.monotonic() - began
        (folder / "model.safetensors").unlink()
        found["peak_submit"] = coordinator.memory("VmHWM") - idle
        orders = {name: await agent.expect("instruction") for name, agent in agents.items()}
        began = time.monotonic()
        for agent, order in zip(agents.values(), orders.values(), strict=True):
            await download(agent, order.train.model.digest)
        found["two_downloads_s"] = time.monotonic() - began
        began = time.monotonic()
        header = header_of(orders["alder"], updates["alder"], digests["alder"])
        receipt = await upload(agents["alder"], header, updates["alder"])
        assert receipt.status == receipt.ACCEPTED, receipt.reason
        found["upload_s"] = time.monotonic() - began
        header = header_of(orders["birch"], updates["birch"], digests["birch"])
        half = size // 2 // BLOCK_BYTES * BLOCK_BYTES
        broken = asyncio.ensure_future(upload(agents["birch"], header, updates["birch"], half))
        await until(lambda: coordinator.partial("birch") >= half - 4 * CHUNK_BYTES)

        coordinator.end()
        broken.cancel()
        for agent in agents.values():
            await agent.close()
        found["second_listens_s"] = coordinator.start()
        agents = {name: ScriptedAgent(coordinator.port, folder / name) for name in SILOS}
        for agent in agents.values():
            await agent.connect()
        order = await agents["birch"].expect("instruction")
        found["silo_is_asked_again_s"] = coordinator.since()
        state = await agents["birch"].stub.UploadStatus(header_of(order, updates["birch"], digests["birch"]))
        assert state.wanted, state
        assert state.offset >= half - 8 * CHUNK_BYTES, state
        found["kept_of_half"] = state.offset / half
        header = header_of(order, updates["birch"], digests["birch"], state.offset)
        resumed = asyncio.ensure_future(upload(agents["birch"], header, updates["birch"]))
        await until(lambda: coordinator.partial("birch") > state.offset or resumed.done())
        found["new_bytes_after_upload_kill_s"] = coordinator.since()
        receipt = await resumed
        assert receipt.status == receipt.ACCEPTED, receipt.reason
        await until(lambda: coordinator.partial("own") >= size // 2)

        coordinator.end()
        for agent in agents.values():
            await agent.close()
        found["third_listens_s"] = coordinator.start()
        before = coordinator.read_bytes()
        await until(lambda: coordinator.read_bytes() > before + 4 * BLOCK_BYTES)
        found["reads_updates_after_combining_kill_s"] = coordinator.since()
        await until(lambda: coordinator.partial("own") > BLOCK_BYTES)
        found["combining_after_its_kill_s"] = coordinator.since()
        combining = time.monotonic()
        await asyncio.to_thread(lambda: list(operator.watch(submitted.id, patience=PATIENCE)))
        found["combining_s"] = time.monotonic() - combining
        found["committed_after_combining_kill_s"] = coordinator.since()
        job_now = operator.job(submitted.id).job
        assert job_now.status == "finished", job_now.reason
        coordinator.end(signal.SIGTERM)
        digest = job_now.model.digest
        new = open_model(coordinator.artifacts / "objects" / digest[:2] / digest).vector
        marks = [new[place].item() for place in (0, 1, elements // 2, elements - 1)]
        assert marks == [2.0, 0.0, 6.0, 2.0], marks
    found["idle"] = idle
    found["peaks_over_idle"] = [peak - idle for peak in coordinator.peaks]
    found["cpu_s"] = coordinator.cpu
    found["cpu_to_listen_s"] = coordinator.cpu_to_listen
    found["most_in_blocks"] = max(found["peaks_over_idle"]) / BLOCK_BYTES
    found["most_in_models"] = max(found["peaks_over_idle"]) / size
    found["load"] = os.getloadavg()[0]
    return found


def extrapolated(runs: list[dict[str, Any]], name: Callable[[dict[str, Any]], float], at: float) -> float:
    """The line through the first and the last run, at so many elements."""
    (x, y), (far, high) = ((run["elements"], name(run)) for run in (runs[0], runs[-1]))
    return y + (high - y) * (at - x) / (far - x)


FIGURES: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("submitted", "s", lambda run: run["submit_s"]),
    ("downloaded by two silos, one after the other", "s", lambda run: run["two_downloads_s"]),
    ("an update uploaded until it is durable", "s", lambda run: run["upload_s"]),
    ("killed in an upload: listens", "s", lambda run: run["second_listens_s"]),
    ("killed in an upload: takes new bytes (< 60)", "s", lambda run: run["new_bytes_after_upload_kill_s"]),
    ("killed as it combines: listens", "s", lambda run: run["third_listens_s"]),
    (
        "killed as it combines: combines again (< 60)",
        "s",
        lambda run: run["reads_updates_after_combining_kill_s"],
    ),
    ("killed as it combines: writes again", "s", lambda run: run["combining_after_its_kill_s"]),
    ("from there until the round is committed", "s", lambda run: run["combining_s"]),
    ("a start until it listens, CPU", "s", lambda run: max(run["cpu_to_listen_s"])),
    ("CPU of all three processes", "s", lambda run: sum(run["cpu_s"])),
    ("peak over idle", "MB", lambda run: max(run["peaks_over_idle"]) / 1e6),
    ("peak over idle", "blocks", lambda run: run["most_in_blocks"]),
    ("peak over idle", "models", lambda run: run["most_in_models"]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--billions", type=float, nargs="+", default=[0.4, 1.3], help="sizes, rising")
    parser.add_argument("--extrapolate", type=float, default=8.0, help="to so many, by the line of two sizes")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    runs = []
    for billions in options.billions:
        elements = int(billions * 1e9)
        with tempfile.TemporaryDirectory(prefix="roundtable-large-", dir=options.folder) as folder:
            needed, free = 5 * 4 * elements, shutil.disk_usage(folder).free
            if free < needed + (1 << 30):
                sys.exit(f"{billions:g} B needs {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free")
            runs.append(asyncio.run(measure(Path(folder), elements)))
    if options.json:
        print(json.dumps(runs, indent=2))
        return
    far = options.extrapolate * 1e9
    sizes = "".join(f"{run['elements'] / 1e9:>8g} B" for run in runs)
    print(f"{'':<52}{sizes}" + (f"  by a line {options.extrapolate:g} B" if len(runs) > 1 else ""))
    for what, unit, figure in FIGURES:
        line = f"{what + ', ' + unit:<52}" + "".join(f"{figure(run):>10.4g}" for run in runs)
        if len(runs) > 1 and unit != "models":
            line += f"{extrapolated(runs, figure, far):>15.4g}"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
