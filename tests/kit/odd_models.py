"""Models whose passes do more than compute: they keep something, write to weights, or leave parts out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from architectures import CLASSES, EXAMPLES, Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core import JobConfig, Layout
from roundtable.core.task import Site, initial_state

_ROWS = 12


class RunningMean(nn.Module):
    """Subtracts a mean of the inputs that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)
        self.register_buffer("mean", torch.zeros(_ROWS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.head(x - self.mean)


class Clamped(nn.Module):
    """Keeps its weights above zero by writing to them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data.clamp_(min=0.0)
        return self.head(x)


class Late(nn.Module):
    """Makes a table in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        return self.head(x * self.table)


class LeftOut(nn.Module):
    """Leaves layers out by chance, drawn by torch or by Python."""

    def __init__(self, chance: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_ROWS, _ROWS) for _ in range(4))
        self.head = nn.Linear(_ROWS, CLASSES)
        self._chance = chance

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self._chance() > 0.5:
                x = x + layer(x)
        return self.head(x)


class Rows(nn.Module):
    """Layers over rows with a residual, `between` each: the first two come again."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        one, two = (nn.Sequential(nn.Linear(_ROWS, _ROWS), nn.Tanh()) for _ in range(2))
        self.layers = nn.ModuleList([one, two, one, two])
        self.between = between
        self.head = nn.Linear(_ROWS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.between(x))
        return self.head(x)


class Furnished(nn.Module):
    """Has what it draws, or computes from weights, in attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(_ROWS, _ROWS), nn.Linear(_ROWS, CLASSES)
        self.order = torch.randperm(_ROWS).tolist()
        self.chosen = set(torch.randperm(_ROWS)[:5].tolist())
        self.tables = {"mask": [torch.rand(_ROWS) > 0.3], "wave": (np.random.rand(_ROWS), random.random())}
        self.scale = [self.body.weight.detach().norm().double()]

    def forward(self, x: Tensor) -> Tensor:
        wave, number = self.tables["wave"]
        x = self.body(x[:, self.order] * self.tables["mask"][0] * torch.from_numpy(wave) * number)
        return self.head(x * self.scale[0] + x[:, sorted(self.chosen)].sum(1, keepdim=True))


class Recurrent(nn.Module):
    """Goes on from what it has seen, in a plain attribute; counts passes, or examples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)
        self.kind, self.count, self.state = kind, 0, None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "state":
            self.state = x.mean(0) if self.state is None else (self.state + x.mean(0)).detach()
            return self.head(x - self.state)
        if self.kind == "buffer":
            self.seen += len(x)
        else:
            self.count += 1 if self.kind == "passes" else len(x)
        self.last = x.detach()
        return self.head(x) / (1 + self.count + self.seen)


class Speaker(nn.Module):
    """Words by the table that it reads them with; by itself it can compute its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))
        self.layers = nn.ModuleList(blocks)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = x + layer(x)
        logits = F.linear(x, self.table.weight)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Normed(nn.Module):
    """Asks its batch normalisation what it is, as code does that keeps it in evaluation; it has a hook."""

    def __init__(self, *, rests: bool) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(_ROWS, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, CLASSES)
        self.norm.register_forward_hook(lambda module, inputs, output: output * 2)
        self._rests = rests

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        for module in self.modules():
            if self._rests and isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x))
        return self.head(F.relu(x) / self.norm.num_features)


class Counting(nn.Module):
    """Divides by how many examples it has seen in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen += len(x)
        return self.head(x) / (1 + self.seen)


class Spread(nn.Module):
    """Divides by the spread of the batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_ROWS, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x / x.std())}


class _ByLength(torch.autograd.Function):
    """Whose gradient is divided by the length of the batch, as one is that somebody averaged by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 / len(gradient)


class ByHand(nn.Module):
    """Has a function with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(_ROWS, _ROWS), nn.Linear(_ROWS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_ByLength.apply(self.body(x)))


def measured_twice(rank: int) -> tuple[list[float], float]:
    """The losses of two evaluations, and what the model counted in them that is left."""
    task = Odd(Counting)
    layout = Layout.of(initial_state(task, 3))
    strategy = Strategy(micro_batch=4)
    trainer = RankTrainer(
        task, job(), layout, strategy, Meshes(strategy.mesh, "cpu"), torch.device("cpu"), "silo"
    )
    trainer.load(layout.flatten(initial_state(task, 3)).clone(), {})
    data, _ = task.data(Site("silo"))
    losses = [trainer.evaluate(data, 8)["loss"][0] for _ in range(2)]
    return losses, float(dict(trainer.replica.buffers())["seen"])


class Odd(Table):
    """A task with such a model; `loss` may be another."""

    def __init__(self, make: Any, loss: Any = None) -> None:
        self._make, self._loss = make, loss

    def model(self) -> Any:
        made = self._make()
        return made.double() if isinstance(made, nn.Module) else made

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self._loss is not None:
            return self._loss(model, batch)
        return F.cross_entropy(model(batch[0]), batch[1])


class Stepped(Odd):
    """With an optimizer of its own."""

    def __init__(self, make: Any, optimizer: Any) -> None:
        super().__init__(make)
        self._optimizer = optimizer

    def optimizer(self, parameters: Any) -> Any:
        return self._optimizer(list(parameters))


class Lamb(torch.optim.Optimizer):
    """Steps as long as a parameter is, whatever its gradient's norm; it refuses a wrong `sign`."""

    def __init__(self, parameters: Any, lr: float, *, sign: float = -1.0, hidden: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "sign": sign})
        self.hidden = hidden

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    length = each.norm() / (each.grad.norm() + 1e-6) * self.hidden
                    each.add_(each.grad * length, alpha=group["sign"] * group["lr"])


def by_length(parameters: Any) -> torch.optim.Optimizer:
    return Lamb(parameters, 0.05)


def matrices_alone(parameters: Any) -> torch.optim.Optimizer:
    """Another rate than the defaults', and no vectors."""
    group = {"params": [each for each in parameters if each.dim() > 1], "lr": 0.004}
    return torch.optim.AdamW([group], lr=0.1)


class Words(Odd):
    """With whole numbers as inputs."""

    def data(self, site: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(64, (EXAMPLES, 5), generator=generator)
        return (words, torch.randint(CLASSES, (EXAMPLES,), generator=generator)), None


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(_ROWS, 16)), nn.Linear(16, CLASSES)
    )


def instance_norm() -> nn.Module:
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (3, 4)), layer, nn.Flatten(), nn.Linear(_ROWS, CLASSES))


class _Scaled(nn.Module):
    """Multiplies by a number that Python draws, and a layer's weights by it too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * (random.random() + np.random.rand())))


def drawn_by_host() -> nn.Module:
    return nn.Sequential(*(_Scaled(_ROWS) for _ in range(4)), nn.Linear(_ROWS, CLASSES))


def repeated() -> nn.Module:
    return Rows(nn.Identity())


def resting() -> nn.Module:
    return Normed(rests=True)


def active() -> nn.Module:
    return Normed(rests=False)


def normed_weight() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(_ROWS, 24), nn.ReLU(), nn.Linear(24, _ROWS)) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(_ROWS, CLASSES))
    nn.utils.parametrizations.weight_norm(model[0][0])
    return model


def by_torch() -> nn.Module:
    return LeftOut(lambda: torch.rand(()))


def job() -> JobConfig:
    table = {"name": "fedavg", "steps": 3, "batch_size": 8, "learning_rate": 0.05, "momentum": 0.9}
    return JobConfig.model_validate({"task": "t", "seed": 3, "algorithm": table})


def trained(rank: int, cases: list[tuple[Any, Strategy]]) -> list[tuple[dict[str, Tensor], float]]:
    """Each task's weights on this rank after a round, and the largest difference from one process's."""
    found = []
    for make, strategy in cases:
        task = make if isinstance(make, Odd) else Odd(make)
        model = initial_state(task, 3)
        assert isinstance(model, nn.Module)
        layout = Layout.of(model)
        start = layout.flatten(model).clone()
        data, _ = task.data(Site("silo"))
        meshes = Meshes(strategy.mesh, "cpu")
        trainer = RankTrainer(task, job(), layout, strategy, meshes, torch.device("cpu"), "silo")
        whole = {name: each for name, each in model.state_dict().items() if not each.is_floating_point()}
        trainer.load(start.clone(), whole)
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
        train(task, model, data, LocalWork(job(), layout, start, 1, "silo"))
        alone = dict(model.named_parameters())
        own = {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for name, each in trainer.replica.tensors()
        }
        gap = max(float((own[name] - each).detach().abs().max()) for name, each in alone.items())
        found.append((own, gap))
    return found
