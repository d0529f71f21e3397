"""Clients over a Ray cluster, for populations that outgrow one machine (`pip install roundtable-fl[ray]`).

Every node gets an actor for each of its cores. The model goes out once a round through the object
store. Where the aggregate is a plain mean, updates never travel: each actor sums its own, each node
adds the sums of its actors, and one vector for each node comes back. For other rules the updates
come back whole. The task must be importable on every node, or is carried there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import job_from_json
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.initial_model import initial_model
from roundtable.core.task import load_task
from roundtable.simulation.backend import Failed, Measured, Trained, Work, World, can_sum
from roundtable.simulation.backends.carried_task import unpack_task
from roundtable.simulation.backends.local import make_local
from roundtable.simulation.backends.sequential import allocate_rows
from roundtable.simulation.world.simulated_clients import DATA_BUDGET, Clients

_LOG = logging.getLogger(__name__)
_CHUNK = 4
_AHEAD = 2
_Item = tuple[int, Mapping[str, Any] | None, int | None]
"""A client's number, its own tensors, and the steps that it was given by its speed."""


class Host:
    """What runs in an actor: a sequential backend and the updates of the round."""

    def __init__(
        self, job: str, task: bytes | str, folder: str | None, path: list[str], budget: int, summing: bool
    ) -> None:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        torch.set_num_threads(1)
        config = job_from_json(job)
        beside = None if folder is None else Path(folder)
        if isinstance(task, bytes):
            made = unpack_task(task)
        else:
            made = load_task(task, beside, parameters=config.task.parameters)
        model = initial_model(config, made, make_algorithm(config.algorithm, beside))
        self._world = World(config, made, model, folder=beside)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._backend = make_local("sequential", self._world, Clients(self._world, budget), device)
        chosen = config.transfer.automatic
        dense = None if chosen else get_encoding(config.transfer.up, beside).dense_dtype
        self._dense = dense or torch.float32
        self._summing = summing
        self._updates: dict[int, Tensor] = {}

    def fingerprint(self) -> str:
        """Of the layout: it must be the simulation's."""
        return self._world.layout.fingerprint

    def examples(self, indices: Sequence[int]) -> list[int | None]:
        """Training examples of these clients."""
        return self._backend.examples([Work(self._world.names[index], index) for index in indices])

    def train(
        self, round: int, vector: np.ndarray, work: Sequence[_Item]
    ) -> list[tuple[Trained | Failed, np.ndarray | float]]:
        """Answers, each with its update, or the update's norm where updates are summed here."""
        answers: list[tuple[Trained | Failed, np.ndarray | float]] = []
        model = torch.from_numpy(vector.copy())
        for item in self._work(work):
            row = torch.empty(self._world.layout.sent.size)
            for answer in self._backend.train(round, model, [item], [row]):
                row = row.to(self._dense).float()
                if self._summing:
                    self._updates[item.index] = row
                answers.append((answer, float(row.double().norm()) if self._summing else row.numpy()))
        return answers

    def evaluate(self, round: int, vector: np.ndarray, work: Sequence[_Item]) -> list[Measured | Failed]:
        """Test metrics."""
        model = torch.from_numpy(vector.copy())
        return list(self._backend.evaluate(round, model, list(self._work(work))))

    def total(self, weights: Mapping[int, float]) -> np.ndarray:
        """Σ weight · update over these clients, float64 [layout.sent.size]."""
        total = torch.zeros(self._world.layout.sent.size, dtype=torch.float64)
        for index, weight in sorted(weights.items()):
            total.add_(self._updates[index], alpha=weight)
        return total.numpy()

    def forget(self) -> None:
        """A new attempt: the updates of the last one are of no more use."""
        self._updates.clear()

    def _work(self, work: Sequence[_Item]) -> Iterator[Work]:
        for index, local, steps in work:
            yield Work(self._world.names[index], index, dict(local) if local else None, steps)


@dataclass(eq=False)
class _Actor:
    """An actor, the node that it is on, and the calls that it has not answered, each with its work."""

    handle: Any
    node: str
    calls: dict[Any, list[int]] = field(default_factory=dict)


class RayCluster:
    """Clients over the Ray cluster that RAY_ADDRESS names, or over one that is started on this machine."""

    name = "ray"
    chunk = _CHUNK

    def __init__(self, world: World, packed: bytes | None = None) -> None:
        """Nodes find the task by the world's `reference`, or are given it as `packed` bytes.

        Raises ResourceError without Ray, ConfigError where a node makes another model of it.
        """
        self._ray = _import_ray()
        self._packed = packed
        self.world = world
        self.sums_updates = can_sum(world)
        self._began = not self._ray.is_initialized()
        if self._began:
            address = os.environ.get("RAY_ADDRESS")
            self._ray.init(
                address=address, include_dashboard=False if address is None else None, log_to_driver=False
            )
        self._round: tuple[int, Any, dict[int, Work]] = (0, None, {})
        self._home: dict[int, _Actor] = {}
        self._norms: dict[int, float] = {}
        self._actors: list[_Actor] = []
        self._rows = torch.empty(0, world.layout.sent.size)
        self._start()

    @property
    def description(self) -> str:
        nodes = len({actor.node for actor in self._actors})
        how = "summed on their nodes" if self.sums_updates else "sent back whole"
        return f"{len(self._actors)} actors on {nodes} Ray nodes, updates {how}"

    def rows(self, count: int) -> Tensor:
        self._home.clear()
        self._norms.clear()
        self._round = (0, None, {})
        for actor in self._actors:
            actor.handle.forget.remote()
        if self.sums_updates:
            return torch.empty(count, 0)
        if len(self._rows) < count:
            self._rows = allocate_rows(count, self.world.layout.sent.size)
        return self._rows

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        actor = self._actors[0].handle
        counts: list[int | None] = self._ray.get(actor.examples.remote([item.index for item in work]))
        return counts

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        model = self._ray.put(vector.numpy())
        self._round = (round, model, self._round[2] | {item.index: item for item in work})
        for place, actor, (answer, update) in self._spread("train", (round, model), work):
            self._home[work[place].index] = actor
            if isinstance(update, float):
                self._norms[work[place].index] = update
            else:
                rows[place].copy_(torch.from_numpy(update.copy()))
            yield answer

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        model = self._ray.put(vector.numpy())
        for _, _, answer in self._spread("evaluate", (round, model), work):
            yield answer

    def norms(self, indices: Sequence[int]) -> list[float]:
        """Euclidean norms of these clients' updates, as their nodes have measured them."""
        return [self._norms[index] for index in indices]

    def total(self, weights: Mapping[int, float]) -> Tensor:
        """Σ weight · update over clients by number [layout.sent.size]: each node sends one vector."""
        while True:
            self._train_again(weights)
            try:
                parts = self._ray.get(self._node_sums(weights))
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.RayTaskError):
                self._replace([actor for actor in self._actors if not self._alive(actor)])
                continue
            return torch.from_numpy(np.sum(parts, axis=0)).float()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._actors = []
        if self._began:
            self._began = False
            self._ray.shutdown()

    def _node_sums(self, weights: Mapping[int, float]) -> list[Any]:
        """A reference for each node to the sum over its actors, added there."""
        shares: dict[int, dict[int, float]] = {}
        for index, weight in weights.items():
            shares.setdefault(self._actors.index(self._home[index]), {})[index] = weight
        by_node: dict[str, list[Any]] = {}
        for number, share in sorted(shares.items()):
            actor = self._actors[number]
            by_node.setdefault(actor.node, []).append(actor.handle.total.remote(share))
        add = self._ray.remote(_add)
        return [
            add.options(scheduling_strategy=self._on(node), num_cpus=0).remote(*sums)
            for node, sums in sorted(by_node.items())
        ]

    def _train_again(self, weights: Mapping[int, float]) -> None:
        """What only an actor had that has died since is made anew, with the same result."""
        round, model, items = self._round
        lost = [items[index] for index in weights if self._home[index] not in self._actors]
        for place, actor, _ in self._spread("train", (round, model), lost):
            self._home[lost[place].index] = actor

    def _spread(
        self, method: str, arguments: tuple[Any, ...], work: Sequence[Work]
    ) -> Iterator[tuple[int, _Actor, Any]]:
        """Runs `method` over the work in chunks; gives the place of each item, who ran it and the answer."""
        queue = deque(range(len(work)))
        while queue or any(actor.calls for actor in self._actors):
            for actor in self._actors:
                while queue and len(actor.calls) < _AHEAD:
                    places = [queue.popleft() for _ in range(min(self._fair(queue), len(queue)))]
                    items = [
                        (work[p].index, dict(work[p].local or {}) or None, work[p].steps) for p in places
                    ]
                    call = getattr(actor.handle, method).remote(*arguments, items)
                    actor.calls[call] = places
            waiting = {call: actor for actor in self._actors for call in actor.calls}
            done, _ = self._ray.wait(list(waiting), num_returns=1)
            actor = waiting[done[0]]
            places = actor.calls.pop(done[0])
            try:
                answers = self._ray.get(done[0])
            except self._ray.exceptions.RayActorError:
                queue.extendleft(reversed([*places, *(p for rest in actor.calls.values() for p in rest)]))
                self._replace([actor])
                continue
            yield from ((place, actor, answer) for place, answer in zip(places, answers, strict=True))

    def _fair(self, queue: deque[int]) -> int:
        """Small enough that nobody waits for somebody else's last chunk."""
        return max(1, min(_CHUNK, len(queue) // (2 * len(self._actors))))

    def _start(self) -> None:
        """An actor for each core of each node, at most `simulation.workers` of them."""
        most = self.world.job.simulation.workers
        places = [
            node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
            for _ in range(int(node["Resources"].get("CPU", 0)))
        ]
        # In turn over the nodes, so that fewer actors than cores still use all of them.
        turns = [places[:place].count(node) for place, node in enumerate(places)]
        chosen = [node for _, node in sorted(zip(turns, places, strict=True))][:most]
        if not chosen:
            raise ResourceError("the Ray cluster has no cores; give its nodes CPUs")
        self._actors = [self._actor(node) for node in chosen]
        fingerprints = self._ray.get([actor.handle.fingerprint.remote() for actor in self._actors])
        if set(fingerprints) != {self.world.layout.fingerprint}:
            raise ConfigError(
                f"task {self.world.job.task.name!r} makes another model on some node of the Ray cluster: "
                "install the same version of it everywhere"
            )

    def _actor(self, node: str) -> _Actor:
        task, folder = self.world.reference or (self._packed, self.world.folder)
        budget = DATA_BUDGET // max(1, len(self._actors))
        remote = self._ray.remote(Host).options(num_cpus=1, scheduling_strategy=self._on(node))
        handle = remote.remote(
            self.world.job.to_json(),
            task,
            None if folder is None else str(folder),
            sys.path,
            budget,
            self.sums_updates,
        )
        return _Actor(handle, node)

    def _replace(self, dead: Sequence[_Actor]) -> None:
        for actor in dead:
            _LOG.warning("an actor on Ray node %s died; it is replaced and its clients run again", actor.node)
            self._actors[self._actors.index(actor)] = self._actor(actor.node)

    def _alive(self, actor: _Actor) -> bool:
        try:
            self._ray.get(actor.handle.fingerprint.remote())
        except self._ray.exceptions.RayActorError:
            return False
        return True

    def _on(self, node: str) -> Any:
        """On this node if it is there, else anywhere."""
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)


def _add(*parts: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.sum(parts, axis=0)
    return total


def _import_ray() -> Any:
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ResourceError(
            'simulation.backend = "ray" needs Ray: pip install "roundtable-fl[ray]"'
        ) from error
    return ray
