"""TensorBoard, MLflow and Weights & Biases: what was written is read back."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading

import pytest

from roundtable.core.config import TrackingTable
from roundtable.core.errors import ConfigError, ResourceError, StorageError
from roundtable.core.observability.tracking import (
    BackgroundTrackers,
    TrackedRun,
    Trackers,
    check_inside,
    check_trackers,
    mlflow_name,
)

RUN = TrackedRun("digits", "first", "k1", {"cohort.size": 5})


def trackers(folder, run=RUN, complain=pytest.fail, **table):
    return Trackers(TrackingTable(**table), folder, run, complain)


def events(folder):
    """{name: [(step, value)]} as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, round(event.value, 6)) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


class TestTensorBoard:
    def test_figures_become_scalars(self, tmp_path):
        pytest.importorskip("tensorboard")
        told = trackers(tmp_path, tensorboard="runs")
        told.log(1, {"round": 1, "attempt": 2, "accuracy": 0.5, "clients": 3, "seconds": None})
        told.log(2, {"round": 2, "attempt": 1, "accuracy": 0.75, "clients": 3})
        told.close(True)
        assert events(tmp_path / "runs" / "first") == {
            "accuracy": [(1, 0.5), (2, 0.75)],
            "clients": [(1, 3.0), (2, 3.0)],
        }

    def test_a_run_that_goes_on_shows_each_round_once(self, tmp_path):
        pytest.importorskip("tensorboard")
        for rounds in ((1, 2), (1, 2, 3)):
            told = trackers(tmp_path, tensorboard="runs")
            for number in rounds:
                told.log(number, {"accuracy": number / 4})
            told.close(False)
        assert events(tmp_path / "runs" / "first") == {"accuracy": [(1, 0.25), (2, 0.5), (3, 0.75)]}

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path):
        pytest.importorskip("tensorboard")
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="file"):
            trackers(tmp_path, tensorboard="file/runs")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder whose MLflow database is made once: that takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


class TestMLflow:
    def metrics(self, folder):
        mlflow = pytest.importorskip("mlflow")
        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        experiment = client.get_experiment_by_name("digits")
        (run,) = client.search_runs([experiment.experiment_id], "tags.`roundtable.run` = 'k1'")
        history = {
            name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        return run, history

    def test_figures_become_metrics_of_one_run_over_a_restart(self, shelf):
        pytest.importorskip("mlflow")
        told = trackers(shelf, mlflow="ml")
        told.log(1, {"accuracy": 0.5, "clients": 3})
        told.close(False)
        run, history = self.metrics(shelf / "ml")
        assert run.info.status == "KILLED"
        told = trackers(shelf, mlflow="ml")
        for number in (1, 2):
            told.log(number, {"accuracy": number / 2, "clients": 3})
        told.close(True)
        run, history = self.metrics(shelf / "ml")
        assert history == {"accuracy": [(1, 0.5), (2, 1.0)], "clients": [(1, 3.0), (2, 3.0)]}
        assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
        assert run.data.params == {"cohort.size": "5"}

    def test_a_server_that_is_not_there_is_an_error_at_once_and_a_word_later(self, shelf, monkeypatch):
        mlflow = pytest.importorskip("mlflow")
        heard = []
        told = trackers(shelf, TrackedRun("digits", "other", "k2", {}), heard.append, mlflow="ml")

        def away(*_args, **_kwargs):
            raise mlflow.exceptions.MlflowException("connection refused\nwith a long story")

        told.log(1, {"accuracy": 0.5})
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", away)
        told.log(3, {"accuracy": 0.5})
        told.log(4, {"accuracy": 0.5})
        assert heard == ["tracking.mlflow is given up: connection refused"]
        monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", away)
        with pytest.raises(StorageError, match="connection refused"):
            trackers(shelf, mlflow="ml")


WANDB = """
import sys
from pathlib import Path
from roundtable.core.config import TrackingTable
from roundtable.core.observability.tracking import TrackedRun, Trackers
run = TrackedRun("digits", "first", "k1", {"rounds": 2})
told = Trackers(TrackingTable(wandb="project"), Path(sys.argv[1]), run, print)
told.log(1, {"accuracy": 0.5})
told.log(2, {"accuracy": 0.75})
told.close(True)
"""


def _records(file):
    """The records of a .wandb file: LevelDB's log format after seven bytes, in one block here."""
    data, place = file.read_bytes(), 7
    while place + 7 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        yield data[place + 7 : place + 7 + size]
        place += 7 + size


def test_weights_and_biases_keeps_an_offline_run(tmp_path):
    pytest.importorskip("wandb")
    # In a process of its own: the library leaves a service behind until its process ends.
    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], check=True, timeout=120)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    seen, projects = [], []
    for data in _records(file):
        record = messages.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            projects.append((record.run.project, record.run.display_name, record.run.run_id))
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            seen.append((int(items["_step"]), json.loads(items["accuracy"])))
    assert seen == [(1, 0.5), (2, 0.75)]
    assert ("project", "first", "k1") in projects


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_without_the_library_the_extra_is_named(name, module, monkeypatch, tmp_path):
    real = importlib.import_module

    def absent(wanted, *rest):
        if wanted.split(".")[-1] == module:
            raise ImportError(f"No module named {module!r}")
        return real(wanted, *rest)

    monkeypatch.setattr("roundtable.core.observability.tracking.import_module", absent)
    with pytest.raises(ResourceError, match=rf"tracking\.{name} .*'roundtable-fl\[{name}\]'"):
        trackers(tmp_path, **{name: "runs"})
    with pytest.raises(ResourceError, match=rf"roundtable-fl\[{name}\]"):
        check_trackers(TrackingTable(**{name: "runs"}))


@pytest.mark.parametrize("place", ["/etc", "../up", "a/../../b", "https://mlflow.example:5000"])
def test_a_coordinator_writes_below_its_own_folder_alone(place):
    with pytest.raises(ConfigError, match="only below its own folder"):
        check_inside(TrackingTable(mlflow=place))
    check_inside(TrackingTable(mlflow="ml", tensorboard="runs/digits"))


def test_nothing_asked_for_is_nothing_done(tmp_path):
    told = trackers(tmp_path / "no")
    told.log(1, {"accuracy": 1.0})
    told.close(True)
    assert not (tmp_path / "no").exists()


def test_rows_that_come_faster_than_they_are_written_are_left_out(tmp_path):
    pytest.importorskip("tensorboard")
    said, going = [], threading.Event()

    class Slow(BackgroundTrackers):
        def _begin(self, *about):
            going.wait()
            super()._begin(*about)

    told = Slow(TrackingTable(tensorboard="runs"), tmp_path, RUN, said.append, most=2)
    for number in range(1, 6):
        told.log(number, {"loss": number / 4})
    going.set()
    told.close(True)
    told._thread.shutdown()
    assert events(tmp_path / "runs" / "first") == {"loss": [(1, 0.25), (2, 0.5)]}
    assert said == ["figures come faster than trackers write them: some are left out"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("training/loss at 0.5", "training/loss at 0.5"),
        ("recall@10", "recall_x40_10"),
        ("Trefferquote größe", "Trefferquote größe"),
        ("a//b", "_a_x2f__x2f_b"),
        ("../a", "_.._x2f_a"),
        ("n" * 300, "n" * 250),
    ],
)
def test_mlflow_is_given_names_that_it_takes(name: str, taken: str) -> None:
    assert mlflow_name(name) == taken
