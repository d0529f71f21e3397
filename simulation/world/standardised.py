"""Figures of `[standardise]` for a simulation: found by an analysis of the simulated silos' tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from roundtable.core.algorithms.analysis import answers_of
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError, RoundtableError
from roundtable.core.privacy_table import masking_of
from roundtable.core.tables.silo_tables import described_table, is_table
from roundtable.core.tables.standardise_table import KEY
from roundtable.engine.analysis_job import analysis_job
from roundtable.privacy.secagg import MINIMUM_COHORT


def with_answers(job: JobConfig, folder: Path) -> JobConfig:
    """The job with the figures in the file that it names as their source. ConfigError where they are not
    there."""
    table = job.standardise
    if table is None or table.answers is None:
        return job
    if table.complete:
        raise ConfigError("every column has mean and sd: leave answers out", key=(KEY, "answers"))
    return job.model_copy(update={"standardise": table.answered(folder)})


def standardise_job(job: JobConfig, silos: int, tables: tuple[Any, ...] = ()) -> JobConfig:
    """The analysis of so many silos that finds what the job's columns lack.

    Masked where there are silos enough, or where the job is, which then says itself how many it takes.
    Raises ConfigError for a column without a range.
    """
    table = job.standardise
    assert table is not None
    lacking = [name for name, column in table.columns.items() if column.mean is None]
    for name in lacking:
        if table.columns[name].least is None or table.columns[name].most is None:
            raise ConfigError(
                f"column {name!r} has neither mean and sd, nor least and most within which to look for them: "
                f"state its range ([{KEY}.columns.{name}]), or name the answers of an analysis",
                key=(KEY, "columns"),
            )
    masked = silos >= MINIMUM_COHORT
    if not masked and masking_of(job.privacy) is not None:
        raise ConfigError(
            f"the job is masked, and so is the analysis of its columns: that takes {MINIMUM_COHORT} silos, "
            f"and there are {silos}",
            key=(KEY,),
        )
    asked = {
        "table": table.table,
        "columns": {name: table.described[name].model_dump(mode="json") for name in lacking},
        "questions": [{"ask": "describe", "name": KEY, "columns": lacking}],
        "least_count": table.least_count,
    }
    return analysis_job(asked, silos, masked=masked, name=f"{table.table[:80]}.{KEY}", tables=tables)


def filled_from(job: JobConfig, analysis: JobConfig, vector: Tensor, where: str) -> JobConfig:
    """The job with the figures that the analysis has found, whose global vector this is."""
    table = job.standardise
    assert table is not None
    (answer,), silos = answers_of(analysis.algorithm, vector)
    if answer.why:
        raise ConfigError(f"[{KEY}]: {where} gave no figures: {answer.why}")
    figures = table.figures(answer.values, where)
    return job.model_copy(update={"standardise": table.filled(figures, f"{where}, {silos} silos")})


def standardised(job: JobConfig, folder: Path, run: Callable[[JobConfig], tuple[Tensor, str]]) -> JobConfig:
    """The job with all figures of its `[standardise]`; `run` simulates an analysis, and gives its global
    vector, and why it has failed, if it has.

    Raises ConfigError where they cannot be found, AggregationError where a silo does not answer.
    """
    job = with_answers(job, folder)
    table = job.standardise
    if table is None or table.complete:
        return job
    clients = job.simulation.clients
    analysis = standardise_job(job, clients, _tables(job, table.table, clients))
    fast = analysis.simulation.model_copy(update={"masking": "fast"})
    try:
        vector, why = run(analysis.model_copy(update={"simulation": fast}))
    except RoundtableError as error:
        vector, why = None, str(error)
    if vector is None or why:
        raise AggregationError(f"[{KEY}]: the clients' tables could not be described: {why}")
    return filled_from(job, analysis, vector, "an analysis of the simulated clients")


def _tables(job: JobConfig, name: str, clients: int) -> tuple[Any, ...]:
    value = job.simulation.data.get(name)
    described = list(value) if isinstance(value, list | tuple) else [value]
    if not all(map(is_table, described)):
        raise ConfigError(
            f"the simulation has no table {name!r}: describe one of each client as simulation.data.{name}, "
            'such as [{ file = "a.csv" }, { file = "b.csv" }]',
            key=("simulation", "data"),
        )
    if len(described) != clients:
        raise ConfigError(
            f"simulation.data.{name} has {len(described)} tables for {clients} clients: its figures would "
            "count rows of one table more than once; give a table for each client, or mean and sd",
            key=("simulation", "data"),
        )
    for each in described:
        described_table(name, each)
    return tuple(described)
