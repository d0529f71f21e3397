"""Which backend runs a job's clients, and why that one."""

from __future__ import annotations

import torch

from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.machine.possible import must_be_possible, why_not
from roundtable.core.machine.process_facts import cores
from roundtable.simulation.backend import Backend, World
from roundtable.simulation.backends.carried_task import pack_task
from roundtable.simulation.backends.local import make_local
from roundtable.simulation.backends.precision import mixed
from roundtable.simulation.backends.processes import Processes
from roundtable.simulation.backends.ray_cluster import RayCluster
from roundtable.simulation.backends.stacked.backend import why_not_stacked
from roundtable.simulation.backends.vectorised import why_not_recorded
from roundtable.simulation.world.simulated_clients import DATA_BUDGET


def make_backend(world: World) -> tuple[Backend, str]:
    """The job's `simulation.backend`, and in words why it was taken.

    Raises ConfigError where what was asked for is impossible, ResourceError where something is missing.
    """
    wanted, workers = world.job.simulation.backend, world.job.simulation.workers
    mixed(world)
    if wanted == "sequential":
        return make_local("sequential", world, device=device_of(world)), "chosen by the job"
    if wanted == "processes":
        must_be_possible('simulation.backend = "processes"')
        count = workers or cores()
        return Processes(world, count, device=device_of(world), packed=_must_pack(world)), "chosen by the job"
    if wanted == "ray":
        return RayCluster(world, _must_pack(world)), "chosen by the job"
    device = device_of(world)
    if wanted == "stacked":
        return _spread(world, "stacked", workers, "chosen by the job", device)
    inner = "stacked" if device == "cuda" else "vectorised"
    refusal = why_not_stacked(world) if inner == "stacked" else why_not_recorded(world)
    if wanted == "vectorised" or refusal is None:
        why = "chosen by the job" if wanted == "vectorised" else "chosen automatically"
        return _spread(world, inner, workers, why, device)
    return _spread(
        world, "sequential", workers, f"chosen automatically, not vectorised because {refusal}", device
    )


def without_carrying(world: World, backend: Backend, why: str) -> tuple[Backend, str]:
    """For a task that carries state from call to call: clients one after the other in one process.

    Raises ConfigError where the job asks for another backend: what a client then starts with would depend on
    which clients its process had before.
    """
    wanted = world.job.simulation.backend
    if wanted == "sequential":
        return backend, why
    reason = "the task keeps something from one call of loss() to the next"
    if wanted != "auto":
        raise ConfigError(
            f'simulation.backend = "{wanted}": {reason}, so that results depend on which clients share a '
            "process, and in which order: mend that (`roundtable task check` says more), or choose backend "
            '= "sequential"'
        )
    backend.close()
    made = make_local("sequential", world, device=device_of(world))
    return made, f"chosen automatically, in one process because {reason}"


def _spread(world: World, inner: str, workers: int | None, why: str, device: str) -> tuple[Backend, str]:
    """The backend `inner` in as many processes as were asked for, or as there are cores.

    One process feeds a GPU best: there the work of many clients is one call.
    """
    count = workers or (1 if inner == "stacked" else cores())
    if count == 1:
        return make_local(inner, world, device=device), why
    if (reason := why_not('simulation.backend = "processes"')) is not None:
        return make_local(inner, world, device=device), f"{why}; in one process: {reason.partition(';')[0]}"
    try:
        packed = _packed(world, DATA_BUDGET // count)
    except ConfigError as error:
        return make_local(inner, world, device=device), f"{why}; in one process, because {error}"
    return Processes(world, count, inner, device, packed), why


def _packed(world: World, most: int | None = None) -> bytes | None:
    """The task for other processes as bytes; None where they find it. Raises ConfigError as `pack_task`."""
    return pack_task(world.task, most) if world.reference is None else None


def _must_pack(world: World) -> bytes | None:
    try:
        return _packed(world)
    except ConfigError as error:
        raise ConfigError(
            f'simulation.backend = "{world.job.simulation.backend}": {error}; or name the task in the job '
            '(file.py:Class or module:Class), or choose backend = "sequential"'
        ) from error


def device_of(world: World) -> str:
    """What the clients train on: "cuda" or "cpu". Raises ResourceError where that is not here."""
    wanted = world.job.simulation.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            'simulation.device = "cuda": torch sees no GPU here; set device = "cpu" or "auto"'
        )
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"
