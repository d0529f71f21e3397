"""What is in the picture? A small convolutional network on grey images of 16 x 16 pixels.

A silo names its own .npz file as `starter` in the [data] table of its agent.toml: `images` [n, 16, 16] with
values 0 to 255, `labels` [n]. Without a file the pictures are drawn: squares, circles and crosses.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import roundtable as rt

Tensors = tuple[Tensor, Tensor]

SIZE, CLASSES = 16, 3


class Starter(rt.Task):
    """Tells CLASSES kinds of pictures apart. `channels` may be set in the job's [task] table."""

    def __init__(self, channels: int = 8) -> None:
        self.channels = channels

    def model(self) -> nn.Module:
        # GroupNorm in the place of BatchNorm: it has no statistics that silos would have to agree on.
        return nn.Sequential(
            nn.Conv2d(1, self.channels, 3, padding=1),
            nn.GroupNorm(1, self.channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(self.channels, 2 * self.channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * self.channels * (SIZE // 4) ** 2, CLASSES),
        )

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        images, labels = read(site.options["starter"]) if "starter" in site.options else drawn()
        rows = site.shard(labels)
        inputs = torch.from_numpy(images[rows]).float().unsqueeze(1) / 255
        targets = torch.from_numpy(labels[rows]).long()
        # Every fifth picture is kept for the test, at every silo.
        test = torch.arange(len(targets)) % 5 == 0
        return (inputs[~test], targets[~test]), (inputs[test], targets[test])

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        inputs, targets = batch
        predicted = model(inputs).argmax(1)
        return rt.metrics.confusion("class", predicted, targets, CLASSES)


def read(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """A silo's own pictures and labels."""
    with np.load(path, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    if images.shape[1:] != (SIZE, SIZE) or len(images) != len(labels):
        raise ValueError(
            f"{path}: images {images.shape}, labels {labels.shape}; need [n, {SIZE}, {SIZE}], [n]"
        )
    return images, labels


def drawn(pictures: int = 900) -> tuple[np.ndarray, np.ndarray]:
    """Squares (0), circles (1) and crosses (2) anywhere in the picture, with noise; the same each time."""
    chance = np.random.default_rng(1)
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    images = np.empty((pictures, SIZE, SIZE), dtype=np.uint8)
    labels = np.arange(pictures) % CLASSES
    for index, label in enumerate(labels):
        radius = chance.integers(3, 6)
        y, x = chance.integers(radius, SIZE - radius, 2)
        away = abs(rows - y), abs(columns - x)
        inside = np.maximum(*away) <= radius
        shape = [
            inside & (np.maximum(*away) >= radius - 1),
            abs(np.hypot(*away) - radius) < 0.8,
            inside & (np.minimum(*away) < 1),
        ][label]
        images[index] = np.clip(shape * 180 + chance.normal(40, 25, (SIZE, SIZE)), 0, 255)
    return images, labels
