"""Ranks of simulated clients' low-rank factors, by the memory that the simulation says they have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from roundtable.client.batch_tensors import examples_in
from roundtable.client.first_batch.enough_memory import Room, TriedStep, check_room, of_rank
from roundtable.client.first_batch.fitting_rank import fitting_rank
from roundtable.client.first_batch.trial import first_examples
from roundtable.client.training.local_training import split_data
from roundtable.core.algorithms.factors.own_ranks import RankTable
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.task import Task, initial_state
from roundtable.simulation.backend import Work, World
from roundtable.simulation.first_trial import site_of, some_clients
from roundtable.simulation.world.declared import Declared
from roundtable.simulation.world.partition import SeededPartition

_NAMED = 3


def with_ranks(world: World, declared: Declared, partition: SeededPartition) -> tuple[World, str]:
    """The world whose job says each client's rank, where that was left to memory, and what is told of it.

    A step is counted once for each rank, on a batch of the first client that has data. Raises ConfigError for
    a client of whom nobody says its memory, InsufficientMemory for one that not even the smallest rank fits.
    """
    table, names = world.job.algorithm, world.names
    if not isinstance(table, RankTable) or not table.ranks_by_memory:
        return world, ""
    step = _step(world, partition)
    by_memory: dict[float, int] = {}
    ranks = dict(table.ranks)
    taken: defaultdict[int, list[str]] = defaultdict(list)
    for index in range(len(names)):
        if not (choices := table.choices(name := names[index])):
            continue
        memory = declared.amount("memory", index)
        if memory is None:
            raise ConfigError(
                f"algorithm.ranks_by_memory: nobody says what memory {name} has; set memory in "
                "[simulation.capacity], or a column memory of the trace, or name its rank in algorithm.ranks",
                key=("algorithm", "ranks_by_memory"),
            )
        if memory not in by_memory:
            room = Room(int(memory), f"the memory of {name}")
            by_memory[memory], _ = fitting_rank(step, choices, room)
            if step is not None:
                check_room(of_rank(step, by_memory[memory]), room)
        ranks[name] = by_memory[memory]
        taken[ranks[name]].append(name)
    said = "; ".join(f"{rank} at {_some(taken[rank])}" for rank in sorted(taken))
    settled = table.model_copy(update={"ranks": ranks, "ranks_by_memory": []})
    job = world.job.model_copy(update={"algorithm": settled})
    return replace(world, job=job), f"ranks of factors by memory: {said}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _step(world: World, partition: SeededPartition) -> TriedStep | None:
    """A step of the first client of some that has data; None where none has, or nothing trains by steps."""
    job, task, cpu = world.job, world.task, torch.device("cpu")
    if not isinstance(task, Task):
        return None
    for index in some_clients(job.simulation.clients):
        site = site_of(world, index, partition)
        with isolated_randomness(derive_seed(job.seed, 0, site.name, "ranks"), cpu):
            try:
                data, _ = split_data(task, site)
                batch = first_examples(data, job.algorithm.batch_size)
            except RoundtableError:
                continue  # Its round says why.
            module = initial_state(task, job.seed)
        assert isinstance(module, torch.nn.Module)
        work = world.local_work(1, world.initial.vector, Work(site.name, index))
        return TriedStep(
            task=task,
            work=work,
            module=module,
            context=work.context(data, cpu),
            batch=batch,
            examples=examples_in(batch),
            held=0,
            beside=4 * world.layout.sent.size,
            cluster=False,
        )
    return None
