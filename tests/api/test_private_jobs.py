"""What is wrong with a private job is said before its first round, and what is simulated promises nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from private_jobs import WRONG_FIGURES, write_job

Command = Any


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Writes a job file; every value has a sound default."""
    return partial(write_job, tmp_path)


@pytest.mark.parametrize("command", [("job", "check"), ("simulate",)])
def test_batch_norm_is_refused_with_advice_before_the_first_round(
    roundtable: Command, job: Any, command: tuple[str, ...]
) -> None:
    said = roundtable(*command, job(task="Normed", level="example"))
    assert said.code == 2
    assert "1 is BatchNorm1d" in said.err
    assert "nn.GroupNorm" in said.err
    assert "round" not in said.out
    assert roundtable(*command, job(level="example")).code == 0


@pytest.mark.parametrize("level", ["client", "client_local", "dp_ftrl", "distributed"])
@pytest.mark.parametrize("command", [("job", "check"), ("simulate",)])
def test_running_variances_get_no_noise(
    roundtable: Command, job: Any, level: str, command: tuple[str, ...]
) -> None:
    """They would turn negative; a silo may keep them to itself, and a model may do without."""
    path = job(task="Normed", level=level)
    said = roundtable(*command, path)
    assert said.code == 2
    assert "2 buffers (1.running_mean, 1.running_var)" in said.err
    assert "nn.GroupNorm" in said.err
    assert 'buffers = "local"' in said.err
    assert "round 1" not in said.out
    kept = roundtable(*command, path, "--set", "model.buffers=local")
    assert kept.code == 0, kept.err
    assert "nan" not in kept.out


def test_records_of_a_script_cannot_be_promised_privacy(roundtable: Command, job: Any) -> None:
    said = roundtable("job", "check", job(task="Script", level="example"))
    assert said.code == 2
    assert "needs a Task with a model, data and a loss" in said.err


@pytest.mark.parametrize(("level", "command"), [("client", ("job", "check")), ("example", ("simulate",))])
@pytest.mark.parametrize(("wrong", "complaint"), WRONG_FIGURES)
def test_bad_figures_are_refused_before_the_first_round(
    roundtable: Command,
    job: Any,
    level: str,
    command: tuple[str, ...],
    wrong: dict[str, Any],
    complaint: str,
) -> None:
    said = roundtable(*command, job(level=level, **wrong))
    assert said.code != 0
    assert complaint in said.err
    assert "round 1" not in said.out


@pytest.mark.parametrize("level", ["client", "client_local", "dp_ftrl", "distributed"])
def test_a_delta_that_would_allow_one_silo_in_the_clear_is_refused(
    roundtable: Command, job: Any, level: str
) -> None:
    said = roundtable("job", "check", job(level=level, delta=0.05))
    assert said.code == 2
    assert "not below 1 / 20" in said.err


def test_a_cohort_that_the_noise_drowns_is_warned_of_with_the_ratio(roundtable: Command, job: Any) -> None:
    path = job(level="client_local", spend="noise_multiplier = 5000.0")
    checked = roundtable("job", "check", path)
    assert checked.code == 0
    # Two rounds of 20 updates against noise of 5,000 in each: √40 / (5,000 √49).
    assert "The noise drowns everything" in checked.out
    assert "be 0.00018 of the noise" in checked.out
    simulated = roundtable("simulate", path).out
    assert simulated.index("The noise drowns everything") < simulated.index("round 1/2")
    assert "drowns" not in roundtable("job", "check", job(spend="noise_multiplier = 0.01")).out


@pytest.mark.parametrize("level", ["client", "client_local", "dp_ftrl", "example"])
def test_a_simulation_tells_epsilon_and_that_it_guarantees_nothing(
    roundtable: Command, job: Any, level: str
) -> None:
    path = job(level=level, spend="noise_multiplier = 2.0")
    said = roundtable("simulate", path)
    assert said.code == 0, said.err
    lines = [line for line in said.out.splitlines() if line.startswith("round")]
    spent = [float(line.split("epsilon ")[1].split()[0]) for line in lines]
    assert len(spent) == 2
    assert 0.0 < spent[0] <= spent[1]
    assert "Differential privacy: no guarantee" in said.out
    found = json.loads(roundtable("simulate", path, "--json").out)
    assert found["privacy"].startswith("NO GUARANTEE")
    assert f"{found['history'][-1]['epsilon']:.3f}" == f"{spent[-1]:.3f}"


def test_the_plan_is_drawn(roundtable: Command, job: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "plan.png"
    said = roundtable("privacy", "plan", job(spend="epsilon = 4.0"), "--plot", image)
    assert said.code == 0, said.err
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 10_000
    assert "signal/noise" in said.out


def test_the_plan_says_what_several_records_of_one_person_cost(roundtable: Command, job: Any) -> None:
    path = job(level="example", spend="noise_multiplier = 2.0\npopulation = 400")
    alone = json.loads(roundtable("privacy", "plan", path, "--json").out)
    three = json.loads(roundtable("privacy", "plan", path, "--group", "3", "--json").out)
    assert alone["epsilon"] < three["group_epsilon"]
    assert "group_epsilon" not in alone
    said = roundtable("privacy", "plan", path, "--group", "3").out
    assert f"3 records in one silo: epsilon = {three['group_epsilon']:.4f}" in said
    silos = roundtable("privacy", "plan", job(level="client_local"), "--group", "2").out
    assert "For one person with data in 2 silos: epsilon = " in silos
