"""What a step of a silo's cluster costs beside the same step in a loop written by hand, on ranks of here.

    python benchmarks/step_overhead.py                  # two ranks, FSDP2 and DDP
    python benchmarks/step_overhead.py --layers 24 --dim 64 --json

Both train the same transformer from the same weights over the same batches, with AdamW and clipping, in turn:
eight steps of one, then of the other. Given are medians of a step's seconds and the median of their ratios,
turn by turn, and the same of the CPU time of all ranks, which other work on the machine touches less than the
clock. `--optimizer` times clipping and AdamW's step alone: over DTensors one by one, as a loop written by
hand has them by torch's defaults, and as the cluster takes them.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.stepping.agreed_step import AgreedStep
from roundtable.cluster.stepping.sharded_optimizer import make_optimizer
from roundtable.cluster.tools.verify import Block
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress, StepReport
from roundtable.core.config import JobConfig
from roundtable.core.layout import Layout
from roundtable.core.task import Site, Task, initial_state

_CLIP = 1.0
_STEPS = 8


class Decoder(Task):
    """A decoder on random tokens: twelve parameters a layer and four more."""

    def __init__(self, layers: int, dim: int, length: int, examples: int) -> None:
        self._layers, self._dim, self._length, self._examples = layers, dim, length, examples

    @override
    def model(self) -> nn.Module:
        """Embedding, blocks, head in a row."""
        blocks = [Block(self._dim, 4) for _ in range(self._layers)]
        end = nn.LayerNorm(self._dim), nn.Linear(self._dim, 256)
        return nn.Sequential(nn.Embedding(256, self._dim), *blocks, *end)

    @override
    def data(self, site: Site) -> Any:
        """Sequences of tokens."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(256, (self._examples, self._length + 1), generator=generator)
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of the next token."""
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    @override
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=1e-3)


class ByHand:
    """The loop that an engineer would write: shard, backward, clip, step."""

    def __init__(self, task: Decoder, kind: str, batch: int, device: torch.device) -> None:
        model = initial_state(task, 0)
        assert isinstance(model, nn.Module)
        self._model: nn.Module = model.to(device)
        if kind == "ddp":
            self._model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        else:
            for block in self._model.children():
                if isinstance(block, Block):
                    fully_shard(block)
            fully_shard(self._model)
        self._task, self._device = task, device
        self._optimizer = task.optimizer(self._model.parameters())
        (inputs, targets), _ = task.data(Site("hand"))
        share = batch // dist.get_world_size()
        first = dist.get_rank() * share
        self._batch = tuple(part[first : first + share].to(device) for part in (inputs, targets))

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps; the loss is read at their end, as loops log it."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._optimizer.zero_grad()
            loss = self._task.loss(self._model, self._batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
            self._optimizer.step()
            loss.item()
            seconds.append(time.perf_counter() - began)
        return seconds


class Ours:
    """The cluster's trainer on the same task; its steps are those of a round."""

    def __init__(self, task: Decoder, kind: str, batch: int, device: torch.device) -> None:
        world = dist.get_world_size()
        mesh = Mesh(dp=world) if kind == "ddp" else Mesh(fsdp=world)
        strategy = Strategy(mesh, "ddp" if kind == "ddp" else "zero3", batch)
        self._task, self._batch = task, batch
        model = initial_state(task, 0)
        layout = Layout.of(model)
        self._trainer = RankTrainer(
            task, self._job(1), layout, strategy, Meshes(mesh, device.type), device, "benchmark"
        )
        self._trainer.load(layout.flatten(model).clone(), {})
        self._round = 0
        self._data, _ = task.data(Site("ours"))
        # The one step under the profiler is not what is timed here.
        self._trainer.sampler._wanted = False

    def _job(self, steps: int) -> JobConfig:
        table = {"steps": steps, "batch_size": self._batch, "max_gradient_norm": _CLIP}
        return JobConfig.model_validate({"task": "t", "algorithm": {**table, "optimizer_state": "keep"}})

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        self._trainer.job = self._job(count)
        self._round += 1
        reports: list[StepReport] = []
        batches = self._trainer.batches(self._data, self._round)
        self._trainer.fit(batches, self._round, RoundProgress(), reports.append)
        return [report.seconds for report in reports]


def compare(kind: str, task: Decoder, batch: int, turns: int, device: torch.device) -> dict[str, Any]:
    """Medians of a step by hand and of ours, and of their ratio turn by turn; the same on all ranks."""
    hand, ours = ByHand(task, kind, batch, device), Ours(task, kind, batch, device)
    pairs = []
    for turn in range(turns + 1):
        order = (hand, ours) if turn % 2 else (ours, hand)
        found = {each: measured(each, device) for each in order}
        if turn:
            pairs.append((found[hand], found[ours]))
    return {"kind": kind} | {
        name: {
            "by hand": statistics.median(hand[place] for hand, _ in pairs),
            "ours": statistics.median(ours[place] for _, ours in pairs),
            "overhead": statistics.median(ours[place] / hand[place] for hand, ours in pairs) - 1,
        }
        for place, name in enumerate(("clock", "cpu"))
    }


def measured(loop: ByHand | Ours, device: torch.device) -> tuple[float, float]:
    """(median seconds of a step by this rank's clock, mean seconds of CPU of all ranks a step)."""
    began = time.process_time()
    seconds = statistics.median(loop.steps(_STEPS))
    taken = torch.tensor([time.process_time() - began], dtype=torch.float64, device=device)
    dist.all_reduce(taken)
    return seconds, float(taken) / _STEPS


def optimizers(task: Decoder, turns: int, device: torch.device) -> dict[str, Any]:
    """Seconds of clipping and AdamW's step over all parameters, in three ways, in turn."""
    world = dist.get_world_size()
    strategy = Strategy(Mesh(fsdp=world), "zero3", 1)
    meshes = Meshes(strategy.mesh, device.type)
    job = JobConfig.model_validate({"task": "t"})
    runs: dict[str, Callable[[], None]] = {}
    for name in ("torch, plain tensors", "torch, DTensors", "ours, DTensors"):
        model = initial_state(task, 0)
        assert isinstance(model, nn.Module)
        model.to(device)
        if "DTensors" in name:
            fully_shard(model)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if name.startswith("ours"):
            optimizer = make_optimizer(task, parameters, job, strategy, meshes)
            taking = AgreedStep(optimizer, parameters, meshes, device, max_norm=_CLIP)
            losses = torch.zeros(1, device=device)

            def own(taking: AgreedStep = taking, losses: Tensor = losses) -> None:
                taking.agree(losses, [1], world, [0.0, 0.0]).read()
                taking.take()

            runs[name] = own
        else:

            def theirs(
                parameters: list[nn.Parameter] = parameters,
                optimizer: torch.optim.Optimizer = task.optimizer(parameters),  # noqa: B008
            ) -> None:
                nn.utils.clip_grad_norm_(parameters, _CLIP)
                optimizer.step()

            runs[name] = theirs
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    tensors = sum(1 for _ in initial_state(task, 0).parameters())  # type: ignore[union-attr]
    return {"parameters": tensors, **{name: statistics.median(each) for name, each in seconds.items()}}


def on_ranks(options: argparse.Namespace) -> None:
    """One rank; rank 0 writes the result to the file in the environment."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.set_num_threads(1)
    task = Decoder(options.layers, options.dim, options.length, 4 * options.batch)
    rows = [compare(kind, task, options.batch, options.turns, device) for kind in options.kinds]
    result = {"world": dist.get_world_size(), "steps": rows, "optimizer": None}
    if options.optimizer:
        result["optimizer"] = optimizers(task, options.turns, device)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks and prints what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--batch", type=int, default=8, help="examples of all ranks together")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kinds", nargs="*", default=["zero3", "ddp"], choices=["zero3", "ddp"])
    parser.add_argument("--optimizer", action="store_true", help="time clipping and the optimizer alone too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={options.world}",
    ]
    done = subprocess.run([*command, *sys.argv], stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["steps"]:
        for name in ("clock", "cpu"):
            hand, ours = (1e3 * row[name][who] for who in ("by hand", "ours"))
            print(
                f"{row['kind']:<6} {name:<5} by hand {hand:8.2f} ms   ours {ours:8.2f} ms   "
                f"overhead {row[name]['overhead']:+.1%}"
            )
    if result["optimizer"] is not None:
        for name, value in result["optimizer"].items():
            print(f"{name:<24}", value if name == "parameters" else f"{1e3 * value:8.2f} ms")


if __name__ == "__main__":
    main()
