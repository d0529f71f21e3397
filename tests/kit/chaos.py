"""Chaos: faults at random from a seed upon jobs of every sort, and the verdict on what came of it."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from chaos_faults import CentreFaults, Fault, SiloFaults, StorageFaults
from chaos_jobs import Jobs
from chaos_verdict import Judge, Verdict
from chaos_world import Stuck, World

Tell = Callable[[str], None]
SILO_STREAMS = 3


@dataclass
class Report:
    """What happened. Times in seconds."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, list[float]] = field(default_factory=dict)
    takeovers: list[float] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def well(self) -> bool:
        """Whether everything was as it must be."""
        return not self.verdict.wrong

    def lines(self) -> Iterator[str]:
        """For people."""
        found = self.verdict
        yield f"seed {self.seed}: {sum(self.faults.values())} faults in {self.seconds:.0f} s"
        for kind in sorted(self.faults):
            times = self.recovery.get(kind, [])
            figures = f"{statistics.median(times):6.1f} s {max(times):6.1f} s" if times else ""
            yield f"  {kind:66} {self.faults[kind]:4}  {figures}"
        for case, count in sorted(found.jobs.items()):
            yield f"  jobs: {case:59} {count:4}"
        yield (
            f"rounds committed {found.rounds}, closed without a model {found.closed}; attempts failed "
            f"{found.attempts_failed}; changes of the active coordinator {found.takeovers}; "
            f"pauses {len(self.pauses)}"
        )
        if self.takeovers:
            yield (
                f"from the end of the active coordinator to the next lease, {len(self.takeovers)} times: "
                f"median {statistics.median(self.takeovers):.1f} s, longest {max(self.takeovers):.1f} s"
            )
        yield (
            f"updates acknowledged {found.acknowledged}; of single ones counted {found.counted}, of attempts "
            f"that were given up {found.superseded}; charges {found.charged}, in vain {found.charged_in_vain}"
        )
        yield f"models made again: by audit {found.audited}, from vectors {found.summed}"
        yield from (f"paused: {words}" for words in self.pauses)
        yield from (f"ended by itself: {words}" for words in self.ended)
        yield from (f"WRONG: {words}" for words in found.wrong)


class Chaos:
    """The federation and its tormentor, `jobs` at a time. `tell` is given a line of JSON for each fault."""

    def __init__(self, folder: Path, silos: int, seed: int, tell: Tell = print, jobs: int = 3) -> None:
        self.report = Report(seed)
        self._seed = seed
        self._tell = tell
        self._began = time.monotonic()
        self._writing = Lock()
        self._left = 0
        self._world = World(folder, silos)
        self._jobs = Jobs(self._world, jobs)

    def run(self, faults: int, most_seconds: float) -> Report:
        """Starts everything, torments it, lets it calm down, and judges."""
        try:
            self._jobs.run_undisturbed()
            self._note({"undisturbed": len(self._jobs.undisturbed)})
            self._left = faults
            enough = Event()
            with ThreadPoolExecutor(SILO_STREAMS + 3) as pool, self._given_up():
                end = time.monotonic() + most_seconds
                jobs = pool.submit(self._jobs.run, enough)
                streams = [
                    pool.submit(self._stream, number, end, plan) for number, plan in enumerate(self._plans())
                ]
                for stream in streams:
                    stream.result()
                self._world.heal()
                enough.set()
                jobs.result()
            self.report.takeovers = self._world.takeovers
            self.report.pauses, self.report.ended = self._jobs.pauses, self._jobs.ended
            self.report.verdict = Judge(self._world, self._jobs).judge()
        except Stuck as error:
            self.report.verdict.wrong.append(str(error))
        finally:
            self.report.seconds = time.monotonic() - self._began
            self._world.close()
        return self.report

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        """Where one thread fails the others are told to end."""
        try:
            yield
        except BaseException:
            self._world.ending = True
            raise

    def _plans(self) -> list[Callable[[random.Random], Iterator[tuple[str, Fault]]]]:
        return [self._centre, self._storage, *[self._silo] * SILO_STREAMS]

    def _stream(
        self, number: int, end: float, plan: Callable[[random.Random], Iterator[tuple[str, Fault]]]
    ) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        faults = plan(chance)
        while time.monotonic() < end and self._one_more():
            begun = time.monotonic()
            kind, fault = next(faults)
            time.sleep(chance.uniform(0.2, 1.5))
            fault.heal()
            healed = time.monotonic()
            try:
                self._world.until(fault.recovered)
            except Stuck as error:
                self._world.ending = True
                raise Stuck(f"{error} after {kind!r} of {fault.target} {fault.detail}") from error
            now = time.monotonic()
            with self._writing:
                self.report.faults[kind] += 1
                self.report.recovery.setdefault(kind, []).append(now - healed)
            told = {"fault": kind, "target": fault.target, "detail": fault.detail}
            self._note(
                {**told, "lasted": round(healed - begun, 2), "recovered": round(now - healed, 2)}, begun
            )

    def _one_more(self) -> bool:
        with self._writing:
            self._left -= 1
            return self._left >= 0

    def _centre(self, chance: random.Random) -> Iterator[tuple[str, Fault]]:
        kinds = CentreFaults(self._world).kinds
        while True:
            kind = chance.choice(list(kinds))
            with self._world.turns["centre"]:
                yield kind, kinds[kind](chance)

    def _storage(self, chance: random.Random) -> Iterator[tuple[str, Fault]]:
        kinds = StorageFaults(self._world).kinds
        while True:
            kind = chance.choice(list(kinds))
            yield kind, kinds[kind](chance)

    def _silo(self, chance: random.Random) -> Iterator[tuple[str, Fault]]:
        kinds = SiloFaults(self._world).kinds
        while True:
            kind = chance.choice(list(kinds))
            silos = chance.sample(self._world.silos, len(self._world.silos))
            silo = next(name for name in silos if self._world.turns[name].acquire(blocking=False))
            try:
                yield kind, kinds[kind](silo, chance)
            finally:
                self._world.turns[silo].release()

    def _note(self, values: dict[str, object], at: float | None = None) -> None:
        with self._writing:
            self._tell(json.dumps({"time": round((at or time.monotonic()) - self._began, 2), **values}))
