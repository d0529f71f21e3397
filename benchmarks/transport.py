"""Rounds without training: how fast the coordinator and its agents are beside a bare stream of their bytes.

    python benchmarks/transport.py                     # all three measurements, a minute or so
    python benchmarks/transport.py --rounds 50 --json  # also shows whether memory grows

The coordinator and the agents are the real ones, each a process of its own, over mutually
authenticated TLS on loopback; only the training is left out: an agent answers with an update that
lies ready. The bare stream is Python's gRPC with TLS that moves as many bytes, to as many processes,
and back, and neither stores nor checks them; it runs before and after, and its median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from roundtable.client import Agent, AgentConfig, StepWork, TrainedUpdate
from roundtable.client.trainer import ProgressListener, write_update
from roundtable.client.training.metrics import Metrics
from roundtable.core import Layout, Model, parse_job, save_model
from roundtable.core.allocator import settle_imports
from roundtable.core.identity.credentials import create_ca, issue, load_credentials
from roundtable.operator import OperatorClient
from roundtable.proto.channel import CLIENT_OPTIONS, SERVER_OPTIONS

CHUNK = 1 << 20
MB = 1e6
spawn = multiprocessing.get_context("spawn")


class ReadyTrainer:
    """Answers at once with an update that was written beforehand."""

    def __init__(self, folder: Path, elements: int) -> None:
        self._ready = folder / f"ready-{elements}"
        delta = torch.full((elements,), 1e-3)
        self._digest, self._size = write_update(self._ready, delta, "float32")

    async def start(self) -> None:
        return None

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        os.link(self._ready, work.output)
        return TrainedUpdate(self._digest, self._size, 1, {"loss": (1.0, 1)})

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {"loss": (1.0, 1)}

    def release(self, job: str, *, met: bool) -> None:
        return None

    async def close(self) -> None:
        return None


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[int, int]]:
    """`roundtable server` while the block lasts: its port and its process's number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = ["--state", str(folder / "state"), "--credentials", str(folder / "coordinator")]
    command = [sys.executable, "-m", "roundtable", "server", "--listen", f"127.0.0.1:{port}", *places]
    with (folder / "coordinator.log").open("w") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert child.stdout is not None
        assert "is listening" in child.stdout.readline(), (folder / "coordinator.log").read_text()
        yield port, child.pid
    finally:
        child.terminate()
        child.wait()


def run_agent(folder: Path, port: int, name: str, elements: int, host: str = "localhost") -> None:
    """An agent's process."""
    # One installation has one state folder, whatever it trains.
    state = folder / f"state-{name}"
    state.mkdir(exist_ok=True)
    settle_imports()  # As `roundtable client` does.
    config = AgentConfig(f"{host}:{port}", folder / name, state, {"ready": "ready.py:Ready"})
    asyncio.run(Agent(config, ReadyTrainer(state, elements)).run())


def run_bare_server(pipe: Connection, folder: Path, size: int) -> None:
    """A bare gRPC server: a stream of bytes down, a stream of bytes up."""
    block = os.urandom(CHUNK)

    async def down(request: bytes, context: Any) -> None:
        for place in range(0, size, CHUNK):
            await context.write(block[: min(CHUNK, size - place)])

    async def up(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return str(sum([len(data) async for data in requests])).encode()

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        methods = {
            "Down": grpc.unary_stream_rpc_method_handler(down),
            "Up": grpc.stream_unary_rpc_method_handler(up),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        own = load_credentials(folder / "coordinator")
        secure = grpc.ssl_server_credentials([(own.key, own.certificate)], own.ca, require_client_auth=True)
        pipe.send(server.add_secure_port("127.0.0.1:0", secure))
        await server.start()
        await asyncio.to_thread(pipe.poll, None)
        await server.stop(0)

    asyncio.run(serve())


def run_bare_client(pipe: Connection, folder: Path, port: int, name: str, size: int) -> None:
    """A bare client's process: at each signal moves the bytes down and up, and tells how long it took."""
    block = os.urandom(CHUNK)

    async def parts() -> AsyncIterator[bytes]:
        for place in range(0, size, CHUNK):
            yield block[: min(CHUNK, size - place)]

    async def work() -> None:
        own = load_credentials(folder / name)
        secure = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        async with grpc.aio.secure_channel(f"localhost:{port}", secure, options=CLIENT_OPTIONS) as channel:
            down, up = channel.unary_stream("/bare/Down"), channel.stream_unary("/bare/Up")
            await channel.channel_ready()
            pipe.send(0.0)
            while await asyncio.to_thread(pipe.recv):
                started = time.perf_counter()
                received = sum([len(data) async for data in down(b"")])
                sent = int(await up(parts()))
                assert received == sent == size
                pipe.send(time.perf_counter() - started)

    asyncio.run(work())


@contextmanager
def process(target: Any, *arguments: Any, stop: Connection | None = None) -> Iterator[Any]:
    """A process while the block lasts; one with a pipe ends by itself when that is written to."""
    child = spawn.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        if stop is not None:
            stop.send(None)
            child.join(15)
        if child.is_alive():
            child.terminate()
            child.join()


def bare_rounds(folder: Path, agents: list[str], size: int, repeats: int) -> list[float]:
    """Seconds that each bare round took, from the signal to the slower client's end."""
    mine, theirs = spawn.Pipe()
    with process(run_bare_server, theirs, folder, size, stop=mine):
        port = mine.recv()
        pipes = [spawn.Pipe() for _ in agents]
        clients = [
            spawn.Process(target=run_bare_client, args=(far, folder, port, name, size), daemon=True)
            for (_, far), name in zip(pipes, agents, strict=True)
        ]
        for client in clients:
            client.start()
        for near, _ in pipes:
            near.recv()
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            for near, _ in pipes:
                near.send(True)
            for near, _ in pipes:
                near.recv()
            seconds.append(time.perf_counter() - started)
        for (near, _), client in zip(pipes, clients, strict=True):
            near.send(False)
            client.join(15)
        # The first one warms up the connections, as the first round does for the agents.
        return seconds[1:]


def our_rounds(
    folder: Path, port: int, agents: list[str], elements: int, rounds: int, evaluate: bool
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Records and events of a job without training."""
    state = {"w": torch.zeros(elements)}
    layout = Layout.of(state)
    path = folder / f"model-{elements}.safetensors"
    save_model(path, Model(layout, layout.flatten(state)))
    job = parse_job(
        f'task = "ready"\nrounds = {rounds}\n[cohort]\nsize = {len(agents)}\nwait = 60\n'
        f"[evaluation]\nevery = {int(evaluate)}"
    )
    children = [
        spawn.Process(target=run_agent, args=(folder, port, name, elements), daemon=True) for name in agents
    ]
    for child in children:
        child.start()
    with OperatorClient(f"localhost:{port}", folder / "operator") as operator:
        submitted = operator.submit(job, path)
        events = [event for update in operator.watch(submitted.id) for event in update.events]
        detail = operator.job(submitted.id)
    for child in children:
        child.terminate()
        child.join()
    assert detail.job.status == "finished", detail.job.reason
    return [json.loads(record) for record in detail.history], events


def transfer_seconds(events: list[Any]) -> list[float]:
    """From the round's start to its last update's receipt, for each round."""
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    for event in events:
        if event.kind == "round_started":
            started[event.round] = event.time
        elif event.kind == "update_received":
            ended[event.round] = event.time
    return [ended[number] - started[number] for number in sorted(started)]


class Memory:
    """Resident memory of a process, in bytes, sampled from outside."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")

    def read(self, name: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{self._status} has no {name}")


def measure(folder: Path, elements: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Everything, in one run."""
    agents = ["alder", "birch", "cedar"]
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost", "127.0.0.1"))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    for name in agents:
        issue(folder / "ca", name, "agent", folder / name)
    size = 4 * elements
    before = bare_rounds(folder, agents[:2], size, repeats)
    with coordinator(folder) as (port, pid):
        empty, _ = our_rounds(folder, port, agents, 0, 30, evaluate=True)
        memory = Memory(pid)
        idle = memory.read("VmRSS")
        large, events = our_rounds(folder, port, agents[:2], elements, rounds, evaluate=False)
        peak, after = memory.read("VmHWM"), memory.read("VmRSS")
    bare = statistics.median(before + bare_rounds(folder, agents[:2], size, repeats))
    moved = 2 * 2 * size
    transfers = transfer_seconds(events)[1:]
    whole = [record["ended"] - record["started"] for record in large[1:]]
    return {
        "empty_round_ms": 1e3 * statistics.median(r["ended"] - r["started"] for r in empty[1:]),
        "model_mb": size / MB,
        "bare_s": bare,
        "bare_mb_per_s": moved / bare / MB,
        "transfer_s": statistics.median(transfers),
        "transfer_mb_per_s": moved / statistics.median(transfers) / MB,
        "transfer_ratio": bare / statistics.median(transfers),
        "round_s": statistics.median(whole),
        "round_mb_per_s": moved / statistics.median(whole) / MB,
        "round_ratio": bare / statistics.median(whole),
        "rounds": rounds,
        "idle_mb": idle / MB,
        "peak_mb": peak / MB,
        "after_mb": after / MB,
        "peak_over_idle_in_models": (peak - idle) / size if size else 0.0,
    }


def table(found: dict[str, Any]) -> str:
    """The measurements as a table for people."""
    rows = [
        ("a round over an empty model, 3 agents", f"{found['empty_round_ms']:.1f} ms", "< 50 ms"),
        (
            f"bare gRPC with TLS, {found['model_mb']:.0f} MB × 2 and back",
            f"{found['bare_s']:.2f} s, {found['bare_mb_per_s']:.0f} MB/s",
            "",
        ),
        (
            "the same as updates of a round, until the last is durable",
            f"{found['transfer_s']:.2f} s, {found['transfer_mb_per_s']:.0f} MB/s",
            f"{found['transfer_ratio']:.2f} of bare (≥ 0.6)",
        ),
        (
            "the whole round, aggregated, stored and committed",
            f"{found['round_s']:.2f} s, {found['round_mb_per_s']:.0f} MB/s",
            f"{found['round_ratio']:.2f} of bare",
        ),
        (
            f"coordinator's memory, idle → peak over {found['rounds']} rounds → after",
            f"{found['idle_mb']:.0f} → {found['peak_mb']:.0f} → {found['after_mb']:.0f} MB",
            f"idle + {found['peak_over_idle_in_models']:.2f} models (≤ 2.5)",
        ),
    ]
    return "\n".join(f"{what:<62} {value:<26} {verdict}" for what, value, verdict in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over that model")
    parser.add_argument("--repeats", type=int, default=3, help="bare rounds, before and after")
    parser.add_argument("--runs", type=int, default=1, help="all of it so often, in new processes: medians")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    runs = []
    for number in range(1, options.runs + 1):
        with tempfile.TemporaryDirectory(prefix="roundtable-transport-") as folder:
            runs.append(measure(Path(folder), options.elements, options.rounds, options.repeats))
        if options.runs > 1:
            print(f"run {number}: {runs[-1]['transfer_ratio']:.2f} of bare", file=sys.stderr)
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(json.dumps(found, indent=2) if options.json else table(found))


if __name__ == "__main__":
    sys.exit(main())
