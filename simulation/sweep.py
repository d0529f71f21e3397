"""One job with different settings, one run after the other or side by side, and their comparison."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.paths import AnyPath
from roundtable.core.task import AnyTask, ArrayTask, Task, load_task, make_task
from roundtable.simulation.backends.carried_task import pack_task
from roundtable.simulation.parallel_runs import PlannedRun, run_side_by_side, threads_each
from roundtable.simulation.reporting.comparison import Comparison, Run, open_run
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.progress import Progress
from roundtable.simulation.simulate import simulate
from roundtable.simulation.world.simulated_clients import DATA_BUDGET

Overrides = Mapping[str, Any]


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of dotted keys; the last key varies fastest.

    Raises ConfigError for a key without values.
    """
    for key, values in axes.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f"sweep: {key} needs a list of values, for example [0.01, 0.1]; got {values!r}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def sweep(
    job: AnyPath,
    settings: Sequence[Overrides],
    folder: AnyPath,
    task: AnyTask | type[Task] | type[ArrayTask] | None = None,
    *,
    fixed: Overrides | None = None,
    at_once: int = 1,
    progress: Callable[[str, Progress], None] | None = None,
    done: Callable[[Run], None] | None = None,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Runs the job file once for each set of overrides, each in a run directory below `folder`.

    Called again after an interruption, it goes on where it stopped; runs that are done are not
    repeated. All settings are checked before the first run: ConfigError names the one that is wrong.
    `fixed` are settings of all runs, `names` the folders' names if not those of `run_names`. `progress` gets
    the run's name and what it says, `done` each run that has ended. A run that fails keeps none of the others
    from running: the comparison says why, under `failed`. With `at_once` above 1 so many run side by side,
    each in a process of its own, to the same bits, and `progress` hears nothing; a `task` that is given goes
    there by cloudpickle. The comparison is also written to `folder`.
    """
    folder = Path(folder)
    if at_once < 1:
        raise ConfigError(f"sweep: {at_once} runs at once; give at least 1")
    if not settings:
        raise ConfigError("sweep: nothing to vary; give at least one set of overrides")
    names = run_names(settings) if names is None else list(names)
    shared = {} if at_once == 1 else {"simulation.workers": threads_each(at_once)}
    settings = [{**shared, **(fixed or {}), **overrides} for overrides in settings]
    jobs: dict[str, JobConfig] = {}
    for name, overrides in zip(names, settings, strict=True):
        try:
            checked = jobs[name] = load_job(job, dict(overrides))
            if any(key.startswith("task.") for key in overrides):
                _check_task(checked.task, task, Path(job).resolve().parent)
        except ConfigError as error:
            raise ConfigError(f"sweep: run {name}: {error}") from None
    planned = [PlannedRun(n, o, folder / n) for n, o in zip(names, settings, strict=True)]
    runs: dict[str, Run] = {}

    def ended(plan: PlannedRun, error: str, refused: bool) -> None:
        runs[plan.name] = run = _ended(plan, jobs[plan.name], error, refused)
        if done is not None:
            done(run)

    if at_once > 1:
        packed = None if task is None else _packed(task, DATA_BUDGET // at_once)
        run_side_by_side(Path(job).resolve(), planned, at_once, ended, packed)
    else:
        for plan in planned:
            report = None if progress is None else _named(progress, plan.name)
            failure: RoundtableError | None = None
            try:
                simulate(
                    job,
                    task,
                    overrides=dict(plan.overrides),
                    run_dir=plan.folder,
                    resume=True,
                    progress=report,
                )
            except RoundtableError as raised:
                failure = raised
            ended(plan, str(failure or ""), isinstance(failure, ConfigError))
    comparison = Comparison(tuple(runs[name] for name in names))
    comparison.to_csv(folder / "comparison.csv")
    return comparison


def _ended(plan: PlannedRun, job: JobConfig, error: str, refused: bool) -> Run:
    """What a run has left. One that was refused has no rounds, whatever its folder holds."""
    if error and (refused or not (plan.folder / "job.json").exists()):
        return Run(plan.name, json.loads(job.to_json()), History((), ()), error)
    run = open_run(plan.folder)
    return replace(run, failed=error or run.failed)


def _packed(task: AnyTask | type[Task] | type[ArrayTask], most: int) -> bytes:
    """A task that only this process has, for the processes of the runs."""
    try:
        return pack_task(task, most)
    except ConfigError as error:
        raise ConfigError(
            f"sweep: at_once above 1 runs processes: {error}; or name the task in the job, or run one after "
            "the other"
        ) from error


def _check_task(
    table: JobTaskTable, task: AnyTask | type[Task] | type[ArrayTask] | None, folder: Path
) -> None:
    """Makes the task once; ConfigError for parameters that it does not take."""
    if task is None:
        load_task(table.name, folder, parameters=table.parameters)
    else:
        make_task(table.name, task, table.parameters)


def run_names(settings: Sequence[Overrides], width: int = 0) -> list[str]:
    """A folder's name for each run: its number, of at least so many digits, and its settings, in characters
    that all systems take."""
    width, names = max(width, len(str(len(settings)))), []
    for number, overrides in enumerate(settings, start=1):
        settings_text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items())
        plain = re.sub(r"[^A-Za-z0-9=.,_-]+", "_", settings_text)[:80].strip("_")
        names.append(f"{number:0{width}d}-{plain}")
    return names


def _named(progress: Callable[[str, Progress], None], name: str) -> Callable[[Progress], None]:
    return lambda event: progress(name, event)
