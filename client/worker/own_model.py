"""The model that a silo itself uses: found again after its job, without the coordinator.

Beside what a job's algorithm keeps at the silo (`silo_state.py`) lie the last order and the model that it
was about, as a second name of the file in the cache, which the cache may drop. Only jobs with a part of their
own at the silo have them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from roundtable.client.durable_files import digest_of, replace_synced
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.bounds import is_word, word
from roundtable.core.config import job_from_json
from roundtable.core.errors import ConfigError, RoundtableError, StorageError
from roundtable.core.layout import Layout

_ORDER, _MODEL = "order.json", "model.safetensors"


def has_own_model(algorithm: ClientAlgorithm, layout: Layout) -> bool:
    """Whether a silo would use another model than the global one."""
    local = any(spec.rule == "local" and spec.kind == "parameter" for spec in layout.tensors)
    return local or type(algorithm).personal()


def remember(jobs: Path, client: str, order: Order) -> None:
    """Keeps the order, the silo's name in it, and its model under a second name."""
    folder = jobs / order.job
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{_MODEL}.new"
    fresh.unlink(missing_ok=True)
    with suppress(OSError):  # A file system without hard links: the cache's file has to do.
        os.link(order.model, fresh)
        os.replace(fresh, folder / _MODEL)
    replace_synced(folder / _ORDER, [json.dumps({"client": client, "order": asdict(order)}).encode()])


def forget_unused(jobs: Path, job: str) -> None:
    """Removes what an ended job has kept here between its rounds, unless it is of the silo's own model."""
    if not (jobs / word(job, "the job") / _ORDER).exists():
        SiloState(jobs).forget(job)


def identifier_of(jobs: Path, wanted: str) -> str:
    """The job that is meant: by its identifier, or by its name where one job alone has it here.

    Raises ConfigError with their identifiers where several have it.
    """
    if is_word(wanted) and (jobs / wanted / _ORDER).exists():
        return wanted
    found: dict[str, int] = {}
    for file in sorted(jobs.glob(f"*/{_ORDER}")):
        with suppress(OSError, ValueError, TypeError, KeyError, RoundtableError):  # Nobody asks for that one.
            order = Order.of(json.loads(file.read_text(encoding="utf-8"))["order"])
            if job_from_json(order.config).title == wanted:
                found[file.parent.name] = order.round
    if len(found) > 1:
        told = ", ".join(f"{job} (round {number})" for job, number in found.items())
        raise ConfigError(
            f"{len(found)} jobs with a model at this silo are called {wanted!r}: {told}; name one by its "
            "identifier"
        )
    return next(iter(found), wanted)


def recall(jobs: Path, job: str) -> tuple[str, Order]:
    """(the silo's name, the last order) of a job, with the model as it is here.

    Raises StorageError for a job without one, or whose model is gone.
    """
    folder = jobs / word(job, "the job")
    try:
        known = json.loads((folder / _ORDER).read_text(encoding="utf-8"))
        client, order = str(known["client"]), Order.of(known["order"])
    except FileNotFoundError:
        raise StorageError(
            f"no model of job {job!r} is kept at this silo: only jobs whose algorithm or [model] local "
            "leaves a part of the model here have one, from their first round on, and only where the agent's "
            "own process trains: not with [cluster], nor with a script (rt.join)"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{folder / _ORDER} cannot be read: {error}") from error
    for place in (folder / _MODEL, Path(order.model)):
        # The cache names files by their digest; two names of one file rot together.
        if place.is_file() and digest_of(place) == Path(order.model).stem:
            return client, replace(order, model=str(place))
    raise StorageError(
        f"the model of round {order.round} of job {job!r} is no longer in this silo's cache, or is "
        "damaged there"
    )
