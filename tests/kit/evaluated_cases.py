"""Evaluations over ranks under each strategy, of each kind of test data, and on one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from cluster_cases import Balanced, Case, WithAdam, bench_of
from tar_files import record_id
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.training.evaluation import evaluate
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.core.measures import measured
from roundtable.core.task import initial_state

BATCH = 3


class Read:
    """Which examples this process has read; each draws a number, as an augmentation does."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def example(self, number: int) -> tuple[Tensor, Tensor]:
        self.numbers.append(number)
        chance = torch.Generator().manual_seed(number)
        tokens = torch.randint(64, (17,), generator=chance)
        tokens[0] = random.randrange(64)
        return tokens[:-1], tokens[1:]


class Listed(Dataset[Any]):
    """Map-style."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._read.example(index)


class Rows(IterableDataset[Any]):
    """Iterable alone."""

    def __init__(self, read: Read, numbers: list[int]) -> None:
        self._read, self._numbers = read, numbers

    def __iter__(self) -> Iterator[Any]:
        return map(self._read.example, self._numbers)


class Files(Rows):
    """Divided as a data set of Hugging Face is, into files of uneven length."""

    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Rows:
        assert num_shards == 4
        return Rows(self._read, self._numbers[[0, 2, 9, 10][index] : [2, 9, 10, None][index]])


def test_data(read: Read, urls: list[str]) -> dict[str, Any]:
    """Each kind of test data, none of whose counts a number of ranks divides."""
    return {
        "listed": Listed(read, 23),
        "one": Listed(read, 1),
        "sampled": DataLoader(Listed(read, 23), sampler=list(range(22, 3, -1))),
        "shards": TarShards(urls, lambda sample: read.example(record_id(sample)), lanes=3),
        "files": Files(read, list(range(12))),
        "rows": Rows(read, list(range(7))),
    }


class Measured(WithAdam):
    """Sums, a state that merges, and a model that draws while it is measured."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + torch.rand(())

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])[:, -1, :2]
        area = measured.auroc("odd", logits.softmax(-1)[:, 1].float(), batch[1][:, -1] % 2, bins=8)
        right = (logits.argmax(-1) == batch[1][:, -1] % 2).sum()
        return {"right": (float(right), len(logits)), "drawn": (float(torch.rand(())), 1), **area}


def evaluate_cases(rank: int, cases: list[Case], urls: list[str]) -> list[dict[str, Any]]:
    """For each case and kind of data: the metrics' largest difference from one process's, and what was read
    there and here."""
    found = []
    for each in cases:
        kind, sizes = each.task._kind, each.task._model  # type: ignore[attr-defined]
        case = each if isinstance(each.task, Balanced) else replace(each, task=Measured(kind=kind, **sizes))
        trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu", apart=case.strategy.local_steps > 0))
        start = trainer.layout.flatten(initial_state(case.task, 7)).clone()
        trainer.load(start, {})
        for name in test_data(Read(), urls):
            alone_read, own_read = Read(), Read()
            alone = evaluate(
                case.task,
                initial_state(case.task, 7),
                test_data(alone_read, urls)[name],
                trainer.layout,
                start,
                batch_size=BATCH,
            )
            own = trainer.evaluate(test_data(own_read, urls)[name], BATCH)
            assert {key: pair[1] for key, pair in own.items()} == {
                key: pair[1] for key, pair in alone.items()
            }, (case.name, name)
            gap = max(abs(own[key][0] - alone[key][0]) / max(1.0, abs(alone[key][0])) for key in alone)
            found.append(
                {
                    "case": case.name,
                    "data": name,
                    "gap": gap,
                    "alone": alone_read.numbers,
                    "here": own_read.numbers,
                    "part": trainer.meshes.data_rank,
                }
            )
    return found
