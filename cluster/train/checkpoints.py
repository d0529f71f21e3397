"""Saves and loads a round's state while it goes on: asynchronously, in safetensors, for any number of ranks.

torch's distributed checkpoint does the work, on a process group of its own. A checkpoint counts once its
`state.json` is there, which names every file by digest: a thread of rank 0 writes it as soon as all ranks
have written, then makes copies in other places and removes old ones, while training goes on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from roundtable.client.durable_files import digest_of, replace_synced
from roundtable.cluster.parallel.shards import plain_name
from roundtable.cluster.parallel.text_collectives import broadcast_text
from roundtable.cluster.train.diloco import OuterOptimizer
from roundtable.cluster.train.replica import Replica
from roundtable.cluster.train.sharded_optimizer import fill_state

_STATE, _END = "state.json", "end"
_ENDS_KEPT = 2


@dataclass(frozen=True)
class Position:
    """The point in a round that a checkpoint was made at; `model` is the digest of the global model.

    `replicas` that train apart have weights and optimizers of their own in it; 0: there is one of each.
    `stream` is the place in streamed data, None for others. `packed`: layers that hold several parts are
    split, and each part is a tensor of its own.
    """

    round: int
    model: str
    step: int
    seen: int
    loss_sum: float
    final: bool = False
    replicas: int = 0
    stream: dict[str, Any] | None = None
    packed: bool = False


class Checkpoints:
    """The checkpoints of one job, seen from one rank."""

    def __init__(self, folders: Sequence[Path], keep: int, group: dist.ProcessGroup) -> None:
        """`folders`: the first is written, the others get copies. `group` is a CPU group of all ranks."""
        self._folders = folders
        self._keep = keep
        self._group = group
        self._writing: Any = None
        self.sealing: Future[None] | None = None

    def save(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        position: Position,
        outer: OuterOptimizer | None = None,
    ) -> None:
        """Starts a save; returns once the tensors are copied, so that training may go on."""
        self.finish()
        place = _END if position.final else f"step-{position.step:08d}"
        folder = self._folders[0] / f"round-{position.round:06d}-{place}"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier(self._group)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        own = ""
        if outer is not None:
            own = _own(replica.meshes.place("dp"))
            position = replace(position, replicas=replica.strategy.mesh.dp)
        position = replace(position, packed=replica.packed)
        state = {**dict(_state(replica, optimizer, own)), **dict(_outer_state(replica, outer))}
        response = async_save(state, storage_writer=writer, process_group=self._group)
        staging = getattr(response, "staging_completion", None)
        if staging is not None:
            staging.result()
        self._writing = getattr(response, "upload_completion", response)
        if dist.get_rank() == 0:
            self.sealing = Future()
            arguments = (self._writing, self.sealing, folder, position)
            Thread(target=self._settle, args=arguments, name="checkpoint", daemon=True).start()

    def finish(self) -> None:
        """Waits for a save that is under way until it counts; raises what went wrong with it."""
        writing, sealing = self._writing, self.sealing
        self._writing = self.sealing = None
        if writing is not None:
            writing.result()
        if sealing is not None:
            sealing.result()

    def _settle(self, writing: Any, sealing: Future[None], folder: Path, position: Position) -> None:
        """Makes a checkpoint count. Rank 0's writing has ended when every rank's has."""
        try:
            writing.result()
            _seal(folder, position)
            for other in self._folders[1:]:
                _copy(folder, other / folder.name)
            for place in self._folders:
                _prune(place, self._keep)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it on the thread that trains
            sealing.set_exception(error)
        else:
            sealing.set_result(None)

    def newest(self, round: int, model: str, *, packed: bool = False) -> tuple[Path, Position] | None:
        """The newest whole checkpoint within this round from this model, of layers that are packed or not."""
        return self._find(
            lambda position: (
                position.round == round
                and position.model == model
                and not position.final
                and position.packed == packed
            )
        )

    def end(self, before: int, *, packed: bool = False) -> tuple[Path, Position] | None:
        """The whole checkpoint of the newest round's end below the round `before`."""
        return self._find(
            lambda position: position.final and position.round < before and position.packed == packed
        )

    def _find(self, wanted: Callable[[Position], bool]) -> tuple[Path, Position] | None:
        """Searches on rank 0, and returns its result on every rank."""
        text = ""
        if dist.get_rank() == 0 and (newest := next(self._whole(wanted), None)) is not None:
            text = json.dumps([str(newest[0]), newest[1].__dict__])
        text = broadcast_text(text, self._group)
        if not text:
            return None
        path, values = json.loads(text)
        return Path(path), Position(**values)

    def load(
        self,
        path: Path,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        outer: OuterOptimizer | None = None,
        *,
        weights: bool = True,
    ) -> None:
        """Loads a checkpoint into this rank's parts; without `weights` only the optimizers' state.

        Where the checkpoint has another number of replicas that trained apart, its replicas are dealt out in
        turn; replicas that train together all take the first.
        """
        fill_state(optimizer)
        replicas = Position(**json.loads((path / _STATE).read_text())["position"]).replicas
        place = replica.meshes.place("dp") if replica.strategy.local_steps else 0
        own = _own(place % replicas) if replicas else ""
        tensors = dict(_state(replica, optimizer, own))
        if replicas:
            tensors.update(_outer_state(replica, outer))
        learnt = (f"{own}model/", "outer/anchor/")
        state = {name: tensor for name, tensor in tensors.items() if weights or not name.startswith(learnt)}
        reader = HuggingFaceStorageReader(str(path))
        load(state, storage_reader=reader, process_group=self._group)
        if outer is not None and weights and not replicas:
            outer.depart()

    def _whole(self, wanted: Callable[[Position], bool]) -> Iterator[tuple[Path, Position]]:
        """Yields the wanted checkpoints whose files have their digests, newest first, from any place."""
        paths = [path for place in self._folders for path in place.glob(f"*/{_STATE}")]
        for path in sorted(paths, key=lambda path: path.parent.name, reverse=True):
            try:
                document = json.loads(path.read_text())
                files: Mapping[str, str] = document["files"]
                position = Position(**document["position"])
                if wanted(position) and all(digest_of(path.parent / name) == files[name] for name in files):
                    yield path.parent, position
            except (OSError, ValueError, KeyError, TypeError):
                continue


def _own(place: int) -> str:
    return f"replica-{place}/"


def _outer_state(replica: Replica, outer: OuterOptimizer | None) -> Iterator[tuple[str, Tensor]]:
    if outer is not None:
        names = {id(tensor): name for name, tensor in replica.tensors()}
        trained = [plain_name(names[id(parameter)]) for parameter in replica.parameters()]
        for name, tensor in outer.state(trained):
            yield f"outer/{name}", tensor


def _state(replica: Replica, optimizer: torch.optim.Optimizer, own: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields weights, buffers and optimizer state under names that hold at any number of ranks."""
    names: dict[int, str] = {}
    for name, tensor in replica.tensors():
        names[id(tensor)] = name
        yield f"{own}model/{name}", tensor.detach()
    inner = getattr(optimizer, "optim", optimizer)
    for parameter, values in inner.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{own}optimizer/{plain_name(names[id(parameter)])}/{key}", value


def _seal(folder: Path, position: Position) -> None:
    files = {path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    text = json.dumps({"position": position.__dict__, "files": files})
    replace_synced(folder / _STATE, [text.encode()])


def _copy(folder: Path, to: Path) -> None:
    """Copies a checkpoint; the description goes last, as one without it does not count."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(_STATE))
    shutil.copy2(folder / _STATE, to / _STATE)


def _prune(place: Path, keep: int) -> None:
    """Removes old checkpoints; two ends of rounds stay, as a round may start again from the one before."""
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    ends = [path for path in folders if path.name.endswith(_END)]
    within = [path for path in folders if path not in ends]
    for path in [*ends[:-_ENDS_KEPT], *within[:-keep]]:
        shutil.rmtree(path, ignore_errors=True)
