"""Predicted seconds of a step against measured ones, for plans of several models on ranks of here.

    python benchmarks/plan_predictions.py               # two ranks
    python benchmarks/plan_predictions.py --world 4 --turns 9 --json
    python benchmarks/plan_predictions.py --cpu         # beside other work

Rates and links are measured by the ranks as a silo's are, before each turn of a model's plans and after the
last: a prediction is the median over those measurements. Plans take their steps in turn, so that what else
the machine does meets all of them. Given are for each plan the prediction over the median, and for each pair
of a model's plans whether the one that was predicted to be faster was; pairs that differ by less than a tenth
when measured count for neither side. With `--cpu` rates and steps are both in seconds of a rank's CPU time,
which other work touches less than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from step_overhead import Decoder
from torch import nn
from typing_extensions import override

from roundtable.cluster.choice.machine_rates import rates_of
from roundtable.cluster.choice.step_time import StepTime, step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.experts import MixtureOfExperts
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan.links import measure_links
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.tools.verify import Block
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
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
    experts: bool = False


MODELS = (
    Model("small", 2, 128, 64, 8),
    Model("deep", 12, 128, 32, 8),
    Model("wide", 2, 512, 32, 8),
    Model("long", 4, 128, 256, 8),
    Model("many examples", 4, 256, 32, 32),
    Model("experts", 4, 128, 64, 8, experts=True),
)


class Mixed(Decoder):
    """A decoder whose feed-forward parts are experts, of which each token passes two."""

    @override
    def model(self) -> nn.Module:
        """The decoder's parts in a row."""
        model = super().model()
        for block in model.children():
            if isinstance(block, Block):
                block.mlp = MixtureOfExperts(self._dim, 2 * self._dim, 8)  # type: ignore[assignment]
        return model


def plans(world: int, batch: int, *, experts: bool = False) -> dict[str, Strategy]:
    """The plans of each model, and of one with experts."""
    share = batch // world
    if experts:
        return {
            "ddp": Strategy(Mesh(dp=world), "ddp", share),
            "zero2": Strategy(Mesh(fsdp=world), "zero2", share),
            "zero2 experts": Strategy(Mesh(fsdp=world, ep=world), "zero2", share),
            "zero3 experts": Strategy(Mesh(fsdp=world, ep=world), "zero3", share),
        }
    return {
        "ddp": Strategy(Mesh(dp=world), "ddp", share),
        "ddp in halves": Strategy(Mesh(dp=world), "ddp", max(1, share // 2)),
        "zero1": Strategy(Mesh(dp=world), "zero1", share),
        "zero2": Strategy(Mesh(fsdp=world), "zero2", share),
        "zero3": Strategy(Mesh(fsdp=world), "zero3", share),
        "zero3 again": Strategy(Mesh(fsdp=world), "zero3", share, checkpointing="every"),
        "zero2 in halves": Strategy(Mesh(fsdp=world), "zero2", max(1, share // 2)),
        "tensor": Strategy(Mesh(tp=world), "none", batch),
        "tensor sequence": Strategy(Mesh(tp=world), "none", batch, sequence_parallel=True),
        "1f1b": Strategy(Mesh(pp=world), "none", max(1, batch // (2 * world)), "1f1b"),
    }


def predicted_and_measured(
    model: Model, turns: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """{plan: {"predicted", "measured", the prediction's terms}} in seconds of a step. Collective."""
    world, device = dist.get_world_size(), torch.device("cpu")
    kind = Mixed if model.experts else Decoder
    task = kind(model.layers, model.dim, model.length, 4 * model.batch)
    data, _ = task.data(Site("benchmark"))
    table = {"steps": _STEPS, "batch_size": model.batch, "optimizer_state": "keep"}
    job = JobConfig.model_validate({"task": "t", "algorithm": table})
    probe = probe_model(task, data, device="cpu")
    resources = Resources(1, world, 1 << 34, "cpu")
    sums, start = UnitSums(probe), initial_state(task, 0)
    layout = Layout.of(start)
    trainers: dict[str, RankTrainer] = {}
    for name, strategy in plans(world, model.batch, experts=model.experts).items():
        meshes = Meshes(strategy.mesh, "cpu")
        trainers[name] = RankTrainer(
            task, job, layout, strategy, meshes, device, "benchmark", probe.tensor_parallel
        )
        trainers[name].load(layout.flatten(start).clone(), {})
        # The one step under the profiler is not what is timed here.
        trainers[name].sampler._wanted = False
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    measured_links = []
    for turn in range(turns + 1):
        measured_links.append(measure_links(device, world, clock=clock))
        for name, trainer in trainers.items():
            ends = [0.0]
            batches = trainer.batches(data, turn + 1)
            trainer.fit(batches, turn + 1, RoundProgress(), lambda report, ends=ends: ends.append(clock()))
            if turn:
                seconds[name] += [end - begin for begin, end in pairwise(ends[1:])]
    measured_links.append(measure_links(device, world, clock=clock))
    rates = [rates_of(resources, "float32", links) for links in measured_links]
    found = {}
    for name, trainer in trainers.items():
        terms = [
            asdict(step_time(probe, sums, trainer.strategy, model.batch, each, resources)) for each in rates
        ]
        guess = StepTime(**{term: statistics.median(each[term] for each in terms) for term in terms[0]})
        measured = statistics.median(seconds[name])
        # A rank that waits for other stages takes no CPU time.
        waits = guess.bubble if clock is time.process_time else 0.0
        found[name] = {"predicted": guess.seconds - waits, "measured": measured, **asdict(guess)}
    return found


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
            result[model.name] = predicted_and_measured(
                model, options.turns, time.process_time if options.cpu else time.perf_counter
            )
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
                f"  {name:<16} predicted {1e3 * row['predicted']:8.2f} ms   measured "
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
    parser.add_argument("--cpu", action="store_true", help="CPU time in the place of the clock's")
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
