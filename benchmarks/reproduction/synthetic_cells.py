"""FedProx's synthetic data (Li et al. 2020, section 5.1), in rounds of its own, of pFedMe and of q-FFL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roundtable.core.config import JobConfig

from .shares import (
    Examples,
    OwnTests,
    Shares,
    best_personal_round,
    best_round,
    joined,
    last_accuracies,
    last_loss,
    linear,
    one_hidden,
)

_PLACES, _CLASSES = 60, 10


def generate(
    clients: int, alpha: float, beta: float, iid: bool, times: int, chance: np.random.RandomState
) -> list[Examples]:
    """Each client's examples. α and β are deviations, as in the authors' code; the paper says variances."""
    sizes = (chance.lognormal(4, 2, clients).astype(int) + 50) * times
    centres, shifts = chance.normal(0, alpha, clients), chance.normal(0, beta, clients)
    scale = np.diag(np.arange(1, _PLACES + 1) ** -1.2)
    means = [np.full(_PLACES, shift) if iid else chance.normal(shift, 1, _PLACES) for shift in shifts]
    common = (chance.normal(0, 1, (_PLACES, _CLASSES)), chance.normal(0, 1, _CLASSES)) if iid else None
    made = []
    for size, centre, mean in zip(sizes, centres, means, strict=True):
        weights, bias = common or (
            chance.normal(centre, 1, (_PLACES, _CLASSES)),
            chance.normal(centre, 1, _CLASSES),
        )
        inputs = chance.multivariate_normal(mean, scale, size)
        labels = (inputs @ weights + bias).argmax(1)
        made.append(Examples(torch.from_numpy(inputs).float(), torch.from_numpy(labels)))
    return made


def _cut(share: Examples) -> tuple[Examples, Examples]:
    nine = int(0.9 * len(share.labels))
    return share.of(slice(nine)), share.of(slice(nine, None))


@cache
def _pfedme_shares() -> list[tuple[Examples, Examples]]:
    return [_cut(share) for share in generate(100, 0.5, 0.5, False, 5, np.random.RandomState(0))]


def run_pfedme_synthetic(
    job: JobConfig, options: Mapping[str, Any], data: Path | None
) -> tuple[float, dict[str, float]]:
    """The best round's accuracy on all clients' test examples, of the global model or of `personal` ones."""
    train, test = zip(*_pfedme_shares(), strict=True)
    make = linear(_PLACES) if options["model"] == "mclr" else one_hidden(_PLACES, 20)
    if options.get("personal"):
        return best_personal_round(job, OwnTests(train, test, make)), {}
    return best_round(job, Shares(train, make), joined(test)), {}


def run_fedprox(
    job: JobConfig, options: Mapping[str, Any], data: Path | None
) -> tuple[float, dict[str, float]]:
    """The last model's loss on all clients' training examples; the data are drawn by the job's seed."""
    spread = options.get("spread")
    chance = np.random.RandomState(job.seed)
    shares = generate(30, spread or 0.0, spread or 0.0, spread is None, 1, chance)
    train = [_cut(share)[0] for share in shares]
    return last_loss(job, Shares(train, linear(_PLACES)), joined(train)), {}


def run_qffl(job: JobConfig, options: Mapping[str, Any], data: Path | None) -> tuple[float, dict[str, float]]:
    """How unequal the clients' accuracies on their own test examples are, in points²; beside it, in points,
    their mean (not weighted, as the paper's table), worst and best tenth. Data and split follow the seed."""
    chance = np.random.RandomState(job.seed)
    train, test = [], []
    for share in generate(100, 1.0, 1.0, False, 1, chance):
        share = share.of(torch.from_numpy(chance.permutation(len(share.labels))))
        eighth, ninth = (int(part * len(share.labels)) for part in (0.8, 0.9))
        train.append(share.of(slice(eighth)))
        test.append(share.of(slice(ninth, None)))
    points = 100 * last_accuracies(job, OwnTests(train, test, linear(_PLACES))).sort().values
    tenth = len(points) // 10
    return float(points.var(correction=0)), {
        "mean": float(points.mean()),
        "worst tenth": float(points[:tenth].mean()),
        "best tenth": float(points[-tenth:].mean()),
    }
