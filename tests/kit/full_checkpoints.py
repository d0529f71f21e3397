"""Checkpoints and updates of two ranks on a disk that is full at times."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cluster_plans import plan
from file_limit import files_of_at_most
from odd_models import Odd, job, repeated

from roundtable.client.failures import diagnose
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import prepare_update, write_deltas
from roundtable.cluster.train.checkpoint_places import STATE, Position
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.local_state import save_local
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.core import Layout
from roundtable.core.errors import ResourceError
from roundtable.core.task import initial_state


def save_while_full(rank: int, folder: Path) -> tuple[list[str], list[str], list[str], int]:
    """(what rank 0 says, what is there after each save, errors of a round's end, the newest step).

    Saved are steps 2, 4, whose part of rank 1 does not fit, and 1 of a round that is begun anew; a save of
    step 9 was broken off before.
    """
    said: list[str] = []
    strategy = plan("zero3", 4, fsdp=2)
    task = Odd(repeated)
    layout = Layout.of(model := initial_state(task, 3))
    trainer = RankTrainer(
        task, job(), layout, strategy, Meshes(strategy.mesh, "cpu"), torch.device("cpu"), "silo"
    )
    trainer.load(layout.flatten(model), {})
    trainer.begin(1)
    assert trainer.optimizer is not None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    checkpoints = Checkpoints(folder, [], 1, group, said.append)
    if rank == 0:
        (folder / "round-000001-step-00000009").mkdir()
    there: list[str] = []
    for step, full in ((2, False), (4, True), (1, False)):
        with files_of_at_most(64) if full and rank == 1 else nullcontext():
            checkpoints.save(trainer.replica, trainer.optimizer, Position(1, "m", step, 0, 0.0))
            checkpoints.finish()
        dist.barrier()
        there.append(" ".join(sorted(path.parent.name[-1] for path in folder.glob(f"*/{STATE}"))))
        there[-1] += f" of {len(list(folder.iterdir()))}"
    dist.barrier()
    ended = []
    with files_of_at_most(64) if rank == 1 else nullcontext():
        try:
            checkpoints.save(trainer.replica, trainer.optimizer, Position.end_of(1, "m", 4))
            checkpoints.finish()
        except ResourceError as error:
            ended.append(str(error))
    newest = checkpoints.newest(1, "m")
    assert newest is not None
    return said, there, ended, newest[1].step


def deliver_while_full(rank: int, folder: Path) -> list[str]:
    """What each rank is told where its parts of the update do not fit, or the first the silo's tensors."""
    strategy, task = plan("zero3", 4, fsdp=2), Odd(repeated)
    layout = Layout.of(model := initial_state(task, 3))
    meshes = Meshes(strategy.mesh, "cpu")
    trainer = RankTrainer(task, job(), layout, strategy, meshes, torch.device("cpu"), "silo")
    start = layout.flatten(model)
    trainer.load(start, {})
    alone = [dist.new_group([each], backend="gloo") for each in range(2)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    own = folder / str(rank)
    own.mkdir()
    update, tensors = own / "update", list(trainer.replica.tensors())
    prepare_update(update, "float32", layout)
    order = Order("job", 1, "train", "", "", "", "", "")
    kept = {"stream/position": torch.zeros(64, dtype=torch.uint8)}
    told = []
    with files_of_at_most(64):
        for write in (
            partial(write_deltas, update, "float32", tensors, trainer.places, start, meshes),
            partial(save_local, SiloState(own), order, [], kept, layout, meshes, alone),
        )[: 2 - rank]:
            try:
                write()
            except Exception as error:  # noqa: BLE001 - whatever a rank would report
                told.append(f"{diagnose(error).kind}: {error}")
    return told
