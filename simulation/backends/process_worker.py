"""A worker of the `processes` backend; `main` is called with the socket's descriptor as first argument.

It builds the task and the clients' data by itself, maps the model and the updates, and runs the
clients that it is told to. It ends when its socket does, so that it never outlives its simulation.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import job_from_json
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.initial_model import initial_model
from roundtable.core.machine.process_facts import prefer_to_be_killed
from roundtable.core.machine.stop_signals import leave_signals_to_owner
from roundtable.core.task import load_task
from roundtable.core.workers.frames import Channel, PeerGone
from roundtable.core.workers.shared_vectors import SharedFloats, shared_bytes
from roundtable.simulation.backend import Backend, Failed, Measured, Trained, Work, World
from roundtable.simulation.backends.carried_task import unpack_task
from roundtable.simulation.backends.local import make_local
from roundtable.simulation.world.simulated_clients import Clients

WORKER = "ROUNDTABLE_SIMULATION_WORKER"
Answer = Trained | Measured | Failed | tuple[str, int | None]


def main() -> None:
    """Serves one simulation until it closes the connection."""
    # Ctrl-C goes to the whole terminal; the simulation ends its workers itself, by closing the socket.
    leave_signals_to_owner()
    # A worker is replaced, the simulation is not.
    prefer_to_be_killed()
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(PeerGone):
        try:
            backend, world = _prepare(channel)
        except Exception as error:  # noqa: BLE001 - the simulation is told, and says it to its user
            detail = str(error) if isinstance(error, RoundtableError) else f"{type(error).__name__}: {error}"
            channel.send({"op": "broken", "detail": detail, "trace": traceback.format_exc()})
            return
        channel.send({"op": "ready"})
        _serve(channel, backend, world)


def _prepare(channel: Channel) -> tuple[Backend, World]:
    message, _, _ = channel.receive()
    sys.path[:] = message["path"]
    job = job_from_json(message["job"])
    if message["packed"] is not None:
        task = unpack_task(shared_bytes(message["packed"]))
    else:
        task = load_task(message["task"], Path(message["folder"]), parameters=job.task.parameters)
    folder = Path(message["algorithms"]) if message["algorithms"] is not None else None
    algorithm = make_algorithm(job.algorithm, folder)
    world = World(job, task, initial_model(job, task, algorithm), folder=folder)
    if world.layout.fingerprint != message["layout"]:
        raise RoundtableError(
            f"task {job.task.name!r} makes another model in a worker process than here: its layout differs"
        )
    clients = Clients(world, message["budget"])
    return make_local(message["inner"], world, clients, message["device"]), world


def _serve(channel: Channel, backend: Backend, world: World) -> None:
    vector: Tensor | None = None
    rows: Tensor | None = None
    while True:
        message, tensors, descriptors = channel.receive()
        if message["op"] in ("vector", "rows"):
            shared = SharedFloats(descriptors[0], message["rows"], message["columns"])
            shared.close()
            if message["op"] == "rows":
                rows = shared.tensor
            else:
                vector = shared.tensor[0]
            continue
        work = _work(message["work"], tensors, world)
        try:
            answers, kept = encode(_run(message, backend, vector, rows, work))
        except ConfigError as error:
            channel.send({"op": "refused", "detail": str(error)})
            return
        channel.send({"op": "done", "answers": answers}, kept)


def _run(
    message: dict[str, Any], backend: Backend, vector: Tensor | None, rows: Tensor | None, work: list[Work]
) -> Iterator[Answer]:
    if message["op"] == "examples":
        for item, count in zip(work, backend.examples(work), strict=True):
            yield item.client, count
        return
    assert vector is not None
    if message["op"] == "evaluate":
        yield from backend.evaluate(message["round"], vector, work)
        return
    assert rows is not None
    yield from backend.train(message["round"], vector, work, [rows[place] for place in message["rows"]])


def _work(items: Sequence[Any], tensors: Sequence[dict[str, Tensor]], world: World) -> list[Work]:
    return [
        Work(world.names[index], index, tensors[place] if place is not None else None, steps)
        for index, place, steps in items
    ]


def encode(answers: Iterable[Answer]) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """Answers for a message, and what clients keep."""
    plain: list[dict[str, Any]] = []
    kept: list[dict[str, Tensor]] = []
    for answer in answers:
        match answer:
            case Trained():
                values = {"kind": "trained", **vars(answer), "local": None}
                if answer.local:
                    values["local"] = len(kept)
                    kept.append(dict(answer.local))
            case Measured():
                values = {"kind": "measured", **vars(answer)}
            case Failed():
                # Not `kind`, which is the failure's own word.
                values = {**vars(answer), "failure": answer.kind, "kind": "failed"}
            case (client, count):
                values = {"kind": "sized", "client": client, "examples": count}
        plain.append(values)
    return plain, kept


def decode(plain: Sequence[dict[str, Any]], kept: Sequence[Mapping[str, Tensor]]) -> Iterator[Answer]:
    """The answers that `encode` wrote; of what clients keep a copy, as it stays for rounds."""
    for values in plain:
        kind = values.pop("kind")
        if "metrics" in values:
            values["metrics"] = {name: (value, count) for name, (value, count) in values["metrics"].items()}
        match kind:
            case "trained":
                place = values.pop("local")
                own = {} if place is None else {name: each.clone() for name, each in kept[place].items()}
                yield Trained(**values, local=own)
            case "measured":
                yield Measured(**values)
            case "failed":
                yield Failed(kind=values.pop("failure"), **values)
            case _:
                yield values["client"], values["examples"]


def start_message(world: World, packed: int | None, inner: str, device: str, budget: int) -> dict[str, Any]:
    """What a worker needs to build its own world.

    `packed` is the descriptor of its task's bytes, which it inherits; without it the world has a `reference`.
    """
    task, folder = world.reference or (None, None)
    return {
        "path": sys.path,
        "job": world.job.to_json(),
        "packed": packed,
        "task": task,
        "folder": str(folder),
        "algorithms": None if world.folder is None else str(world.folder),
        "layout": world.layout.fingerprint,
        "inner": inner,
        "device": device,
        "budget": budget,
    }
