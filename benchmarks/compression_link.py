"""Seconds a round over a line of 100 Mbit/s and 50 ms: float32 both ways against small updates and changes,
of an encoding that the job names and of one that the coordinator chooses (`up = "auto"`).

    python benchmarks/compression_link.py [--elements 25000000] [--rounds 3]     # about three minutes
    python benchmarks/compression_link.py --quick

A coordinator and one agent are processes of their own. Between them is a proxy on the loopback device that
lets each direction have so many bits a second, holds each piece back for half of the round trip, and
buffers no more than what is under way. Training is left out; encoding, and what a silo keeps of it on its
disk, are not. A job's first round, in which the silo loads the whole model, does not count; where encodings
are chosen, neither do rounds in which another one was still in use than at the end.
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
from roundtable.client.trainer import (
    EncodedUpdate,
    ProgressListener,
    StepWork,
    TrainedUpdate,
    write_remembering,
)
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.silo_state import SiloState
from roundtable.core import Layout, Model, parse_job, save_model
from roundtable.core.encodings import StreamKey
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient

BITS, ROUND_TRIP = 100e6, 0.05
PIECE = 1 << 14
# What a late timer may be made good for: else each piece's lateness, a millisecond, would slow the line down.
LATE = 0.01
TARGET = 6.0
NAMED = 'up = "topk(ratio=0.05) | int8(block=256)"\ndown = "int4(block=256)"'
CHOSEN = 'up = "auto"\ndown = "int4(block=256)"'
SETTLES = 3
"""Rounds in which a choice may still change: two in which the first one stays, and one for luck."""


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
    """Answers at once with an update that it encodes as it is told, and keeps what a silo keeps."""

    def __init__(self, elements: int, jobs: Path) -> None:
        noise = torch.Generator().manual_seed(1)
        self._delta = torch.randn(elements, generator=noise).pow_(3).mul_(1e-4)
        self._layout = Layout.of({"w": self._delta})
        self._state = SiloState(jobs)

    async def start(self) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        written = await asyncio.to_thread(self._written, work)
        return TrainedUpdate(written.digest, written.size, 1, {"loss": (1.0, 1)}, written.writing)

    def _written(self, work: StepWork) -> EncodedUpdate:
        """Each round's update has the values of the others at other places."""
        job, round, attempt = work.step[:3]
        delta = self._delta.roll(round * (len(self._delta) // 7 + 1))
        key, sent = StreamKey(work.job.seed, work.client, round, attempt), self._layout.sent
        kept = self._state.load(job, work.kept)
        written = write_remembering(work.output, delta, work.job.transfer, sent, key, kept, work.encoding)
        self._state.save(job, (round, attempt), written.memory, work.kept)
        return written

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {"loss": (1.0, 1)}

    def release(self, job: str, *, met: bool) -> None: ...

    async def close(self) -> None: ...


def run_agent(folder: Path, port: int, elements: int) -> None:
    """The agent's process."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    config = AgentConfig(f"localhost:{port}", folder / "alder", state, {"ready": "ready.py:Ready"})
    asyncio.run(Agent(config, EncodingTrainer(elements, state / "jobs")).run())


def rounds_of(operator: OperatorClient, model: Path, rounds: int, table: str) -> list[tuple[float, str]]:
    """Seconds of each round of a job and the encoding of its update, the first round left out."""
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
    return [
        (record["ended"] - record["started"], record["transfers"]["alder"].get("encoding", ""))
        for record in records[1:]
    ]


def settled(rounds: list[tuple[float, str]]) -> float:
    """Median seconds of the rounds with the encoding of the last one, without the first of them."""
    last = rounds[-1][1]
    first = max((place for place, (_, each) in enumerate(rounds) if each != last), default=-1)
    return statistics.median(took for took, _ in rounds[first + 1 :])


def measure(folder: Path, elements: int, rounds: int, tables: dict[str, str]) -> dict[str, Any]:
    """By the name of each [transfer] table, and of float32: median seconds of a round, each round, and the
    coordinator's peak, in sizes of the model beyond what it takes without a job."""
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost", "127.0.0.1"))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    issue(folder / "ca", "alder", "agent", folder / "alder")
    state = {"w": torch.zeros(elements)}
    layout = Layout.of(state)
    save_model(folder / "model.safetensors", Model(layout, layout.flatten(state)))
    here, there = multiprocessing.Pipe()
    found: dict[str, Any] = {"elements": elements}
    with coordinator(folder) as (port, pid):
        memory = Memory(pid)
        idle = memory.read("VmRSS")
        line = spawn.Process(target=run_line, args=(there, port, BITS, ROUND_TRIP), daemon=True)
        line.start()
        agent = spawn.Process(target=run_agent, args=(folder, here.recv(), elements), daemon=True)
        agent.start()
        with OperatorClient(f"localhost:{port}", folder / "operator") as operator:
            for name, table in {**tables, "float32": ""}.items():
                Path(f"/proc/{pid}/clear_refs").write_text("5")
                count = rounds + SETTLES + 3 if "auto" in table else rounds + 2 if table else rounds
                each = rounds_of(operator, folder / "model.safetensors", count, table)
                peak = (memory.read("VmHWM") - idle) / 4 / elements
                found[name] = {"seconds": settled(each), "rounds": each, "peak_models": peak}
                print(f"{name}: {found[name]['seconds']:.2f} s a round", file=sys.stderr, flush=True)
        for process in (agent, line):
            process.terminate()
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the job in float32")
    parser.add_argument("--named", default=NAMED, help="a [transfer] table that is compared with float32")
    parser.add_argument("--chosen", default=CHOSEN, help='another one, with up = "auto"')
    parser.add_argument("--quick", action="store_true", help="a tenth of the model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    elements = options.elements // 10 if options.quick else options.elements
    with tempfile.TemporaryDirectory(prefix="roundtable-link-") as folder:
        tables = {"named": options.named, "chosen": options.chosen}
        found = measure(Path(folder), elements, options.rounds, tables)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"a round of one silo, {elements / 1e6:g} M parameters, "
        f"{BITS / 1e6:g} Mbit/s, {ROUND_TRIP * 1e3:g} ms"
    )
    slow = found["float32"]["seconds"]
    for name in ("float32", *tables):
        took, peak = found[name]["seconds"], found[name]["peak_models"]
        print(
            f"{name}: {took:.2f} s, {slow / took:.1f} times as fast; the coordinator's peak beyond idle: "
            f"{peak:.2f} models"
        )
    for took, encoding in found["chosen"]["rounds"]:
        print(f"    chosen: {encoding}: {took:.2f} s")
    print(f"the target: at least {TARGET:g} times as fast")


if __name__ == "__main__":
    sys.exit(main())
