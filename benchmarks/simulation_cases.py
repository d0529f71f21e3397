"""What all contestants of benchmarks/simulation.py share: the cases, the data, the models.

Models are made where torch is there; FedJAX takes the data alone.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

MNIST = "ROUNDTABLE_MNIST"
# Clients, clients a round, model.
CASES: dict[str, tuple[int, int, str]] = {
    "S1": (100, 10, "Perceptron"),
    "S2": (1000, 100, "Perceptron"),
    "S3": (100, 10, "Cnn"),
    "S2-GPU": (1000, 1000, "Perceptron"),
}


def device_of(case: str) -> str:
    """What a case runs on, for all contestants."""
    return "cuda" if case.endswith("-GPU") else "cpu"


@cache
def images() -> tuple[Any, Any]:
    """60,000 images [60000, 28, 28] of uint8 and their labels."""
    import numpy as np

    path = os.environ.get(MNIST)
    if path is None:
        chance = np.random.default_rng(0)
        return chance.integers(0, 256, (60000, 28, 28), dtype=np.uint8), chance.integers(0, 10, 60000)
    with np.load(path) as file:
        names = ("train_images", "train_labels") if "train_images" in file.files else ("x_train", "y_train")
        return file[names[0]], file[names[1]]


def make_perceptron() -> Any:
    """784-200-200-10."""
    from torch import nn

    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def make_cnn() -> Any:
    """McMahan et al. 2017: two 5 × 5 convolutions, 512 units."""
    from torch import nn

    def block(inside: int, outside: int) -> list[Any]:
        return [nn.Conv2d(inside, outside, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 28)), *block(1, 32), *block(32, 64), *head)


@cache
def model(task: str) -> Any:
    """One for each process that asks."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return make_perceptron() if task == "Perceptron" else make_cnn()


@cache
def shard(clients: int, index: int) -> tuple[Any, Any]:
    """A client's inputs and targets, kept by the process that has used them."""
    import numpy as np
    import torch

    pictures, labels = images()
    rows = np.random.default_rng(0).permutation(60000).reshape(clients, -1)[index]
    return torch.from_numpy(pictures[rows]).float().div_(255.0), torch.from_numpy(labels[rows]).long()


def say(round: int) -> None:
    """What every contestant prints when a round is done."""
    print(f"round {round}", flush=True)
