"""Small tasks over made-up data, one for each kind of model that backends must agree on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from roundtable.core import Site, Task, torch_generator

HERE = Path(__file__).parent


class Images(Task):
    """Each client draws its own points around class centres; sizes differ."""

    shape: tuple[int, ...] = (12,)
    classes = 3

    def data(self, site: Site) -> tuple[Any, Any]:
        chance = torch_generator(11, site.index)
        count = 10 + 6 * (site.index % 4)
        labels = torch.randint(self.classes, (count + 6,), generator=chance)
        centres = torch.randn(self.classes, *self.shape, generator=torch_generator(11, "centres"))
        points = centres[labels] + 0.7 * torch.randn(count + 6, *self.shape, generator=chance)
        return (points[:count], labels[:count]), (points[count:], labels[count:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        inputs, labels = batch
        return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}


class Perceptron(Images):
    def __init__(self, hidden: int = 16) -> None:
        self.hidden = hidden

    def model(self) -> nn.Module:
        width = self.hidden
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 3))


class Wide(Perceptron):
    """So many weights that what a client keeps of them is more than a socket holds."""

    def __init__(self) -> None:
        super().__init__(20_000)


class Dropout(Images):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


class Convolution(Images):
    shape = (1, 6, 6)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        )


class BatchNorm(Images):
    """Statistics travel, the counter stays at the client."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.out(states[:, -1])


class Text(Images):
    def model(self) -> nn.Module:
        return _Lstm()

    def data(self, site: Site) -> tuple[Any, Any]:
        chance = torch_generator(12, site.index)
        tokens = torch.randint(20, (20 + site.index % 3, 5), generator=chance)
        labels = tokens.sum(1) % 3
        return (tokens[:14], labels[:14]), (tokens[14:], labels[14:])


class Killer(Perceptron):
    """Client 1 kills its process: once if `options["mark"]` names a file, else always."""

    def data(self, site: Site) -> tuple[Any, Any]:
        mark = site.options.get("mark")
        in_worker = "ROUNDTABLE_SIMULATION_WORKER" in os.environ
        if site.index == 1 and in_worker and not (mark and Path(mark).exists()):
            if mark:
                Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().data(site)


class Broken(Perceptron):
    """Client 1 has a bug in its data."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch)

    def data(self, site: Site) -> tuple[Any, Any]:
        if site.index == 1:
            raise ValueError("column 'age' is missing")
        return super().data(site)


class Cooling(Perceptron):
    """Its loss shrinks with the calls that went before."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) / (1.0 + 0.01 * self.calls)


class Unlearnable(Perceptron):
    """Its loss has a bug."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("no label 'outcome'")


class LearnableOnce(Perceptron):
    """Its loss has a bug that only a batch that is not full meets."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if len(batch[1]) < 9:
            raise ValueError("no label 'outcome'")
        return super().loss(model, batch)


class _Locked(Dataset[Any]):
    """A data set that cannot be pickled."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self._rows = (inputs, labels)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows[1])

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            return self._rows[0][index], self._rows[1][index]


class Unpicklable(Perceptron):
    """Its data sets hold locks."""

    def data(self, site: Site) -> tuple[Any, Any]:
        train, test = super().data(site)
        return _Locked(*train), _Locked(*test)
