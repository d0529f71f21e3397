"""All pages of the reference, by file name below docs/reference/. They are made before the site is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import get_args

from handbook import code_reference as of_code
from handbook.table_reference import cell, document_page, keys, table_page
from roundtable.client.policy.config import AgentTable
from roundtable.client.policy.health_table import HealthTable
from roundtable.client.policy.policy_table import TaskTable
from roundtable.core.algorithms.known_algorithms import BUILTINS, FACTORED
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.core.tables.table_description import ColumnTable
from roundtable.relay.config import RelayTable
from roundtable.server.auth.quotas import QuotaTable
from roundtable.server.config import RootTable, ServerConfig
from roundtable.server.queue.queue_rules import ProjectTable


def job_file() -> list[str]:
    """job.toml, with the keys of every algorithm and every level of privacy."""
    about = (
        "For whoever writes jobs: every key with what it is for. `roundtable job show --resolved job.toml` "
        "prints your own file with every value in force; `--set table.key=value` overrides one."
    )
    lines = document_page("The job file", about, JobConfig)
    lines += [
        "## Keys of single algorithms",
        "",
        "Beside those of `[algorithm]`, with the algorithm of that name.",
        "",
    ]
    for name, algorithm in {**BUILTINS, **FACTORED}.items():
        own = [key.name for key in keys(algorithm.Table) if key.name not in AlgorithmTable.model_fields]
        if own:
            rows = table_page("algorithm", algorithm.Table, f'`name = "{name}"`', 3)
            lines += [row for row in rows if not _is_row(row) or row.split("`")[1] in own]
    lines += ["## Levels of privacy", "", "What `[privacy]` takes at each `level`.", ""]
    for level in (NoPrivacy, *get_args(Private)):
        (name,) = get_args(level.model_fields["level"].annotation)[:1]
        lines += table_page("privacy", level, f'`level = "{name}"`', 3)
    return lines


def survey_file() -> list[str]:
    """survey.toml: the columns and each kind of question."""
    about = "What `roundtable analyse` reads. A tour is in [analyses](../analytics.md)."
    lines = ["# The survey", "", about, "", *table_page("columns.NAME", ColumnTable)]
    for question in get_args(get_args(AnyQuestion)[0]):
        (ask,) = get_args(question.model_fields["ask"].annotation)
        lines += table_page("question", question, f'`ask = "{ask}"`')
    return lines


def agent_file() -> list[str]:
    """agent.toml."""
    about = "For a silo's administrator: what `roundtable client --config agent.toml` reads."
    lines = document_page("The agent's file", about, AgentTable)
    return [*lines, *table_page("tasks.NAME", TaskTable), *table_page("health", HealthTable, "`[[health]]`")]


def coordinator_file() -> list[str]:
    """coordinator.toml and relay.toml."""
    about = "For the operator: what `roundtable server --config coordinator.toml` reads."
    lines = document_page("The coordinator's file", about, ServerConfig)
    lines += [*table_page("projects.NAME", ProjectTable), *table_page("root_data.NAME", RootTable)]
    lines += table_page("quotas", QuotaTable) if "## `[quotas]`" not in lines else []
    return lines


def relay_file() -> list[str]:
    """relay.toml."""
    return document_page(
        "The relay's file", "For a region's relay: what `roundtable relay` reads.", RelayTable
    )


def metrics_of_tasks() -> list[str]:
    """`rt.metrics`, which are no table of a file."""
    from roundtable.core import measures

    lines = [
        "# Metrics of tasks",
        "",
        "What `rt.metrics` has for a task's `metrics()`.",
        "",
        "| name | what it is |",
    ]
    lines.append("| --- | --- |")
    for name in measures.__all__:
        told = inspect.getdoc(getattr(measures, name)) or ""
        lines.append(f"| `rt.metrics.{name}` | {cell(told.split(chr(10) * 2)[0])} |")
    return [*lines, ""]


PAGES: Mapping[str, Callable[[], list[str]]] = {
    "job-file.md": job_file,
    "survey-file.md": survey_file,
    "agent-file.md": agent_file,
    "coordinator-file.md": coordinator_file,
    "relay-file.md": relay_file,
    "commands.md": of_code.commands_page,
    "python.md": of_code.python_page,
    "task-metrics.md": metrics_of_tasks,
    "events.md": of_code.events_page,
    "metrics.md": of_code.metrics_page,
    "errors.md": of_code.errors_page,
    "wire.md": of_code.wire_page,
}


def _is_row(line: str) -> bool:
    return line.startswith("| `")
