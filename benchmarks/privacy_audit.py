"""Audits a real DP-SGD training with canaries: ε cannot be below what guessing them shows.

    python benchmarks/privacy_audit.py [--canaries 40000]

A classifier of handwritten digits (scikit-learn's, or noise where it is absent) is trained with
example-level privacy. Each canary is an example whose gradient, once clipped, is all in one entry of
an extra table. For an honest mechanism the lower bound must stay below the claim; with the noise at
half its scale it must exceed it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy import NoiseSource, compose, gaussian_charge, solve_noise
from roundtable.privacy.audit.one_run import Audit, one_run_audit
from roundtable.privacy.example_level import make_private
from roundtable.privacy.example_level.dp_sgd import secure_sources

CLIP, DELTA = 1.0, 1e-6


class Audited(nn.Module):
    """A small classifier with a table that only canaries look into; row 0 is for everybody else."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.table = nn.Embedding(canaries + 1, 1, padding_idx=0)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor, canary: Tensor) -> tuple[Tensor, Tensor]:
        return self.classifier(x), self.table(canary).squeeze(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy for an example; for a canary a slope far steeper than the clip norm."""
    x, y, canary = batch
    logits, entry = model(x, canary)
    real = (canary == 0).to(logits.dtype)
    return (F.cross_entropy(logits, y, reduction="none") * real - 1e3 * entry).mean()


@dataclass(frozen=True)
class Outcome:
    """What was claimed and what the audit shows."""

    claimed: float
    audit: Audit
    accuracy: float


def run(
    canaries: int,
    guesses: int,
    epsilon: float,
    steps: int,
    rate: float,
    noise_scale: float = 1.0,
    sources: Callable[[str], NoiseSource] = secure_sources,
) -> Outcome:
    """Trains with the noise that `epsilon` asks for, times `noise_scale`; 1 is honest."""
    x, y = digits()
    rng = np.random.default_rng(1)
    included = rng.random(canaries) < 0.5
    chosen = torch.from_numpy(np.flatnonzero(included) + 1)
    data = (
        torch.cat([x, torch.zeros(len(chosen), 64)]),
        torch.cat([y, torch.zeros(len(chosen), dtype=torch.long)]),
        torch.cat([torch.zeros(len(x), dtype=torch.long), chosen]),
    )
    size = len(data[0])
    sampling = {"sampling": "poisson", "rate": rate}
    charge = solve_noise(gaussian_charge("example", sampling, 1.0, steps=steps), epsilon, DELTA)
    config = ExampleLevel(
        level="example",
        noise_multiplier=charge.noise_multiplier * noise_scale,
        delta=DELTA,
        clip_norm=CLIP,
        batch_size=max(1, round(rate * size)),
    )
    model = Audited(canaries)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    with make_private(
        model,
        optimizer,
        loss,
        lambda rows: tuple(part[rows] for part in data),
        size,
        config,
        mode="bookkeeping",
        physical_batch=4096,
        sources=sources,
    ) as training:
        for batch in training.batches(steps):
            training.step(batch)
    scores = model.table.weight.detach()[1:, 0].double().numpy()
    audit = one_run_audit(scores, included, guesses, DELTA)
    with torch.no_grad():
        accuracy = float((model.classifier(x).argmax(1) == y).double().mean())
    return Outcome(compose([charge], DELTA), audit, accuracy)


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 × 8 pixels, or noise with labels where scikit-learn is absent."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1797, 64, generator=generator), torch.randint(0, 10, (1797,), generator=generator)
    data = load_digits()
    return torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--canaries", type=int, default=40_000)
    count = parser.parse_args().canaries
    print(f"{'training':<42}{'claimed':>9}{'audited':>9}   verdict (95 %, delta = {DELTA:g})")
    for epsilon, steps, rate in ((2.0, 8, 1.0), (4.0, 8, 1.0), (4.0, 40, 0.2)):
        for scale, name in ((1.0, "honest"), (0.5, "half the noise")):
            outcome = run(count, count // 50, epsilon, steps, rate, scale)
            caught = outcome.audit.epsilon > outcome.claimed
            print(
                f"{f'{steps} steps, rate {rate:g}, {name}':<42}{outcome.claimed:>9.3f}"
                f"{outcome.audit.epsilon:>9.3f}   {'REFUTED' if caught else 'not refuted'}"
                f" ({outcome.audit.right} of {outcome.audit.guesses} guesses right)"
            )


if __name__ == "__main__":
    main()
