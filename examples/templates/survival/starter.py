"""How long until the event? Cox's proportional hazards with a small network (Katzman et al. 2018, DeepSurv).

A silo names its own CSV as `starter` in the [data] table of its agent.toml: a line of names, then a row for
each person with the columns below, `time` (above 0) and `event` (1, or 0 where it was not seen). Without a
file the rows are made up.

The loss is Cox's partial likelihood within a batch (its negative logarithm; ties as Breslow).
Risks are compared within a batch alone: take batches as large as the silos' data allow. Exact Cox regression
over all silos needs sums over sets at risk, which is another computation than rounds of training.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import roundtable as rt

Tensors = tuple[Tensor, Tensor, Tensor]

# Column: what it is centred at and divided by. The same at every silo, so that a value means the same.
COLUMNS = {"age": (60.0, 10.0), "stage": (2.0, 1.0), "marker": (1.0, 0.5)}


class Starter(rt.Task):
    """A score of risk from the columns. `width` may be set in the job's [task] table."""

    def __init__(self, width: int = 8) -> None:
        self.width = width

    def model(self) -> nn.Module:
        # No bias at the end: Cox's likelihood does not depend on it.
        return nn.Sequential(
            nn.Linear(len(COLUMNS), self.width), nn.Tanh(), nn.Linear(self.width, 1, bias=False)
        )

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        values, times, events = read(site.options["starter"]) if "starter" in site.options else made_up()
        rows = torch.as_tensor(site.shard(events))
        values, times, events = values[rows], times[rows], events[rows]
        # Every fifth person is kept for the test, at every silo.
        test = torch.arange(len(times)) % 5 == 0
        return (values[~test], times[~test], events[~test]), (values[test], times[test], events[test])

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        values, times, events = batch
        risk = model(values).squeeze(1)
        # Who is at risk when i has the event: everybody whose time is not before i's.
        at_risk = times.unsqueeze(0) >= times.unsqueeze(1)
        total = risk.unsqueeze(0).masked_fill(~at_risk, float("-inf")).logsumexp(1)
        return ((total - risk) * events).mean()

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        values, times, events = batch
        return rt.metrics.concordance("risk", model(values).squeeze(1), times, events)


def read(path: str | Path) -> Tensors:
    """A silo's own rows: values [n, columns], standardised, times [n], events [n]."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows")
    missing = [name for name in (*COLUMNS, "time", "event") if name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(rows[0])}")
    values = [[(float(row[name]) - mean) / scale for name, (mean, scale) in COLUMNS.items()] for row in rows]
    times = torch.tensor([float(row["time"]) for row in rows])
    if not (times > 0).all():
        raise ValueError(f"{path}: every time must be above 0")
    return torch.tensor(values), times, torch.tensor([float(row["event"]) for row in rows])


def made_up(people: int = 1500) -> Tensors:
    """People that nobody is, the same each time: exponential times, a third of them not seen to the end."""
    chance = torch.Generator().manual_seed(1)
    values = torch.randn(people, len(COLUMNS), generator=chance)
    risk = 0.8 * values[:, 0] + 0.6 * values[:, 1] - 0.7 * values[:, 2]
    until = -torch.rand(people, generator=chance).clamp(min=1e-6).log() / risk.exp()
    censored = -torch.rand(people, generator=chance).clamp(min=1e-6).log() * 2
    return values, torch.minimum(until, censored), (until <= censored).float()
