"""What the best model does not go together with is said before round 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundtable.core import Layout, parse_job
from roundtable.core.config import job_from_json, override_job
from roundtable.core.errors import ConfigError
from roundtable.engine import make_plan
from roundtable.engine.validation.kept_composition import check_kept_layout

BEST = 'task = "t"\n[keep]\nbest = true\n'
STOP = '[stop]\nmetric = "loss"\n'


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ("", "best by what"),
        (STOP + "[evaluation]\nevery = 0", "no model is measured"),
        (STOP + '[algorithm]\nname = "ditto"\npull = 1.0', "the model with its own part"),
        (STOP + '[algorithm]\nname = "fedbn"', "the model with its own part"),
    ],
)
def test_a_best_model_that_could_not_be_told_is_refused(tables: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_plan(parse_job(BEST + tables), 10)
    make_plan(parse_job(BEST + STOP), 10)


def test_tensors_that_stay_at_the_silos_are_a_part_of_what_was_measured() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    job = parse_job(BEST + STOP + '[model]\nbuffers = "local"')
    with pytest.raises(ConfigError, match=r"the local tensor '1\.running_mean'"):
        check_kept_layout(job, Layout.of(model, job.model.rules()))
    check_kept_layout(parse_job(BEST + STOP), Layout.of(model))
    check_kept_layout(job, Layout.of({"w": torch.zeros(2)}, job.model.rules()))


PATIENCE = 'task = "t"\n[stop]\nmetric = "loss"\npatience = 3\n'


@pytest.mark.parametrize(
    ("tables", "kept"),
    [
        ("", True),
        ("[keep]\nevery = 2", True),
        ("[keep]\nbest = false", False),
        ("[evaluation]\nevery = 0", False),
        ('[model]\nbuffers = "local"', False),
        ('[model]\nlocal = ["head.*"]', False),
        ('[algorithm]\nname = "ditto"\npull = 1.0', False),
        ('[algorithm]\nname = "fedbn"', False),
        ('[algorithm]\nname = "scaffold"', True),
        ('[algorithm]\nname = "own.py:Own"', False),
    ],
)
def test_early_stopping_keeps_the_best_model_where_it_can_be_told(tables: str, kept: bool) -> None:
    job = parse_job(PATIENCE + tables)
    assert job.keep.best is kept
    assert job_from_json(job.to_json()).keep == job.keep
    check_kept_layout(job, Layout.of(nn.BatchNorm1d(2), job.model.rules()))


def test_what_the_job_does_not_say_follows_from_what_else_it_says() -> None:
    job = parse_job(PATIENCE + "[keep]\nevery = 2")
    assert override_job(job, {"evaluation.every": 0}).keep.best is False
    assert override_job(job, {"keep.best": False}).keep.best is False
    target = override_job(job, {"stop.patience": None, "stop.target": 0.5})
    assert target.keep.best is True
    assert parse_job('task = "t"\n[stop]\nmetric = "loss"').keep.best is False
    central = parse_job(PATIENCE.replace("loss", "central_loss") + "[evaluation]\nevery = 0")
    assert central.keep.best is True
