"""Small tasks over clients of unequal size, and how a backend trains all of them for one round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.core import ArrayTask, Model, Site, Task, initial_state, parse_job
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.initial_model import initial_vector, job_layout
from roundtable.simulation.backend import Backend, Failed, Trained, Work, World
from roundtable.simulation.backends.sequential import one_thread

SIZES = [7, 12, 1, 5]


class Base(Task):
    """Clients of unequal size with data drawn for each."""

    inputs: tuple[int, ...] = (6,)
    classes = 4

    def data(self, site: Site) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(site.index)
        count = SIZES[site.index]
        x = torch.randn(count, *self.inputs, generator=generator)
        return (x, torch.randint(0, self.classes, (count,), generator=generator)), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Perceptron(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


class Convolution(Base):
    inputs = (1, 8, 8)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 4),
        )


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0][:, -1])


class Tokens(Base):
    def model(self) -> nn.Module:
        return _Recurrent()

    def data(self, site: Site) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(site.index)
        count = SIZES[site.index]
        tokens = torch.randint(0, 11, (count, 4), generator=generator)
        return (tokens, tokens[:, 0] % 4), None


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.embedding(tokens))[:, 0])


class Attention(Tokens):
    """With tied weights."""

    def model(self) -> nn.Module:
        return _Attention()


class Dropout(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4))


class Partial(Base):
    """One layer frozen, one never reached."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {"a": nn.Linear(6, 8), "frozen": nn.Linear(8, 8), "b": nn.Linear(8, 4), "idle": nn.Linear(2, 2)}
        )
        model["frozen"].requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hidden = model["frozen"](model["a"](batch[0])).relu()  # type: ignore[index]
        return nn.functional.cross_entropy(model["b"](hidden), batch[1])  # type: ignore[index]


TASKS = [Perceptron, Convolution, Tokens, Attention, Dropout, Partial]
ALGORITHMS = {
    "fedavg": "",
    "fedprox": 'name = "fedprox"\nmu = 0.3',
    "momentum": "momentum = 0.9\nweight_decay = 0.05",
    "clipped": "max_gradient_norm = 0.2\nweight_decay = 0.1",
    "prox-clipped": 'name = "fedprox"\nmu = 0.3\nmax_gradient_norm = 0.5\nmomentum = 0.5',
    "prox-decayed": 'name = "fedprox"\nmu = 0.3\nweight_decay = 0.1',
    "steps": "steps = 7",
    "decay": "learning_rate_decay = 0.5",
}


def world(task: Task | ArrayTask, algorithm: str = "", model: str = "", folder: Path | None = None) -> World:
    length = "" if "steps" in algorithm else "epochs = 2"
    job = parse_job(
        f'task = "t"\n[algorithm]\n{length}\nbatch_size = 4\nlearning_rate = 0.1\n{algorithm}\n'
        f"[model]\n{model}\n[simulation]\nclients = {len(SIZES)}"
    )
    state = initial_state(task, job.seed)
    layout = job_layout(job, make_algorithm(job.algorithm, folder), state)
    return World(job, task, Model(layout, initial_vector(layout, state).clone()), folder=folder)


def run(backend: Backend, place: World, round: int = 2) -> tuple[list[Trained | Failed], Tensor]:
    rows = torch.empty(len(SIZES), place.layout.size)
    work = [Work(place.names[index], index) for index in range(len(SIZES))]
    with one_thread():
        return list(backend.train(round, place.initial.vector, work, rows.unbind())), rows


def moved(place: World) -> World:
    """The same world with other weights everywhere than those that the task makes."""
    chance = torch.Generator().manual_seed(1)
    vector = place.initial.vector + 0.1 * torch.randn(place.layout.size, generator=chance)
    return replace(place, initial=Model(place.layout, vector))
