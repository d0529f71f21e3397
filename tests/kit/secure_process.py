"""Coordinators and silos in processes of their own, which a test kills where it wants to.

    python secure_process.py FOLDER PLACE NAME PORT [FAULT]     a silo of a `Federation`

FAULT is `before:KIND` or `after:KIND`: the silo kills itself (SIGKILL) when the coordinator's message of
that kind has come, or when its answer is made and not sent. Every vector that the silo masks is noted
in FOLDER/NAME.masked: attempt, public mask key, digest of the vector.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from secure_federation import Federation, GivenTrainer, unit

from roundtable.client.agent import secure_attempts as secure
from roundtable.client.agent import step_worker
from roundtable.client.agent.agent import Agent
from roundtable.privacy.secagg.framing import Kind, unseal

COLUMNS = 1500
COORDINATOR = """
import sys
from pathlib import Path
from roundtable.server import load_server_config, run_server
sys.exit(run_server(load_server_config(Path(sys.argv[1]))))
"""


class Deaf:
    """Keeps messages of one kind from one silo, in one round or all; `heard` is set when one has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silo, self.kind, self.round, self.heard = "", Kind.EVIDENCE, 0, asyncio.Event()
        self.gives_up = False
        handle, advertise = secure.SecureAttempts.handle, step_worker.StepWorker.advertise

        def told(attempts: Any, step: Any, message: bytes) -> bytes | None:
            here = self.round in (0, step.round) and attempts._name == self.silo
            if here and unseal(message).kind is self.kind:
                self.heard.set()
                return self._give_up(attempts, step) if self.gives_up else None
            return handle(attempts, step, message)

        def first(own: Any, step: Any) -> None:
            if own._observer.silo == self.silo and self.kind is Kind.ADVERTISE:
                self.heard.set()
            else:
                advertise(own, step)

        monkeypatch.setattr(secure.SecureAttempts, "handle", told)
        monkeypatch.setattr(step_worker.StepWorker, "advertise", first)

    @staticmethod
    def _give_up(attempts: Any, step: Any) -> bytes:
        """Instead of its share the silo says why it has none."""
        client = attempts.find(step).client
        attempts.forget(step)
        return bytes(client.abort("its disk broke"))

    def keep(self, silo: str, kind: Kind, round: int = 0) -> None:
        self.silo, self.kind, self.round = silo, kind, round
        self.heard.clear()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_coordinator(federation: Federation) -> subprocess.Popen[str]:
    """A coordinator that listens on the federation's port, over the same files as the one before it."""
    values = federation.server_config().model_dump(exclude_defaults=True)
    file = federation.folder / "coordinator.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    process = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(file)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert process.stdout is not None
    assert "is listening on" in process.stdout.readline()
    return process


def start_silo(federation: Federation, name: str, fault: str = "") -> subprocess.Popen[str]:
    """A silo; `fault` may also be a place of the fault injector, written with slashes."""
    injected = {"ROUNDTABLE_FAILPOINT": fault} if "/" in fault else {}
    own = [fault] if fault and not injected else []
    place = str(federation.names.index(name))
    command = [sys.executable, __file__, str(federation.folder), place, name, str(federation.port), *own]
    return subprocess.Popen(command, text=True, env={**_environment(), **injected})


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Ends the processes when the block is left."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def masked_by(folder: Path, name: str) -> list[tuple[int, str, str]]:
    """(attempt, public mask key, digest) of every vector that a silo has masked."""
    path = folder / f"{name}.masked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def note_masks(folder: Path) -> Any:
    """`MaskingAttempt.mask`, writing down what it masks under which key."""
    original = secure.MaskingAttempt.mask

    def mask(attempt: Any, *given: Any) -> Any:
        client = attempt.client
        key = client._mask_keys.public.hex()
        digest, size = original(attempt, *given)
        with (folder / f"{client.name}.masked").open("a") as file:
            file.write(json.dumps([client.session.attempt, key, digest]) + "\n")
        return digest, size

    return mask


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def fail_at(fault: str) -> None:
    """Arms a place around the protocol's messages."""
    moment, _, kind = fault.partition(":")
    original = secure.SecureAttempts.handle

    def handle(attempts: Any, step: Any, message: bytes) -> bytes | None:
        here = unseal(message).kind is Kind[kind]
        if here and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = original(attempts, step, message)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    secure.SecureAttempts.handle = handle  # type: ignore[method-assign]


def _silo(folder: Path, place: int, name: str, port: int) -> None:
    federation = Federation(folder, (), port)
    trainer = GivenTrainer(lambda round: unit(place, round, COLUMNS), examples=10 + 20 * place)
    trainer.gate.set()
    asyncio.run(Agent(federation.config(name), trainer).run())


if __name__ == "__main__":
    _, given, number, who, where, *faults = sys.argv
    secure.MaskingAttempt.mask = note_masks(Path(given))  # type: ignore[method-assign]
    for each in faults:
        fail_at(each)
    _silo(Path(given), int(number), who, int(where))
