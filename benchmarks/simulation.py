"""Seconds per simulated round, against a plain PyTorch loop and the peers at their best settings.

    python benchmarks/simulation.py [--quick] [--cases S1,S2,S3] [--rounds 60] [--repeat 3] [--cpu] [--json]
        [--mnist FILE.npz] [--flower PYTHON] [--pfl PYTHON] [--fedjax PYTHON]
    python benchmarks/simulation.py --gpu

MNIST, B = 10, E = 1, SGD 0.1. S1: MLP 784-200-200-10, 100 clients × 600 samples, 10 a round. S2: the
same, 1,000 × 60, 100 a round. S3: McMahan's CNN (1,663,370 parameters), S1's clients, 2 rounds.
In S1 SCAFFOLD (option II, 60 steps) and Ditto (as many steps of the own model) run beside FedAvg: their
targets are the most that they may take, those of others the least. In S2 a round after which all 1,000
clients measure the model on 10 images each stands beside one without.
`--cpu`: ratios are of processor seconds, which other work on the machine changes less; what two processes of
ours do at a time counts twice.
`--gpu`: S2 with all 1,000 clients in a round, on a CUDA device, against the plain loop there. Every
contestant is a process of its own that prints a line when a round is done; here the lines are
timed, so that all are measured alike: seconds per round (median of the second half), seconds
from the command to the end of round 1, and the largest memory of all its processes together
(proportional set size). Contestants take turns, `--repeat` times.

Peers are run by the interpreter given, of an environment made from simulation-*-requirements.txt.
Without --mnist random images of the same shape are used, which take the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from contestants import Measured, measure
from simulation_cases import CASES, MNIST, device_of, images, make_cnn, make_perceptron, say

HERE = Path(__file__).resolve().parent
TARGETS = {
    "S1": {"flower": 8.0, "pfl": 3.5, "fedjax": 2.5, "plain": 5.0},
    "S2": {"flower": 25.0, "pfl": 3.5, "fedjax": 2.5},
    "S3": {"plain": 1.0, "pfl": 1.0},
    "S2-GPU": {"plain": 20.0},
}
MOST = {"S1": {"scaffold": 1.4, "ditto": 2.2}, "S2": {"evaluated": 2.0}}
"""What algorithms of ours, and evaluation, may take in rounds of FedAvg."""
ALGORITHMS = {
    "ours": "",
    "scaffold": 'name = "scaffold"\nsteps = 60\n',
    "ditto": 'name = "ditto"\npull = 0.1\n',
    "evaluated": "",
}
FIRST_ROUND_TARGET, MEMORY_TARGET = 4.0, 900.0


class Mnist:
    """The task, as plain functions on an object."""

    def data(self, site: Any) -> Any:
        import torch

        pictures, labels = images()
        rows = site.shard(labels)
        inputs = torch.from_numpy(pictures[rows]).float().div_(255.0)
        targets = torch.from_numpy(labels[rows]).long()
        return (inputs, targets), (inputs[:10], targets[:10])

    def loss(self, model: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


class Perceptron(Mnist):
    def model(self) -> Any:
        return make_perceptron()


class Cnn(Mnist):
    def model(self) -> Any:
        return make_cnn()


def run_ours(case: str, rounds: int, algorithm: str = "ours") -> None:
    """`simulate` with the backend that it chooses by itself."""
    from roundtable.core import parse_job
    from roundtable.simulation import simulate

    clients, cohort, task = CASES[case]
    job = parse_job(
        f'task = "simulation.py:{task}"\nrounds = {rounds}\n[cohort]\nsize = {cohort}\n'
        f"[algorithm]\n{ALGORITHMS[algorithm]}learning_rate = 0.1\nbatch_size = 10\n"
        '[aggregation]\nweighting = "uniform"\n[evaluation]\n'
        f"every = {int(algorithm == 'evaluated')}\n"
        f'clients = "all"\n[simulation]\nclients = {clients}\ndevice = "{device_of(case)}"\n'
    )
    result = simulate(
        job, folder=HERE, progress=lambda said: say(said.round) if said.kind == "round" else None
    )
    print(json.dumps({"backend": result.backend, "loss": result.history["train_loss"][-1]}), flush=True)


def run_plain(case: str, rounds: int) -> None:
    """Federated averaging as one writes it by hand: one model, one thread, state dicts."""
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(device_of(case))
    clients, cohort, task = CASES[case]
    chance = np.random.default_rng(0)
    pictures, labels = images()
    inputs = torch.from_numpy(pictures).float().div_(255.0).to(device)
    targets = torch.from_numpy(labels).long().to(device)
    shards = torch.from_numpy(chance.permutation(60000)).view(clients, -1).to(device)
    model = (make_perceptron() if task == "Perceptron" else make_cnn()).to(device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(1, rounds + 1):
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for client in chance.choice(clients, cohort, replace=False):
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            own = shards[client]
            for rows in own[torch.randperm(len(own), device=device)].split(10):
                optimizer.zero_grad()
                cross_entropy(model(inputs[rows]), targets[rows]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value
        weights = {name: value / cohort for name, value in total.items()}
        if device.type == "cuda":
            torch.cuda.synchronize()
        say(number)


def contestants(arguments: argparse.Namespace, case: str, rounds: int) -> dict[str, list[str]]:
    """Commands by name."""
    own = [sys.executable, str(Path(__file__).resolve()), "--run"]
    names = ["ours", *MOST.get(case, {}), "plain"]
    commands = {name: [*own, name, case, str(rounds)] for name in names}
    for peer in ("flower", "pfl", "fedjax"):
        python = getattr(arguments, peer)
        takes_part = case != "S2-GPU" and (peer, case) != ("flower", "S3")
        if python is not None and takes_part:
            commands[peer] = [python, str(HERE / f"simulation_{peer}.py"), case, str(rounds)]
    return commands


def compete(arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    """All contestants in turn, `--repeat` times; medians over the repetitions."""
    rounds = min(arguments.rounds, {"S3": 3, "S2-GPU": 8}.get(case, arguments.rounds))
    environment = {"OMP_NUM_THREADS": "1"}
    if arguments.mnist:
        environment[MNIST] = str(Path(arguments.mnist).resolve())
    runs: dict[str, list[Measured]] = {}
    for _ in range(arguments.repeat):
        for name, command in contestants(arguments, case, rounds).items():
            runs.setdefault(name, []).append(measure(command, environment))
    table = {}
    for name, found in runs.items():
        table[name] = {
            "seconds": statistics.median(run.per_round for run in found),
            "processor": statistics.median(run.processor_per_round for run in found),
            "first": statistics.median(run.ends[0] for run in found),
            "memory": max(run.memory for run in found),
            **found[-1].said,
        }
        what = "processor" if arguments.cpu else "seconds"
        table[name]["ratio"] = table[name][what] / table["ours"][what]
    return table


def show(case: str, table: dict[str, Any]) -> None:
    """One line a contestant; targets beside the ratios."""
    print(f"\n{case}: {table['ours'].get('backend', '')}")
    print(
        f"{'':9} {'s/round':>9} {'processor':>10} {'times ours':>11} {'target':>7} {'round 1 at':>11} "
        f"{'memory':>9}"
    )
    for name, row in table.items():
        target, most = TARGETS[case].get(name), MOST.get(case, {}).get(name)
        aim = f"≤ {most:.1f}" if most else f"{target:.1f}" if target else ""
        print(
            f"{name:9} {row['seconds']:9.4f} {row['processor']:9.4f}s {row['ratio']:11.2f} {aim:>7} "
            f"{row['first']:9.1f} s {row['memory']:5.0f} MiB"
        )


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="S1,S2,S3")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mnist")
    parser.add_argument("--flower")
    parser.add_argument("--pfl")
    parser.add_argument("--fedjax")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="ratios of processor seconds, for a busy machine")
    parser.add_argument("--gpu", action="store_true", help="S2 with 1,000 clients a round, on a GPU")
    parser.add_argument("--quick", action="store_true", help="S1 and S2, 40 rounds, once")
    parser.add_argument("--run", nargs=3, metavar=("WHO", "CASE", "ROUNDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        who, case, rounds = arguments.run
        if who == "plain":
            run_plain(case, int(rounds))
        else:
            run_ours(case, int(rounds), who)
        return
    if arguments.quick:
        arguments.cases, arguments.rounds, arguments.repeat = "S1,S2", 40, 1
    if arguments.gpu:
        arguments.cases = "S2-GPU"
        if not has_gpu():
            print("S2-GPU: not measured, for torch sees no CUDA device here")
            return
    results = {}
    for case in arguments.cases.split(","):
        results[case] = compete(arguments, case)
        if not arguments.json:
            show(case, results[case])
    if arguments.json:
        targets = {
            "ratios": TARGETS,
            "most": MOST,
            "first_round": FIRST_ROUND_TARGET,
            "memory_S2": MEMORY_TARGET,
        }
        print(json.dumps({"results": results, "targets": targets}, indent=2))


if __name__ == "__main__":
    main()
