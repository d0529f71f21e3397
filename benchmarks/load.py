"""Many agents on one coordinator: connect storm, heartbeats, rounds of 200; memory, CPU, latency of dispatch.

    pip install -e '.[bench]'
    python benchmarks/load.py                       # 1,000 agents
    python benchmarks/load.py --quick               # 100 agents, rounds of 20
    python benchmarks/load.py --relays 4            # the same agents behind relays
    python benchmarks/load.py --agents 10000 --cohort 1000 --rounds 3 --dial 50 --heartbeat 30
    python benchmarks/load.py --one-door            # operators connect where agents do
    python benchmarks/load.py --bare                # what their connections alone cost a server of gRPC

The agents are light (light_agents.py): many to a process, each with its own certificate, connection (gRPC
over TLS), heartbeats and uploads. Latency is from the event "round_started" to the instruction's arrival at
an agent. With `--dial` so many of them dial a second, as their own handshakes take as much of this machine as
the coordinator's, and its deadline for one is 10 s.
At the end the coordinator is killed and started again, and all come back, relays by themselves; then one of
those is killed and started again. Meanwhile somebody asks the coordinator how it is and what waits, as
`roundtable status` and `job queue` do: how long that takes is told for each part.
What hours of such rounds do to a coordinator: benchmarks/soak.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from light_agents import BARE, HEARTBEAT, VALUES

from roundtable.core import JobConfig, Layout, Model
from roundtable.core.errors import UnavailableError
from roundtable.core.identity.credentials import (
    create_ca,
    issue,
)
from roundtable.core.models import save_model
from roundtable.operator import OperatorClient

AGENTS_A_PROCESS = 500
STORM_SECONDS = 600.0
COORDINATOR = """
import sys
from pathlib import Path
from roundtable.server import load_server_config, run_server
sys.exit(run_server(load_server_config(Path(sys.argv[1]))))
"""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Region:
    """A relay in a process of its own."""

    def __init__(self, folder: Path, name: str, port: int, heartbeat: float) -> None:
        self.name, self.port, self._folder = name, free_port(), folder
        issue(folder / "ca", name, "relay", folder / name, hosts=("localhost", "127.0.0.1"))
        values = {
            "coordinator": f"localhost:{port}",
            "listen": f"127.0.0.1:{self.port}",
            "credentials": name,
            "state": f"{name}-state",
            "heartbeat": heartbeat,
        }
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        (folder / f"{name}.toml").write_text(settings)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "roundtable", "relay", "--config", f"{self.name}.toml"]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=self._folder)

    def listens(self) -> None:
        """Waits until it does."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def again(self) -> None:
        """Kills it and starts it; it listens when this returns."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()
        self.listens()


@contextmanager
def relays(folder: Path, port: int, count: int, heartbeat: float = HEARTBEAT) -> Iterator[list[Region]]:
    """So many relays."""
    regions = [Region(folder, f"relay{number}", port, heartbeat) for number in range(count)]
    try:
        for region in regions:
            region.listens()
        yield regions
    finally:
        for region in regions:
            region.process.terminate()
            region.process.wait(60)


@contextmanager
def coordinator(
    folder: Path,
    port: int,
    metrics: str = "",
    program: str = COORDINATOR,
    heartbeat: float = HEARTBEAT,
    operators: int = 0,
) -> Iterator[psutil.Process]:
    """A coordinator in a process of its own; where it answers for its metrics, if anywhere, and the port of
    operators, 0 where they connect at the same one as agents."""
    values = {"listen": f"127.0.0.1:{port}", "state": "state", "credentials": "hub", "heartbeat": heartbeat}
    if metrics:
        values["metrics"] = metrics
    if operators:
        values["operators"] = f"127.0.0.1:{operators}"
    file = folder / "coordinator.toml"
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    file.write_text(f"{settings}[quotas]\nconnections = 100000\n")
    with (folder / "coordinator.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.poll() not in (None, 0, -signal.SIGKILL):
            said = (folder / "coordinator.log").read_text(errors="replace")[-2000:]
            print(f"the coordinator ended by itself with status {process.returncode}:\n{said}", flush=True)
        process.terminate()
        process.wait(60)


class Load:
    """One run against one coordinator."""

    def __init__(
        self,
        folder: Path,
        agents: int,
        cohort: int,
        rounds: int,
        train: float = 0.0,
        regions: int = 0,
        dial: float = 0.0,
        heartbeat: float = HEARTBEAT,
        one_door: bool = False,
    ) -> None:
        self.dial, self.heartbeat = dial, heartbeat
        self.folder, self.agents, self.cohort, self.rounds = folder, agents, cohort, rounds
        self.regions, self._through = regions, list[Region]()
        self._each = min(AGENTS_A_PROCESS, -(-agents // max(1, regions)))
        self.train = train
        self.port = free_port()
        self._operators = 0 if one_door else free_port()
        self.started: dict[int, float] = {}

    def prepare(self) -> None:
        """Certificates and the initial model."""
        ca = self.folder / "ca"
        with patch("os.fsync"):  # Nothing of it is to outlast the machine.
            create_ca(ca)
            issue(ca, "hub", "coordinator", self.folder / "hub", hosts=("localhost", "127.0.0.1"))
            issue(ca, "olga", "operator", self.folder / "olga")
            for number in range(self.agents):
                issue(ca, f"agent{number}", "agent", self.folder / f"agent{number}")
        layout = Layout.of({"w": torch.zeros(VALUES)})
        save_model(self.folder / "model.safetensors", Model(layout, torch.zeros(VALUES)))

    def run(self) -> None:
        """The whole programme, printed as it goes."""
        with (
            self._coordinator() as process,
            relays(self.folder, self.port, self.regions, self.heartbeat) as self._through,
            self._operator() as operator,
        ):
            before = process.memory_info().rss
            with self._asking("while they connected"):
                workers = self.connect(operator, process)
            with self._asking("at rest"):
                self._idle(process, before)
            with self._asking("in the rounds"):
                self._rounds(operator, process)
                if self.regions:
                    self._rounds(operator, process, summed=True)
            process.kill()
            process.wait()
            self._storm(operator)
            self._latencies(workers)

    def _coordinator(self) -> AbstractContextManager[psutil.Process]:
        return coordinator(self.folder, self.port, heartbeat=self.heartbeat, operators=self._operators)

    def _operator(self) -> OperatorClient:
        return OperatorClient(f"localhost:{self._operators or self.port}", self.folder / "olga")

    def bare(self) -> None:
        """What the agents' connections and streams alone cost a server that does nothing with them."""
        with coordinator(self.folder, self.port, program=BARE) as process:
            before, cpu, began = process.memory_info().rss, _cpu(process), time.monotonic()
            workers = self._workers()
            while sum(each.status == "ESTABLISHED" for each in process.net_connections()) < self.agents:
                time.sleep(0.5)
            seconds, used = time.monotonic() - began, _cpu(process) - cpu
            time.sleep(2 * HEARTBEAT)
            grown = process.memory_info().rss - before
            print(
                f"bare: {self.agents} connections in {seconds:.1f} s, CPU {used:.1f} s; "
                f"{grown / self.agents / 1e3:.0f} kB for each",
                flush=True,
            )
            for worker in workers:
                worker.communicate(b"")

    def _storm(self, operator: OperatorClient) -> None:
        """The coordinator was killed: it starts again, and all agents come back at once."""
        with self._coordinator() as process:
            with self._asking("in the storm"):
                here, seconds = self._until_back(operator)
                print(
                    f"{here} of {self.agents} agents are back {seconds:.1f} s after the coordinator that was "
                    f"killed listens again; its CPU {_cpu(process):.1f} s, of which its start is a part",
                    flush=True,
                )
            if self._through:
                with self._asking("while a relay was gone"):
                    self._relay_storm(operator, process)

    def _relay_storm(self, operator: OperatorClient, process: psutil.Process) -> None:
        """A relay is killed, and starts again: its agents come back."""
        cpu, before = _cpu(process), self.online(operator)
        self._through[0].again()
        behind = before - self.online(operator)
        here, seconds = self._until_back(operator)
        print(
            f"{here} of {self.agents} agents are there {seconds:.1f} s after the relay that was killed with "
            f"{behind} of them behind it listens again; coordinator's CPU {_cpu(process) - cpu:.1f} s",
            flush=True,
        )

    def _until_back(self, operator: OperatorClient) -> tuple[int, float]:
        """How many are there once all are, or it has taken too long; and seconds."""
        began = time.monotonic()
        while (here := self.online(operator)) < self.agents:
            if time.monotonic() - began > STORM_SECONDS:
                break
            time.sleep(0.2)
        return here, time.monotonic() - began

    @contextmanager
    def _asking(self, when: str) -> Iterator[None]:
        """Asks for status and queue four times a second, and tells how long that took."""
        over, took = threading.Event(), list[float]()

        def ask() -> None:
            with self._operator() as operator:
                while not over.wait(0.25):
                    began = time.monotonic()
                    with suppress(UnavailableError):
                        operator.status()
                        operator.queue()
                    took.append(time.monotonic() - began)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join()
            took.sort()
            if took:
                middle, last = took[len(took) // 2], took[int(0.95 * (len(took) - 1))]
                print(
                    f"commands {when}: median {1e3 * middle:.0f} ms, 95th percentile {1e3 * last:.0f} ms, "
                    f"longest {1e3 * took[-1]:.0f} ms ({len(took)} asked, two calls each)",
                    flush=True,
                )

    def connect(self, operator: OperatorClient, process: psutil.Process) -> list[subprocess.Popen[bytes]]:
        """Starts the agents; returns their processes once all are online."""
        began, cpu = time.monotonic(), _cpu(process)
        workers = self._workers()
        while self.online(operator) < self.agents:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError("the coordinator did not survive the storm")
            time.sleep(0.2)
        seconds, used = time.monotonic() - began, _cpu(process) - cpu
        print(
            f"{self.agents} agents connected in {seconds:.1f} s, coordinator's CPU {used:.1f} s", flush=True
        )
        return workers

    def _workers(self) -> list[subprocess.Popen[bytes]]:
        command = [sys.executable, str(Path(__file__).with_name("light_agents.py"))]
        return [
            subprocess.Popen([*command, *self._place(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for first in range(0, self.agents, self._each)
        ]

    def _place(self, first: int) -> list[str]:
        """What a process full of agents is told; those behind relays are dealt out process by process."""
        through = self._through
        relay = through[first // self._each % len(through)] if through else None
        count, port = min(self._each, self.agents - first), relay.port if relay else self.port
        values = (self.folder, port, first, count, self.train, self.dial, self.heartbeat)
        told = [str(each) for each in values]
        return [*told, relay.name] if relay else told

    @staticmethod
    def online(operator: OperatorClient) -> int:
        """How many agents the coordinator sees now."""
        try:
            return operator.status().clients_online
        except UnavailableError:
            # In the thick of it, even this question may time out.
            return 0

    def _idle(self, process: psutil.Process, before: int) -> None:
        time.sleep(2 * self.heartbeat)
        cpu, began = _cpu(process), time.monotonic()
        time.sleep(4 * self.heartbeat)
        share = 100 * (_cpu(process) - cpu) / (time.monotonic() - began)
        grown = process.memory_info().rss - before
        print(
            f"idle: {before / 1e6:.0f} MB without agents, {grown / self.agents / 1e3:.0f} kB more for each; "
            f"heartbeats every {self.heartbeat:g} s take {share:.1f} % of a core",
            flush=True,
        )

    def job(self, rounds: int, *, summed: bool = False) -> JobConfig:
        """Rounds of the cohort, without evaluation; `summed` by the relays."""
        return JobConfig.model_validate(
            {
                "task": "t",
                "rounds": rounds,
                "cohort": {"size": self.cohort, "minimum": self.cohort * 3 // 4, "deadline": "120 s"},
                "evaluation": {"every": 0},
                "regions": {"sum": summed},
                "aggregation": {"validation": {"norm_ratio": "off", "weight_ratio": "off"}},
            }
        )

    def _rounds(self, operator: OperatorClient, process: psutil.Process, *, summed: bool = False) -> None:
        began, cpu = time.monotonic(), _cpu(process)
        job = operator.submit(self.job(self.rounds, summed=summed), self.folder / "model.safetensors")
        for update in operator.watch(job.id):
            for event in update.events:
                if event.kind == "round_started" and not summed:
                    self.started[event.round] = event.time
        seconds, used = time.monotonic() - began, _cpu(process) - cpu
        how = " that relays add up" if summed else ""
        print(
            f"{self.rounds} rounds of {self.cohort}{how}: {seconds / self.rounds:.2f} s a round, "
            f"CPU {used / self.rounds:.2f} s a round ({operator.job(job.id).job.status})",
            flush=True,
        )

    def _latencies(self, workers: list[subprocess.Popen[bytes]]) -> None:
        found = []
        for worker in workers:
            out, _ = worker.communicate(b"")
            arrivals = json.loads(out)
            found += [at - self.started[number] for number, at in arrivals if number in self.started]
        found = sorted(found)[: self.rounds * self.cohort]
        if found:
            middle, last = statistics.median(found), found[int(0.99 * (len(found) - 1))]
            print(
                f"dispatch: median {1e3 * middle:.0f} ms, 99th percentile {1e3 * last:.0f} ms "
                f"({len(found)} instructions)",
                flush=True,
            )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--relays", type=int, default=0, help="relays that the agents connect to; 0: none")
    parser.add_argument(
        "--dial", type=float, default=0.0, help="agents that dial in a second; 0: all at once"
    )
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT, help="seconds")
    parser.add_argument("--one-door", action="store_true", help="operators have no address of their own")
    parser.add_argument("--bare", action="store_true", help="only what the connections cost")
    chosen = parser.parse_args()
    agents, cohort = (100, 20) if chosen.quick else (chosen.agents, chosen.cohort)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="roundtable-load-") as folder:
        load = Load(
            Path(folder),
            agents,
            cohort,
            chosen.rounds,
            regions=chosen.relays,
            dial=chosen.dial,
            heartbeat=chosen.heartbeat,
            one_door=chosen.one_door,
        )
        load.prepare()
        if chosen.bare:
            load.bare()
        else:
            load.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
