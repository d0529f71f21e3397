"""What encoding the way down does not go together with, before round 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.layout import Layout
from roundtable.engine import make_plan
from roundtable.engine.validation.down_composition import check_down_layout


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            '[algorithm]\nname = "scaffold"\n[aggregation]\nweighting = "uniform"\n[transfer]\ndown = "int4"',
            "beside the model",
        ),
        ('[transfer]\ndown = "int4(rounding=stochastic)"', "comes nearer"),
        ('[transfer]\ndown = "lowrank"', "comes nearer"),
        ('[transfer]\ndown = "topk(ratio=0.01, warmup=3)"', "no round to warm up by"),
    ],
)
def test_what_does_not_converge_is_refused(table: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(parse_job(f'task = "t"\n{table}'), 3)


def test_statistics_are_not_rounded_together_with_weights() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    job = parse_job('task = "t"\n[transfer]\ndown = "int4"')
    with pytest.raises(ConfigError, match="running_mean' and 1 more"):
        check_down_layout(job, layout)
    check_down_layout(parse_job('task = "t"\n[transfer]\ndown = "bfloat16"'), layout)
    check_down_layout(job, Layout.of({"w": torch.zeros(3)}))
