"""Accuracy of aggregation rules under attack: MNIST, 20 silos of which 4 are hostile, 40 rounds.

    python benchmarks/attacks.py                              the table of docs/robustness.md, one seed
    python benchmarks/attacks.py --rule caf --attack ipm_2    one cell
    python benchmarks/attacks.py --alpha 0.1 --seeds 0 1 2    data that differ much more between silos

Every silo trains a 784-100-10 network for 10 steps of 32 images at learning rate 0.1; all 20 silos take part
in every round, unweighted, and the aggregate is added to the model. The data of each class are spread over
the silos by a Dirichlet distribution (`--alpha`; 1 is moderate, 0.1 severe). The last four silos are hostile
and know all honest updates. The tuned attacks choose their strength in every round by trying it against the
rule itself. Printed is the accuracy on the 10 000 test images, mean of the last five rounds, in percent.

The silos are trained at once, as one batch of networks, so that a cell takes seconds; the way of the updates
is the one that a coordinator uses, `roundtable.aggregation.aggregate`. `--check FILE` compares each cell
with a table of least accuracies: the worst of as many seeds as that table had for the cell. `--results FILE`
keeps each training that ends as a line of JSON and runs none again that the file holds: the whole table takes
hours, and processes can share it.

With `--simulate` the same cells run through `roundtable.simulation.simulate` instead, as a job with
`[simulation.attack]` would: the whole round engine, slower, with hostile silos drawn by the seed. Of tuned
attackers, those that try the most are among them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks_cases import (
    ATTACKS,
    BATCH,
    HOSTILE,
    NOT_SIMULATED,
    RATE,
    ROUNDS,
    RULES,
    SILOS,
    SIMULATED,
    SIZES,
    STEPS,
    Results,
    least,
)

import roundtable as rt
from roundtable.aggregation import (
    AggregationConfig,
    AggregationResult,
    ClientRow,
    RuleContext,
    TensorMatrix,
    aggregate,
    attacks,
)
from roundtable.core.config import JobConfig
from roundtable.simulation import simulate


@dataclass(frozen=True)
class Data:
    """Training and test images, and which training images each silo holds."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    silos: tuple[torch.Tensor, ...]
    root: torch.Tensor


@lru_cache(maxsize=1)
def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Normalised images [n, 784] and labels [n], by train and test."""
    with np.load(path) as archive:
        images = {part: torch.from_numpy(archive[f"{part}_images"]) for part in ("train", "test")}
        digits = {part: torch.from_numpy(archive[f"{part}_labels"]).long() for part in ("train", "test")}
    scaled = {part: (raw.reshape(-1, 784).float() / 255 - 0.1307) / 0.3081 for part, raw in images.items()}
    return scaled, digits


def load(path: Path, alpha: float, seed: int) -> Data:
    """MNIST, normalised and split; where a silo would have less than a batch of images, split again."""
    images, digits = read(path)
    labels = digits["train"]
    generator = np.random.default_rng(seed)
    while True:
        parts: list[list[np.ndarray]] = [[] for _ in range(SILOS)]
        for digit in range(10):
            members = generator.permutation(np.flatnonzero(labels.numpy() == digit))
            cuts = (np.cumsum(generator.dirichlet([alpha] * SILOS)) * len(members)).astype(int)[:-1]
            for part, chunk in zip(parts, np.split(members, cuts), strict=True):
                part.append(chunk)
        silos = tuple(torch.from_numpy(np.concatenate(part)) for part in parts)
        if min(len(silo) for silo in silos) >= BATCH:
            break
    root = torch.from_numpy(generator.choice(len(labels), 100, replace=False))
    return Data(images["train"], labels, images["test"], digits["test"], silos, root)


def initial_model(generator: torch.Generator) -> torch.Tensor:
    """Weights and biases, uniform in ±1/√(inputs), as one flat vector."""
    parts = []
    for inputs, outputs in SIZES:
        for size in (inputs * outputs, outputs):
            parts.append((torch.rand(size, generator=generator) * 2 - 1) / math.sqrt(inputs))
    return torch.cat(parts)


def unpack(models: torch.Tensor) -> list[torch.Tensor]:
    """Flat models [m, d] → weights [m, inputs, outputs] and biases [m, 1, outputs] of each layer; views."""
    parts, position = [], 0
    for inputs, outputs in SIZES:
        parts.append(models[:, position : position + inputs * outputs].view(-1, inputs, outputs))
        position += inputs * outputs
        parts.append(models[:, position : position + outputs].view(-1, 1, outputs))
        position += outputs
    return parts


def train(model: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Updates [m, d] of m silos after one step of SGD on each batch: images [steps, m, batch, 784]."""
    models = model.repeat(images.shape[1], 1)
    first, first_bias, second, second_bias = unpack(models)
    for x, y in zip(images, labels, strict=True):
        hidden = torch.baddbmm(first_bias, x, first).relu_()
        errors = torch.softmax(torch.baddbmm(second_bias, hidden, second), dim=2)
        errors.scatter_add_(2, y[..., None], torch.full_like(errors[..., :1], -1.0))
        errors /= x.shape[1]
        back = torch.bmm(errors, second.transpose(1, 2)).mul_(hidden > 0)
        second -= RATE * torch.bmm(hidden.transpose(1, 2), errors)
        second_bias -= RATE * errors.sum(dim=1, keepdim=True)
        first -= RATE * torch.bmm(x.transpose(1, 2), back)
        first_bias -= RATE * back.sum(dim=1, keepdim=True)
    return models - model


def accuracy(model: torch.Tensor, data: Data) -> float:
    """Share of the test images that the model gets right."""
    first, first_bias, second, second_bias = (part[0] for part in unpack(model[None]))
    scores = (data.test_images @ first + first_bias).relu() @ second + second_bias
    return float((scores.argmax(dim=1) == data.test_labels).float().mean())


Server = Callable[..., AggregationResult]


def run(rule: str, attack: str, data: Data, seed: int, server: Server = aggregate) -> float:
    """Accuracy after one training, mean of the last five rounds; `server` stands in for `aggregate`."""
    config, hostile = RULES[rule], ATTACKS[attack]
    clients = [ClientRow(f"silo-{index:02}") for index in range(SILOS)]
    generator = torch.Generator().manual_seed(seed)
    model = initial_model(generator)
    previous, scores = torch.zeros_like(model), []
    past = torch.zeros(SILOS, len(model))
    honest_silos = SILOS if hostile is None else SILOS - HOSTILE
    for round in range(ROUNDS):
        batches = [
            data.silos[silo][torch.randint(len(data.silos[silo]), (STEPS, BATCH), generator=generator)]
            for silo in range(honest_silos)
        ]
        chosen = torch.stack(batches, dim=1)
        labels = data.labels[chosen]
        if attack == "label_flip":
            labels[:, -HOSTILE:] = attacks.flip_labels(labels[:, -HOSTILE:], 10)
        rows = train(model, data.images[chosen], labels)
        if not torch.isfinite(rows).all():
            return accuracy(model, data)  # The attack has won: training has diverged, the model guesses.
        root = root_update(config, model, data, generator)

        def defence(
            rows: torch.Tensor,
            round: int = round,
            previous: torch.Tensor = previous,
            root: torch.Tensor | None = root,
            past: torch.Tensor = past,
        ) -> torch.Tensor:
            if rule == "mean_nofilter":
                return rows.mean(dim=0)
            history = TensorMatrix(past + rows) if rule == "foolsgold" else None
            context = RuleContext(previous, root, history)
            return server(TensorMatrix(rows), clients, config, seed + round, context=context).vector

        if hostile is not None:
            rows = torch.cat([rows, hostile(rows, defence, seed * ROUNDS + round)])
        previous = defence(rows)
        past = past + rows
        model = model + previous
        if round >= ROUNDS - 5:
            scores.append(accuracy(model, data))
    return sum(scores) / len(scores)


def root_update(
    config: AggregationConfig, model: torch.Tensor, data: Data, generator: torch.Generator
) -> torch.Tensor | None:
    """The server's own update on its 100 trusted images, for the rule that wants one."""
    if config.rule != "fltrust":
        return None
    chosen = data.root[torch.randint(len(data.root), (STEPS, 1, BATCH), generator=generator)]
    return train(model, data.images[chosen], data.labels[chosen])[0]


class Digits(rt.Task):
    """The same network and data, as a task; the file is named in `[simulation.data]`."""

    def model(self) -> torch.nn.Module:
        (inputs, hidden), (_, outputs) = SIZES
        layers = torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs)
        return torch.nn.Sequential(*layers)

    def data(self, site: rt.Site) -> tuple[Any, Any]:
        images, digits = read(Path(site.options["mnist"]))
        shares = []
        for part in ("train", "test"):
            rows = site.shard(digits[part].numpy())
            shares.append((images[part][rows], digits[part][rows]))
        return shares[0], shares[1]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def simulated(rule: str, attack: str, data: Path, alpha: float, seed: int) -> float:
    """What `run` returns, through the simulation."""
    config, hostile = RULES[rule], SIMULATED[attack]
    simulation: dict[str, object] = {
        "clients": SILOS,
        "partition": {"name": "dirichlet", "alpha": alpha},
        "data": {"mnist": str(data.resolve())},
    }
    if hostile is not None:
        simulation["attack"] = {**hostile, "count": HOSTILE}
    job = JobConfig.model_validate(
        {
            "task": "digits",
            "rounds": ROUNDS,
            "seed": seed,
            "cohort": {"size": SILOS},
            "algorithm": {"name": "fedavg", "steps": STEPS, "batch_size": BATCH, "learning_rate": RATE},
            "aggregation": {
                "rule": config.rule,
                "parameters": dict(config.parameters),
                "pre": [{"name": name, **parameters} for name, parameters in config.pre],
                "weighting": "uniform",
            },
            "simulation": simulation,
        }
    )
    scores = simulate(job, Digits).history["accuracy"][-5:]
    return sum(float(score) for score in scores) / len(scores)


def report(rules: Sequence[str], names: Sequence[str], options: argparse.Namespace) -> int:
    """Prints the table, one line a rule; returns the number of cells below the reference."""
    table = json.loads(options.check.read_text()) if options.check else {}
    results, load_once = Results(options.results), lru_cache(maxsize=None)(load)
    print(f"{'rule':24}" + "".join(f"{name:>18}" for name in names), flush=True)
    failures = 0

    def train_once(rule: str, attack: str, seed: int) -> float:
        if options.simulate:
            return simulated(rule, attack, options.data, options.alpha, seed)
        return run(rule, attack, load_once(options.data, options.alpha, seed), seed)

    for rule in rules:
        print(f"{rule:24}", end="", flush=True)
        for name in names:
            scores = [
                results.get(
                    partial(train_once, rule, name, s), rule, name, options.alpha, s, options.simulate
                )
                for s in options.seeds
            ]
            wanted, seeds = least(table, rule, name) or (0.0, 0)
            missed = seeds > 0 and min(scores[:seeds]) < wanted
            failures += missed
            mark = "" if seeds == 0 else f" <{wanted:.1%}" if missed else " ok"
            print(f"{min(scores):>9.1%}{mark:9}", end="", flush=True)
        print(flush=True)
    if table:
        print(f"{failures} cells below the reference")
    return failures


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--rule", action="append", choices=sorted(RULES))
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS))
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--check", type=Path, help="JSON with the least accuracy of each cell")
    parser.add_argument("--results", type=Path, help="keep what has been run in this file, and read it first")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("ROUNDTABLE_SHARED", "../shared")) / "data" / "mnist.npz",
        help="MNIST as train_images, train_labels, test_images, test_labels in one .npz",
    )
    parser.add_argument("--simulate", action="store_true", help="run whole jobs through the simulation")
    options = parser.parse_args()
    started = time.perf_counter()
    rules, names = options.rule or list(RULES), options.attack or list(ATTACKS)
    if options.simulate:
        rules = [rule for rule in rules if rule not in NOT_SIMULATED]
        names = [name for name in names if name in SIMULATED]
    failures = report(rules, names, options)
    print(f"{time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
