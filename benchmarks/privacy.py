"""What privacy costs: ratios to the same work without it, in one run.

    python benchmarks/privacy.py [--repeats 7]

Processor time on one thread, medians over interleaved repeats: on a busy machine wall time says
little. Models: an MLP (784-128-64-10, batch 128), a CNN with GroupNorm (batch 128) and an attention
block (32 tokens of width 64, batch 32). Opacus's own optimizer step, noise included, stands beside ours.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy import (
    CentralDP,
    DistributedDP,
    SecureNoise,
    add_gaussian,
    encode,
)
from roundtable.privacy.example_level import make_private

EXAMPLES = 4096


class Attention(nn.Module):
    """Two pre-norm blocks over `scaled_dot_product_attention`."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.ModuleList(_block(width)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, qkv, out, second, up, down in self.blocks:
            shape = (*tokens.shape, 3, self.heads, -1)
            q, k, v = qkv(first(x)).view(shape).permute(2, 0, 3, 1, 4)
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
            x = x + down(F.gelu(up(second(x))))
        return self.head(x.mean(1))


class Encoder(nn.Module):
    """Two of PyTorch's pre-norm encoder layers."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter of rank 4 (Hu et al. 2022, equation 3)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(width: int = 64) -> nn.Module:
    """An encoder of which only the adapters and the head learn."""
    model = Encoder(width).requires_grad_(False)
    for layer in model.layers:
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    model.head.requires_grad_(True)
    return model


def _block(width: int) -> list[nn.Module]:
    return [
        nn.LayerNorm(width),
        nn.Linear(width, 3 * width),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.Linear(4 * width, width),
    ]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


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


def medians(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of each, interleaved so that a busy minute hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def report(title: str, found: dict[str, float]) -> None:
    base = next(iter(found.values()))
    print(f"\n{title}")
    for name, seconds in found.items():
        print(f"  {name:<44}{1e3 * seconds:>10.2f} ms{seconds / base:>9.2f} ×")


def client_round(repeats: int) -> None:
    """20 silos that train an MLP for ten steps each, and the coordinator's mean of their updates."""
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(EXAMPLES, 784), torch.randint(0, 10, (EXAMPLES,))
    size = sum(p.numel() for p in model.parameters())
    updates = torch.randn(20, size) * 0.01
    central = CentralDP(1.0, 1.0, 20.0)

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(20 * 10):
            rows = torch.randint(0, EXAMPLES, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()

    plain = medians({"train": train, "mean": lambda: updates.mean(0)}, repeats)
    private = medians({"noise": lambda: central.prepare(Rows(updates), SecureNoise())}, repeats)
    whole = plain["train"] + plain["mean"]
    report(
        f"A round of 20 silos, {size:,} parameters",
        {"training and mean": whole, "the same with central DP": plain["train"] + private["noise"]},
    )
    large = torch.randn(20, 1 << 20)
    report(
        "The coordinator alone, 20 × 1,048,576",
        medians(
            {
                "mean": lambda: large.mean(0),
                "mean of rows clipped, in float64 blocks, with noise": lambda: central.prepare(
                    Rows(large), SecureNoise()
                ),
            },
            repeats,
        ),
    )


def mechanisms(repeats: int) -> None:
    """Noise on a million entries, and a silo's pipeline for distributed noise."""
    vector, source = torch.randn(1 << 20), SecureNoise()
    skellam = DistributedDP(1.0, 5.0, 1 << 20, cohort=100, survivors=70)
    gaussian = DistributedDP(1.0, 5.0, 1 << 20, cohort=100, survivors=70, mechanism="discrete_gaussian")
    report(
        "1,048,576 entries",
        medians(
            {
                "torch.randn (no guarantee)": lambda: torch.randn(1 << 20),
                "Gaussian noise, cryptographic, on a grid": lambda: add_gaussian(vector, 1.0, source),
                "clip, rotate, round, Skellam noise": lambda: encode(vector, skellam, b"round", source),
                "clip, rotate, round, discrete Gaussian": lambda: encode(vector, gaussian, b"round", source),
            },
            repeats,
        ),
    )


def example_level(name: str, make: Callable[[], nn.Module], batch: int, x: Tensor, repeats: int) -> None:
    """One step without privacy, with it by each mode, and Opacus's own."""
    y = torch.randint(0, 10, (EXAMPLES,))
    found = medians(_steps(make, batch, x, y), repeats * (4 if name == "MLP" else 1))
    report(f"A step of the {name}, batch {batch}", found)


def _steps(
    make: Callable[[], nn.Module], batch: int, x: Tensor, y: Tensor
) -> dict[str, Callable[[], object]]:
    def rows() -> Tensor:
        return torch.randperm(EXAMPLES)[:batch]

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(data[0]), data[1])

    plain = make()
    optimizer = torch.optim.SGD(_learning(plain), 0.01)

    def step() -> None:
        chosen = rows()
        optimizer.zero_grad()
        loss(plain, (x[chosen], y[chosen])).backward()
        optimizer.step()

    works: dict[str, Callable[[], object]] = {"without privacy": step}
    config = ExampleLevel(level="example", noise_multiplier=1.0, delta=1e-6, clip_norm=1.0, batch_size=batch)
    for mode in ("auto", "bookkeeping"):
        model = make()
        training = make_private(
            model,
            torch.optim.SGD(_learning(model), 0.01),
            loss,
            lambda chosen: (x[chosen], y[chosen]),
            EXAMPLES,
            config,
            mode=mode,
        )
        works[f"{mode}: {training.mode}" if mode == "auto" else mode] = lambda t=training: t.step(rows())
    works |= _opacus(make, batch, x, y)
    return works


def _learning(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _opacus(
    make: Callable[[], nn.Module], batch: int, x: Tensor, y: Tensor
) -> dict[str, Callable[[], object]]:
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    logging.getLogger("opacus").setLevel(logging.ERROR)
    works: dict[str, Callable[[], object]] = {}
    for mode in ("hooks", "functorch", "ew", "ghost"):
        # What Opacus has no rule for it replaces by layers of its own.
        model = ModuleValidator.fix(make())
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(_learning(model), 0.01),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        )
        module, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step(module=module, optimizer=optimizer, criterion=criterion) -> None:
            chosen = torch.randperm(EXAMPLES)[:batch]
            optimizer.zero_grad()
            criterion(module(x[chosen]), y[chosen]).backward()
            optimizer.step()

        try:
            step()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"  Opacus, {mode}, cannot: {str(error).splitlines()[0][:80]}")
            continue
        works[f"Opacus, {mode}"] = step
    return works


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    client_round(repeats)
    mechanisms(repeats)
    example_level("MLP", mlp, 128, torch.randn(EXAMPLES, 784), repeats)
    example_level("CNN with GroupNorm", cnn, 128, torch.randn(EXAMPLES, 1, 28, 28), repeats)
    tokens = torch.randint(0, 100, (EXAMPLES, 32))
    example_level("attention by hand", Attention, 32, tokens, repeats)
    example_level("encoder of nn.MultiheadAttention", Encoder, 32, tokens, repeats)
    example_level("encoder, frozen, with adapters", adapters, 32, tokens, repeats)


if __name__ == "__main__":
    main()
