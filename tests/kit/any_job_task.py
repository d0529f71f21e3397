"""The task of jobs that are drawn at random: that of `algorithm_tasks`, at silos too, with figures.

What a job sets of it makes another task of it, or a silo in it a strange one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from algorithm_tasks import Net, Plain
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from typing_extensions import override

from roundtable import metrics
from roundtable.core import Site
from roundtable.core.task import ArrayTask

PARAMETERS = ["normalised", "drop", "mapped", "streamed", "factors", "tabled", "adam", "arrays", "odd_silo"]


def made(arrays: bool = False, adam: bool = False, odd_silo: str = "", **parameters: Any) -> Toy | Arrays:
    """The task of a job's `[task]`."""
    if arrays:
        return Arrays()
    if adam:
        return WithAdam(**parameters)
    return OddSilo(odd_silo, **parameters) if odd_silo else Toy(**parameters)


class Stream(IterableDataset[Any]):
    """Rows one after the other, and again from the beginning."""

    def __init__(self, rows: tuple[Tensor, ...]) -> None:
        self.rows = rows

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.rows, strict=True))


class LowRank(nn.Module):
    """A layer that is frozen, and the factors of what is added to it, by the names that peft gives them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 8, bias=False)})

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B["default"](self.lora_A["default"](x))  # type: ignore[no-any-return]


class Toy(Plain):
    """`normalised`: with batch normalisation; `drop`: the rate of dropout; `mapped`: rows in a Dataset;
    `streamed`: rows in a stream; `factors`: the rank of factors in the place of the first layer; `tabled`:
    features are columns of the silo's table.
    """

    def __init__(
        self,
        normalised: bool = False,
        drop: float = 0.0,
        mapped: bool = False,
        streamed: bool = False,
        factors: int = 0,
        tabled: bool = False,
    ) -> None:
        self.normalised = normalised
        self.drop = drop
        self.mapped = mapped
        self.streamed = streamed
        self.factors = factors
        self.tabled = tabled

    @override
    def model(self) -> nn.Module:
        net = Net(self.normalised)
        if self.factors:
            net.base[0] = LowRank(self.factors)
        if self.drop:
            net.base.append(nn.Dropout(self.drop))
        return net

    @override
    def data(self, site: Site) -> Any:
        """A silo has no number; its name ends in one, as a simulated client's does."""
        number = site.name.rpartition("-")[2]
        index = int(number) if number.isdigit() else 9
        train, test = super().data(replace(site, index=index))
        if self.tabled:
            rows = torch.tensor(site.table("people").matrix([f"x{n}" for n in range(6)]), dtype=torch.float32)
            train, test = (rows[8:], train[1][: len(rows) - 8]), (rows[:8], test[1])
        if self.streamed:
            return Stream(train), test
        return TensorDataset(*train) if self.mapped else train, test

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, int]]:
        out, labels = model(batch[0]), batch[1]
        said, truth, rows = out.argmax(1) == 1, labels == 1, len(labels)
        return {
            "accuracy": ((out.argmax(1) == labels).sum(), rows),
            "hits": ((said & truth).sum(), rows),
            "said": (said.sum(), rows),
            **metrics.auroc("risk", torch.softmax(out, 1)[:, 1], truth, bins=20),
        }


class WithAdam(Toy):
    """Brings an optimizer of its own."""

    @override
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)


class OddSilo(Toy):
    """client-3 has no test data, one example, a loss that is not a number in round 2, or an error there."""

    def __init__(self, odd_silo: str, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.odd_silo = odd_silo

    @override
    def data(self, site: Site) -> Any:
        train, test = super().data(site)
        odd = self.odd_silo if site.name == "client-3" else ""
        if odd == "one example" and isinstance(train, tuple):
            train = tuple(each[:1] for each in train)
        return train, None if odd == "no test data" else test

    @override
    def loss(self, model: nn.Module, batch: Any, context: Any = None) -> Tensor:
        found = super().loss(model, batch)
        if context is not None and context.site == "client-3" and context.round == 2 and model.training:
            if self.odd_silo == "no number":
                return found * float("nan")
            if self.odd_silo == "error":
                raise ValueError("no label 'outcome'")
        return found


class Arrays(ArrayTask):
    """A logistic regression of one's own, in NumPy, over the same rows."""

    @override
    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}

    @override
    def data(self, site: Site) -> Any:
        train, test = Toy().data(site)
        return tuple(tuple(each.numpy() for each in part) for part in (train, test))

    @override
    def fit(
        self, weights: dict[str, np.ndarray], data: Any, options: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], int, dict[str, float]]:
        x, y = data[0] if isinstance(data[0], tuple) else data
        w, b = weights["w"].copy(), weights["b"].copy()
        for _ in range(4):
            wrong = _shares(x, w, b) - np.eye(3, dtype=np.float32)[y]
            w -= 0.2 * x.T @ wrong / len(x)
            b -= 0.2 * wrong.mean(0)
        return {"w": w, "b": b}, len(x), {"loss": _loss(x, y, w, b)}

    @override
    def evaluate(self, weights: dict[str, np.ndarray], data: Any) -> Mapping[str, tuple[float, int]]:
        x, y = data[1] if isinstance(data[0], tuple) else data
        w, b = weights["w"], weights["b"]
        right = float((_shares(x, w, b).argmax(1) == y).sum())
        return {"loss": (_loss(x, y, w, b) * len(x), len(x)), "accuracy": (right, len(x))}


def _shares(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.exp(x @ w + b)
    return np.asarray(out / out.sum(1, keepdims=True))


def _loss(x: np.ndarray, y: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
    return float(-np.log(_shares(x, w, b)[np.arange(len(y)), y]).mean())
