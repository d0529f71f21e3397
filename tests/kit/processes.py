"""A federation of processes on this machine: each can be killed and started again, with a fault armed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nursery import Nursery, Nursling, shared

from roundtable.core import JobConfig, load_task
from roundtable.core.errors import UnavailableError
from roundtable.core.failpoints import VARIABLE
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.initial_model import initial_model
from roundtable.core.models import save_model
from roundtable.operator import OperatorClient

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(600, 900), nn.BatchNorm1d(900), nn.Tanh(), nn.Linear(900, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(len(site.name))
        x = torch.randn(24, 600, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:16], y[:16]), (x[16:], y[16:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
SILOS = ("elm", "birch", "poplar")
PATIENCE = 180.0
_COORDINATOR = """
import logging, sys
from pathlib import Path
from roundtable.server import load_server_config, run_server
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
sys.exit(run_server(load_server_config(Path(sys.argv[1]))))
"""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(value: Any) -> str:
    """As TOML has it: a table in one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{ " + ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items()) + " }"


def environment(fault: str = "") -> dict[str, str]:
    """This process's, with one thread for arithmetic, and a fault armed or none."""
    values = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    values.pop(VARIABLE, None)
    return {**values, VARIABLE: fault} if fault else values


@dataclass
class Federation:
    """Folders, certificates and processes by name; `hub` is the coordinator."""

    folder: Path
    silos: tuple[str, ...] = SILOS
    settings: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    program: str = "agent_process"
    hub_program: str = ""
    task: str = TASK
    nursery: Nursery = field(default_factory=shared)
    processes: dict[str, Nursling] = field(default_factory=dict)
    relay_ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        create_ca(self.folder / "ca")
        hosts = ("127.0.0.1", "localhost")
        issue(self.folder / "ca", "hub", "coordinator", self.folder / "hub", hosts=hosts)
        issue(self.folder / "ca", "olga", "operator", self.folder / "olga")
        for name in self.silos:
            issue(self.folder / "ca", name, "agent", self.folder / name)
        (self.folder / "toy.py").write_text(self.task)

    def coordinator(self, fault: str = "", name: str = "hub", **changes: Any) -> Nursling:
        """Starts a coordinator; returns once it says that it listens."""
        values = {
            "listen": f"127.0.0.1:{self.port}",
            "state": str(self.folder / "server"),
            "credentials": str(self.folder / "hub"),
            "heartbeat": 1.0,
            **self.settings,
            **changes,
        }
        file = self.folder / f"{name}.toml"
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        own = [str(Path(__file__).with_name(f"{self.hub_program}.py"))] if self.hub_program else []
        command = [*(own or ["-c", _COORDINATOR]), str(file)]
        starts = self.said(name).count("coordinator is")
        process = self.start(name, command, fault)
        self.until(lambda: process.poll() is not None or self.said(name).count("coordinator is") > starts)
        assert process.poll() is None, self.log(name)[-3000:]
        return process

    def agent(self, name: str, fault: str = "", **changes: Any) -> Nursling:
        """Starts an agent that trains in its own process."""
        values = {
            "name": name,
            "coordinator": f"127.0.0.1:{self.port}",
            "credentials": str(self.folder / name),
            "state": str(self.folder / "silos" / name),
            "folder": str(self.folder),
            **changes,
        }
        program = Path(__file__).with_name(f"{self.program}.py")
        return self.start(name, [str(program), json.dumps(values)], fault)

    def installed_agent(self, name: str, fault: str = "") -> Nursling:
        """Starts an agent as it is installed, with a training process of its own."""
        file = self.folder / f"{name}.toml"
        values = {
            "coordinator": f"127.0.0.1:{self.port}",
            "credentials": str(self.folder / name),
            "state": str(self.folder / "silos" / name),
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
        file.write_text(
            "".join((*lines, '[tasks]\ntoy = "toy.py:Toy"\n[limits]\ndevice = "cpu"\nthreads = 1\n'))
        )
        command = ["-m", "roundtable", "client", "--config", str(file)]
        return self.start(name, command, fault)

    def relay(self, name: str = "east", fault: str = "", parent: int = 0, **changes: Any) -> Nursling:
        """Starts a relay as it is installed, at `relay_ports[name]`; returns once it says that it listens."""
        if not (self.folder / name).exists():
            hosts = ("127.0.0.1", "localhost")
            issue(self.folder / "ca", name, "relay", self.folder / name, hosts=hosts)
            self.relay_ports[name] = free_port()
        values = {
            "coordinator": f"127.0.0.1:{parent or self.port}",
            "listen": f"127.0.0.1:{self.relay_ports[name]}",
            "credentials": str(self.folder / name),
            "state": str(self.folder / "relays" / name),
            "heartbeat": 1.0,
            **changes,
        }
        file = self.folder / f"{name}.toml"
        file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
        starts = self.said(name).count("relay is")
        command = ["-m", "roundtable", "relay", "--config", str(file)]
        process = self.start(name, command, fault)
        self.until(lambda: process.poll() is not None or self.said(name).count("relay is") > starts)
        assert process.poll() is None, self.log(name)[-3000:]
        return process

    def silo_of(self, relay: str, name: str, fault: str = "", **changes: Any) -> Nursling:
        """Starts an agent that a relay serves, or several behind each other: "west/east"."""
        port = self.relay_ports[relay.partition("/")[0]]
        return self.agent(name, fault, coordinator=f"127.0.0.1:{port}", relay=relay, **changes)

    def start(self, name: str, command: list[str], fault: str) -> Nursling:
        """Runs a program as `Nursery.start` does; what it says and logs is kept under its name."""
        out, log = self.folder / f"{name}.out", self.folder / f"{name}.log"
        process = self.nursery.start(command, environment(fault), out, log)
        older = self.processes.get(name)
        assert older is None or older.poll() is not None, f"{name} runs already"
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """SIGKILL, at once."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def died(self, name: str) -> int:
        """Waits until the process has ended; its exit status, negative for a signal."""
        return self.processes.pop(name).wait(PATIENCE)

    def close(self) -> None:
        """Kills whatever still runs."""
        for name in list(self.processes):
            self.kill(name)

    def operator(self) -> OperatorClient:
        """A connection of the operator."""
        return OperatorClient(f"127.0.0.1:{self.port}", self.folder / "olga")

    def job(self, **tables: Any) -> JobConfig:
        """A seeded job for all silos, none of which can be done without."""
        table: dict[str, Any] = {
            "task": "toy",
            "rounds": 3,
            "seed": 11,
            "cohort": {"size": len(self.silos), "minimum": len(self.silos), "grace": "10m"},
            "algorithm": {"learning_rate": 0.1, "batch_size": 8, "epochs": 1},
        }
        return JobConfig.model_validate({**table, **tables})

    def submit(self, job: JobConfig, request: str) -> str:
        """Submits, however often the coordinator has to be asked; the job's identifier."""
        file = self.folder / "initial.safetensors"
        if not file.exists():
            save_model(file, initial_model(job, load_task("toy.py", self.folder)))
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with self.operator() as operator:
                    return str(operator.submit(job, file, request_id=request).id)
            except UnavailableError:
                if time.monotonic() > end:
                    raise

    def finish(self, job: str) -> Any:
        """Follows the job to its end; its detail."""
        with self.operator() as operator:
            for _ in operator.watch(job, patience=PATIENCE):
                pass
            return operator.job(job)

    def log(self, name: str) -> str:
        """What a process wrote to its log, over all its lives."""
        return self._read(f"{name}.log")

    def said(self, name: str) -> str:
        """What a process printed, over all its lives."""
        return self._read(f"{name}.out")

    def until(self, condition: Callable[[], object]) -> None:
        """Looks now and then until the condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""
