"""Seconds a round over a line of 100 Mbit/s and 50 ms: float32 both ways against small updates and changes.

    python benchmarks/compression_link.py [--elements 25000000] [--rounds 3]     # about two minutes
    python benchmarks/compression_link.py --quick

A coordinator and one agent are processes of their own. Between them is a proxy on the loopback device that
lets each direction have so many bits a second, holds each piece back for half of the round trip, and
buffers no more than what is under way. Training is left out; encoding is not. A job's first round, in which
the silo loads the whole model, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transport import Memory, coordinator, spawn

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, write_update
from roundtable.client.training.metrics import Metrics
from roundtable.core import Layout, Model, parse_job, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient

BITS, ROUND_TRIP = 100e6, 0.05
PIECE = 1 << 14
# What a late timer may be made good for: else each piece's lateness, a millisecond, would slow the line down.
LATE = 0.01
TARGET = 6.0
SMALL = 'up = "topk(ratio=0.05) | int8(block=256)"\ndown = "int4(block=256)"'


async def carry(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, rate: float, delay: float
) -> None:
    """One direction of the line: `rate` bytes a second, each `delay` seconds late."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(max(2, int(2 * rate * delay / PIECE)))

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            target.write(data)
            await target.drain()

    delivering = asyncio.create_task(deliver())
    free = time.monotonic()
    try:
        while data := await source.read(PIECE):
            free = max(free, time.monotonic() - LATE) + len(data) / rate
            await asyncio.sleep(max(0.0, free - time.monotonic()))
            await under_way.put((time.monotonic() + delay, data))
    finally:
        delivering.cancel()
        target.close()


def run_line(pipe: Connection, port: int, bits: float, round_trip: float) -> None:
    """The proxy's process: says which port leads over the line to `port`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
        rate, delay = bits / 8, round_trip / 2
        await asyncio.gather(
            carry(reader, back, rate, delay), carry(onward, writer, rate, delay), return_exceptions=True
        )

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=PIECE)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


class EncodingTrainer:
    """Answers at once with an update that it encodes as the job says."""

    def __init__(self, elements: int) -> None:
        noise = torch.Generator().manual_seed(1)
        self._delta = torch.randn(elements, generator=noise).pow_(3).mul_(1e-4)

    async def start(self) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        digest, size = await asyncio.to_thread(write_update, work.output, self._delta, work.job.transfer.up)
        return TrainedUpdate(digest, size, 1, {"loss": (1.0, 1)})

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {"loss": (1.0, 1)}

    def release(self, job: str) -> None: ...

    async def close(self) -> None: ...


def run_agent(folder: Path, port: int, elements: int) -> None:
    """The agent's process."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    config = AgentConfig(f"localhost:{port}", folder / "alder", state, {"ready": "ready.py:Ready"})
    asyncio.run(Agent(config, EncodingTrainer(elements)).run())


def seconds(operator: OperatorClient, model: Path, rounds: int, table: str) -> list[float]:
    """What each round of a job took, the first left out."""
    job = parse_job(
        f'task = "ready"\nrounds = {rounds}\n[cohort]\nsize = 1\ndeadline = 600\nwait = 60\n'
        f"[evaluation]\nevery = 0\n[transfer]\n{table}\n"
    )
    submitted = operator.submit(job, model)
    for _ in operator.watch(submitted.id):
        pass
    detail = operator.job(submitted.id)
    assert detail.job.status == "finished", detail.job.reason
    records: list[dict[str, Any]] = [json.loads(record) for record in detail.history]
    return [record["ended"] - record["started"] for record in records[1:]]


def measure(folder: Path, elements: int, rounds: int, small: str) -> dict[str, float]:
    """Median seconds of a round, both ways, and their ratio; the coordinator's peaks, in sizes of the model
    beyond what it takes without a job."""
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost", "127.0.0.1"))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    issue(folder / "ca", "alder", "agent", folder / "alder")
    state = {"w": torch.zeros(elements)}
    layout = Layout.of(state)
    save_model(folder / "model.safetensors", Model(layout, layout.flatten(state)))
    here, there = multiprocessing.Pipe()
    peaks = {}
    with coordinator(folder) as (port, pid):
        memory = Memory(pid)
        idle = memory.read("VmRSS")
        line = spawn.Process(target=run_line, args=(there, port, BITS, ROUND_TRIP), daemon=True)
        line.start()
        agent = spawn.Process(target=run_agent, args=(folder, here.recv(), elements), daemon=True)
        agent.start()
        with OperatorClient(f"localhost:{port}", folder / "operator") as operator:
            few = seconds(operator, folder / "model.safetensors", rounds + 2, small)
            peaks["small"] = memory.read("VmHWM")
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            whole = seconds(operator, folder / "model.safetensors", rounds, "")
            peaks["float32"] = memory.read("VmHWM")
        for process in (agent, line):
            process.terminate()
            process.join()
    slow, fast = statistics.median(whole), statistics.median(few)
    beyond = {f"{kind}_peak_models": (peak - idle) / 4 / elements for kind, peak in peaks.items()}
    return {"elements": elements, "float32_s": slow, "small_s": fast, "ratio": slow / fast, **beyond}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the job in float32")
    parser.add_argument("--small", default=SMALL, help="the [transfer] table that is compared with float32")
    parser.add_argument("--quick", action="store_true", help="a tenth of the model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    elements = options.elements // 10 if options.quick else options.elements
    with tempfile.TemporaryDirectory(prefix="roundtable-link-") as folder:
        found = measure(Path(folder), elements, options.rounds, options.small)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"a round of one silo, {elements / 1e6:g} M parameters, "
        f"{BITS / 1e6:g} Mbit/s, {ROUND_TRIP * 1e3:g} ms"
    )
    print(f"float32 {found['float32_s']:.2f} s, small {found['small_s']:.2f} s")
    print(f"{found['ratio']:.1f} times as fast (target ≥ {TARGET:g})")
    print(
        f"the coordinator's peak beyond idle: {found['float32_peak_models']:.2f} models in float32, "
        f"{found['small_peak_models']:.2f} small"
    )


if __name__ == "__main__":
    sys.exit(main())
