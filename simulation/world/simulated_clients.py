"""Clients that exist only while somebody asks for their data."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

from torch import Tensor

from roundtable.client.training.batches import as_tensors
from roundtable.client.training.local_training import split_data
from roundtable.client.training.trusted_data import NAME, RootData
from roundtable.core.errors import RoundtableError, TaskError
from roundtable.core.plugins.doors import described
from roundtable.core.task import Site
from roundtable.simulation.backend import World
from roundtable.simulation.world.attackers import Attackers
from roundtable.simulation.world.partition import make_partition

DATA_BUDGET = 1 << 30
_UNKNOWN_SIZE = 1 << 20


class Clients:
    """The data of clients by number: made by the task when first asked for, the latest kept.

    What is kept is bounded by `budget` bytes, so that a population may be larger than memory.
    Hostile clients' training data come poisoned, if that is the job's attack.
    """

    def __init__(self, world: World, budget: int = DATA_BUDGET) -> None:
        simulation = world.job.simulation
        self._world = world
        self._names = world.names
        self._partition = make_partition(simulation.partition, world.job.seed, world.folder)
        self._budget = budget
        self._poison = Attackers.of(world.job).poison
        self._held: OrderedDict[int, tuple[Any, Any, int]] = OrderedDict()
        self._bytes = 0

    def data(self, index: int) -> tuple[Any, Any]:
        """(train, test) of client `index`. Raises what the task raises, as a TaskError."""
        held = self._held.get(index)
        if held is not None:
            self._held.move_to_end(index)
            return held[0], held[1]
        train, test = self._load(index)
        size = _bytes_of(train) + (0 if test is train else _bytes_of(test))
        self._held[index] = (train, test, size)
        self._bytes += size
        while self._bytes > self._budget and len(self._held) > 1:
            _, (_, _, freed) = self._held.popitem(last=False)
            self._bytes -= freed
        return train, test

    def hold(self, index: int) -> bool:
        """Whether the client's data need not be made."""
        return index in self._held

    def _load(self, index: int) -> tuple[Any, Any]:
        world, simulation = self._world, self._world.job.simulation
        site = Site(
            self._names[index],
            index,
            simulation.clients,
            simulation.data,
            self._partition,
            world.job.standardise,
        )
        try:
            train, test = split_data(world.task, site)
        except RoundtableError:
            raise
        except Exception as error:
            raise TaskError(
                f"{type(world.task).__name__}.data() failed for {site.name}: {described(error)}"
            ) from error
        return (self._poison(index, train) if self._poison else train), test


def trusted_data(world: World) -> RootData:
    """What the coordinator would hold of its own, for a rule that compares updates with it: a random part of
    all data. Raises what the task raises, as a TaskError."""
    simulation = world.job.simulation
    site = Site(NAME, options=simulation.data)
    try:
        return RootData(world.task, site, simulation.root_examples, world.job.seed)
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(
            f"{type(world.task).__name__}.data() failed for the coordinator's own data: {described(error)}"
        ) from error


def _bytes_of(dataset: Any) -> int:
    """What a data set holds in memory; a guess where it is no tuple of tensors."""
    try:
        tensors = as_tensors(dataset)
    except TaskError:
        tensors = None
    if tensors is None:
        return 0 if dataset is None else max(sys.getsizeof(dataset), _UNKNOWN_SIZE)
    return sum(_tensor_bytes(tensor) for tensor in tensors)


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
