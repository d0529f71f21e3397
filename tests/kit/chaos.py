"""Chaos: a federation of processes, faults at random from a seed, and the count of what came of it.

Two coordinators on one PostgreSQL server, one of them standing by; silos whose connections run over wires
that can be spoiled, and wires between the coordinators and the database too; artifacts on a small disk.
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import torch
from chaos_silo import delta_of
from postgresql import PostgreSQL
from processes import Federation, free_port
from wires import Wire, Wires

from roundtable.core.errors import RoundtableError
from roundtable.core.models import Model, open_model

TASK = """
import torch
from torch import nn
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(300, 1000)
    def data(self, site):
        raise NotImplementedError
    def loss(self, model, batch):
        raise NotImplementedError
"""
LEASE = 2.0
DELIVERED = re.compile(r"(\w+) round (\d+)(?:, attempt (\d+))?, train: delivered")
SILENCE = 90.0


@dataclass
class Report:
    """What happened. Times in seconds."""

    seconds: float = 0.0
    rounds: int = 0
    attempts_failed: int = 0
    takeovers: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, list[float]] = field(default_factory=dict)
    acknowledged: int = 0
    counted: int = 0
    superseded: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong_models: list[int] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.seconds:.0f} s, {self.rounds} rounds committed, {self.attempts_failed} attempts failed"
        yield f"{sum(self.faults.values())} faults, {self.takeovers} changes of the active coordinator"
        for kind in sorted(self.faults):
            times = self.recovery.get(kind, [])
            figures = f"median {statistics.median(times):.1f} s, max {max(times):.1f} s" if times else "-"
            yield f"  {kind:22} {self.faults[kind]:4}  recovery {figures}"
        every = [value for times in self.recovery.values() for value in times]
        if every:
            yield f"recovery of all: median {statistics.median(every):.1f} s, max {max(every):.1f} s"
        yield f"updates acknowledged {self.acknowledged}, counted {self.counted}, " + (
            f"of attempts that were given up {self.superseded}, "
            f"lost {len(self.lost)}, doubled {len(self.doubled)}"
        )
        yield f"committed models that are not the mean of their contributors: {len(self.wrong_models)}"


class Chaos:
    """The federation and its tormentor."""

    def __init__(self, folder: Path, silos: int, seed: int) -> None:
        self.report = Report()
        self._names = tuple(f"silo{number}" for number in range(silos))
        self._chance = random.Random(seed)
        self._postgresql = PostgreSQL()
        self._wires = Wires()
        self._disk = _mount(folder / "disk")
        self._federation = Federation(folder, self._names, {}, program="chaos_silo", task=TASK)
        self._direct = self._postgresql.fresh()
        self._hubs = {name: free_port() for name in ("hub", "second")}
        self._lines: dict[tuple[str, str], Wire] = {}
        self._base: dict[str, Wire] = {}
        self._active = ""
        self._job = ""

    def run(self, faults: int, most_seconds: float) -> Report:
        """Starts everything, torments it, lets it calm down, and counts."""
        began = time.monotonic()
        try:
            self._start()
            with ThreadPoolExecutor(3) as streams:
                share, end = faults // 4, began + most_seconds
                kinds = ((self._centre(), share), (self._silo(), (faults - share + 1) // 2))
                plan = [*kinds, (self._silo(), (faults - share) // 2)]
                work = [
                    streams.submit(self._stream, made, count, end, n) for n, (made, count) in enumerate(plan)
                ]
                for one in work:
                    one.result()
            self._calm_down()
            self.report.seconds = time.monotonic() - began
            self._count()
        finally:
            self.close()
        return self.report

    def close(self) -> None:
        """Ends all processes and gives everything back."""
        for process in self._federation.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        self._federation.close()
        self._wires.close()
        self._postgresql.remove()
        if self._disk is not None:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    def _start(self) -> None:
        for name in self._hubs:
            self._base[name] = self._wires.lay(self._postgresql.port)
            self._start_hub(name)
        for silo in self._names:
            for name, port in self._hubs.items():
                self._lines[silo, name] = self._wires.lay(port)
            self._start_silo(silo)
        self._federation.port = self._hubs["hub"]
        cohort = {"size": len(self._names), "minimum": max(1, len(self._names) * 5 // 8)}
        cohort |= {"deadline": "20 s", "grace": "2 s", "wait": "5 s", "retries": 1000}
        job = self._federation.job(rounds=100_000, cohort=cohort, evaluation={"every": 0})
        self._job = self._federation.submit(job, "chaos")
        self._until(lambda: self._rounds() >= 2)

    def _start_hub(self, name: str) -> None:
        self._federation.coordinator(
            name=name,
            listen=f"127.0.0.1:{self._hubs[name]}",
            database=re.sub(r":\d+/", f":{self._base[name].port}/", self._direct),
            artifacts=str((self._disk or self._federation.folder) / "artifacts"),
            state=str(self._federation.folder / name),
            lease=LEASE,
            keep_models=100_000,
        )

    def _start_silo(self, silo: str) -> None:
        first, second = (f"127.0.0.1:{self._lines[silo, hub].port}" for hub in self._hubs)
        self._federation.agent(silo, coordinator=first, standbys=[second], seconds=0.1)

    def _stream(self, faults: Iterator[str], count: int, end: float, number: int) -> None:
        chance = random.Random(self._chance.random() + number)
        for _ in range(count):
            if time.monotonic() > end:
                return
            kind = next(faults)
            heal, recovered = getattr(self, f"_{kind}")(chance)
            time.sleep(chance.uniform(0.5, 3.0))
            heal()
            self.report.faults[kind] += 1
            began = time.monotonic()
            self._until(recovered)
            self.report.recovery.setdefault(kind, []).append(time.monotonic() - began)

    def _silo(self) -> Iterator[str]:
        kinds = ("kill_silo", "stop_silo", "cut", "half_open", "delay", "throttle", "corrupt")
        while True:
            yield self._chance.choice(kinds)

    def _centre(self) -> Iterator[str]:
        kinds = ["kill_active", "stop_active", "kill_standby", "part_from_database", "crash_database"]
        if self._disk is not None:
            kinds.append("full_disk")
        while True:
            yield self._chance.choice(kinds)

    def _free_silo(self, chance: random.Random) -> tuple[str, Callable[[], bool]]:
        """A silo, and the question whether it has delivered since it was healed."""
        silo = chance.choice(self._names)
        return silo, self._more(lambda: len(self._deliveries(silo)))

    def _kill_silo(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        silo, recovered = self._free_silo(chance)
        with suppress(KeyError):
            self._federation.kill(silo)

        def heal() -> None:
            if silo not in self._federation.processes:
                self._start_silo(silo)

        return heal, recovered

    def _stop_silo(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        silo, recovered = self._free_silo(chance)
        self._signal(silo, signal.SIGSTOP)
        return lambda: self._signal(silo, signal.SIGCONT), recovered

    def _spoil(
        self, chance: random.Random, how: Callable[[Wire], None]
    ) -> tuple[Callable[[], None], Callable[[], bool]]:
        silo, recovered = self._free_silo(chance)
        wires = [self._lines[silo, hub] for hub in self._hubs]
        for wire in wires:
            how(wire)

        def heal() -> None:
            for wire in wires:
                self._wires.reset(wire) if wire.silent else wire.heal()

        return heal, recovered

    def _cut(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        return self._spoil(chance, self._wires.cut)

    def _half_open(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        return self._spoil(chance, lambda wire: setattr(wire, "silent", True))

    def _delay(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        return self._spoil(chance, lambda wire: setattr(wire, "delay", chance.uniform(0.02, 0.3)))

    def _throttle(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        return self._spoil(chance, lambda wire: setattr(wire, "rate", chance.uniform(1e5, 1e6)))

    def _corrupt(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        return self._spoil(chance, lambda wire: setattr(wire, "wrong", chance.randint(1, 5)))

    def _kill_active(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        name = self._find_active()
        self._federation.kill(name)
        return lambda: self._start_hub(name), self._more(self._rounds)

    def _kill_standby(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        name = next(hub for hub in self._hubs if hub != self._find_active())
        self._federation.kill(name)
        return lambda: self._start_hub(name), self._more(self._rounds)

    def _stop_active(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        name = self._find_active()
        self._signal(name, signal.SIGSTOP)
        time.sleep(1.5 * LEASE)
        return lambda: self._signal(name, signal.SIGCONT), self._more(self._rounds)

    def _part_from_database(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        wire = self._base[self._find_active()]
        if chance.random() < 0.5:
            self._wires.cut(wire)
        else:
            wire.silent = True
        time.sleep(1.5 * LEASE)
        return lambda: self._wires.reset(wire), self._more(self._rounds)

    def _crash_database(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        self._postgresql.stop()
        return self._postgresql.start, self._more(self._rounds)

    def _full_disk(self, chance: random.Random) -> tuple[Callable[[], None], Callable[[], bool]]:
        assert self._disk is not None
        filler = self._disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * (1 << 20)):
                pass
        return filler.unlink, self._more(self._rounds)

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(KeyError, ProcessLookupError):
            self._federation.processes[name].send_signal(number)

    def _more(self, count: Callable[[], int]) -> Callable[[], bool]:
        """Whether the count has grown since the question was first asked."""
        seen: list[int] = []

        def grown() -> bool:
            now = count()
            if not seen:
                seen.append(now)
            return now > seen[0] >= 0

        return grown

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SILENCE
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"nothing goes on for {SILENCE:g} s")
            time.sleep(0.1)

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._direct, connect_timeout=5) as connection:
            return connection.execute(query.encode()).fetchall()

    def _rounds(self) -> int:
        try:
            return int(self._ask("SELECT count(*) FROM rounds")[0][0])
        except psycopg.Error:
            return -1

    def _find_active(self) -> str:
        """Who holds the lease; waits while nobody does."""
        ports = {f"127.0.0.1:{port}": name for name, port in self._hubs.items()}
        while True:
            with suppress(psycopg.Error):
                query = "SELECT address FROM lease WHERE expires > extract(epoch FROM clock_timestamp())"
                for (address,) in self._ask(query):
                    return ports[address]
            time.sleep(0.1)

    def _deliveries(self, silo: str) -> list[tuple[int, int]]:
        """(round, attempt) of each receipt that the silo has seen."""
        delivered = DELIVERED.findall(self._federation.log(silo))
        return [(int(round), int(attempt or 1)) for _, round, attempt in delivered]

    def _calm_down(self) -> None:
        for wire in (*self._lines.values(), *self._base.values()):
            self._wires.reset(wire)
        goal = self._rounds() + 3
        self._until(lambda: self._rounds() >= goal)
        self._federation.port = self._hubs[self._find_active()]
        with suppress(RoundtableError), self._federation.operator() as operator:
            operator.cancel(self._job)
        query = f"SELECT status FROM jobs WHERE id = '{self._job}'"
        self._until(lambda: self._ask(query)[0][0] == "cancelled")

    def _count(self) -> None:
        report = self.report
        records = [json.loads(text) for (text,) in self._ask("SELECT record FROM rounds ORDER BY round")]
        rows = self._ask("SELECT round, attempt, client FROM updates WHERE receipt = 'accepted'")
        stored = Counter((round, attempt, client) for round, attempt, client in rows)
        events = self._ask("SELECT kind, round, attempt, client FROM events")
        taken = Counter(event[1:] for event in events if event[0] == "update_received")
        winners = {record["round"]: record for record in records}
        report.rounds = len(records)
        report.attempts_failed = sum(event[0] == "attempt_failed" for event in events)
        report.takeovers = int(self._ask("SELECT token FROM lease")[0][0])
        for silo in self._names:
            for round, attempt in set(self._deliveries(silo)):
                report.acknowledged += 1
                record = winners.get(round)
                if not stored[round, attempt, silo]:
                    report.lost.append(f"{silo} {round}.{attempt}: no row")
                elif record is None or record["attempt"] != attempt:
                    report.superseded += 1
                elif silo in record["contributors"]:
                    report.counted += 1
                else:
                    report.lost.append(f"{silo} {round}.{attempt}: not counted")
        report.doubled += [str(key) for key, times in {**stored, **taken}.items() if times > 1]
        report.doubled += [
            f"round {r['round']}" for r in records if len(set(r["contributors"])) < len(r["contributors"])
        ]
        self._check_models(records)

    def _check_models(self, records: list[dict[str, Any]]) -> None:
        """Each model must be the one before plus the mean of its contributors' vectors."""
        folder = (self._disk or self._federation.folder) / "artifacts" / "objects"
        before = open_model(self._federation.folder / "initial.safetensors")
        for record in records:
            digest = record["model"]
            after: Model = open_model(folder / digest[:2] / digest)
            deltas = [delta_of(record["round"], name, before.layout.size) for name in record["contributors"]]
            expected = before.vector + torch.stack(deltas).mean(0)
            if not torch.allclose(after.vector, expected, atol=1e-4):
                self.report.wrong_models.append(record["round"])
            before = after


def _mount(folder: Path) -> Path | None:
    """A small disk of its own, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)]
    return folder if subprocess.run(command, capture_output=True).returncode == 0 else None
