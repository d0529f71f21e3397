"""Steps by speed against a plain float64 loop with the steps that each client was given, by every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roundtable.core import JobConfig, Site, Task
from roundtable.core.initial_model import initial_model
from roundtable.simulation import Progress, Result, simulate
from roundtable.simulation.world.config import devices_table
from roundtable.simulation.world.devices import Devices, Transfer

CLIENTS, MOST, RATE, ROWS = 5, 6, 0.1, 8
SPEEDS = {"speed": {"median": 50.0, "sigma": 1.0}}
BY_SPEED = {"steps": MOST, "work": "by_speed", "learning_rate": RATE, "batch_size": ROWS}
Given = Mapping[int, Mapping[int, int]]
"""Round → client → steps."""


class Slopes(Task):
    """Least squares; every step sees all rows of a client, so that no order matters."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1, bias=False)

    def data(self, site: Site) -> Any:
        chance = np.random.default_rng(site.index)
        x = chance.normal(size=(ROWS, 3))
        y = x @ (chance.normal(size=3) + site.index) + 0.1 * chance.normal(size=ROWS)
        return (torch.from_numpy(x).float(), torch.from_numpy(y).float()), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return 0.5 * (model(batch[0]).squeeze(1) - batch[1]).square().mean()


def job_of(algorithm: Mapping[str, Any], **tables: Any) -> JobConfig:
    document: dict[str, Any] = {
        "task": "slopes",
        "rounds": 4,
        "seed": 4,
        "cohort": {"size": 4},
        "evaluation": {"every": 0},
        "algorithm": {**BY_SPEED, **algorithm},
        "aggregation": {"weighting": "uniform"},
        "simulation": {"clients": CLIENTS, "backend": "sequential", "devices": SPEEDS},
    }
    for name, values in tables.items():
        document[name] = {**document.get(name, {}), **values}
    return JobConfig.model_validate(document)


def run(job: JobConfig) -> tuple[Result, Given]:
    """The result, and the steps that clients were given."""
    given: dict[int, dict[int, int]] = {}

    def hear(progress: Progress) -> None:
        if progress.note is not None and progress.note.kind == "round_started":
            steps = progress.note.detail["steps"]
            given[progress.round] = {int(name.removeprefix("client-")): each for name, each in steps.items()}

    return simulate(job, Slopes(), progress=hear), given


def expected(job: JobConfig, given: Given) -> np.ndarray:
    """The model by the papers' equations, client after client in float64."""
    name, momentum = job.algorithm.name, job.algorithm.momentum
    data = {i: [t.numpy().astype(float) for t in Slopes().data(Site("", i))[0]] for i in range(CLIENTS)}
    x = initial_model(job, Slopes()).vector[:3].numpy().astype(float)
    c, own = np.zeros(3), {i: np.zeros(3) for i in range(CLIENTS)}
    alpha = getattr(job.algorithm, "alpha", 0.0)
    mu = getattr(job.algorithm, "mu", 0.0)
    for number in sorted(given):
        moved, changes = {}, {}
        for i, steps in given[number].items():
            rows, targets = data[i]
            y, buffer, length, unit, track = x.copy(), np.zeros(3), 0.0, 0.0, 0.0
            for _ in range(steps):
                gradient = rows.T @ (rows @ y - targets) / ROWS
                gradient += {"scaffold": c - own[i], "feddyn": alpha * (y - x) - own[i]}.get(
                    name, mu * (y - x)
                )
                buffer = momentum * buffer + gradient
                y = y - RATE * buffer
                # ‖a‖₁: the same optimizer on one number, with gradient 1.
                unit = momentum * unit + 1.0 + mu * track
                track -= RATE * unit
            length = -track / RATE
            moved[i] = (y - x, length)
            if name == "scaffold":
                changes[i] = -c - (y - x) / (RATE * length)
        mean = np.mean([delta for delta, _ in moved.values()], axis=0)
        if name == "fednova":
            effective = np.mean([length for _, length in moved.values()])
            x = x + effective * np.mean([delta / length for delta, length in moved.values()], axis=0)
        elif name == "scaffold":
            x = x + mean
            for i, change in changes.items():
                own[i] = own[i] + change
            c = c + sum(changes.values()) / CLIENTS
        else:
            for i, (delta, _) in moved.items():
                own[i] = own[i] - alpha * delta
            c = c - alpha / CLIENTS * sum(delta for delta, _ in moved.values())
            x = x + mean - c / alpha
    return x


ALGORITHMS = {
    "fednova": {"name": "fednova"},
    "fednova, momentum and mu": {"name": "fednova", "momentum": 0.8, "mu": 0.3},
    "scaffold": {"name": "scaffold"},
    "scaffold, momentum": {"name": "scaffold", "momentum": 0.5},
    "feddyn": {"name": "feddyn", "alpha": 0.5},
}


CASES = [(name, backend) for name in ALGORITHMS for backend in ("sequential", "vectorised")]
CASES += [
    (name, backend) for name in ("fednova", "scaffold", "feddyn") for backend in ("processes", "stacked")
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_the_model_is_that_of_the_equations_with_the_steps_that_were_given(name: str, backend: str) -> None:
    workers = 2 if backend == "processes" else 1
    job = job_of(ALGORITHMS[name], simulation={"backend": backend, "workers": workers})
    result, given = run(job)
    assert result.status == "finished"
    assert " because " not in result.backend
    assert len({steps for round in given.values() for steps in round.values()}) > 2, "speeds differ"
    found = result.model.vector[:3].double().numpy()
    np.testing.assert_allclose(found, expected(job, given), rtol=2e-4, atol=2e-5)


def test_steps_follow_from_the_devices_speeds() -> None:
    job = job_of(ALGORITHMS["fednova"], cohort={"size": CLIENTS})
    _, given = run(job)
    assert set(given[1].values()) == {MOST}
    devices = Devices(devices_table(job), CLIENTS, job.seed)
    paces = [devices.seconds(i, 1, MOST * ROWS, Transfer(0, 0)) / MOST for i in range(CLIENTS)]
    usual = sorted(paces)[(CLIENTS - 1) // 2]
    wanted = {
        i: MOST if pace <= usual else max(1, round(MOST * usual / pace)) for i, pace in enumerate(paces)
    }
    assert given[2] == given[3] == wanted
    assert len(set(wanted.values())) > 1


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_masked_sums_give_the_same(name: str) -> None:
    """What goes along beside the update is in the sum: no share or number of steps is needed with it."""
    plain, given = run(job_of(ALGORITHMS[name]))
    masked, same = run(
        job_of(ALGORITHMS[name], privacy={"level": "none", "secure_aggregation": True, "clip_norm": 50.0})
    )
    assert given == same
    # Four rounds, each within the ring's rounding of values of up to 50.
    assert (masked.model.vector[:3] - plain.model.vector[:3]).abs().max() < 0.05


def test_a_run_that_goes_on_gives_the_same_steps_and_bits(tmp_path: Any) -> None:
    job = job_of(ALGORITHMS["fednova"])
    whole, given = run(job)
    simulate(job, Slopes(), run_dir=tmp_path / "run", overrides={"rounds": 2})
    heard: dict[int, Any] = {}

    def hear(progress: Progress) -> None:
        if progress.note is not None and progress.note.kind == "round_started":
            heard[progress.round] = progress.note.detail["steps"]

    resumed = simulate(job, Slopes(), run_dir=tmp_path / "run", resume=True, progress=hear)
    assert torch.equal(resumed.model.vector, whole.model.vector)
    assert {n: list(steps.values()) for n, steps in heard.items()} == {
        n: list(given[n].values()) for n in (3, 4)
    }
