"""Tasks that train on tar shards, and write down which records they were given."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tar_files import record_id
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from roundtable import Site, Task
from roundtable.client.streams.tar_shards import TarShards


class Shards(Task):
    """Records as points; `[data]` names the `folder` of shards and of the `log`, one line for each record.

    A file `kill` in the log's folder with a number in it: the process is killed at that record.
    """

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, site: Site) -> tuple[Any, Any]:
        folder = Path(site.options["folder"])
        log = Path(site.options["log"])

        def decode(sample: Mapping[str, bytes]) -> dict[str, Tensor]:
            number = record_id(sample)
            kill = log / "kill"
            if kill.exists() and int(kill.read_text()) == number:
                kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            with (log / site.name).open("a") as file:
                file.write(f"{number}\n")
            return {"x": torch.tensor([number, 1.0, 0.0]) / 40 + 0.1 * torch.rand(3), "y": number % 2}

        train = TarShards(sorted(folder.glob("*.tar")), decode, shuffle=8, lanes=2)
        return train, None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Loaded(Shards):
    """The same, read by a process ahead of training."""

    def data(self, site: Site) -> tuple[Any, Any]:
        train, test = super().data(site)
        return DataLoader(train, batch_size=4, num_workers=1, prefetch_factor=4), test


class Iterables(Shards):
    """The same over an iterable data set without a place of its own."""

    def data(self, site: Site) -> tuple[Any, Any]:
        log = Path(site.options["log"]) / site.name

        class Points(IterableDataset[dict[str, Any]]):
            def __iter__(self) -> Iterator[dict[str, Any]]:
                for number in torch.randperm(10).tolist():
                    with log.open("a") as file:
                        file.write(f"{number}\n")
                    yield {"x": torch.tensor([number, 1.0, 0.0]) / 10, "y": number % 2}

        return Points(), None
