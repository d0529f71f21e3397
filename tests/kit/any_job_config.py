"""The agent.toml of silos for jobs that are drawn at random: called as simulated clients are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from any_job_task import PARAMETERS
from federation import NAMES, Federation, silo

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable, TaskTable

SILOS = 5
REGIONS = {"east": 3, "west": 2}
"""Relays, in the order of the silos' numbers, with how many silos each serves."""
NAMES_OF_TASKS = 1000
"""As many as a coordinator takes of a silo's: one for each job of a batch, and while one is made smaller."""


def table_at(folder: Path, place: int) -> dict[str, Any]:
    """How a silo's [data] describes its table."""
    columns: dict[str, Any] = {f"x{number}": {} for number in range(6)}
    return {"file": str(folder / f"people-{place}.csv"), "columns": columns}


def config_of(federation: Federation, place: int) -> AgentConfig:
    """A silo, whose credentials are there, that offers the task under a name for each job."""
    folder, name = federation[1], f"client-{place}"
    offered = TaskTable(use="toy.py:Toy", parameters=PARAMETERS)
    names = [f"toy{number}" for number in range(NAMES_OF_TASKS - 1)]
    return replace(
        silo(federation, NAMES[0]),
        credentials=folder / name,
        state=folder / "state" / name,
        metadata={"region": "ab"[place % 2]},
        data={"people": table_at(folder, place)},
        tasks={**dict.fromkeys(names, offered.use), "analysis": "analysis"},
        task_tables=dict.fromkeys(names, offered),
        policy=PolicyTable(public_evaluation=True, regional_models=list(REGIONS)),
    )
