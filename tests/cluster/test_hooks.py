"""What lossy reductions keep and what they put off."""

from __future__ import annotations

import torch
from cluster_cases import sent_in_parts
from ranks import run_ranks


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
