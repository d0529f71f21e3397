"""The jobs that run under chaos: one of each case undisturbed, then one after the other, some at a time."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
from chaos_world import HUBS, World

from roundtable.core import JobConfig, load_task
from roundtable.core.errors import RoundtableError, UnavailableError
from roundtable.core.initial_model import initial_model
from roundtable.core.models import save_model
from roundtable.operator import OperatorClient

ROUNDS = 4
_UNIFORM = {"weighting": "uniform"}
_QUIET = {"every": 0}
_NOISE = {"clip_norm": 2.0, "noise_multiplier": 0.5, "delta": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": {"name": "scaffold"}, "aggregation": _UNIFORM},
    "fedadam": {"aggregation": {"server_optimizer": {"name": "fedadam"}}},
    "client": {
        "aggregation": _UNIFORM,
        "cohort": {"size": None},
        "evaluation": _QUIET,
        "model": {"buffers": "local"},
        "privacy": {"level": "client", **_NOISE},
    },
    "buffered": {"round": {"mode": "buffered", "buffer": 2}, "evaluation": _QUIET},
    "masked": {
        "evaluation": _QUIET,
        "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 2.0},
    },
    # With noise: exact sums from one model are over the same silos, and all jobs of a case begin with one.
    "kept": {
        "aggregation": _UNIFORM,
        "round": {"mode": "buffered", "buffer": 3},
        "evaluation": _QUIET,
        "model": {"buffers": "local"},
        "privacy": {"level": "distributed", **_NOISE},
    },
    "distributed": {
        "aggregation": _UNIFORM,
        "evaluation": _QUIET,
        "model": {"buffers": "local"},
        "privacy": {"level": "distributed", **_NOISE},
    },
}
SAME = ("scaffold", "fedadam", "client")
"""Cases whose every model is the undisturbed run's."""
AUDITED = ("scaffold", "fedadam", "buffered")
"""Cases whose every model an auditor makes again, from the updates that silos have signed."""
SUMMED = ("masked", "kept", "distributed")
"""Cases whose every model is made again from the vectors of those that it names, without masks."""


def configured(world: World, case: str) -> JobConfig:
    """The job of a case, for all silos."""
    silos, given = len(world.silos), CASES[case]
    waits = {"deadline": "45 s", "wait": "60 s", "retries": 1000, "grace": "10m"}
    # A cohort that is drawn, of so many, may not wait for all of it where the draw amplifies a guarantee.
    cohort = waits if "round" in given else {"size": silos, "minimum": silos, **waits}
    cohort = {**cohort, **given.get("cohort", {})}
    algorithm = {"learning_rate": 0.1, "batch_size": 8, "epochs": 1, **given.get("algorithm", {})}
    table = {"task": "toy", "rounds": ROUNDS, "seed": 11, "cohort": cohort}
    return JobConfig.model_validate({**table, **given, "algorithm": algorithm, "cohort": cohort})


@dataclass(frozen=True)
class Submitted:
    """A job of this case as it was submitted."""

    case: str
    job: str


class Jobs:
    """Keeps jobs going, as an operator would: one that is paused is looked at and resumed."""

    def __init__(self, world: World, at_a_time: int) -> None:
        self._world = world
        self._at_a_time = at_a_time
        self.configs = {case: configured(world, case) for case in CASES}
        self._models = {case: self._initial(case) for case in CASES}
        self.undisturbed: dict[str, str] = {}
        self.submitted: list[Submitted] = []
        self.pauses: list[str] = []
        self.ended: list[str] = []
        self._over: set[str] = set()

    def run_undisturbed(self) -> None:
        """One of each case whose models are compared with it, while nothing happens."""

        def all_submitted() -> bool:
            with suppress(UnavailableError):
                for case in SAME:
                    self.undisturbed[case] = self._submit(case, f"undisturbed {case}")
            return len(self.undisturbed) == len(SAME)

        # A job's noise may depend on how many silos there are when it is submitted.
        silos = len(self._world.silos)
        self._world.until(lambda: self._world.ask("SELECT count(*) FROM clients")[0][0] == silos)
        self._world.until(all_submitted)
        self._world.until(lambda: self._left(list(self.undisturbed.values())) == 0)

    def run(self, enough: Event) -> None:
        """Keeps some going until it is enough, and then until all have ended; one of each case at least."""
        cases, going = list(CASES), 0
        while True:
            with suppress(psycopg.Error, RoundtableError):
                going = self._left([each.job for each in self.submitted])
                number = len(self.submitted)
                wanted = not enough.is_set() or number < len(cases)
                if wanted and going < self._at_a_time:
                    case = cases[number % len(cases)]
                    self.submitted.append(Submitted(case, self._submit(case, f"{case} {number}")))
                    continue
                if going == 0 and not wanted:
                    return
            self._revive()
            if self._world.ending:
                return
            time.sleep(0.3)

    def _left(self, jobs: list[str]) -> int:
        """How many of these go on; those that were paused are resumed."""
        left = [job for job in jobs if job not in self._over]
        if not left:
            return 0
        names = ", ".join(f"'{job}'" for job in left)
        for job, status, reason in self._world.ask(
            f"SELECT id, status, reason FROM jobs WHERE id IN ({names})"
        ):
            if status in ("finished", "cancelled", "failed"):
                self._over.add(job)
            elif status == "paused":
                with suppress(RoundtableError), self._operator() as operator:
                    operator.resume(job)
                    self.pauses.append(f"{job}: {reason}")
        return len([job for job in left if job not in self._over])

    def _revive(self) -> None:
        """Starts again what has ended by itself, as a service manager does."""
        for name, turn in self._world.turns.items():
            if not turn.acquire(blocking=False):
                continue
            try:
                for each in HUBS if name == "centre" else (name,):
                    if self._world.condition(each) == "dead":
                        said = self._world.federation.log(each).strip().rpartition("\n")[2]
                        self.ended.append(f"{each}: {said[-300:]}")
                        self._world.kill(each)
                        self._world.start(each)
            finally:
                turn.release()

    def _operator(self) -> OperatorClient:
        port = self._world.ports[self._world.active()]
        return OperatorClient(f"127.0.0.1:{port}", self._world.folder / "olga")

    def _submit(self, case: str, request: str) -> str:
        with self._operator() as operator:
            return str(operator.submit(self.configs[case], self._models[case], request_id=request).id)

    def _initial(self, case: str) -> Path:
        file = self._world.folder / f"{case}.safetensors"
        save_model(file, initial_model(self.configs[case], load_task("toy.py", self._world.folder)))
        return file


def records_of(world: World, job: str) -> list[dict[str, Any]]:
    """The job's committed rounds, in order."""
    found = world.ask(f"SELECT record FROM rounds WHERE job = '{job}' ORDER BY round")
    return [json.loads(text) for (text,) in found]
