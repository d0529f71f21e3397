"""Every rank of every strategy on the stand-in for CUDA: what a step asks of it, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from tempfile import TemporaryDirectory
from typing import Any, Generic, TextIO, TypeVar
from unittest.mock import patch

import fake_cuda
import torch
import torch.distributed as dist
from cluster_models import Language, Mixture, Noisy, Normed
from cluster_plans import plan
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from roundtable.cluster.parallel.anatomy import dissect
from roundtable.cluster.parallel.forward_trace import fake_model, trace
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.tensor_parallel import find_tensor_parallel
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.stepping import gradient_hooks
from roundtable.cluster.stepping.gradient_hooks import GradientHook
from roundtable.cluster.train import rank_trainer
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core.config import JobConfig
from roundtable.core.layout import Layout
from roundtable.core.task import Site, initial_state


class Adam(Language):
    """Two states for each parameter."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=1e-3)


T = TypeVar("T")


class Placeless(torch.futures.Future[T], Generic[T]):
    """That does not ask where the memory of its value is, which a fake tensor has nowhere."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()


STRATEGIES = {
    "none": plan(),
    "ddp": plan("ddp", dp=2),
    "zero1": plan("zero1", dp=2),
    "zero2": plan("zero2", fsdp=2),
    "zero3": plan("zero3", fsdp=2),
    "zero3 bfloat16": plan("zero3", fsdp=2, precision="bfloat16"),
    "zero3 checkpointed": plan("zero3", fsdp=2, checkpointing="every"),
    "zero3 offload": plan("zero3", fsdp=2, offload=True),
    "hsdp": plan("zero3", dp=2, fsdp=2),
    "tp": plan(tp=2),
    "tp sequence": plan(tp=2, sequence_parallel=True),
    "zero3 tp": plan("zero3", fsdp=2, tp=2),
    "tp dropout": plan(tp=2),
    "zero3 batch norm": plan("zero3", micro=4, fsdp=2),
    "ddp powersgd": plan("ddp", dp=2, reduction="powersgd(rank=2)"),
    "none bfloat16": plan(precision="bfloat16"),
    "ddp bfloat16 reduction": plan("ddp", dp=2, reduction="bfloat16"),
    "ddp float16": plan("ddp", dp=2, precision="float16"),
    "ddp uneven": plan("ddp", dp=2),
    "optimizer offloaded": plan("zero3", fsdp=2, offload_optimizer=True),
    "optimizer in 8 bits": plan("zero3", fsdp=2, optimizer_bits=8),
    "activations offloaded": plan(offload_activations=True),
    "local": plan("ddp", dp=2, local_steps=2),
    "pp": plan(pp=2),
    "zero3 pp": plan("zero3", fsdp=2, pp=2),
    "zero3 experts": plan("zero3", fsdp=2),
    "zero3 experts shared": plan("zero3", fsdp=2, ep=2),
}


SIZES: dict[str, dict[str, Any]] = {
    "tp dropout": {"kind": Noisy},
    "zero3 batch norm": {"kind": Normed},
    "zero3 experts": {"block": Mixture},
    "zero3 experts shared": {"block": Mixture},
    # Of fewer values the state is not in 8 bits.
    "optimizer in 8 bits": {"dim": 64, "hidden": 256},
}


class Reads(Adam):
    """Looks at its loss on the host."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """As before."""
        loss = super().loss(model, batch)
        float(loss.detach())
        return loss


class Disordered(Adam):
    """Rank 1 adds up another number first."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """As before."""
        sizes = (1, 2) if dist.get_rank() else (2, 1)
        for size in sizes:
            dist.all_reduce(torch.zeros(size, device=batch[0].device))
        return super().loss(model, batch)


MISTAKES = {"ddp reads a number": Reads, "ddp out of order": Disordered}
"""Two that the tests have to see, under DDP."""


def steps(name: str, rank: int) -> dict[str, Any]:
    """What a round of two steps asks of the device, on one rank."""
    strategy = STRATEGIES.get(name) or STRATEGIES["ddp"]
    task = MISTAKES.get(name, Adam)(layers=2, **SIZES.get(name, {}))
    job = JobConfig.model_validate(
        {"task": "t", "seed": 7, "algorithm": {"steps": 2, "batch_size": 8, "max_gradient_norm": 0.5}}
    )
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = task.data(Site("silo"))
    split = None
    if strategy.mesh.tp > 1:
        mode, fake = fake_model(task)
        split = find_tensor_parallel(fake, dissect(fake), trace(task, mode, fake, example_batch(data, 2)))
    device = torch.device("cuda", 0)
    with (
        fake_cuda.recorded(rank, strategy.mesh.world) as record,
        patch.object(rank_trainer, "next_shares", lambda *given: None),
        # Within this thread, whose modes see what is done.
        patch.object(GradientHook, "submit", lambda self, future: future.set_result(None)),
        patch.object(gradient_hooks, "Future", Placeless),
    ):
        meshes = Meshes(strategy.mesh, "cuda", apart=strategy.local_steps > 0)
        trainer = RankTrainer(task, job, layout, strategy, meshes, device, "silo", split)
        trainer.sampler._wanted = False
        trainer.uneven = name == "ddp uneven"
        # Counters do not travel.
        trainer.load(start, {name: torch.zeros((), dtype=torch.int64) for name, _ in model.named_buffers()})
        # Stages tell each other once what they pass on, on the host.
        for round in (1, 2) if strategy.mesh.pp > 1 else (1,):
            record.clear()
            done, began = RoundProgress(), time.perf_counter()
            # A build for CUDA asks the card which of its kernels it has.
            with sdpa_kernel(SDPBackend.MATH):
                trainer.fit(trainer.batches(data, round), round, done, lambda report: None)
            took = time.perf_counter() - began
        lags = trainer.lags and trainer._taking().lags
        weights = {str(each.device) + " " + str(each.dtype) for each in trainer.replica.parameters()}
        return {
            "lags": lags,
            "seconds": done.seconds / took,
            "weights": sorted(weights),
            "exchanges": list(fake_cuda.EXCHANGES),
            "products": sorted(record.products),
            "reads": list(record.reads),
            "copies": list(record.copies),
            "waits": list(fake_cuda.WAITS),
            "on_cpu": list(fake_cuda.ON_CPU),
        }


def forked(name: str) -> list[dict[str, Any]]:
    """Each rank in a process of its own, as torch remembers groups; all at once, as they may talk."""
    world = STRATEGIES.get(name, STRATEGIES["ddp"]).mesh.world
    with TemporaryDirectory() as folder:
        talk = os.path.join(folder, "talk")
        told = [_begun(name, rank, talk, world) for rank in range(world)]
        answers = [reading.read() for reading in told]
    for reading in told:
        reading.close()
        os.wait()
    return [json.loads(answer or '{"error": "it ended"}') for answer in answers]


def _begun(name: str, rank: int, talk: str, world: int) -> TextIO:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return os.fdopen(reading)
    fake_cuda.objects_through(dist.FileStore(talk, world))
    try:
        found = steps(name, rank)
    except Exception:  # noqa: BLE001 - told of each
        found = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as told:
        told.write(json.dumps(found))
    os._exit(0)


def main() -> None:
    """All of them, or those that are named."""
    fake_cuda.pretend()
    found: dict[str, Any] = {}
    for name in sys.argv[1:] or STRATEGIES:
        found[name] = forked(name)
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
