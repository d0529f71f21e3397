"""The verdict on a chaos run finds what it is there for: faults are planted into what a sound run left."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from chaos_jobs import Submitted, configured
from chaos_verdict import Judge
from constant_trainer import Constant
from federation import NAMES, federation_of, silo
from unvarying import unvaried

from roundtable.client.agent.agent import Agent
from roundtable.client.agent.silo_log import NAME
from roundtable.core import JobConfig, Layout, Model, save_model
from roundtable.core.identity.credentials import issue
from roundtable.operator import OperatorClient

CASES = ("fedadam", "client")


class Ended:
    """What the verdict asks of a world in which all has ended; its database is a copy, to be changed."""

    def __init__(self, address: str, folder: Path) -> None:
        self.folder, self.silos = folder, NAMES
        self.ports = {"hub": int(address.rpartition(":")[2])}
        self.database = f"sqlite:///{folder / 'coordinator.db'}"
        self.told: dict[str, list[tuple[str, int, int]]] = {}
        self.said: dict[str, str] = {}
        self.federation = SimpleNamespace(log=lambda name: self.said.get(name, ""))
        self.copy = sqlite3.connect(":memory:", check_same_thread=False)
        with closing(sqlite3.connect(folder / "coordinator.db")) as source:
            source.backup(self.copy)

    def active(self) -> str:
        return "hub"

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self.copy.execute(query).fetchall()

    def deliveries(self, silo: str) -> list[tuple[str, int, int]]:
        return self.told[silo]

    def state_of(self, silo: str) -> Path:
        return self.folder / "state" / silo


Plant = Callable[[Ended, str], None]


def submitted(address: str, folder: Path, configs: dict[str, JobConfig]) -> list[Submitted]:
    """Each case twice, to its end; the first of each pair is the undisturbed one."""
    save_model(folder / "initial.safetensors", Model(Layout.of({"w": torch.zeros(4)}), torch.zeros(4)))
    with OperatorClient(address, folder / "olga") as operator:
        jobs = [
            Submitted(case, str(operator.submit(configs[case], folder / "initial.safetensors").id))
            for _ in range(2)
            for case in CASES
        ]
        for each in jobs:
            for _ in operator.watch(each.job):
                pass
    return jobs


@asynccontextmanager
async def ended(folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A sound run's world and jobs, with a coordinator that still answers."""
    async with AsyncExitStack() as stack:
        stack.enter_context(unvaried("coordinator"))
        address, _ = await stack.enter_async_context(federation_of(folder, "", keep_updates=100))
        issue(folder / "ca", "olga", "operator", folder / "olga")
        (folder / "hub.toml").write_text(
            f'listen = "{address}"\nstate = "{folder / "server"}"\nartifacts = "{folder / "artifacts"}"\n'
            f'credentials = "{folder / "coordinator"}"\n'
        )
        running = [Agent(silo((address, folder), name), Constant()) for name in NAMES]
        tasks = [asyncio.create_task(agent.run()) for agent in running]
        configs = {case: configured(SimpleNamespace(silos=NAMES), case) for case in CASES}  # type: ignore[arg-type]
        jobs = await asyncio.to_thread(submitted, address, folder, configs)
        for agent in running:
            agent.stop()
        await asyncio.gather(*tasks)
        world = Ended(address, folder)
        world.told = {
            name: world.ask(f"SELECT job, round, attempt FROM updates WHERE client = '{name}'")
            for name in NAMES
        }
        undisturbed = {each.case: each.job for each in jobs[: len(CASES)]}
        yield world, SimpleNamespace(submitted=jobs[len(CASES) :], undisturbed=undisturbed, configs=configs)


def changed(world: Ended, job: str, round: int, change: Callable[[dict[str, Any]], None]) -> None:
    [(text,)] = world.ask(f"SELECT record FROM rounds WHERE job = '{job}' AND round = {round}")
    record = json.loads(text)
    change(record)
    place = (json.dumps(record), job, round)
    world.copy.execute("UPDATE rounds SET record = ? WHERE job = ? AND round = ?", place)


def another_model(world: Ended, job: str) -> None:
    [(text,)] = world.ask(f"SELECT record FROM rounds WHERE job = '{job}' AND round = 1")
    changed(world, job, 2, lambda record: record.update(model=json.loads(text)["model"]))


def lost_charge(world: Ended, job: str) -> None:
    world.copy.execute("DELETE FROM ledger WHERE job = ? AND round = 3", (job,))


def doubled_update(world: Ended, job: str) -> None:
    changed(world, job, 2, lambda record: record["contributors"].append(record["contributors"][0]))


def counted_in_two_rounds(world: Ended, job: str) -> None:
    changed(world, job, 3, lambda record: record["staleness"].update(birch=1))


def lost_update(world: Ended, job: str) -> None:
    world.copy.execute("DELETE FROM updates WHERE job = ? AND round = 1 AND client = 'birch'", (job,))


def uncounted_update(world: Ended, job: str) -> None:
    changed(world, job, 4, lambda record: record["contributors"].remove("cedar"))


def lost_round(world: Ended, job: str) -> None:
    world.copy.execute("DELETE FROM rounds WHERE job = ? AND round = 4", (job,))


def lost_proofs(world: Ended, job: str) -> None:
    log = world.state_of("alder") / NAME
    log.write_text("".join(line for line in log.read_text().splitlines(True)[:5] if '"seal"' not in line))


def traceback(world: Ended, job: str) -> None:
    world.said["birch"] = 'Traceback (most recent call last):\n  File "x", line 1\nKeyError: 17\n'


FOUND: list[tuple[str, Plant, str]] = [
    ("client", another_model, "client JOB: round 2: the model is not the undisturbed run's"),
    ("fedadam", another_model, "fedadam JOB: round 2: the model is not the undisturbed run's"),
    (
        "client",
        lost_charge,
        "client JOB: charged [(1, 1), (2, 1), (4, 1)], released",
    ),
    ("fedadam", doubled_update, "fedadam JOB: round 2 counts a silo twice"),
    ("fedadam", counted_in_two_rounds, "fedadam JOB: (2, 'birch') is in 2 models"),
    ("fedadam", lost_update, "birch JOB 1.1: acknowledged, and no row"),
    ("fedadam", uncounted_update, "cedar JOB 4.1: acknowledged, and not counted"),
    ("client", lost_round, "client JOB: its rounds are [1, 2, 3]"),
    ("fedadam", traceback, "birch: 1 times KeyError: #"),
    ("fedadam", lost_proofs, "alder: job JOB, round 4, attempt 1: the coordinator counts an update"),
]


async def test_each_planted_fault_is_found_and_named(tmp_path: Path) -> None:
    async with ended(tmp_path) as (world, jobs):
        verdict = await asyncio.to_thread(lambda: Judge(world, jobs).judge())
        assert verdict.wrong == []
        assert (verdict.rounds, verdict.acknowledged, verdict.charged, verdict.audited) == (8, 24, 4, 4)
        job = {each.case: each.job for each in jobs.submitted}
        for case, plant, _ in FOUND:
            plant(world, job[case])
        verdict = await asyncio.to_thread(lambda: Judge(world, jobs).judge())
        for case, plant, words in FOUND:
            named = [found for found in verdict.wrong if words.replace("JOB", job[case]) in found]
            assert named, f"{plant.__name__}: {verdict.wrong}"
