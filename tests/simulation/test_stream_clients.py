"""Streams over rounds: the samples of a simulated client are those of an agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tar_files import write_shards

from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.errors import PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.simulation import simulate

KIT = Path(__file__).parents[1] / "kit"
STEPS, BATCH, ROUNDS = 3, 4, 5


def job_of(folder: Path, task: str = "Shards", **simulation: Any) -> JobConfig:
    log = folder / "log"
    log.mkdir(exist_ok=True)
    for path in log.iterdir():
        path.unlink()
    if not (folder / "data").exists():
        write_shards(folder / "data", [9, 4, 12])
    return JobConfig.model_validate(
        {
            "task": f"shard_tasks.py:{task}",
            "rounds": ROUNDS,
            "seed": 3,
            "cohort": {"size": simulation.get("clients", 2)},
            "algorithm": {"batch_size": BATCH, "steps": STEPS, "learning_rate": 0.5},
            "simulation": {
                "clients": 2,
                "backend": "sequential",
                "data": {"folder": str(folder / "data"), "log": str(log)},
                **simulation,
            },
        }
    )


def records(folder: Path, tried: int = BATCH) -> dict[str, list[int]]:
    """What each client was given, in order; the batch that a simulation tries before round 1 left out."""
    paths = sorted((folder / "log").iterdir())
    taken = {path.name: [int(line) for line in path.read_text().split()] for path in paths}
    first = next(iter(taken))
    return {**taken, first: taken[first][tried:]}


def epochs(taken: list[int]) -> list[list[int]]:
    return [sorted(taken[i : i + 25]) for i in range(0, len(taken) - 24, 25)]


def test_rounds_go_through_the_data_and_each_backend_takes_the_same(tmp_path: Path) -> None:
    result = simulate(job_of(tmp_path), folder=KIT)
    given = records(tmp_path)
    assert [len(taken) for taken in given.values()] == [ROUNDS * STEPS * BATCH] * 2
    assert len({tuple(taken) for taken in given.values()}) == 2
    for backend in ({"backend": "processes", "workers": 2}, {"backend": "vectorised", "workers": 1}):
        again = simulate(job_of(tmp_path, **backend), folder=KIT)
        assert {name: sorted(taken) for name, taken in records(tmp_path).items()} == {
            name: sorted(taken) for name, taken in given.items()
        }
        torch.testing.assert_close(again.model.vector, result.model.vector)


def test_processes_that_read_ahead_change_no_bit(tmp_path: Path) -> None:
    alone = simulate(job_of(tmp_path), folder=KIT)
    loaded = simulate(job_of(tmp_path, "Loaded"), folder=KIT)
    assert torch.equal(loaded.model.vector, alone.model.vector)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = simulate(job_of(tmp_path), folder=KIT)
    given = records(tmp_path)
    job = job_of(tmp_path)
    simulate(job.model_copy(update={"rounds": 2}), folder=KIT, run_dir=tmp_path / "run")
    resumed = simulate(job, folder=KIT, run_dir=tmp_path / "run", resume=True)
    taken = records(tmp_path)
    first, again = next(iter(taken)), 2 * STEPS * BATCH
    # A run that goes on tries its first batch again, which counts no more than the first time.
    assert taken[first][again : again + BATCH] == records(tmp_path, tried=0)[first][:BATCH]
    del taken[first][again : again + BATCH]
    assert taken == given
    assert torch.equal(resumed.model.vector, whole.model.vector)


def silo(folder: Path) -> Executor:
    options = {"folder": str(folder / "data"), "log": str(folder / "log")}
    return Executor(Settings("client-0", str(KIT), str(folder / "jobs"), "cpu", 1, options))


def order_of(folder: Path, job: JobConfig, round: int, attempt: int = 1, newest: int = 1) -> Order:
    layout = initial_model(job, load_task(job.task.name, KIT)).layout
    return Order(
        "job", round, "train", job.to_json(), job.task.name, str(folder / "model"), layout.fingerprint,
        str(folder / "update"), attempt, counted=(round - 1, newest) if round > 1 else None,
    )  # fmt: skip


def test_an_agent_takes_the_samples_of_a_simulated_client(tmp_path: Path) -> None:
    """One client: the model is its own. Every round is done twice, as two attempts, by another process."""
    job = job_of(tmp_path, clients=1)
    simulated = simulate(job, folder=KIT)
    ((name, given),) = records(tmp_path).items()
    job_of(tmp_path, clients=1)
    model = initial_model(job, load_task(job.task.name, KIT))
    for round in range(1, ROUNDS + 1):
        save_model(tmp_path / "model", model)
        updates = []
        for attempt in (1, 2):
            order = order_of(tmp_path, job, round, attempt, newest=2)
            settings = Settings(name, str(KIT), str(tmp_path / "jobs"), "cpu", 1, dict(job.simulation.data))
            trained = Executor(settings).train(order, lambda done, total, loss: None)
            assert trained.examples == STEPS * BATCH
            updates.append(Path(order.output).read_bytes())
        assert updates[0] == updates[1]
        delta = torch.frombuffer(bytearray(updates[0]), dtype=torch.float32)
        model = type(model)(model.layout, model.vector + delta, model.local, model.metadata)
    taken = records(tmp_path, tried=0)[name]
    size = STEPS * BATCH
    attempts = [taken[i : i + size] for i in range(0, len(taken), size)]
    assert attempts[0::2] == attempts[1::2]
    assert list(chain(*attempts[0::2])) == given
    torch.testing.assert_close(model.vector, simulated.model.vector)


def test_a_process_killed_within_a_round_begins_the_round_again(tmp_path: Path) -> None:
    job = job_of(tmp_path, clients=1)
    save_model(tmp_path / "model", initial_model(job, load_task(job.task.name, KIT)))
    for round in (1, 2):
        silo(tmp_path).train(order_of(tmp_path, job, round), lambda done, total, loss: None)
    ((name, given),) = records(tmp_path, tried=0).items()
    update = (tmp_path / "update").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    job = job_of(other, clients=1)
    save_model(other / "model", initial_model(job, load_task(job.task.name, KIT)))
    silo(other).train(order_of(other, job, 1), lambda done, total, loss: None)
    (other / "log" / "kill").write_text(str(given[-2]))
    script = (
        f"import sys; sys.path.insert(0, {str(KIT)!r}); sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nimport test_stream_clients as t\n"
        f"folder = Path({str(other)!r})\n"
        "from roundtable.core import parse_job\nfrom roundtable.core.config import job_from_json\n"
        f"job = job_from_json({job.to_json()!r})\n"
        "t.silo(folder).train(t.order_of(folder, job, 2), lambda *_: None)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(records(other, tried=0)[name]) == 2 * STEPS * BATCH - 2
    silo(other).train(order_of(other, job, 2), lambda done, total, loss: None)
    assert records(other, tried=0)[name][-STEPS * BATCH :] == given[-STEPS * BATCH :]
    assert (other / "update").read_bytes() == update


def test_a_place_that_is_lost_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(tmp_path, clients=1)
    save_model(tmp_path / "model", initial_model(job, load_task(job.task.name, KIT)))
    silo(tmp_path).train(order_of(tmp_path, job, 1), lambda done, total, loss: None)
    assert not caplog.text
    for path in (tmp_path / "jobs" / "job").iterdir():
        path.unlink()
    silo(tmp_path).train(order_of(tmp_path, job, 2), lambda done, total, loss: None)
    assert "round 2 began anew in the training data, as the place that round 1 left" in caplog.text
    ((_, taken),) = records(tmp_path, tried=0).items()
    assert taken[:12] == taken[12:]


def test_iterables_without_a_place_go_on_by_reading_again(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Iterables", clients=1)
    first = simulate(job, folder=KIT)
    (taken,) = records(tmp_path).values()
    # Round r reads what the rounds before it took of its epoch, and then its own twelve.
    assert len(taken) > ROUNDS * STEPS * BATCH
    again = simulate(job_of(tmp_path, "Iterables", clients=1), folder=KIT)
    assert torch.equal(first.model.vector, again.model.vector)


def test_streams_at_example_level_are_refused(tmp_path: Path) -> None:
    """Poisson sampling draws from a known number of examples."""
    job = job_of(tmp_path, clients=1)
    privacy = {"level": "example", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    table = {"privacy": privacy, "aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}}
    job = JobConfig.model_validate({**job.model_dump(), **table})
    for backend in ("sequential", "processes"):
        with pytest.raises(PrivacyError, match="that can only be iterated have none"):
            simulate(job, folder=KIT, overrides={"simulation.backend": backend})
    save_model(tmp_path / "model", initial_model(job, load_task(job.task.name, KIT)))
    with pytest.raises(PrivacyError, match="that can only be iterated have none"):
        silo(tmp_path).train(order_of(tmp_path, job, 1), lambda done, total, loss: None)
    assert not list((tmp_path / "log").iterdir())
    assert not (tmp_path / "privacy").exists()
