"""Seconds per round and memory when few of very many clients train.

    python benchmarks/population.py [--clients 1000000] [--cohort 1000] [--rounds 6] [--json]

Every client is a device with a speed, links and hours of its own, in virtual time; its 20 examples are made
when it is chosen. The model has 199,210 parameters. Synchronous rounds select the cohort among those online
and wait for it; buffered rounds keep twice as many at work and make a model of each `--cohort` answers.
Each mode runs in a process of its own; memory is that of all its processes together (proportional set size).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from contestants import measure
from simulation_cases import make_perceptron, say

HERE = Path(__file__).resolve().parent
MODES = {
    "synchronous": "[cohort]\nsize = {cohort}\nminimum = {half}\n",
    "buffered": (
        '[cohort]\nminimum = {half}\n[round]\nmode = "buffered"\nbuffer = {cohort}\nconcurrency = {double}\n'
    ),
}
JOB = """task = "population.py:Fleet"
rounds = {rounds}
{mode}
[algorithm]
learning_rate = 0.1
batch_size = 10
[evaluation]
every = 0
[simulation]
clients = {clients}
[simulation.devices]
speed = {{ median = 200, sigma = 0.8 }}
download = 2e6
upload = {{ median = 5e5, sigma = 1.0 }}
availability = 0.3
period = "1d"
"""


class Fleet:
    """The task: twenty images of chance for each client."""

    def model(self) -> Any:
        return make_perceptron()

    def data(self, site: Any) -> Any:
        import torch

        chance = torch.Generator().manual_seed(site.index)
        inputs = torch.rand(20, 28, 28, generator=chance)
        return (inputs, torch.randint(10, (20,), generator=chance)), None

    def loss(self, model: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch[0]), batch[1])


def run(mode: str, clients: int, cohort: int, rounds: int) -> None:
    """One mode, a line when a round is done."""
    from roundtable.core import parse_job
    from roundtable.simulation import simulate

    how = MODES[mode].format(cohort=cohort, half=cohort // 2, double=2 * cohort)
    job = parse_job(JOB.format(mode=how, clients=clients, rounds=rounds))
    result = simulate(
        job, folder=HERE, progress=lambda said: say(said.round) if said.kind == "round" else None
    )
    print(json.dumps({"backend": result.backend, "loss": result.history["train_loss"][-1]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1_000, help="clients of a round, or of a buffer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--run", help=argparse.SUPPRESS, choices=list(MODES))
    options = parser.parse_args()
    if options.run:
        run(options.run, options.clients, options.cohort, options.rounds)
        return
    numbers = [f"--{name}={getattr(options, name)}" for name in ("clients", "cohort", "rounds")]
    found = {}
    for mode in MODES:
        command = [sys.executable, str(Path(__file__).resolve()), "--run", mode, *numbers]
        measured = measure(command, {"OMP_NUM_THREADS": "1"})
        found[mode] = {
            "seconds": measured.per_round,
            "first": measured.ends[0],
            "memory_mib": measured.memory,
            **measured.said,
        }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for mode, row in found.items():
        print(
            f"{mode:<12} {row['seconds']:.2f} s a round, the first after {row['first']:.1f} s, "
            f"{row['memory_mib']:.0f} MiB ({row['backend']})"
        )


if __name__ == "__main__":
    main()
