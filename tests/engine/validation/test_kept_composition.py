"""What the best model does not go together with is said before round 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundtable.core import Layout, parse_job
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
