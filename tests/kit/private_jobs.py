"""A small private job for the command line, and the figures in it that must be refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TASK = """
import torch
from torch import nn
import roundtable as rt

class Normed(rt.Task):
    norm = nn.BatchNorm1d(8)
    def model(self):
        return nn.Sequential(nn.Linear(2, 8), type(self).norm, nn.Linear(8, 1))
    def data(self, site):
        return (torch.ones(40, 2), torch.ones(40, 1)), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

class Grouped(Normed):
    norm = nn.GroupNorm(2, 8)

class Script:
    def model(self):
        return nn.Linear(2, 1)
"""
JOB = """
task = "normed.py:{task}"
rounds = 2
[cohort]
size = 20
[algorithm]
steps = 2
batch_size = 4
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[simulation]
clients = 20
backend = "sequential"
[privacy]
level = "{level}"
clip_norm = {clip_norm}
delta = {delta}
{spend}
"""

WRONG_FIGURES: list[tuple[dict[str, Any], str]] = [
    ({"spend": "epsilon = 0.0"}, "privacy.epsilon: Input should be greater than 0 (got 0.0)"),
    ({"spend": "epsilon = -1.0"}, "privacy.epsilon: Input should be greater than 0 (got -1.0)"),
    ({"spend": "epsilon = nan"}, "privacy.epsilon: Input should be a finite number (got nan)"),
    (
        {"spend": "epsilon = 1.0\nnoise_multiplier = 0.0"},
        "noise_multiplier: Input should be greater than 0",
    ),
    ({"spend": ""}, "are both missing"),
    ({"clip_norm": 0.0}, "privacy.clip_norm: Input should be greater than 0"),
    ({"delta": 0.0}, "privacy.delta: 0: it must be above 0"),
    ({"delta": 1.0}, "privacy.delta: 1: it must be above 0 and below 1"),
    ({"spend": "noise_multiplier = 1.0\nsigma = 2"}, "privacy.sigma: unknown key"),
]
"""What to give `write_job`, and what must be said of it."""


def write_job(
    folder: Path,
    task: str = "Grouped",
    level: str = "client",
    clip_norm: float = 1.0,
    delta: float = 1e-3,
    spend: str = "noise_multiplier = 1.0",
) -> Path:
    """The job file, with its task beside it."""
    (folder / "normed.py").write_text(TASK)
    path = folder / "job.toml"
    path.write_text(JOB.format(task=task, level=level, clip_norm=clip_norm, delta=delta, spend=spend))
    return path
