"""Who is readmitted? A small network on a table of numbers.

A silo names its own CSV as `starter` in the [data] table of its agent.toml: a line of names, then a row for
each person with the columns below and `label`, 0 or 1. Without a file the rows are made up.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import roundtable as rt

Tensors = tuple[Tensor, Tensor]

# Column: what it is centred at and divided by. The same at every silo, so that a value means the same.
COLUMNS = {"age": (60.0, 15.0), "pressure": (130.0, 20.0), "glucose": (100.0, 25.0), "stays": (2.0, 2.0)}


class Starter(rt.Task):
    """The probability of `label` from the columns. `width` may be set in the job's [task] table."""

    def __init__(self, width: int = 16) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(len(COLUMNS), self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        values, labels = read(site.options["starter"]) if "starter" in site.options else made_up()
        rows = torch.as_tensor(site.shard(labels))
        values, labels = values[rows], labels[rows]
        # Every fifth row is kept for the test, at every silo.
        test = torch.arange(len(labels)) % 5 == 0
        return (values[~test], labels[~test]), (values[test], labels[test])

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        values, labels = batch
        return binary_cross_entropy_with_logits(model(values).squeeze(1), labels.float())

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        values, labels = batch
        scores = model(values).squeeze(1)
        right = ((scores > 0) == labels.bool()).sum()
        return {
            "accuracy": (right, len(labels)),
            **rt.metrics.auroc("risk", scores.sigmoid(), labels),
        }


def read(path: str | Path) -> Tensors:
    """A silo's own rows: values [n, columns], standardised, and labels [n]."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows")
    missing = [name for name in (*COLUMNS, "label") if name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(rows[0])}")
    values = [[(float(row[name]) - mean) / scale for name, (mean, scale) in COLUMNS.items()] for row in rows]
    return torch.tensor(values), torch.tensor([int(row["label"]) for row in rows])


def made_up(rows: int = 2000) -> Tensors:
    """Rows of nobody, the same each time: the label depends on two columns and on chance."""
    chance = torch.Generator().manual_seed(1)
    values = torch.randn(rows, len(COLUMNS), generator=chance)
    score = 1.5 * values[:, 0] - values[:, 1] * values[:, 2]
    labels = (score + 0.5 * torch.randn(rows, generator=chance) > 0).long()
    return values, labels
