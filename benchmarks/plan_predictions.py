"""Predicted seconds of a step against measured ones, for plans of several models on ranks of here.

    python benchmarks/plan_predictions.py               # two ranks
    python benchmarks/plan_predictions.py --world 4 --turns 9 --json

Rates and links are measured by the ranks as a silo's are, before the steps of each model, and the plans of a
model take their steps in turn, so that what else the machine does meets all of them. Given are for each plan
the prediction over the median, and for each pair of a model's plans whether the one that was predicted to be
faster was; pairs that differ by less than a tenth when measured count for neither side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from step_overhead import Decoder

from roundtable.cluster.choice.machine_rates import rates_of
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan.links import measure_links
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core.config import JobConfig
from roundtable.core.layout import Layout
from roundtable.core.task import Site, initial_state

_STEPS, _CLOSE, _ALIKE = 4, 0.25, 0.1


@dataclass(frozen=True)
class Model:
    """A decoder, and the examples of a batch of all ranks together."""

    name: str
    layers: int
    dim: int
    length: int
    batch: int


MODELS = (
    Model("small", 2, 128, 64, 8),
    Model("deep", 12, 128, 32, 8),
    Model("wide", 2, 512, 32, 8),
    Model("long", 4, 128, 256, 8),
    Model("many examples", 4, 256, 32, 32),
)


def plans(world: int, batch: int) -> dict[str, Strategy]:
    """The plans of each model."""
    share = batch // world
    return {
        "ddp": Strategy(Mesh(dp=world), "ddp", share),
        "ddp in halves": Strategy(Mesh(dp=world), "ddp", max(1, share // 2)),
        "zero1": Strategy(Mesh(dp=world), "zero1", share),
        "zero2": Strategy(Mesh(fsdp=world), "zero2", share),
        "zero3": Strategy(Mesh(fsdp=world), "zero3", share),
        "zero3 again": Strategy(Mesh(fsdp=world), "zero3", share, checkpointing="every"),
    }


def predicted_and_measured(model: Model, turns: int) -> dict[str, dict[str, float]]:
    """{plan: {"predicted", "measured"}} in seconds of a step. Collective."""
    world, device = dist.get_world_size(), torch.device("cpu")
    task = Decoder(model.layers, model.dim, model.length, 4 * model.batch)
    data, _ = task.data(Site("benchmark"))
    table = {"steps": _STEPS, "batch_size": model.batch, "optimizer_state": "keep"}
    job = JobConfig.model_validate({"task": "t", "algorithm": table})
    probe = probe_model(task, data, device="cpu")
    resources = Resources(1, world, 1 << 34, "cpu")
    sums, start = UnitSums(probe), initial_state(task, 0)
    sums, start = UnitSums(probe), initial_state(task, 0)
    layout = Layout.of(start)
    trainers: dict[str, RankTrainer] = {}
    for name, strategy in plans(world, model.batch).items():
        meshes = Meshes(strategy.mesh, "cpu")
        trainers[name] = RankTrainer(task, job, layout, strategy, meshes, device, "benchmark")
        trainers[name].load(layout.flatten(start).clone(), {})
        # The one step under the profiler is not what is timed here.
        trainers[name].sampler._wanted = False
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    guesses: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        rates = rates_of(resources, "float32", measure_links(device, world))
        for name, trainer in trainers.items():
            reports: list[StepReport] = []
            batches = trainer.batches(data, turn + 1)
            trainer.fit(batches, turn + 1, RoundProgress(), reports.append)
            if turn:
                guess = step_time(probe, sums, trainer.strategy, model.batch, rates, resources)
                guesses[name].append(guess.seconds)
                seconds[name] += [report.seconds for report in reports]
    return {
        name: {
            "predicted": statistics.median(guesses[name]),
            "measured": statistics.median(seconds[name]),
        }
        for name in trainers
    }


def verdicts(found: dict[str, dict[str, float]]) -> dict[str, bool]:
    """For each pair of plans that differ when measured, whether they were predicted to in the same order."""
    right = {}
    for one, other in combinations(found, 2):
        fast, slow = sorted((one, other), key=lambda name: found[name]["measured"])
        if found[slow]["measured"] > (1 + _ALIKE) * found[fast]["measured"]:
            right[f"{fast} before {slow}"] = found[fast]["predicted"] < found[slow]["predicted"]
    return right


def on_ranks(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints the result."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    result = {}
    for model in MODELS:
        if not options.models or model.name in options.models:
            result[model.name] = predicted_and_measured(model, options.turns)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


def show(result: dict[str, Any]) -> None:
    """The tables, and what of them comes out as it should."""
    ratios, right = [], []
    for model, found in result.items():
        print(model)
        for name, row in found.items():
            ratio = row["predicted"] / row["measured"]
            ratios.append(ratio)
            print(
                f"  {name:<14} predicted {1e3 * row['predicted']:8.2f} ms   measured "
                f"{1e3 * row['measured']:8.2f} ms   {ratio:.2f}"
            )
        found_right = verdicts(found)
        right += found_right.values()
        for said, true in found_right.items():
            if not true:
                print(f"  wrong: {said}")
    close = sum(1 / (1 + _CLOSE) <= ratio <= 1 + _CLOSE for ratio in ratios)
    print(f"{close} of {len(ratios)} predictions within {_CLOSE:.0%}, median {statistics.median(ratios):.2f}")
    print(f"{sum(right)} of {len(right)} pairs in the right order")


def main() -> None:
    """Starts the ranks and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--turns", type=int, default=5, help="of four steps of each plan")
    parser.add_argument("--models", nargs="*", choices=[model.name for model in MODELS])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command.append(f"--nproc-per-node={options.world}")
    done = subprocess.run([*command, *sys.argv], stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    if options.json:
        pairs = {model: verdicts(found) for model, found in result.items()}
        print(json.dumps({"steps": result, "orders": pairs}, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
