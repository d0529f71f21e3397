"""One of two processes that train together; prints its weights. Run by test_example_level_group.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy.example_level import make_private

COLUMNS = 4000


def main(rank: int, meeting: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = torch.zeros(20, COLUMNS)
    data[:, rank] = 1.0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]

    config = ExampleLevel(level="example", noise_multiplier=0.5, delta=1e-3, clip_norm=1.0, batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    group = dist.group.WORLD
    with make_private(
        model, optimizer, loss, lambda rows: data[rows], 20, config, mode="bookkeeping", group=group
    ) as training:
        training.step(torch.arange(7 if rank == 0 else 0))
        rate = training.sampling_rate
    print(json.dumps({"rate": rate, "weights": model.weight.flatten().tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
