"""A classifier over shares that are made beforehand, and the rounds of a job over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import roundtable as rt
from roundtable.core.config import JobConfig
from roundtable.simulation import simulate

from .cells import HERE


@dataclass(frozen=True)
class Examples:
    """Inputs float32 [n, ...] and labels int64 [n]."""

    inputs: Tensor
    labels: Tensor

    def of(self, rows: Any) -> Examples:
        """Some of them."""
        return Examples(self.inputs[rows], self.labels[rows])


class Shares(rt.Task):
    """Client i trains on the i-th share. What is tested is tested beside the job, on the global model."""

    def __init__(self, shares: Sequence[Examples], make: Callable[[], nn.Module]) -> None:
        self._shares, self._make = shares, make

    def model(self) -> nn.Module:
        return self._make()

    def data(self, site: rt.Site) -> tuple[Any, None]:
        share = self._shares[site.index]
        return (share.inputs, share.labels), None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])


def best_round(job: JobConfig, task: Shares, test: Examples) -> float:
    """The accuracy of the global model on `test`, of the best round."""
    model, found = task.model().eval(), [0.0]

    def seen(progress: Any) -> None:
        if progress.kind == "round":
            model.load_state_dict(progress.model.state_dict())
            with torch.no_grad():
                right = model(test.inputs).argmax(1) == test.labels
            found.append(float(right.float().mean()))

    _finished(simulate(job, task, folder=HERE, progress=seen))
    return max(found)


class OwnTests(Shares):
    """With test examples at each client, for models of clients' own."""

    def __init__(
        self, shares: Sequence[Examples], tests: Sequence[Examples], make: Callable[[], nn.Module]
    ) -> None:
        super().__init__(shares, make)
        self.tests = tests

    def data(self, site: rt.Site) -> tuple[Any, Any]:
        test = self.tests[site.index]
        return super().data(site)[0], (test.inputs, test.labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def best_personal_round(job: JobConfig, task: OwnTests) -> float:
    """The accuracy of the clients' own models over all their test examples, of the best round evaluated."""
    found = _finished(simulate(job, task, folder=HERE)).history["accuracy"]
    return max(float(value) for value in found if value is not None)


def last_loss(job: JobConfig, task: Shares, train: Examples) -> float:
    """The mean loss of the last global model on `train`."""
    model = task.model().eval()
    model.load_state_dict(_finished(simulate(job, task, folder=HERE)).model.state_dict())
    with torch.no_grad():
        return float(cross_entropy(model(train.inputs), train.labels))


def last_accuracies(job: JobConfig, task: OwnTests) -> Tensor:
    """The accuracy of the last global model on each client's test examples, float64 [clients]."""
    model = task.model().eval()
    model.load_state_dict(_finished(simulate(job, task, folder=HERE)).model.state_dict())
    with torch.no_grad():
        right = [model(test.inputs).argmax(1) == test.labels for test in task.tests]
    return torch.stack([one.double().mean() for one in right])


def _finished(result: Any) -> Any:
    if result.status != "finished":
        raise rt.RoundtableError(f"{result.job.title}: {result.status}, {result.reason}")
    return result


def joined(parts: Sequence[Examples]) -> Examples:
    """All of them after each other."""
    inputs, labels = ([getattr(part, name) for part in parts] for name in ("inputs", "labels"))
    return Examples(torch.cat(inputs), torch.cat(labels))


def linear(inputs: int) -> Callable[[], nn.Module]:
    """Softmax regression with ten classes."""
    return lambda: nn.Linear(inputs, 10)


def one_hidden(inputs: int, hidden: int) -> Callable[[], nn.Module]:
    """One hidden layer."""
    return lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))
