"""`simulate`: a whole job on this machine, through the engine that runs in production."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ResourceError, TaskError
from roundtable.core.initial import initial_model
from roundtable.core.task import AnyTask, ArrayTask, Task, load_task
from roundtable.engine.messages import Note, RoundRecord, Step
from roundtable.engine.plan import make_plan
from roundtable.simulation.backend import World
from roundtable.simulation.choose import make_backend
from roundtable.simulation.config import check_population, devices_table
from roundtable.simulation.devices import Devices
from roundtable.simulation.driver import Checkpoint
from roundtable.simulation.fleet import Fleet
from roundtable.simulation.history import History
from roundtable.simulation.overlapping import driver_of
from roundtable.simulation.progress import Progress, Report, peak_memory
from roundtable.simulation.result import Result
from roundtable.simulation.rundir import RunDirectory
from roundtable.simulation.sequential import one_thread


def simulate(
    job: JobConfig | Path | str,
    task: AnyTask | type[Task] | type[ArrayTask] | None = None,
    *,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: Report | None = None,
    folder: Path | None = None,
    overrides: dict[str, Any] | None = None,
) -> Result:
    """Runs a job with simulated clients and gives its history and model.

    `job` is a job or the path of a job file (to which `overrides`, dotted keys, apply). `task` is
    the task, or its class; without it the job's `task` is loaded, relative to `folder` or to the
    job file. `run_dir` keeps everything on disk; with `resume` a run there goes on from its last
    committed round, and ends with the same bits as one that was never interrupted.

    Raises RoundtableError (ConfigError, TaskError, ...) for what can be known before round 1.
    """
    if isinstance(job, str | Path):
        path = Path(job)
        job, folder = load_job(path, overrides), folder or path.resolve().parent
    folder = folder or Path.cwd()
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        check_population(job)
        world = make_world(job, task, folder)
        layout = world.layout
        slices = tuple(place for _, place in layout.slices())
        plan = make_plan(job, job.simulation.clients, slices)
        devices = Devices(devices_table(job), job.simulation.clients, job.seed, folder)
        run = stack.enter_context(RunDirectory(Path(run_dir), job, resume)) if run_dir is not None else None
        backend, why = make_backend(world)
        stack.callback(backend.close)
        if run is not None:
            run.describe(_environment(backend.name, backend.description, why))
        listener = _Listener(job, run, progress)
        driver = driver_of(world, plan, backend, Fleet(world.names, devices), listener)
        if run is not None and (last := run.last(world.initial)) is not None:
            listener.seconds = list(last[1].seconds)
            driver.resume(last[0], last[1].records)
        driver.run()
        history = History(tuple(driver.history), tuple(listener.seconds))
        said = f"{backend.name}: {backend.description}; {why}"
        result = Result(
            job,
            history,
            driver.model,
            driver.status.status,
            driver.status.reason,
            said,
            run.path if run else None,
        )
        if run is not None:
            run.finish(history, driver.model)
            _plot_if_possible(result, run.path / "curves.png")
        return result


def make_world(job: JobConfig, task: AnyTask | type[Task] | type[ArrayTask] | None, folder: Path) -> World:
    """The job's task and initial model, and how other processes find the task."""
    if task is None:
        loaded = load_task(job.task, folder)
        return World(job, loaded, initial_model(job, loaded), (job.task, folder))
    made: AnyTask
    if isinstance(task, type):
        try:
            made = task()
        except Exception as error:
            raise TaskError(f"creating {task.__name__}() failed: {type(error).__name__}: {error}") from error
    else:
        made = task
    return World(job, made, initial_model(job, made), _reference(made))


def _reference(task: AnyTask) -> tuple[str, Path] | None:
    """How another process can make this object: by its class, if the class is all there is to it."""
    kind = type(task)
    if vars(task) or "<" in kind.__qualname__ or "." in kind.__qualname__:
        return None
    if kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}", Path.cwd()
    file = getattr(sys.modules["__main__"], "__file__", None)
    return (f"{Path(file).name}:{kind.__qualname__}", Path(file).resolve().parent) if file else None


class _Listener:
    """Passes on what happens: to the run directory, and to whoever watches."""

    def __init__(self, job: JobConfig, run: RunDirectory | None, report: Report | None) -> None:
        self._job = job
        self._run = run
        self._report = report
        self._begun = time.monotonic()
        self._new_rounds = 0
        self._round_begun = self._begun
        self.seconds: list[float | None] = []

    def committed(self, record: RoundRecord, checkpoint: Callable[[], Checkpoint]) -> None:
        now = time.monotonic()
        seconds, self._round_begun = now - self._round_begun, now
        self.seconds.append(seconds)
        self._new_rounds += 1
        if self._run is not None:
            self._run.commit(record, seconds, checkpoint())
        if self._report is not None:
            left = (now - self._begun) / self._new_rounds * (self._job.rounds - record.round)
            self._report(
                Progress(
                    "round",
                    record.round,
                    self._job.rounds,
                    record=record,
                    seconds_left=left,
                    memory=peak_memory(),
                )
            )

    def note(self, note: Note, now: float) -> None:
        if self._run is not None:
            self._run.note(note, now)
        if self._report is not None and note.kind != "update_received":
            self._report(Progress("note", note.round, self._job.rounds, note=note))

    def answered(self, step: Step, done: int, total: int) -> None:
        if self._report is not None:
            self._report(Progress("clients", step.round, self._job.rounds, step.phase, done, total))


def _environment(name: str, description: str, why: str) -> dict[str, Any]:
    return {
        "backend": name,
        "description": description,
        "reason": why,
        "python": sys.version,
        "torch": torch.__version__,
        "platform": platform.platform(),
        "machine": platform.processor() or platform.machine(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _plot_if_possible(result: Result, path: Path) -> None:
    try:
        result.plot(path)
    except ResourceError:
        # Without matplotlib a run has no picture; the table holds the same.
        return
