"""A trainer without training: its updates of four values follow from the round."""

from __future__ import annotations

import torch

from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, write_update
from roundtable.client.training.metrics import Metrics


class Constant:
    """A trainer whose updates follow from the round."""

    async def start(self) -> None: ...

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        digest, size = write_update(work.output, torch.full((4,), float(work.step.round)), "float32")
        return TrainedUpdate(digest, size, 4, {})

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        return {}

    def release(self, job: str, *, met: bool) -> None: ...

    async def close(self) -> None: ...
