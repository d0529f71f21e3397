"""A model's evaluation over ranks: each reads and measures its own batches, the same ones as one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from roundtable.client.batch_tensors import moved
from roundtable.client.streams.shares import ReadingShare
from roundtable.client.training.batches import Batch, ordered_batches
from roundtable.client.training.evaluation import EVALUATION_SEED, seed_batch
from roundtable.client.training.metrics import Counts, Metrics, add, checked
from roundtable.cluster.parallel.meshes import gather_names
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import Task


@dataclass(frozen=True)
class RankEvaluation:
    """What one rank does of it; `share` is that of its data rank, whose tensor ranks and stages read alike.

    `model_for` gives the model for a batch's loss and metrics, None where another stage has it; `counts`
    says whether this rank counts what it measures, of those that measure the same; `precision` is the context
    of losses and metrics.
    """

    task: Task
    share: ReadingShare
    device: torch.device
    counts: bool
    model_for: Callable[[Any], nn.Module | None]
    precision: Callable[[], AbstractContextManager[Any]]

    def over(self, data: Any, batch_size: int, beat: Callable[[], None]) -> Metrics:
        """Named (sum, count), "loss" among them, the same on every rank.

        `beat` is called with each batch; it may raise on all ranks. Shards are gathered together, so that all
        run equally many: who has none left runs another and does not count it.
        """
        sums: Metrics = {}
        counts = Counts(self.task)
        last: Batch | None = None
        with torch.no_grad(), isolated_randomness(EVALUATION_SEED, self.device):
            own = ordered_batches(data, batch_size, share=self.share, seed=EVALUATION_SEED)
            while self._any(batch := next(own, None)):
                beat()
                last = batch or last or self._filler(data)
                here = moved(last.data, self.device)
                seed_batch(last, self.device)
                model = self.model_for(here)
                if model is None:
                    continue
                found = self._measure(model, here, last.size)
                if batch is not None and self.counts:
                    counts.add(found, batch.size)
                    add(sums, found)
        counts.warn()
        return self._summed(sums)

    def _any(self, batch: Batch | None) -> bool:
        """Whether a rank has a batch left: nobody knows how many a stream gives."""
        if self.share.ranks == 1:
            return batch is not None
        left = torch.tensor(float(batch is not None), device=self.device)
        dist.all_reduce(left)
        return bool(left)

    @staticmethod
    def _filler(data: Any) -> Batch:
        """One example, for a rank that has none of its own."""
        return next(ordered_batches(data, 1, seed=EVALUATION_SEED))

    def _measure(self, model: Any, data: Any, size: int) -> Metrics:
        with self.precision():
            sums: Metrics = {"loss": (float(self.task.loss(model, data)) * size, size)}
            if (measure := getattr(self.task, "metrics", None)) is not None:
                add(sums, checked(measure(model, data), self.task, reserved="loss"))
        return sums

    def _summed(self, sums: Metrics) -> Metrics:
        """Adds up over all ranks; only those that counted know the names, so ranks agree on them first."""
        names = sorted({name for names in gather_names(sorted(sums)) for name in names})
        if not names:
            return {}
        pairs = [sums.get(name, (0.0, 0)) for name in names]
        table = torch.tensor(pairs, dtype=torch.float64, device=self.device)
        dist.all_reduce(table)
        return {name: (float(row[0]), int(row[1])) for name, row in zip(names, table.tolist(), strict=True)}
