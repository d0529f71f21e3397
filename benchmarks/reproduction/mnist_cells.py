"""MNIST as NIID-Bench splits it (in Flower's baseline), and as pFedMe's authors do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError

from .shares import Examples, OwnTests, Shares, best_personal_round, best_round, joined, linear, one_hidden

_TRAINED = 60_000


@cache
def read_mnist(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All 70,000 images [n, 784] of bytes, those to train first, and their labels."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("{}_images", "{}_labels") if "train_images" in file else ("x_{}", "y_{}")
            images, labels = (
                np.concatenate([file[name.format(part)] for part in ("train", "test")]) for name in names
            )
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"--mnist {path}: no MNIST as an .npz file: {error}") from None
    if images.shape[0] != 70_000 or labels.shape != (70_000,):
        raise ConfigError(f"--mnist {path}: {images.shape[0]} images and {labels.shape} labels, not 70,000")
    return images.reshape(70_000, -1), labels.astype(np.int64)


def run_niid(job: JobConfig, options: Mapping[str, Any], data: Path | None) -> tuple[float, dict[str, float]]:
    """The best round's accuracy on the 10,000 test images."""
    assert data is not None
    images, labels = read_mnist(data)
    pixels = torch.from_numpy(images).float().div_(255).reshape(-1, 1, 28, 28)
    every = Examples(pixels, torch.from_numpy(labels))
    owners = split(
        labels[:_TRAINED], options["split"], job.simulation.clients, np.random.default_rng(job.seed)
    )
    shares = [every.of(torch.from_numpy(rows)) for rows in owners]
    test = every.of(slice(_TRAINED, None))
    return best_round(job, Shares(shares, convolutional), test), {}


def convolutional() -> nn.Module:
    """NIID-Bench's network of 44,426 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def split(labels: np.ndarray, kind: str, clients: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Row numbers by client: "iid", "dirichlet", or "labels_K"."""
    if kind == "iid":
        return [np.sort(part) for part in np.array_split(chance.permutation(len(labels)), clients)]
    if kind == "dirichlet":
        return _dirichlet(labels, clients, chance)
    wanted = int(kind.removeprefix("labels_"))
    has = [{client % 10} for client in range(clients)]
    for mine in has:
        others = [label for label in range(10) if label not in mine]
        mine.update(chance.choice(others, wanted - 1, replace=False).tolist())
    rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(10):
        holders = [client for client, mine in enumerate(has) if label in mine]
        of_label = chance.permutation(np.flatnonzero(labels == label))
        for client, part in zip(holders, np.array_split(of_label, len(holders)), strict=True):
            rows[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in rows]


def _dirichlet(labels: np.ndarray, clients: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Dir(0.5) for each label; who has its equal share already gets nothing more; again until all have 10."""
    while True:
        rows: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * clients
        for label in range(10):
            of_label = chance.permutation(np.flatnonzero(labels == label))
            shares = chance.dirichlet(np.full(clients, 0.5))
            shares *= [len(mine) < len(labels) / clients for mine in rows]
            ends = (np.cumsum(shares / shares.sum()) * len(of_label)).astype(int)[:-1]
            parts = np.split(of_label, ends)
            rows = [np.concatenate(pair) for pair in zip(rows, parts, strict=True)]
        if min(map(len, rows)) >= 10:
            return [np.sort(mine) for mine in rows]


def run_pfedme(
    job: JobConfig, options: Mapping[str, Any], data: Path | None
) -> tuple[float, dict[str, float]]:
    """The best round's accuracy on all clients' test examples, of the global model or of `personal` ones."""
    assert data is not None
    train, test = _pfedme_split(data)
    make = linear(784) if options["model"] == "mclr" else one_hidden(784, 100)
    if options.get("personal"):
        return best_personal_round(job, OwnTests(train, test, make)), {}
    return best_round(job, Shares(train, make), joined(test)), {}


@cache
def _pfedme_split(data: Path) -> tuple[list[Examples], list[Examples]]:
    """20 clients with two labels each, three quarters to train; the authors' draws, with their seeds of 1."""
    images, labels = read_mnist(data)
    pixels = images.astype(np.float32)
    pixels = (pixels - pixels.mean(0)) / (pixels.std(0) + 0.001)
    by_label = [np.flatnonzero(labels == label) for label in range(10)]
    legacy, shuffles = np.random.RandomState(1), random.Random(1)
    # Sizes come from labels 0 and 1 alone, 20 of each, and are dealt out in turn.
    sizes = [_sizes(len(by_label[label]), 20, legacy) for label in (0, 1)]
    dealt = [size for pair in zip(*sizes, strict=True) for size in pair]
    train, test, used = [], [], [0] * 10
    for client in range(20):
        rows: list[int] = []
        for number in range(2):
            label, size = (client + number) % 10, dealt[2 * client + number]
            if used[label] + size < len(by_label[label]):
                rows += by_label[label][used[label] : used[label] + size].tolist()
                used[label] += size
        shuffles.shuffle(rows)
        everything = Examples(torch.from_numpy(pixels[rows]), torch.from_numpy(labels[rows]))
        cut = int(0.75 * len(rows))
        train.append(everything.of(slice(cut)))
        test.append(everything.of(slice(cut, None)))
    return train, test


def _sizes(total: int, count: int, legacy: np.random.RandomState) -> list[int]:
    sizes = []
    for _ in range(count - 1):
        sizes.append(int(legacy.randint(total // (count + 1), total // 2)))
        total -= sizes[-1]
    return [*sizes, total]
