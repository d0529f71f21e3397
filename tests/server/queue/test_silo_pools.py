"""What a pool of silos has to do by the queue of jobs, and that a coordinator's command hears it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.config import JobConfig
from roundtable.server import ServerConfig
from roundtable.server.queue.silo_pools import SiloPoolTable, load_of
from roundtable.server.queue.standing import Contender
from roundtable.server.store import AgentRow

POOL = {"command": ["scale"], "most": 9, "tasks": ["t"], "labels": {"pool": "cloud"}}


def silo(name: str, **metadata: str) -> AgentRow:
    return AgentRow(name, "v", ("t",), metadata, (), 0.0, 0.0)


def waiting(name: str, silos: str, least: int, **changes: Any) -> Contender:
    plain = {"project": "p", "priority": 0, "since": 10.0, "turn": False, "demand": {"jobs": 1.0}}
    return Contender(
        job=name, name=name, silos=frozenset(silos), there=0, least=least, **{**plain, **changes}
    )


def job(**changes: Any) -> JobConfig:
    return JobConfig.model_validate({"task": "t", **changes})


def test_a_pool_lacks_what_jobs_wait_for_that_its_silos_would_help() -> None:
    pool = SiloPoolTable.model_validate({**POOL, "gpus": 1})
    own, cloud = [silo("h"), silo("i")], [silo("a", pool="cloud"), silo("b", pool="cloud")]
    running_job = waiting("r", "ha", 2, turn=True)
    first = waiting("f", "hiab", 4, since=20.0)
    jobs = [(running_job, job()), (first, job(resources={"gpus": 1}))]
    load = load_of(pool, jobs, [*own, *cloud], 50.0)
    # i and b are free and wait for the other two.
    assert (load.busy, load.lacking, load.waited, load.told["idle"]) == (2, 2, 30.0, [])
    assert load.told["waiting"][0] | {"labels": {}} == {
        **{"job": "f", "name": "f", "project": "p", "waited": 30.0, "silos": 4, "lacking": 2},
        **{"gpus": 1, "memory": 0, "disk": 0, "labels": {}},
    }
    for contender, of in (
        (first, job(resources={"gpus": 2})),
        (first, job(resources={"labels": {"pool": "other"}})),
        (first, job(task="u")),
        (waiting("f", "hiab", 4, blocked="held by olga"), job()),
        (waiting("f", "hiab", 4, earliest=60.0), job()),
    ):
        assert load_of(pool, [(running_job, job()), (contender, of)], [*own, *cloud], 50.0).lacking == 0
    # Silos of nobody's pool are taken first: the pool's own may then go.
    load = load_of(pool, [(waiting("f", "hiab", 2), job())], [*own, *cloud], 50.0)
    assert (load.busy, load.lacking, load.told["idle"]) == (0, 0, ["a", "b"])


SCALE = """
import json, pathlib, sys
asked = json.load(sys.stdin)
with pathlib.Path(sys.argv[1]).open("a") as log:
    log.write(json.dumps(asked) + "\\n")
if asked["nodes"] == 2:
    sys.exit("no quota")
json.dump({"nodes": 0}, sys.stdout)
"""
ALERT = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"


async def test_a_job_that_waits_for_silos_has_them_started_and_failures_are_told(
    settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    asked, alert = tmp_path / "asked", tmp_path / "alert"
    command = [sys.executable, "-c", SCALE, str(asked)]
    rules = {**POOL, "labels": {}, "command": command, "every": 1.0, "up_after": 0.0}
    alerts = {"command": [sys.executable, "-c", ALERT, str(alert)]}
    async with (
        running(settings(pools={"cloud": rules}, alerts=alerts)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
    ):
        made = await operator.submit("[cohort]\nsize = 2\n[evaluation]\nevery = 0\n", rounds=1)
        async with asyncio.timeout(20):
            while not alert.exists() or not alert.read_text():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.1)
        told = json.loads(alert.read_text())
        assert (told["kind"], "ended with status 1: no quota" in told["message"]) == ("autoscaler", True)
        last = json.loads(asked.read_text().splitlines()[-1])
        assert (last["nodes"], last["load"]["waiting"][0]["job"]) == (2, made.id)
        # It fails and fails, and holds nobody up.
        async with (
            ScriptedAgent(coordinator.port, certificates / "alder") as alder,
            ScriptedAgent(coordinator.port, certificates / "birch") as birch,
        ):
            for agent in (alder, birch):
                await agent.answer(await agent.expect("instruction"), torch.ones(4))
            await operator.watch_until(made.id, "finished")
