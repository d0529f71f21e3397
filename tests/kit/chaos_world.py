"""The federation that chaos is let loose upon, all of it processes of this machine.

Two coordinators on a PostgreSQL server, one of them standing by; a bucket as the home of their artifacts;
silos that train; between any two of these a wire that can be spoiled; small disks; clocks that can be set.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import psycopg
import pytest
from postgresql import PostgreSQL
from processes import Federation, free_port
from s3 import s3_bucket
from small_disk import small_disk
from wires import Wire, Wires

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(40, 120), nn.BatchNorm1d(120), nn.Tanh(), nn.Linear(120, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(sum(site.name.encode()))
        x = torch.randn(24, 40, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:16], y[:16]), (x[16:], y[16:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
HUBS = ("hub", "second")
LEASE = 4.0
SILENCE = 480.0
HUB_DISK, SILO_DISK = "256m", "32m"
_DELIVERED = re.compile(r"(\w+) round (\d+)(?:, attempt (\d+))?, train: delivered$")


class Stuck(Exception):
    """Nothing has gone on for longer than any fault explains."""


class World:
    """Everything that runs, and what can be asked of it from outside."""

    def __init__(self, folder: Path, silos: int) -> None:
        self.folder = folder
        self.silos = tuple(f"silo{number}" for number in range(silos))
        self.ending = False
        self.takeovers: list[float] = []
        self._stack = ExitStack()
        self._seen: dict[str, int] = defaultdict(int)
        self._deliveries: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        self._reading = Lock()
        self._counting, self._counted, self._rounds = Lock(), 0.0, -1
        # Who holds a silo's lock, or that of both coordinators, starts and ends its processes.
        self.turns = {name: Lock() for name in ("centre", *self.silos)}
        with ExitStack() as stack:
            self.postgresql = PostgreSQL()
            stack.callback(self.postgresql.remove)
            self.database = self.postgresql.fresh()
            self.wires = Wires()
            stack.callback(self.wires.close)
            environment = stack.enter_context(pytest.MonkeyPatch.context())
            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            bucket = stack.enter_context(s3_bucket(environment))
            target = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
            self.bucket_line = self.wires.lay(target)
            environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.bucket_line.port}")
            self.disks = {
                name: stack.enter_context(small_disk(folder / "disks" / name, size))
                for names, size in ((HUBS, HUB_DISK), (self.silos, SILO_DISK))
                for name in names
            }
            settings = {"bucket": bucket, "lease": LEASE, "keep_models": 1000, "keep_updates": 1000}
            self.federation = Federation(
                folder, self.silos, settings, program="chaos_silo", hub_program="chaos_hub", task=TASK
            )
            stack.callback(self._end_processes)
            self.ports = {name: free_port() for name in HUBS}
            self.base = {name: self.wires.lay(self.postgresql.port) for name in HUBS}
            self.lines: dict[tuple[str, str], Wire] = {}
            for name in HUBS:
                self.start_hub(name)
            for silo in self.silos:
                for name in HUBS:
                    self.lines[silo, name] = self.wires.lay(self.ports[name])
                self.start_silo(silo)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ends all processes and gives everything back."""
        self._stack.close()

    def start_hub(self, name: str, fault: str = "") -> None:
        """Starts a coordinator, again where it ends at once: what it needs may be away. Only the first try
        has the fault armed."""
        end = time.monotonic() + SILENCE
        while True:
            try:
                self.federation.coordinator(
                    fault,
                    name,
                    listen=f"127.0.0.1:{self.ports[name]}",
                    database=re.sub(r":\d+/", f":{self.base[name].port}/", self.database),
                    state=str(self._place(name)),
                )
            except AssertionError:
                self.federation.processes.pop(name, None)
                if time.monotonic() > end:
                    raise
                fault = ""
            else:
                return

    def start_silo(self, silo: str, fault: str = "") -> None:
        """Starts a silo's agent."""
        first, second = (f"127.0.0.1:{self.lines[silo, hub].port}" for hub in HUBS)
        self.federation.agent(
            silo, fault, coordinator=first, standbys=[second], state=str(self.state_of(silo))
        )

    def start(self, name: str, fault: str = "") -> None:
        """Starts the process of this name."""
        (self.start_hub if name in HUBS else self.start_silo)(name, fault)

    def kill(self, name: str) -> None:
        """SIGKILL; nothing where it does not run."""
        with suppress(KeyError):
            self.federation.kill(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal, if it runs."""
        with suppress(KeyError, ProcessLookupError):
            self.federation.processes[name].send_signal(number)

    def condition(self, name: str) -> str:
        """ "running", "stopped" (it stands still) or "dead"."""
        process = self.federation.processes[name]
        if process.poll() is not None:
            return "dead"
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "dead"
        return "stopped" if state == "T" else "running"

    def state_of(self, name: str) -> Path:
        """The state folder of a process."""
        return self._place(name)

    def files_that_can_be_had_again(self, name: str) -> list[Path]:
        """What lies on a party's disk and is elsewhere too, or can be made again."""
        state = self.state_of(name)
        stored = ("artifacts/objects", "artifacts/partial", "artifacts/secure")
        rooms = (*stored, "models", "spool", "secure", "prepared")
        found = (path for room in rooms for path in sorted((state / room).rglob("*")))
        return [path for path in found if path.is_file()]

    def set_clock(self, name: str, seconds: float) -> None:
        """Sets a process's clock ahead by so much, or back."""
        file = self.folder / f"{name}.clock.new"
        file.write_text(str(seconds))
        file.replace(self.folder / f"{name}.clock")

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Asks the database itself, by no wire."""
        with psycopg.connect(self.database, connect_timeout=5) as connection:
            return connection.execute(query.encode()).fetchall()

    def rounds(self) -> int:
        """Committed rounds of all jobs, half a second old at most; -1 while the database does not say."""
        with self._counting:
            if time.monotonic() > self._counted + 0.5:
                try:
                    self._rounds = int(self.ask("SELECT count(*) FROM rounds")[0][0])
                except psycopg.Error:
                    self._rounds = -1
                self._counted = time.monotonic()
            return self._rounds

    def active(self) -> str:
        """Who holds the lease; waits while nobody does."""
        names = {f"127.0.0.1:{port}": name for name, port in self.ports.items()}
        query = "SELECT address FROM lease WHERE expires > extract(epoch FROM clock_timestamp())"
        found: list[str] = []

        def somebody() -> bool:
            with suppress(psycopg.Error):
                found.extend(names[address] for (address,) in self.ask(query))
            return bool(found)

        self.until(somebody)
        return found[0]

    def lease(self) -> int:
        """The number of the lease, which grows with each takeover."""
        return int(self.ask("SELECT token FROM lease")[0][0])

    def taken_over(self, former: str, lease: int) -> None:
        """Waits until there is a later lease than the former's, and notes how many seconds that took."""
        began = time.monotonic()
        other = next(name for name in HUBS if name != former)

        def settled() -> bool:
            return self.lease() > lease or self.condition(other) == "dead"

        self.until(settled)
        if self.condition(other) != "dead":
            self.takeovers.append(time.monotonic() - began)

    def standby(self) -> str:
        """The other one."""
        active = self.active()
        return next(name for name in HUBS if name != active)

    def deliveries(self, silo: str) -> list[tuple[str, int, int]]:
        """(job, round, attempt) of each receipt that the silo has seen."""
        with self._reading, (self.folder / f"{silo}.log").open("rb") as file:
            file.seek(self._seen[silo])
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._seen[silo] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if found := _DELIVERED.search(line):
                    self._deliveries[silo].append((found[1], int(found[2]), int(found[3] or 1)))
            return self._deliveries[silo]

    def until(self, condition: Callable[[], bool], seconds: float = SILENCE) -> None:
        """Looks now and then; Stuck if it does not hold in time, or if the run is given up."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.ending:
                raise Stuck(f"nothing goes on for {seconds:g} s")
            time.sleep(0.1)

    def heal(self) -> None:
        """All wires carry again, and clocks are right."""
        for wire in (*self.lines.values(), *self.base.values(), self.bucket_line):
            self.wires.reset(wire)
        for name in (*HUBS, *self.silos):
            self.set_clock(name, 0.0)

    def _place(self, name: str) -> Path:
        return (self.disks[name] or self.folder / "states" / name) / "state"

    def _end_processes(self) -> None:
        for name in list(self.federation.processes):
            self.signal(name, signal.SIGCONT)
        self.federation.close()
