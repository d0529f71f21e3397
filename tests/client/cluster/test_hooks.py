"""What lossy reductions keep and what they put off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from roundtable.client.cluster.hooks import TopK, topk_hook

pytestmark = pytest.mark.slow


def sent_in_parts(rank: int, kept: float, steps: int) -> list[list[list[float]]]:
    """The gradients that DDP hands out over some steps, from a gradient that is the same in each."""
    model = nn.Linear(10, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ddp = DistributedDataParallel(model)
    group: Any = dist.group.WORLD
    ddp.register_comm_hook(TopK(group, kept), topk_hook)
    x = torch.arange(1.0, 11.0) * (rank + 1)
    found = []
    for _ in range(steps):
        model.zero_grad()
        ddp(x).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad.tolist())
    return found


def test_all_entries_make_the_exact_mean() -> None:
    for gradients in run_ranks(sent_in_parts, 2, 1.0, 1):
        assert torch.allclose(torch.tensor(gradients[0]), torch.arange(1.0, 11.0).mul(1.5).expand(4, 10))


def test_what_stays_behind_is_sent_later() -> None:
    for gradients in run_ranks(sent_in_parts, 2, 0.25, 60):
        sent = torch.tensor(gradients)
        assert (sent[0] != 0).sum() <= 20
        mean = sent.sum(0)
        exact = torch.arange(1.0, 11.0).mul(1.5 * 60).expand(4, 10)
        # All that was not sent is what the ranks still hold back, some twenty steps of the smallest.
        assert ((exact - mean) >= -1e-4).all()
        assert (mean / exact).min() > 0.5
