"""Algorithms of one's own in every backend: run exactly, or refused by name before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundtable.core import job_from_json, load_job, parse_job
from roundtable.core.errors import ConfigError
from roundtable.simulation import simulate

HERE = Path(__file__).parent
DAMPED = {"algorithm__name": "own_algorithms.py:Damped"}
HELD = {"algorithm__name": "own_algorithms.py:Held", "algorithm__strength": 0.3}


@pytest.mark.parametrize("backend", ["auto", "vectorised", "stacked"])
def test_a_hook_around_the_gradient_runs_client_by_client_and_the_log_says_why(run, backend):
    reference = run("Perceptron", **DAMPED)
    assert not torch.equal(reference.model.vector, run("Perceptron").model.vector)
    result = run("Perceptron", **DAMPED, simulation__backend=backend, simulation__workers=1)
    assert torch.equal(result.model.vector, reference.model.vector)
    assert "'own_algorithms.py:Damped' works on each client's module by its after_gradient" in result.backend


@pytest.mark.parametrize("backend", ["auto", "vectorised", "stacked"])
def test_what_a_step_says_runs_everywhere(run, backend):
    reference = run("Perceptron", algorithm__name="fedprox", algorithm__mu=0.3)
    result = run("Perceptron", **HELD, simulation__backend=backend, simulation__workers=1)
    torch.testing.assert_close(result.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)
    assert not torch.allclose(result.model.vector, run("Perceptron").model.vector, rtol=1e-3)


def test_workers_find_the_algorithm_where_the_job_lies(run):
    reference = run("Perceptron", **HELD)
    result = run("Perceptron", **HELD, simulation__backend="processes", simulation__workers=2)
    assert torch.equal(result.model.vector, reference.model.vector)


def test_its_table_is_checked_with_file_and_line(tmp_path):
    (tmp_path / "own_algorithms.py").write_text((HERE / "own_algorithms.py").read_text())
    file = tmp_path / "job.toml"
    file.write_text(
        'task = "t"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrenght = 0.1\nstrength = 0.1'
    )
    with pytest.raises(
        ConfigError, match=r"job.toml:4: algorithm.strenght: unknown key; did you mean 'strength'"
    ):
        load_job(file)
    file.write_text('task = "t"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrength = 0.1')
    job = load_job(file)
    assert job.algorithm.strength == 0.1
    assert job_from_json(job.to_json()).to_json() == job.to_json()


def test_who_has_the_job_alone_keeps_its_keys_and_does_not_run_it(run, tmp_path):
    job = parse_job(
        'task = "worlds.py:Perceptron"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrenght = 1.0'
    )
    assert job_from_json(job.to_json()) == job
    with pytest.raises(ConfigError, match="strenght"):
        simulate(job, folder=HERE)
    with pytest.raises(ConfigError, match=r"there is no file .*own_algorithms.py"):
        simulate(job, folder=tmp_path)


def test_an_object_that_is_no_algorithm_is_refused(run):
    with pytest.raises(ConfigError, match=r"no subclass of roundtable\.ClientAlgorithm"):
        run("Perceptron", algorithm__name="own_algorithms.py:Ordinary")
