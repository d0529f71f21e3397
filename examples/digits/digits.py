"""Handwritten digits: scikit-learn's 1,797 real images of 8 x 8 pixels, and a small network."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import roundtable as rt

Tensors = tuple[Tensor, Tensor]


class Digits(rt.Task):
    """Tells digits apart. A silo names its own file as `digits` in the [data] table of its agent.toml."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        images, labels = read(site.options["digits"]) if "digits" in site.options else everything()
        rows = site.shard(labels)
        inputs = torch.from_numpy(images[rows]).float() / 16.0
        targets = torch.from_numpy(labels[rows]).long()
        # Every fifth image is kept for the test, at every site.
        test = torch.arange(len(rows)) % 5 == 0
        return (inputs[~test], targets[~test]), (inputs[test], targets[test])

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        inputs, targets = batch
        return {"accuracy": ((model(inputs).argmax(1) == targets).sum(), len(targets))}


def read(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """A silo's own images and labels."""
    with np.load(path, allow_pickle=False) as file:
        return file["images"], file["labels"]


def everything() -> tuple[np.ndarray, np.ndarray]:
    """The whole data set, for a simulation to split: images [1797, 64] with values 0 to 16, labels [1797]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.astype(np.uint8), labels.astype(np.uint8)
