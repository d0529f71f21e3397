"""Saves and loads a round's state while it goes on: asynchronously, in safetensors, for any number of ranks.

torch's distributed checkpoint does the work, on a process group of its own. A checkpoint counts once its
`state.json` is there, which names every file by digest: a thread of rank 0 writes it as soon as all ranks
have written, then makes copies in other places and removes old ones, while training goes on. A copy is
fetched and checked where the folder has no whole one that is as new.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from roundtable.client.durable_files import digest_of, replace_synced
from roundtable.cluster.parallel.meshes import broadcast_text
from roundtable.cluster.parallel.shards import plain_name
from roundtable.cluster.stepping.coded_state import read_state
from roundtable.cluster.stepping.diloco import OuterOptimizer
from roundtable.cluster.stepping.local_parameters import state_of, whole_of
from roundtable.cluster.stepping.sharded_optimizer import fill_state
from roundtable.cluster.train.checkpoint_places import (
    STATE,
    Mirror,
    Position,
    checked_position,
    made_empty,
    superseded,
    why_not_read,
    why_not_written,
)
from roundtable.cluster.train.replica import Replica
from roundtable.core.errors import ResourceError

_END = "end"
_ENDS_KEPT = 2


class Checkpoints:
    """The checkpoints of one job, seen from one rank."""

    def __init__(
        self,
        folder: Path,
        mirrors: Sequence[Mirror],
        keep: int,
        group: dist.ProcessGroup,
        say: Callable[[str], None] = lambda line: None,
        counted: int = 0,
    ) -> None:
        """`folder` is written, `mirrors` get copies. `group` is a CPU group of all ranks. `counted` is the
        round whose end stays however many are newer, as their updates may never count; 0 for none.

        `written` is then the step of the newest one within a round.

        `say` is told, on rank 0, of copies that fail and of those that are taken up.
        """
        self._say = say
        self._folder = folder
        self._mirrors = mirrors
        self._keep = keep
        self._counted = f"round-{counted:06d}-{_END}"
        self._group = group
        self.written = 0
        self._under_way = folder, Position(0, "", 0, 0, 0.0)
        self._writing: Any = None
        self.sealing: Future[None] | None = None

    def save(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        position: Position,
        outer: OuterOptimizer | None = None,
    ) -> None:
        """Starts a save; returns once the tensors are copied, so that training may go on.

        One that cannot be written, as the disk is full, costs nothing but itself: rank 0 says so. That of a
        round's end is what the next round begins from: then `finish` raises ResourceError.
        """
        self.finish()
        place = _END if position.final else f"step-{position.step:08d}"
        folder = self._folder / f"round-{position.round:06d}-{place}"
        self._under_way = folder, position
        if reason := broadcast_text(made_empty(folder) if dist.get_rank() == 0 else None, self._group):
            self._not_written(reason)
            return
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        own = ""
        if outer is not None:
            own = _own(replica.meshes.place("dp"))
            position = replace(position, replicas=replica.strategy.mesh.dp)
        position = replace(position, packed=replica.packed, parted=replica.parted)
        state = {**dict(training_state(replica, optimizer, own)), **dict(_outer_state(replica, outer))}
        if replica.parted:
            state = {**_without(state, replica, own), **_buffers(replica, replica.meshes.data_rank)}
        if replica.hook is not None:
            position = replace(position, unsent=(replica.strategy.reduction, replica.hook.size))
            state.update((f"unsent/{name}", each) for name, each in replica.hook.state(replica.hook.place))
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
        """Waits for a save that is under way until it counts; raises what went wrong with it.

        ResourceError for one of a round's end that cannot be written, on every rank or on rank 0 alone.
        """
        writing, sealing = self._writing, self.sealing
        self._writing = self.sealing = None
        try:
            if writing is not None:
                writing.result()
            if sealing is not None:
                sealing.result()
        except (CheckpointException, OSError) as error:
            reason = why_not_written(error)
            if not reason:
                raise
            self._not_written(reason)
        else:
            if writing is not None and not self._under_way[1].final:
                self.written = self._under_way[1].step

    def _not_written(self, reason: str) -> None:
        folder, position = self._under_way
        if position.final:
            raise ResourceError(
                f"the checkpoint of the end of round {position.round}, from which the next round's optimizer "
                f"goes on, could not be written: {reason}; make room in the agent's state folder, or set "
                '[algorithm] optimizer_state = "drop"'
            )
        if dist.get_rank() == 0:
            # What is there of it would fill the disk that the next one needs.
            shutil.rmtree(folder, ignore_errors=True)
            self._say(
                f"checkpoint {folder.name} could not be written: {reason}; the round goes on without it"
            )

    def _settle(self, writing: Any, sealing: Future[None], folder: Path, position: Position) -> None:
        """Makes a checkpoint count. Rank 0's writing has ended when every rank's has."""
        try:
            writing.result()
            _seal(folder, position)
            there = [path.name for path in self._folder.iterdir() if path.is_dir()]
            whole = [name for name in there if (self._folder / name / STATE).exists()]
            # One save is under way at a time: what else has no state was broken off.
            for name in (*self._old(whole, folder.name), *(set(there) - set(whole))):
                shutil.rmtree(self._folder / name, ignore_errors=True)
            for mirror in self._mirrors:
                self._copy(folder, mirror)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it on the thread that trains
            sealing.set_exception(error)
        else:
            sealing.set_result(None)

    def _copy(self, folder: Path, mirror: Mirror) -> None:
        """A copy that fails costs nothing but itself: training goes on, and the next checkpoint is tried.

        An agent whose job is over removes its folder and then the copies there are, without waiting for ranks
        that it has not started: whose copy was not whole then takes it away itself.
        """
        try:
            mirror.put(folder)
            for name in self._old(mirror.names(), folder.name):
                mirror.remove(name)
        except (OSError, ResourceError) as error:
            if self._folder.exists():
                self._say(f"checkpoint {folder.name} has no copy: {error}")
        if not self._folder.exists():
            try:
                mirror.remove(folder.name)
            except ResourceError as error:
                self._say(f"the job is over, and a copy of its checkpoint {folder.name} is left: {error}")

    def _old(self, names: Sequence[str], newest: str) -> list[str]:
        others = [name for name in names if name != self._counted]
        return superseded(others, newest, self._keep, lambda name: name.endswith(_END), _ENDS_KEPT)

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

    def end(self, round: int, *, packed: bool = False) -> tuple[Path, Position] | None:
        """The whole checkpoint of this round's end."""
        return self._find(
            lambda position: position.final and position.round == round and position.packed == packed
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
        position = Position(**json.loads((path / STATE).read_text())["position"])
        replicas = position.replicas
        place = replica.meshes.place("dp") if replica.strategy.local_steps else 0
        own = _own(place % replicas) if replicas else ""
        tensors = dict(training_state(replica, optimizer, own))
        if position.parted:
            tensors = _without(tensors, replica, own)
        if replicas:
            tensors.update(_outer_state(replica, outer))
        learnt = (f"{own}model/", "outer/anchor/")
        state = {name: tensor for name, tensor in tensors.items() if weights or not name.startswith(learnt)}
        reader = HuggingFaceStorageReader(str(path))
        load(state, storage_reader=reader, process_group=self._group)
        self._load_unsent(path, replica, position)
        if weights:
            self._load_parted(path, replica, position.parted)
        if outer is not None and weights and not replicas:
            outer.depart()

    @torch.no_grad()
    def _load_unsent(self, path: Path, replica: Replica, position: Position) -> None:
        """Loads what ranks had not sent of their gradients: their own, or where others train the mean.

        The mean gradient is the same in the end. Under another reduction there is nothing to load.
        """
        hook = replica.hook
        if hook is None or position.unsent is None or position.unsent[0] != replica.strategy.reduction:
            return
        ranks = position.unsent[1]
        places = [hook.place] if ranks == hook.size else range(ranks)
        own = [tensor for _, tensor in hook.state(hook.place)]
        sums = [torch.zeros_like(tensor) for tensor in own]
        for place in places:
            state = {f"unsent/{name}": tensor for name, tensor in hook.state(place)}
            load(state, storage_reader=HuggingFaceStorageReader(str(path)), process_group=self._group)
            torch._foreach_add_(sums, own)
        for tensor, total in zip(own, sums, strict=True):
            tensor.copy_(total / len(places))

    @torch.no_grad()
    def _load_parted(self, path: Path, replica: Replica, ranks: int) -> None:
        """Loads the buffers that each of so many ranks had: a rank's own, or where others train the mean.

        Of what has no mean, counts, those of the first.
        """
        own = replica.parted == ranks
        sums: dict[str, Tensor] = {}
        for place in [replica.meshes.data_rank] if own and ranks else reversed(range(ranks)):
            state = _buffers(replica, place)
            load(state, storage_reader=HuggingFaceStorageReader(str(path)), process_group=self._group)
            for name, tensor in replica.buffers():
                if tensor.is_floating_point() and not own:
                    sums[name] = sums.get(name, torch.zeros_like(tensor)) + tensor / ranks
        for name, tensor in replica.buffers():
            if name in sums:
                tensor.copy_(sums[name])

    def _whole(self, wanted: Callable[[Position], bool]) -> Iterator[tuple[Path, Position]]:
        """Yields the wanted checkpoints whose files have their digests, newest first, from any place."""
        found: list[tuple[str, Mirror | None]] = [
            (path.parent.name, None) for path in self._folder.glob(f"*/{STATE}")
        ]
        for mirror in self._mirrors:
            try:
                found += [(name, mirror) for name in mirror.names()]
            except ResourceError as error:
                self._say(f"copies of checkpoints cannot be looked for: {error}")
        # Of one name the folder's own comes first.
        for name, place in sorted(found, key=lambda each: (each[0], each[1] is None), reverse=True):
            folder = self._folder / name
            try:
                document = json.loads((folder / STATE).read_text()) if place is None else place.describe(name)
                files: Mapping[str, str] = document["files"]
                position = checked_position(document["position"])
                if not wanted(position):
                    continue
                if place is not None:
                    self._say(f"checkpoint {name} comes from its copy at {place.address}")
                    _fetch(place, name, files, folder, position)
                if all(digest_of(folder / file) == files[file] for file in files):
                    yield folder, position
                else:
                    self._say(f"checkpoint {name} in the agent's state folder is damaged, and is not used")
            except (OSError, ValueError, KeyError, TypeError, ResourceError) as error:
                where = "in the agent's state folder" if place is None else f"at {place.address}"
                self._say(f"checkpoint {name} {where} is not used: {why_not_read(error)}")


def _own(place: int) -> str:
    return f"replica-{place}/"


def _outer_state(replica: Replica, outer: OuterOptimizer | None) -> Iterator[tuple[str, Tensor]]:
    if outer is not None:
        names = {id(tensor): name for name, tensor in replica.tensors()}
        trained = [plain_name(names[id(parameter)]) for parameter in replica.parameters()]
        for name, tensor in outer.state(trained):
            yield f"outer/{name}", tensor


def _buffers(replica: Replica, place: int) -> dict[str, Tensor]:
    """Those of the rank at this place among all that have other examples, under names of its own."""
    return {f"rank-{place}/model/{name}": tensor for name, tensor in replica.buffers()}


def _without(state: Mapping[str, Tensor], replica: Replica, own: str) -> dict[str, Tensor]:
    theirs = {f"{own}model/{name}" for name, _ in replica.buffers()}
    return {name: tensor for name, tensor in state.items() if name not in theirs}


def training_state(
    replica: Replica, optimizer: torch.optim.Optimizer, own: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yields weights, buffers and optimizer state under names that hold at any number of ranks."""
    names: dict[int, str] = {}
    for name, tensor in replica.tensors():
        names[id(tensor)] = name
        yield f"{own}model/{name}", tensor.detach()
    inner = getattr(optimizer, "optim", optimizer)
    for parameter, values in inner.state.items():
        for key, held in values.items():
            if isinstance(value := read_state(held), Tensor):
                name = plain_name(names[id(whole_of(parameter))])
                yield f"{own}optimizer/{name}/{key}", state_of(parameter, value)


def _seal(folder: Path, position: Position) -> None:
    files = {path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    text = json.dumps({"position": position.__dict__, "files": files})
    replace_synced(folder / STATE, [text.encode()])


def _fetch(mirror: Mirror, name: str, files: Mapping[str, str], folder: Path, position: Position) -> None:
    """Brings a copy into the folder; it counts there once its files have the digests that it states."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in files:
        mirror.fetch(name, file, folder / file)
        if digest_of(folder / file) != files[file]:
            raise ValueError(f"its file {file} is damaged")
    _seal(folder, position)
