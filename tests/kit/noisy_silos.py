"""Silos whose analyses are answered under differential privacy, and what each sends of its table."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import NAMES, Federation, silo

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.client.training.silo_account import Protection, payment
from roundtable.client.worker.kept_release import KeptRelease
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.silo_tables import SiloTables
from roundtable.core.task import Site, load_task
from roundtable.operator import OperatorClient

SURVEY = """
table = "people"

[privacy]
epsilon = 0.4
delta = 1e-6

[columns.age]
least = 0
most = 120

[columns.ill]
kind = "category"
values = ["no", "yes"]

[[questions]]
name = "ages"
ask = "describe"
columns = ["age"]

[[questions]]
ask = "histogram"
column = "age"
by = "ill"

[[questions]]
name = "trees"
ask = "boosted_trees"
outcome = "ill"
on = ["age"]
cuts = "equal"
rounds = 2
"""


BEGAN = {"algorithm/seen": torch.ones(1)}
"""What a silo keeps of an analysis that it began: nothing of its rows."""


def write(folder: Path, asked: str = SURVEY) -> Path:
    """A survey beside the files of three silos; the last of each has a row that is none."""
    lines = [asked, "[silos]"]
    for place, name in enumerate(NAMES):
        ages = np.random.default_rng(place).integers(20, 90, 200)
        rows = [f"{age},{'yes' if age > 60 else 'no'}" for age in ages]
        (folder / f"{name}.csv").write_text("\n".join(["age,ill", *rows, "999,perhaps"]) + "\n")
        lines.append(f'{name} = "{name}.csv"')
    (folder / "survey.toml").write_text("\n".join(lines))
    return folder / "survey.toml"


def offering(federation: Federation, name: str, policy: PolicyTable) -> AgentConfig:
    data = {"people": {"file": f"{name}.csv"}}
    return replace(silo(federation, name), tasks={"analysis": "analysis"}, data=data, policy=policy)


def wait_for_silos(operator: OperatorClient) -> None:
    while sum(client.online for client in operator.clients()) < len(NAMES):
        time.sleep(0.01)


def answered(
    job: JobConfig, folder: Path, attempt: int, table: Path, round: int = 1, vector: Any = None
) -> Any:
    """What a silo sends in an attempt, as its training process makes it; its account is in `folder`."""
    name = "alder"
    task, algorithm = load_task("analysis", folder), make_algorithm(job.algorithm)
    model = initial_model(job, task)
    sent, kept = (model.vector, None) if vector is None else (vector, BEGAN)
    work = LocalWork(job, model.layout, sent, round, name, kept, algorithm, alone=True)
    protection = Protection(
        payment(folder / "privacy", "one-job", round, attempt, None, None),
        release=KeptRelease(folder / "jobs" / "one-job" / f"released-{round}.safetensors"),
    )
    data = task.data(Site(name, options={"people": {"file": str(table)}}))
    assert isinstance(data, SiloTables)
    return train(task, task.weights(), data, work, Execution(protection=protection))  # type: ignore[union-attr]
