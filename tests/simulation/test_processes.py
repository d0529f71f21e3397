"""Worker processes: the same bits as the sequential reference, and workers that die."""

from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.workers.frames import Channel
from roundtable.simulation import simulate
from roundtable.simulation.backends import processes
from roundtable.simulation.backends.processes import Processes


@pytest.fixture(autouse=True)
def answers_of_workers(monkeypatch):
    """Runs are so short here that they would end before a worker has started: wait for them, and count."""
    counted = []
    original, decode = Processes._run, processes.decode

    def counting(plain, kept):
        counted.extend(each["kind"] for each in plain)
        return decode(plain, kept)

    def patient(self, *arguments):
        self.wait()
        return original(self, *arguments)

    monkeypatch.setattr(Processes, "_run", patient)
    monkeypatch.setattr(processes, "decode", counting)
    return counted


HERE = Path(__file__).parent
TASKS = ["Perceptron", "Dropout", "Convolution", "Text"]


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_sequential_bits(run, workers, answers_of_workers):
    reference = run("BatchNorm")
    result = run("BatchNorm", simulation__backend="processes", simulation__workers=workers)
    assert torch.equal(result.model.vector, reference.model.vector)
    assert result.history.records == reference.history.records
    assert answers_of_workers.count("trained") >= 3 * (workers - 1)
    assert ("measured" in answers_of_workers) == (workers > 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_all_kinds_of_models_agree(run, task):
    settings = {
        "algorithm__name": "fedprox",
        "algorithm__mu": 0.1,
        "simulation__dropouts": {"dropout": 0.2},
        "cohort__minimum": 1,
    }
    reference = run(task, **settings)
    result = run(task, **settings, simulation__backend="processes", simulation__workers=2)
    assert torch.equal(result.model.vector, reference.model.vector)


@pytest.mark.slow
def test_data_that_cannot_be_pickled_need_not_be(run, answers_of_workers):
    reference = run("Unpicklable", rounds=1)
    result = run("Unpicklable", rounds=1, simulation__backend="processes", simulation__workers=2)
    assert "trained" in answers_of_workers
    assert torch.equal(result.model.vector, reference.model.vector)


def test_a_killed_worker_is_replaced_and_its_client_runs_again(run, tmp_path, caplog):
    settings = {
        "simulation__clients": 4,
        "cohort__size": 4,
        "simulation__data": {"mark": str(tmp_path / "mark")},
    }
    # The reference never kills: it is no worker.
    reference = run("Killer", **settings)
    result = run("Killer", **settings, simulation__backend="processes", simulation__workers=2, rounds=3)
    assert (tmp_path / "mark").exists()
    assert torch.equal(result.model.vector, reference.model.vector)
    assert "was killed (signal 9" in caplog.text


@pytest.mark.slow
def test_a_client_that_kills_every_worker_fails_and_the_round_goes_on(run):
    settings = {"simulation__clients": 4, "cohort__size": 4, "rounds": 1, "evaluation__clients": "cohort"}
    result = run("Killer", **settings, simulation__backend="processes", simulation__workers=2)
    assert result.status == "finished"
    assert list(result.history.records[0].failures) == ["client-1"]
    assert "two worker processes died while they ran it" in result.history.records[0].failures["client-1"]


@pytest.mark.slow
def test_a_worker_that_cannot_make_the_task_says_why(make_job, tmp_path):
    source = (HERE / "worlds.py").read_text()
    trap = "if 'ROUNDTABLE_SIMULATION_WORKER' in os.environ:\n    raise RuntimeError('no licence here')\n"
    (tmp_path / "worlds.py").write_text(source + trap)
    job = make_job(simulation__backend="processes", simulation__workers=2)
    with pytest.raises(TaskError, match=r"a worker process could not start: .*no licence here"):
        simulate(job, folder=tmp_path)


@pytest.mark.slow
def test_nothing_is_left_behind(run):
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    run(simulation__backend="processes", simulation__workers=2)
    before = open_files()
    run(simulation__backend="processes", simulation__workers=2)
    assert open_files() <= before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not any(processes._COMMAND.encode() in command for command in commands)


@pytest.mark.timeout(60)
def test_two_that_send_more_than_a_connection_holds_do_not_wait_for_each_other():
    ours, theirs = socket.socketpair()
    mine, other = Channel(ours, yields=True), Channel(theirs)
    large, text = torch.arange(1 << 20, dtype=torch.float32), "x" * (1 << 22)
    heard = []

    def worker():
        for number in range(3):
            other.send({"answer": number, "text": text}, [{"state": large}])
        heard.extend(other.receive()[0]["order"] for _ in range(2))

    thread = threading.Thread(target=worker)
    thread.start()
    for number in range(2):
        mine.send({"order": number, "text": text}, [{"state": large}])
    thread.join()
    assert heard == [0, 1]
    answers = [mine.receive() for _ in range(3)]
    assert [message["answer"] for message, _, _ in answers] == [0, 1, 2]
    assert all(torch.equal(tensors[0]["state"], large) for _, tensors, _ in answers)
    assert not mine.keeps


@pytest.mark.timeout(60)
def test_nobody_waits_until_many_values_are_read():
    """A worker that trains reads nothing: whoever gives it a client's state goes on all the same."""
    ours, theirs = socket.socketpair()
    mine, other = Channel(ours), Channel(theirs)
    state = {
        "weights": torch.arange(1 << 20, dtype=torch.float32).view(2, -1),
        "count": torch.tensor(7),
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "halves": torch.tensor([0.5, 1.5], dtype=torch.float16),
    }
    reader, writer = os.pipe()
    mine.send({"op": "work"}, [state, {"few": torch.ones(3)}], [reader])
    mine.send({"op": "work"}, [{"few": torch.ones(3)}], [reader])
    os.close(reader)
    for expected in ([state, {"few": torch.ones(3)}], [{"few": torch.ones(3)}]):
        message, tensors, descriptors = other.receive()
        assert message == {"op": "work"}
        assert [part.keys() for part in tensors] == [part.keys() for part in expected]
        for part, sent in zip(tensors, expected, strict=True):
            for name, value in sent.items():
                assert part[name].dtype == value.dtype
                assert torch.equal(part[name], value)
        os.write(writer, b"+")
        assert os.read(descriptors[0], 1) == b"+"
        os.close(descriptors[0])
    os.close(writer)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_clients_that_keep_much_go_through_workers(run):
    """What each keeps, 1.3 MB, travels both ways between a worker and the simulation, at the same time."""
    settings = {"algorithm__name": "ditto", "algorithm__pull": 0.1, "cohort__size": 8}
    reference = run("Wide", **settings)
    result = run("Wide", **settings, simulation__backend="processes", simulation__workers=2)
    assert torch.equal(result.model.vector, reference.model.vector)


def test_a_task_that_goes_on_from_its_last_client_has_one_order_of_clients(run):
    """Counted calls scale its loss: in two processes each would count for itself."""
    reference = run("Cooling", rounds=1)
    found = run("Cooling", rounds=1, simulation__backend="auto", simulation__workers=2)
    assert "in one process because the task keeps something" in found.backend
    assert torch.equal(found.model.vector, reference.model.vector)
    for backend in ("processes", "vectorised", "stacked"):
        with pytest.raises(ConfigError, match=r"which clients share a process.*\"sequential\""):
            run("Cooling", rounds=1, simulation__backend=backend, simulation__workers=2)
