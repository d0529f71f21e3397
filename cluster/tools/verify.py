"""Checks a silo's hardware before it is trusted with a job: `roundtable client verify-cluster`.

Each rank runs `main` under torchrun: it measures all-reduce bandwidth by size, and compares every strategy
that the number of ranks allows with one process, on a small transformer, with training's devices and backend.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typing_extensions import override

from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.cluster.parallel.anatomy import dissect
from roundtable.cluster.parallel.forward_trace import fake_model, trace
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.parallel.tensor_parallel import find_tensor_parallel
from roundtable.cluster.plan.launch_variables import LaunchVariables
from roundtable.cluster.tools.local_ranks import print_result, run_ranks
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core.config import JobConfig
from roundtable.core.layout import Layout
from roundtable.core.task import Site, Task, initial_state

# Weights are float64; what they are compared with passes through float32.
TOLERANCE = 1e-4
_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Probe(Task):
    """A small decoder on random tokens."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    @override
    def model(self) -> nn.Module:
        """Embedding, blocks, head in a row."""
        blocks = [Block(128, 8) for _ in range(self._layers)]
        whole = nn.Sequential(nn.Embedding(256, 128), *blocks, nn.LayerNorm(128), nn.Linear(128, 256))
        return whole.double()

    @override
    def data(self, site: Site) -> Any:
        """Sequences of 32 tokens."""
        tokens = torch.randint(256, (64, 33), generator=torch.Generator().manual_seed(1))
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of the next token."""
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def verify_here(world: int | None = None) -> dict[str, Any]:
    """Runs the checks on this machine, by default on its GPUs or two CPU ranks; errors as `run_ranks`."""
    gpus = torch.cuda.device_count()
    result = run_ranks(world or gpus or 2, "roundtable.cluster.tools.verify", "cuda" if gpus else "cpu")
    return {**result, "torch": torch.__version__}


def strategies(world: int) -> list[Strategy]:
    """One strategy of each kind that so many ranks allow."""
    chosen = [Strategy(Mesh(dp=world), "ddp", 2), Strategy(Mesh(dp=world), "zero1", 2)]
    chosen += [Strategy(Mesh(fsdp=world), "zero2", 2), Strategy(Mesh(fsdp=world), "zero3", 2)]
    if world in (2, 4, 8):
        chosen.append(Strategy(Mesh(tp=world), "none", 2, sequence_parallel=True))
    chosen += [Strategy(Mesh(pp=world), "none", 1, kind) for kind in ("gpipe", "1f1b")]
    if world % 4 == 0:
        half = world // 2
        chosen.append(Strategy(Mesh(dp=2, fsdp=half), "zero3", 2))
        chosen.append(Strategy(Mesh(fsdp=half, tp=2), "zero3", 2, sequence_parallel=True))
    if world % 8 == 0:
        chosen.append(Strategy(Mesh(pp=2, fsdp=world // 4, tp=2), "zero2", 2, sequence_parallel=True))
    return chosen


def bandwidth(device: torch.device, budget: float = 10.0) -> list[dict[str, float]]:
    """All-reduce by size: seconds, and bus bandwidth in bytes a second, 2·(n−1)/n of the payload."""
    world, rows = dist.get_world_size(), []
    began = time.monotonic()
    for size in _SIZES:
        data = torch.ones(size // 4, device=device)
        dist.all_reduce(data)
        _wait(device)
        start, count = time.perf_counter(), 5
        for _ in range(count):
            dist.all_reduce(data)
        _wait(device)
        seconds = torch.tensor((time.perf_counter() - start) / count, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        each = float(seconds)
        rows.append({"bytes": size, "seconds": each, "bus": size * 2 * (world - 1) / world / each})
        spent = torch.tensor(time.monotonic() - began, device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if float(spent) + 8 * 16 * each > budget:
            break
    return rows


def difference(strategy: Strategy, device: torch.device, kind: type[Probe] = Probe) -> float:
    """max|a − b| / max|b| of the weights' change against one process, after three steps."""
    task = kind(2 * max(2, strategy.mesh.pp))
    table = {"steps": 3, "batch_size": 16, "learning_rate": 0.1}
    job = JobConfig.model_validate({"task": "probe", "seed": 1, "algorithm": table})
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    start = layout.flatten(model).clone()
    data, _ = task.data(Site("probe"))
    expected = train(
        task, model, data, LocalWork(job, layout, start, 1, "probe"), Execution(device=device)
    ).delta
    plan = None
    if strategy.mesh.tp > 1:
        mode, fake = fake_model(task)
        batch = tuple(part[:1] for part in data)
        plan = find_tensor_parallel(fake, dissect(fake), trace(task, mode, fake, batch))
    meshes = Meshes(strategy.mesh, device.type)
    trainer = RankTrainer(task, job, layout, strategy, meshes, device, "probe", plan)
    trainer.load(start, {})
    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
    worst = torch.zeros(1, device=device)
    wanted = layout.unflatten(expected)
    before = layout.unflatten(start)
    for name, tensor in trainer.replica.tensors():
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().float()
        gap = (whole - before[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-12)
        worst = torch.maximum(worst, gap.to(device))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def main() -> None:
    """One rank; rank 0 writes a JSON document to standard output."""
    cuda = sys.argv[1] == "cuda"
    place = LaunchVariables.read(os.environ)
    device = torch.device("cuda", place.device_of(torch.cuda.device_count())) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    rates = bandwidth(device)
    checks = [
        {"strategy": str(strategy), "difference": difference(strategy, device)}
        for strategy in strategies(dist.get_world_size())
    ]
    if dist.get_rank() == 0:
        group = {"world": dist.get_world_size(), "backend": dist.get_backend(), "device": str(device)}
        print_result({**group, "all_reduce": rates, "checks": checks})
    dist.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
