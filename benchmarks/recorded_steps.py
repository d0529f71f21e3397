"""What a training step of a simulated client costs: on compiled kernels, replayed by torch, and by autograd.

    python benchmarks/recorded_steps.py                     # all models
    python benchmarks/recorded_steps.py --only LeNet --turns 15

One process and one thread. Each turn takes a few steps in each of the three ways, one after the other; given
are the medians of a step's processor time and of the turns' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from simulation_cases import make_cnn, make_perceptron
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.core import Layout
from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised import recorded_steps
from roundtable.simulation.backends.vectorised.recorded_work import Manner

_RATE = 0.01


class Classes:
    """All that steps ask of a task."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(model(batch[0]), batch[1])


def lenet() -> nn.Module:
    """NIID-Bench's network for MNIST (Li et al. 2022), 44,426 parameters."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP 784-200-200-10, B = 10": (make_perceptron, 10),
    "LeNet, B = 10": (lenet, 10),
    "LeNet, B = 64": (lenet, 64),
    "CNN of S3, B = 10": (make_cnn, 10),
}


def recorded(make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    """A step as simulated clients take it."""
    model, manner = make(), Manner(LocalStep())
    layout = Layout.of(model.state_dict())
    steps = recorded_steps.Steps(Classes(), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), manner.step)
    program = steps.prepare(batch, manner)
    return lambda: program.run(_RATE, *batch).item()


def by_autograd(make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> Callable[[], object]:
    """The loop that everybody writes."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def measured(step: Callable[[], object], seconds: float = 0.1) -> float:
    """Processor time of a step in µs, over as many as take about so long."""
    step()
    count, began = 0, time.process_time()
    while count < 3 or time.process_time() - began < seconds:
        step()
        count += 1
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    """Prints a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<28} compiled  replayed  autograd   autograd / compiled")
    for name, (make, size) in CASES.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        batch = torch.randn(size, 28, 28), torch.randint(0, 10, (size,))
        ways = {"compiled": recorded(make, batch)}
        with mock.patch.object(recorded_steps, "load", return_value=None):
            ways["replayed"] = recorded(make, batch)
        ways["autograd"] = by_autograd(make, batch)
        turns = [{way: measured(step) for way, step in ways.items()} for _ in range(options.turns)]
        times = [statistics.median(turn[way] for turn in turns) for way in ways]
        ratio = statistics.median(turn["autograd"] / turn["compiled"] for turn in turns)
        print(f"{name:<28}" + "".join(f"{value:>9,.0f} " for value in times) + f"  {ratio:.2f} ×")


if __name__ == "__main__":
    main()
