"""Accuracy on MNIST under client-level and example-level privacy, beside the same training without.

    python benchmarks/privacy_mnist.py --data mnist.npz [--level client|example] [--rounds 60]

Client level: 1,000 simulated silos of 60 digits each, sorted by label into two shards a silo, so that
most silos know two digits (the split of McMahan et al. 2017). All silos take part in every round, no
amplification is claimed, and ε holds for the removal of a silo. Example level: 10 silos of 6,000
random digits train by DP-SGD each, and their models are averaged; ε holds for one digit in a silo.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy import CentralDP, SecureNoise, gaussian_charge, solve_noise
from roundtable.privacy.example_level import make_private

DELTA, HIDDEN, PIXELS = 1e-5, 32, 196
SILOS, STEPS, LOCAL_RATE, MOMENTUM = 1000, 5, 0.5, 0.9
# Found by a few trials: less noise bears longer steps. The search itself is not accounted for.
CLIP = {1.0: 0.3, 2.0: 0.3, 4.0: 0.5, 8.0: 0.8}
PRIVATE_RATE = {1.0: 2.0, 2.0: 4.0, 4.0: 8.0, 8.0: 12.0}
BUDGETS = (1.0, 2.0, 4.0, 8.0)


@dataclass
class Rows:
    """Updates in memory."""

    data: Tensor

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1]

    def block(self, start: int, stop: int) -> Tensor:
        return self.data[:, start:stop]


def load(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits of 14 × 14 (means of 2 × 2 pixels, the same for any data), and labels."""
    with np.load(path) as file:
        names = ("train_images", "train_labels", "test_images", "test_labels")
        arrays = [torch.from_numpy(file[name]) for name in names]
    images = [F.avg_pool2d(a.float().view(-1, 1, 28, 28) / 255.0, 2).flatten(1) - 0.13 for a in arrays[::2]]
    return images[0] * 2, arrays[1].long(), images[1] * 2, arrays[3].long()


def split(vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of one silo or of many (`[..., d]`) as the two layers' tensors."""
    sizes = (PIXELS * HIDDEN, HIDDEN, HIDDEN * 10, 10)
    w1, b1, w2, b2 = torch.split(vector, sizes, dim=-1)
    return (
        w1.unflatten(-1, (PIXELS, HIDDEN)),
        b1.unsqueeze(-2),
        w2.unflatten(-1, (HIDDEN, 10)),
        b2.unsqueeze(-2),
    )


def logits(vector: Tensor, x: Tensor) -> Tensor:
    """The classifier, for one weight vector or for one each."""
    w1, b1, w2, b2 = split(vector)
    return torch.relu(x @ w1 + b1) @ w2 + b2


def initial() -> Tensor:
    """One fixed start."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(PIXELS * HIDDEN, generator=generator) / PIXELS**0.5
    w2 = torch.randn(HIDDEN * 10, generator=generator) / HIDDEN**0.5
    return torch.cat([w1, torch.zeros(HIDDEN), w2, torch.zeros(10)])


def local_updates(model: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Full-batch gradient steps of all silos at once: `[silos, d]`."""
    weights = model.repeat(len(x), 1)
    for _ in range(STEPS):
        weights.requires_grad_(True)
        loss = F.cross_entropy(logits(weights, x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = weights.detach() - LOCAL_RATE * gradient
    return weights - model


def client_level(data: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int, epsilon: float | None) -> float:
    """Test accuracy after `rounds` of DP-FedAvg with server momentum; None: neither noise nor clipping."""
    x, y, x_test, y_test = data
    order = torch.argsort(y, stable=True).view(2 * SILOS, -1)
    shards = torch.randperm(2 * SILOS, generator=torch.Generator().manual_seed(1))
    mine = order[shards].view(SILOS, -1)
    model, velocity = initial(), torch.zeros(initial().numel())
    central = None
    if epsilon is not None:
        charge = solve_noise(
            gaussian_charge("client", {"sampling": "none"}, 1.0, steps=rounds), epsilon, DELTA
        )
        central = CentralDP(CLIP[epsilon], charge.noise_multiplier, SILOS)
    for _ in range(rounds):
        updates = torch.cat([local_updates(model, x[part], y[part]) for part in mine.split(250)])
        mean = updates.mean(0) if central is None else central.prepare(Rows(updates), SecureNoise()).vector
        velocity = MOMENTUM * velocity + mean
        model = model + velocity
    return float((logits(model, x_test).argmax(1) == y_test).double().mean())


def example_level(data: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int, epsilon: float | None) -> float:
    """Test accuracy of FedAvg over 10 silos that train by DP-SGD; None is plain SGD on the same batches."""
    x, y, x_test, y_test = data
    parts = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).view(10, -1)
    model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    vector, steps, batch = initial_state(model), 12, 500
    charge = gaussian_charge(
        "example", {"sampling": "poisson", "rate": batch / 6000}, 1.0, steps=rounds * steps
    )
    noise = None if epsilon is None else solve_noise(charge, epsilon, DELTA).noise_multiplier
    for _ in range(rounds):
        results = []
        for part in parts:
            nn.utils.vector_to_parameters(vector, model.parameters())
            optimizer = torch.optim.SGD(
                model.parameters(), lr=0.5 if epsilon is None else PRIVATE_RATE[epsilon]
            )
            train_silo(model, optimizer, x[part], y[part], steps, batch, noise)
            results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        vector = torch.stack(results).mean(0)
    nn.utils.vector_to_parameters(vector, model.parameters())
    return float((model(x_test).argmax(1) == y_test).double().mean())


def initial_state(model: nn.Module) -> Tensor:
    """The start of the example-level run."""
    torch.manual_seed(0)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train_silo(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    steps: int,
    batch: int,
    noise: float | None,
) -> None:
    """One silo's round."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(x[rows]), y[rows])

    if noise is None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, torch.randperm(len(x))[:batch]).backward()
            optimizer.step()
        return
    config = ExampleLevel(
        level="example", noise_multiplier=noise, delta=DELTA, clip_norm=0.5, batch_size=batch
    )
    with make_private(
        model, optimizer, loss, lambda rows: rows, len(x), config, mode="bookkeeping", physical_batch=1024
    ) as training:
        for rows in training.batches(steps):
            training.step(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="mnist.npz")
    parser.add_argument("--level", choices=("client", "example"), default="client")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    data = load(arguments.data)
    train = client_level if arguments.level == "client" else example_level
    for epsilon in (None, *BUDGETS):
        start = time.perf_counter()
        accuracies = [train(data, arguments.rounds, epsilon) for _ in range(arguments.repeats)]
        name = "without privacy" if epsilon is None else f"epsilon = {epsilon:g}"
        mean, spread = float(np.mean(accuracies)), float(np.max(accuracies) - np.min(accuracies))
        seconds = time.perf_counter() - start
        print(f"{name:<18}{100 * mean:6.2f} %  (range {100 * spread:.2f})  {seconds:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
