"""`simulate`: a whole job on this machine, through the engine that runs in production."""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor

from roundtable.client.first_batch.oddities import STATE, Oddity
from roundtable.client.training.batches import count_examples
from roundtable.client.training.private_training import CANNOT_SAMPLE
from roundtable.client.training.task_composition import check_task_with
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig, job_document, override_job, read_job
from roundtable.core.errors import ConfigError, PrivacyError, ResourceError, RoundtableError
from roundtable.core.initial_model import initial_model, travel_note, whole_model
from roundtable.core.models import Model
from roundtable.core.observability.tracking import TrackedRun, Trackers, check_trackers
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.folder_imports import file_of
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import AnyTask, ArrayTask, Task, load_task, make_task
from roundtable.core.toml import with_place
from roundtable.engine.messages import Note, RoundRecord, Step
from roundtable.engine.validation.feasibility import check_budget, check_device, check_rule
from roundtable.engine.validation.layout_composition import check_layout
from roundtable.engine.validation.round_plan import aggregation_config, make_plan, weak_signal_of
from roundtable.engine.validation.standardise_composition import check_standardise
from roundtable.engine.validation.transfer_composition import check_cohort_is_all
from roundtable.simulation.backend import Backend, Work, World
from roundtable.simulation.backends.processes import Processes
from roundtable.simulation.backends.sequential import one_thread
from roundtable.simulation.checkpoint import Checkpoint
from roundtable.simulation.choose_backend import make_backend, without_carrying
from roundtable.simulation.client_ranks import with_ranks
from roundtable.simulation.cross_site import check_cross_site
from roundtable.simulation.cross_site import cross_site as measure_cross_site
from roundtable.simulation.driver import Driver
from roundtable.simulation.first_trial import first_oddities
from roundtable.simulation.reporting.comparison import flat
from roundtable.simulation.reporting.cross_table import CrossTable
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.kept_models import Keeper
from roundtable.simulation.reporting.notebook import notebook_report
from roundtable.simulation.reporting.progress import Progress, Report
from roundtable.simulation.reporting.result import Result
from roundtable.simulation.reporting.run_directory import QUIET, RunDirectory
from roundtable.simulation.reporting.usage import Meter
from roundtable.simulation.world.central_test import CentralTest
from roundtable.simulation.world.config import check_population, devices_table
from roundtable.simulation.world.declared import Declared
from roundtable.simulation.world.devices import Devices
from roundtable.simulation.world.fleet import Fleet
from roundtable.simulation.world.natural_names import NaturalNames, natural_names
from roundtable.simulation.world.partition import SeededPartition, make_partition
from roundtable.simulation.world.regions import Regions, check_regions
from roundtable.simulation.world.simulated_clients import Clients
from roundtable.simulation.world.standardised import standardised
from roundtable.simulation.world.tables_check import check_tables


def simulate(
    job: JobConfig | AnyPath,
    task: AnyTask | type[Task] | type[ArrayTask] | None = None,
    *,
    run_dir: AnyPath | None = None,
    resume: bool = False,
    progress: Report | Literal[False] | None = None,
    folder: AnyPath | None = None,
    overrides: Mapping[str, Any] | None = None,
    cross_site: bool = False,
) -> Result:
    """Runs a job with simulated clients and gives its history and model.

    `job` is a job or the path of a job file; `overrides` maps dotted keys to values and wins. `task` is
    the task, or its class; without it the job's `task` is loaded, relative to `folder` or to the
    job file. `run_dir` keeps everything on disk; with `resume` a run there goes on from its last
    committed round, and ends with the same bits as one that was never interrupted. `progress` is told of
    clients and rounds; without it a notebook shows a bar, with False nothing. `cross_site` measures, at the
    end, the model and each client's own at all clients.

    Raises RoundtableError (ConfigError, TaskError, ...) for what can be known before round 1.
    """
    with ExitStack() as stack:
        if isinstance(job, JobConfig):
            beside, job = Path.cwd(), override_job(job, overrides)
        else:
            beside, document = Path(job).resolve().parent, job_document(job, overrides)
            job = read_job(document, beside)
            stack.enter_context(with_place(document))
        folder = beside if folder is None else Path(folder)
        stack.enter_context(one_thread())
        check_standardise(job, aggregation_config(job.aggregation, folder))
        job = standardised(job, folder, _analysed)
        check_population(job)
        check_tables(job, folder)
        check_trackers(job.tracking)
        world = make_world(job, task, folder)
        layout = world.layout
        slices = tuple(place for _, place in layout.sent.slices())
        plan = make_plan(job, job.simulation.clients, slices, folder=folder).over(layout)
        check_layout(job, layout, folder)
        check_cohort_is_all(job, job.simulation.clients)
        check_regions(job, world.algorithm)
        world.algorithm.check_clients(world.names)
        check_rule(job, plan, job.simulation.clients)
        check_budget(plan)
        check_device(plan)
        check_task_with(job, world.algorithm, world.task, layout)
        central = CentralTest(world)
        if cross_site:
            check_cross_site(world)
        weak = weak_signal_of(job, plan, job.simulation.clients, layout.sent.size)
        devices = Devices(devices_table(job), job.simulation.clients, job.seed, folder)
        if job.transfer.automatic and not devices.upload_takes_time:
            raise ConfigError(
                'transfer.up = "auto" in a simulation: encodings are chosen by how fast clients upload; set '
                "simulation.devices.upload, or give it in the trace, or name an encoding"
            )
        declared = Declared(job, devices, Clients(world, budget=1).data)
        partition = make_partition(job.simulation.partition, job.seed, folder)
        world, ranked = with_ranks(world, declared, partition)
        run = stack.enter_context(RunDirectory(Path(run_dir), job, resume)) if run_dir is not None else None
        backend, why = make_backend(world)
        stack.callback(lambda: backend.close())
        _check_samples(world, backend)
        odd = first_oddities(world, partition, backend.count if isinstance(backend, Processes) else 1)
        if any(each.about == STATE for each in odd):
            backend, why = without_carrying(world, backend, why)
        if run is not None:
            run.describe(_environment(backend.name, backend.description, why))
        trackers = _trackers(job, run, folder, resume=resume)
        stack.callback(trackers.close, finished=False)
        keeper = Keeper(job, world.initial, run)
        report = notebook_report() if progress is None else progress or None
        listener = _Listener(job, run, report, trackers, keeper)
        regions = Regions.of(world)
        for note in _told_first(job, weak, travel_note(job, layout), declared.overlooked(), regions, ranked):
            listener.note(note, 0.0)
        driver = Driver(world, plan, backend, Fleet(world.names, declared), listener, central)
        if run is not None and (last := run.last(world.initial)) is not None:
            listener.names = run.named_clients()
            listener.taken_up(last[1])
            driver.resume(last[0], last[1].records)
        else:
            _tell_first(world, listener, run, partition, odd)
        driver.run()
        history = History(tuple(driver.history), tuple(listener.seconds))
        models = keeper.models(len(history), partial(whole_model, job, world.task))
        model = models[keeper.best.round if keeper.best else len(history)]
        how = f"{backend.name} ({why}), {backend.description}"
        result = Result(
            job,
            history,
            model,
            driver.status.status,
            driver.status.reason,
            how,
            run.path if run else None,
            keeper.best,
            models,
            _crossed(driver, keeper.given(len(history)), backend, listener.names)
            if cross_site and history.records
            else None,
            listener.names,
        )
        trackers.close(finished=True)
        if run is not None and history.records:
            run.finish(history, model)
            if result.cross_site is not None:
                result.cross_site.to_csv(run.path / "cross_site.csv")
                _plot_if_possible(result.cross_site, run.path / "cross_site.png")
            if result.clients.rows:
                result.clients.to_csv(run.path / "clients.csv")
            _plot_if_possible(result, run.path / "curves.png")
        return result


def _analysed(analysis: JobConfig) -> tuple[Tensor, str]:
    found = simulate(analysis, progress=False)
    return found.model.vector, "" if found.status == "finished" else found.reason


def _tell_first(
    world: World,
    listener: _Listener,
    run: RunDirectory | None,
    partition: SeededPartition,
    odd_task: Sequence[Oddity],
) -> None:
    """What one batch of one client showed to be odd, and what the clients are called."""
    names = world.names
    listener.names, nameless = natural_names(world.task, names, partition.names(len(names)))
    if run is not None:
        run.name_clients(listener.names)
    for odd in odd_task:
        listener.note(Note("odd_task", f"warning: {odd.says}"), 0.0)
    if nameless:
        listener.note(Note("nameless_clients", f"warning: {nameless}"), 0.0)


def _told_first(
    job: JobConfig,
    weak: str | None,
    stays: str | None,
    overlooked: Sequence[str],
    regions: Regions | None,
    ranked: str,
) -> Iterator[Note]:
    """What is said of the job before round 1."""
    if job.standardise is not None and job.standardise.source:
        yield Note("standardised", f"columns are standardised by {job.standardise.source}")
    if weak is not None:
        yield Note("weak_signal", f"warning: {weak}")
    if stays:
        yield Note("frozen_weights", stays)
    if regions is not None:
        yield Note("regions", regions.described())
    if ranked:
        yield Note("client_ranks", ranked)
    if overlooked:
        said = f"warning: no simulated client states {', '.join(overlooked)}: taken as had by all"
        yield Note("resources_overlooked", said)


def _check_samples(world: World, backend: Backend) -> None:
    """Raises PrivacyError where the first client's data are a stream and the job's privacy samples from them.

    What a client cannot load is that client's failure, in its round.
    """
    if not isinstance(world.job.privacy, ExampleLevel) or world.job.releases_sums:
        return
    try:
        first = Work(world.names[0], 0)
        stream = backend.examples([first]) == [None] and count_examples(Clients(world).data(0)[0]) is None
    except RoundtableError:
        return
    if stream:
        raise PrivacyError(CANNOT_SAMPLE)


def _trackers(job: JobConfig, run: RunDirectory | None, folder: Path, *, resume: bool) -> Trackers:
    """The job's `[tracking]`; a run without a folder is a new one each time."""
    when = time.strftime("%Y%m%d-%H%M%S")
    name = run.path.name if run else f"{job.title.replace('/', '.')}-{when}"
    place = str(run.path.resolve()) if run else f"{os.getpid()}.{time.time_ns()}"
    key = blake3(place.encode()).hexdigest(length=8)
    settings = flat(job.model_dump(mode="json", exclude_defaults=True))
    tracked = TrackedRun(job.title, name, key, settings, goes_on=resume)
    return Trackers(job.tracking, folder, tracked, lambda warning: warnings.warn(warning, stacklevel=2))


def make_world(job: JobConfig, task: AnyTask | type[Task] | type[ArrayTask] | None, folder: Path) -> World:
    """The job's task and initial model, and how other processes find the task."""
    algorithm = make_algorithm(job.algorithm, folder)
    if task is None:
        loaded = load_task(job.task.name, folder, parameters=job.task.parameters)
        return World(job, loaded, initial_model(job, loaded, algorithm), (job.task.name, folder), folder)
    made = make_task(job.task.name, task, job.task.parameters)
    recipe = _reference(type(made)) if isinstance(task, type) or not vars(made) else None
    return World(job, made, initial_model(job, made, algorithm), recipe, folder)


def _reference(kind: type[AnyTask]) -> tuple[str, Path] | None:
    """How another process can make an object of this class, of the job's parameters."""
    if "<" in kind.__qualname__ or "." in kind.__qualname__:
        return None
    if beside := file_of(kind.__module__):
        return f"{beside.name}:{kind.__qualname__}", beside.parent
    if kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}", Path.cwd()
    file = getattr(sys.modules["__main__"], "__file__", None)
    return (f"{Path(file).name}:{kind.__qualname__}", Path(file).resolve().parent) if file else None


class _Listener:
    """Passes on what happens: to the run directory, to trackers, and to whoever watches."""

    def __init__(
        self,
        job: JobConfig,
        run: RunDirectory | None,
        report: Report | None,
        trackers: Trackers,
        keeper: Keeper,
    ) -> None:
        self._job = job
        self._keeper = keeper
        self._trackers = trackers
        self._run = run
        self._report = report
        self._meter = Meter()
        self._begun = time.monotonic()
        self._new_rounds = 0
        self._round_begun = self._begun
        self.seconds: list[float | None] = []
        self.names = NaturalNames()

    def taken_up(self, history: History) -> None:
        """A run goes on: trackers hear what they may have missed."""
        self.seconds = list(history.seconds)
        self._keeper.taken_up(history)
        for record, row in zip(history.records, history, strict=True):
            self._trackers.log(record.round, row)

    def committed(self, record: RoundRecord, model: Model, checkpoint: Callable[[], Checkpoint]) -> None:
        now = time.monotonic()
        seconds, self._round_begun = now - self._round_begun, now
        self.seconds.append(seconds)
        self._new_rounds += 1
        best = self._keeper.committed(record, model)
        if self._run is not None:
            self._run.commit(record, seconds, checkpoint(), best)
        self._trackers.log(record.round, History((record,), (seconds,))[0])
        if self._report is not None:
            left = (now - self._begun) / self._new_rounds * (self._job.rounds - record.round)
            self._report(
                Progress(
                    "round",
                    record.round,
                    self._job.rounds,
                    record=record,
                    model=model,
                    seconds_left=left,
                    usage=self._meter.look(),
                )
            )

    def note(self, note: Note, now: float) -> None:
        if (said := self.names.said(note.message)) != note.message:
            note = replace(note, message=said)
        if self._run is not None:
            self._run.note(note, now, self.names)
        if self._report is not None and note.kind not in QUIET:
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


def _crossed(driver: Driver, model: Model, backend: Backend, names: NaturalNames) -> CrossTable:
    world, made = driver.world, int(model.metadata.get("round", 0))
    return measure_cross_site(world, backend, model.vector, made + 1, driver.work_of_all(), names)


def _plot_if_possible(result: Result | CrossTable, path: Path) -> None:
    try:
        result.plot(path)
    except ResourceError:
        # Without matplotlib a run has no picture; the table holds the same.
        return
