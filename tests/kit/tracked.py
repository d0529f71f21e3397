"""What a strategy really allocates: a step on fake tensors in a fake group, under torch's memory tracker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from roundtable.cluster.parallel import apply_strategy as apply
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.train import replica as held
from roundtable.core.layout import Layout
from roundtable.core.task import Site, Task


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Rank 0 of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocated(task: Task, strategy: Strategy, probe: ModelProbe, micro_batches: int) -> dict[str, int]:
    """Bytes of rank 0 at the peak of a step after the first, by the tracker's kinds and "Total"."""
    device = torch.device("cpu")
    with fake_group(strategy.mesh.world):
        meshes = Meshes(strategy.mesh, "cpu")
        data, _ = task.data(Site("silo"))
        with torch.device("meta"):
            layout = Layout.of(task.model())
        sharded = strategy.data_parallel in ("zero2", "zero3")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            # What a model's constants are is not seen in fake tensors.
            with (
                nullcontext() if sharded else patch.object(apply, "allocate", _allocate),
                patch.object(held, "shared_constants", lambda *given: {}),
            ):
                replica = held.Replica(task, layout, strategy, meshes, device, probe.tensor_parallel)
            optimizer = torch.optim.AdamW(replica.parameters(), foreach=False)
            batch = tuple(mode.from_tensor(part[: strategy.micro_batch]) for part in data)

            def step(tracker: MemTracker | None) -> None:
                optimizer.zero_grad()
                for _ in range(micro_batches):
                    replica.backward([batch], [1.0])
                    if tracker is not None:
                        tracker.reset_mod_stats()
                optimizer.step()

            # The first step makes the optimizer's state, and fills caches with tensors that nobody keeps.
            step(None)
            optimizer.zero_grad()
            tracker = FSDPMemTracker(replica.model, optimizer) if sharded else MemTracker()
            if isinstance(tracker, FSDPMemTracker):
                tracker.track_inputs(batch)
            else:
                tracker.track_external(replica.model, optimizer)
            with tracker:
                step(tracker)
            peak = tracker.get_tracker_snapshot("peak")[device]
            return {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}


def _allocate(module: nn.Module, device: torch.device, *, buffers: torch.device | None = None) -> None:
    """As `empty.allocate`: a module of fake tensors cannot exchange its own."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device))
                part._parameters[name] = made[id(parameter)]
