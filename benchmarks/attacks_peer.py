"""Krum under attack, ours and ByzFL's side by side in the trainings of attacks.py.

    pip install -r benchmarks/aggregation-requirements.txt
    python benchmarks/attacks_peer.py --attack ipm_0.5 --attack mimic --seeds 0 1 2 3 4 5 6 7

Krum keeps one update of a round, so its accuracy depends much on the seed, and a cell of a table says little
about the rule. This says more: in each round of a training, and for everything that a tuned attacker tries,
ByzFL's Krum sees the same updates as ours. ByzFL sums over the n − f − 1 nearest others and the paper over
n − f − 2, so ByzFL's is told f + 1 to count the same; `equal` is how often both gave the same vector, to the
bit. The last column is a training with ByzFL's Krum as it is, f and all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attacks import load, run
from attacks_cases import ATTACKS, HOSTILE, SILOS
from byzfl import Krum

from roundtable.aggregation import AggregationResult, ClientRow, Diagnosis, TensorMatrix, aggregate


def peer(matrix: TensorMatrix, extra: int = 0) -> torch.Tensor:
    """ByzFL's Krum of the finite rows, f lowered by the number of others as ours is."""
    rows = matrix.block(0, matrix.columns)
    rows = rows[torch.isfinite(rows).all(dim=1)]
    vector: torch.Tensor = Krum(HOSTILE - (SILOS - len(rows)) + extra)(rows)
    return vector


class Compared:
    """Ours, and how often ByzFL's gave the same."""

    def __init__(self) -> None:
        self.calls = 0
        self.equal = 0

    def __call__(self, matrix: TensorMatrix, *arguments: Any, **options: Any) -> AggregationResult:
        found = aggregate(matrix, *arguments, **options)
        self.calls += 1
        self.equal += torch.equal(found.vector, peer(matrix, extra=1))
        return found


def as_it_is(matrix: TensorMatrix, clients: Sequence[ClientRow], *_: Any, **__: Any) -> AggregationResult:
    """ByzFL's Krum in the place of the whole pipeline."""
    names = tuple(client.name for client in clients)
    return AggregationResult(peer(matrix), {}, (), Diagnosis("krum", names))


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/mnist.npz"))
    options = parser.parse_args()
    print(f"{'attack':18}{'seed':>6}{'ours':>9}{'equal':>12}{'ByzFL as it is':>18}")
    for attack in options.attack:
        for seed in options.seeds:
            data, compared = load(options.data, 1.0, seed), Compared()
            ours = run("krum", attack, data, seed, compared)
            theirs = run("krum", attack, data, seed, as_it_is)
            equal = f"{compared.equal}/{compared.calls}"
            print(f"{attack:18}{seed:6}{ours:9.1%}{equal:>12}{theirs:18.1%}", flush=True)


if __name__ == "__main__":
    main()
