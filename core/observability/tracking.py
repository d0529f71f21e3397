"""A run's figures in the tools that people already watch: TensorBoard, MLflow, Weights & Biases.

Each is one small class behind `Tracker`, and needs an extra of its own; a job names them in
`[tracking]`. Everything stays in a folder: nothing is sent anywhere unless MLflow is given a server's
address. A tool that fails is given up, with a word to whoever listens: no training stops for a picture.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, Protocol

from roundtable.core.config import TrackingTable
from roundtable.core.errors import ConfigError, ResourceError, RoundtableError, StorageError

_HIDDEN_NAMES = ("round", "attempt")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker calls a run: `key` finds it again, `name` is for people, `job` groups runs.

    `goes_on`: what an earlier process wrote of it stays, or it begins anew in the place of one of that name.
    `always` is a figure that each of its rows has.
    """

    job: str
    name: str
    key: str
    settings: Mapping[str, Any]
    goes_on: bool = True
    always: str = "clients"


class Tracker(Protocol):
    """Where figures go. Its methods raise StorageError where they cannot."""

    @property
    def last(self) -> int:
        """The last round that it has; rounds up to it need not be told again."""

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Takes a round's figures."""

    def close(self, finished: bool) -> None:
        """The run has ended, or is interrupted."""


class Trackers:
    """All that a job asks for. None of them ever raises here; `complain` hears why one was given up."""

    def __init__(
        self,
        table: TrackingTable,
        folder: Path,
        run: TrackedRun,
        complain: Callable[[str], None],
        key: str = "tracking",
    ) -> None:
        """`key` is the table's in a file of users.

        Raises ResourceError, naming the extra, for a tool that is not installed, and StorageError for a place
        that cannot be used.
        """
        self._complain = complain
        self._key = key
        self._open = {name: make(value, folder, run) for name, value, make in _wanted(table)}

    def log(self, round: int, figures: Mapping[str, float | None]) -> None:
        """Tells everybody who does not know it."""
        known = {name: float(value) for name, value in figures.items() if value is not None}
        shown = {name: value for name, value in known.items() if name not in _HIDDEN_NAMES}
        for name, tracker in list(self._open.items()):
            if round > tracker.last:
                with self._giving_up(name):
                    tracker.log(round, shown)

    def close(self, finished: bool) -> None:
        """The run has ended, or is interrupted."""
        for name, tracker in list(self._open.items()):
            with self._giving_up(name):
                tracker.close(finished)
        self._open.clear()

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._open.pop(name, None)
            self._complain(f"{self._key}.{name} is given up: {error}")


class BackgroundTrackers:
    """Trackers in a thread of their own: a slow disk or server holds up nobody. No method raises.

    With `most`, what comes faster than it is written is left out while so many rows wait.
    """

    def __init__(
        self,
        table: TrackingTable,
        folder: Path,
        run: TrackedRun,
        complain: Callable[[str], None],
        key: str = "tracking",
        *,
        most: int | None = None,
    ) -> None:
        self._complain = complain
        self._free = None if most is None else threading.Semaphore(most)
        self._full = False
        self._trackers: Trackers | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tracking-{run.key}")
        self._thread.submit(self._begin, table, folder, run, key)

    def log(self, row: int, figures: Mapping[str, float | None]) -> None:
        """Hands on a row. Returns at once."""
        if self._free is None or self._free.acquire(blocking=False):
            self._thread.submit(self._log, row, figures)
        elif not self._full:
            self._full = True
            self._complain("figures come faster than trackers write them: some are left out")

    def close(self, finished: bool) -> None:
        """Ends tracking. Returns at once; what was logged before is still written."""
        self._thread.submit(self._close, finished)
        self._thread.shutdown(wait=False)

    def _begin(self, table: TrackingTable, folder: Path, run: TrackedRun, key: str) -> None:
        try:
            self._trackers = Trackers(table, folder, run, self._complain, key)
        except RoundtableError as error:
            self._complain(str(error))

    def _log(self, row: int, figures: Mapping[str, float | None]) -> None:
        if self._free is not None:
            self._free.release()
        if self._trackers is not None:
            self._trackers.log(row, figures)

    def _close(self, finished: bool) -> None:
        if self._trackers is not None:
            self._trackers.close(finished)


def check_trackers(table: TrackingTable, key: str = "tracking") -> None:
    """Raises ResourceError, naming the extra, for a tool that is not installed."""
    for name, _, make in _wanted(table):
        _needed(make.module, name, key)


def check_inside(table: TrackingTable, key: str = "tracking", whose: str = "a coordinator") -> None:
    """Raises ConfigError for a place outside the folder that `whose` trackers are kept in."""
    for name, value, _ in _wanted(table):
        path = PurePosixPath(value)
        if "://" in value or path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"{key}.{name} = {value!r}: {whose} writes only below its own folder; give a plain "
                "name, for example 'runs'"
            )


class TensorBoard:
    """Event files in FOLDER/NAME, as `tensorboard --logdir FOLDER` shows them."""

    module = "torch.utils.tensorboard"

    def __init__(self, place: str, folder: Path, run: TrackedRun) -> None:
        writer = _needed(self.module, "tensorboard").SummaryWriter
        with _explained():
            runs = folder / place / run.name
            # What an earlier process wrote stays: not all of it could be told again.
            self.last = _last_shown(runs) if run.goes_on else 0
            self._writer = writer(str(runs), purge_step=self.last + 1)

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        self.last = round
        with _explained():
            for name, value in figures.items():
                self._writer.add_scalar(name, value, round)
            self._writer.flush()

    def close(self, finished: bool) -> None:
        with _explained():
            self._writer.close()


def mlflow_name(name: str) -> str:
    """The name as MLflow takes those of metrics and parameters: letters, digits and `_-. :/`, a path in its
    shortest form, 250 characters at most. Others become their code, as in "a_x21_"."""
    taken = re.sub(r"[^\w\-. :/]", lambda found: f"_x{ord(found[0]):x}_", name)
    if normpath(taken) != taken or taken.startswith(("/", ".")):
        taken = "_" + taken.replace("/", "_x2f_")
    return taken[:250]


class MLflow:
    """A run of an experiment named after the job, on a tracking server or in FOLDER/mlflow.db."""

    module = "mlflow"

    def __init__(self, place: str, folder: Path, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow = _needed(self.module, "mlflow")
        if "://" not in place:
            with _explained():
                (folder / place).mkdir(parents=True, exist_ok=True)
            place = f"sqlite:///{(folder / place).resolve()}/mlflow.db"
        with self._explained():
            self._client = self._mlflow.MlflowClient(tracking_uri=place)
            self._run, self.last = self._find(run) or (self._begin(run), 0)

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        entity = self._mlflow.entities.Metric
        metrics = [entity(mlflow_name(name), value, 0, round) for name, value in figures.items()]
        with self._explained():
            self._client.log_batch(self._run, metrics=metrics)
        self.last = round

    def close(self, finished: bool) -> None:
        with self._explained():
            self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def _find(self, run: TrackedRun) -> tuple[str, int] | None:
        """The run of an earlier process, with its last round."""
        experiment = self._client.get_experiment_by_name(run.job)
        if experiment is None:
            return None
        named = f"tags.`roundtable.run` = '{run.key}'"
        for found in self._client.search_runs([experiment.experiment_id], named):
            history = self._client.get_metric_history(found.info.run_id, run.always)
            self._client.update_run(found.info.run_id, status="RUNNING")
            return found.info.run_id, max((metric.step for metric in history), default=0)
        return None

    def _begin(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.job)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.job)
        begun = self._client.create_run(number, run_name=run.name, tags={"roundtable.run": run.key})
        parameter = self._mlflow.entities.Param
        parameters = [parameter(mlflow_name(key), str(value)[:500]) for key, value in run.settings.items()]
        self._client.log_batch(begun.info.run_id, params=parameters[:100])
        return str(begun.info.run_id)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with _explained(self._mlflow.exceptions.MlflowException):
            yield


class WeightsAndBiases:
    """An offline run of a project, in FOLDER/wandb; `wandb sync` uploads it for whoever wants that."""

    module = "wandb"
    last = 0

    def __init__(self, place: str, folder: Path, run: TrackedRun) -> None:
        wandb = _needed(self.module, "wandb")
        self._errors = wandb.errors.Error
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, save_code=False
        )
        with _explained(self._errors):
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=place,
                name=run.name,
                id=run.key,
                dir=str(folder),
                mode="offline",
                resume="allow",
                config=dict(run.settings),
                settings=settings,
                reinit="create_new",
            )

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        with _explained(self._errors):
            self._run.log(dict(figures), step=round)

    def close(self, finished: bool) -> None:
        with _explained(self._errors):
            self._run.finish(exit_code=0 if finished else 1)


def _last_shown(folder: Path) -> int:
    """The last round that event files of a folder have; 0 without any."""
    if not folder.is_dir():
        return 0
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder), size_guidance={"scalars": 1})
    found.Reload()
    return max((each.step for name in found.Tags()["scalars"] for each in found.Scalars(name)), default=0)


_Maker = type[TensorBoard] | type[MLflow] | type[WeightsAndBiases]


def _wanted(table: TrackingTable) -> Iterator[tuple[str, str, _Maker]]:
    makers: dict[str, _Maker] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
    for name, make in makers.items():
        value = getattr(table, name)
        if value is not None:
            yield name, value, make


def _needed(module: str, extra: str, key: str = "tracking") -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"{key}.{extra} needs a library that is not installed ({error}): "
            f"{Path(sys.executable).name} -m pip install 'roundtable-fl[{extra}]'"
        ) from error


@contextmanager
def _explained(*kinds: type[Exception]) -> Iterator[None]:
    expected: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except expected as error:
        first, *_ = str(error).strip().splitlines() or [repr(error)]
        raise StorageError(first) from error
