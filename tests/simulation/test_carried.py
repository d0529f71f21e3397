"""Tasks that only one process has, in several: the sequential bits, and a name for what cannot be carried."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from roundtable.core.errors import ConfigError
from roundtable.core.task import load_task
from roundtable.simulation import simulate
from roundtable.simulation.backends.carried_task import pack_task, unpack_task
from roundtable.simulation.backends.processes import Processes

HERE = Path(__file__).parent
NOTEBOOK = """
import sys, torch, roundtable as rt
from roundtable.simulation.backends.processes import Processes
started = Processes._run
Processes._run = lambda self, *rest: (self.wait(), started(self, *rest))[1]
wide = 3
scaled = (lambda by: lambda x: x * by)(0.5)
def rows(number):
    chance = torch.Generator().manual_seed(number)
    inputs = torch.randn(20, wide, generator=chance)
    return inputs, (inputs.sum(1) > 0).long()
class Noted(rt.Task):
    def __init__(self): self.width = wide
    def model(self): return torch.nn.Linear(self.width, 2)
    def data(self, site): return rows(site.index), rows(100 + site.index)
    def loss(self, model, batch): return torch.nn.functional.cross_entropy(model(scaled(batch[0])), batch[1])
def ran(backend):
    return rt.simulate(JOB, Noted(), overrides={"simulation.backend": backend, "simulation.workers": 2})
"""


def _local(**values):
    """An object of a class that no other process can find."""

    class Local:
        def __init__(self):
            vars(self).update(values)

        def model(self):
            torch.manual_seed(3)
            return torch.nn.Linear(2, 2)

        def data(self, site):
            chance = torch.Generator().manual_seed(site.index)
            inputs = torch.randn(20, 2, generator=chance)
            return (inputs, (inputs.sum(1) > 0).long()), None

        def loss(self, model, batch):
            return torch.nn.functional.cross_entropy(self.turned(model(batch[0])), batch[1])

    return Local()


@pytest.fixture
def told(monkeypatch):
    """How many workers there were when clients ran: all are waited for."""
    counts = []
    original = Processes._run

    def patient(self, *arguments):
        self.wait()
        counts.append(len(self._workers))
        return original(self, *arguments)

    monkeypatch.setattr(Processes, "_run", patient)
    return counts


@pytest.mark.parametrize("backend", ["processes", "vectorised"])
def test_a_task_of_a_function_gives_the_same_in_many_processes(make_job, told, backend):
    by = torch.tensor(0.5)
    task = _local(turned=lambda given: given * by)
    alone = "sequential" if backend == "processes" else backend
    reference = simulate(make_job(simulation__backend=alone, simulation__workers=1), task)
    result = simulate(make_job(simulation__backend=backend, simulation__workers=2), task)
    assert told
    assert set(told) == {1}
    assert "2 processes" in result.backend
    assert torch.equal(result.model.vector, reference.model.vector)
    assert result.history.records == reference.history.records


@pytest.mark.slow
def test_a_killed_worker_is_given_the_task_anew(make_job, told, tmp_path):
    """The object is of a class in a file, which no process can import by its module's name."""
    settings = {
        "simulation__clients": 4,
        "cohort__size": 4,
        "simulation__data": {"mark": str(tmp_path / "mark")},
    }
    task = load_task("worlds.py:Killer", HERE)
    task.note = "an object with a value of its own"
    reference = simulate(make_job(**settings), task)
    result = simulate(make_job(**settings, simulation__backend="processes", simulation__workers=2), task)
    assert (tmp_path / "mark").exists()
    assert torch.equal(result.model.vector, reference.model.vector)


def test_a_notebook_runs_in_many_processes(tmp_path):
    """As a cell does: a main module without a file, its classes, functions and lambdas."""
    job = tmp_path / "job.toml"
    job.write_text(
        'task = "noted"\nrounds = 2\n[cohort]\nsize = 4\n[algorithm]\nbatch_size = 8\nlearning_rate = 0.1\n'
        "[simulation]\nclients = 6\n"
    )
    end = (
        "one, many = ran('sequential'), ran('processes')\n"
        "print(many.backend)\n"
        "print('same' if torch.equal(one.model.vector, many.model.vector) else 'other')"
    )
    source = f"JOB = {str(job)!r}\n{NOTEBOOK}\n{end}"
    ended = subprocess.run(
        [sys.executable, "-"], input=source, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 processes" in ended.stdout
    assert ended.stdout.split()[-1] == "same"


def _file():
    return (HERE / "worlds.py").open()


def _closure():
    guard = threading.Lock()
    return lambda given: given if guard else None


def _generator():
    return {"rows": [1, (number for number in range(3))]}


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (_file, r"Local\.extra {} \(a _io\.TextIOWrapper: the open file '.*worlds\.py'"),
        (_closure, r"'guard' in Local\.extra {} \(a _thread\.lock: "),
        (_generator, r"Local\.extra\['rows'\]\[1\] {} \(a generator: "),
    ],
)
def test_what_cannot_be_carried_is_named(make_job, made, name):
    task = _local(turned=torch.relu, extra=made())
    said = name.format("cannot be carried to another process")
    with pytest.raises(ConfigError, match=f'simulation.backend = "processes": {said}'):
        simulate(make_job(simulation__backend="processes", simulation__workers=2), task)
    automatic = simulate(make_job(simulation__backend="auto", simulation__workers=2, rounds=1), task)
    assert "in one process, because Local.extra" in automatic.backend or "'guard' in" in automatic.backend


def test_a_task_comes_back_and_a_large_one_is_not_copied():
    held = torch.arange(1000.0)
    assert torch.equal(unpack_task(pack_task(_local(held=held))).held, held)
    with pytest.raises(ConfigError, match=r"holds more than the 1 MB .*load large data in data"):
        pack_task(_local(held=torch.zeros(1 << 19)), most=1 << 20)


def test_without_the_library_it_is_said_what_brings_it(make_job, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"roundtable-fl\[notebook\]"):
        simulate(make_job(simulation__backend="processes", simulation__workers=2), _local(turned=torch.relu))
