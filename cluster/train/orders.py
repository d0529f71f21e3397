"""The protocol between agent and ranks: JSON lines over a UNIX socket, and report files that ranks leave.

The agent listens; rank 0 connects, again after every restart of the group, and gets the order that is still
open. A rank that fails leaves a report in a file, since only rank 0 has a connection, and it may be gone.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundtable.client.durable_files import write_file
from roundtable.client.failures import diagnose
from roundtable.client.worker.worker_order import Order
from roundtable.core.errors import ConfigError

CALL_SECONDS = 20.0
"""How long rank 0 calls an agent that does not answer: one that is started again makes its socket anew."""
SOCKET, ADVICE, REPORTS = "agent.sock", "advice.json", "reports"


@dataclass(frozen=True)
class Report:
    """Why a rank ended. `at` is the time of the failure in seconds since the epoch, `whole` WorkFailed's."""

    rank: int
    kind: str
    detail: str
    trace: str
    at: float
    whole: bool = False


@dataclass
class Advice:
    """What the next start of the group has to avoid, after failures.

    `halvings` of the micro-batch follow from running out of memory. `lost` are the devices of this node that
    failed, `tried` those that were used again since: one that fails twice stays out until the job ends.
    """

    halvings: int = 0
    lost: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()

    def usable(self, devices: int) -> list[int]:
        """The devices out of so many that are not lost."""
        return [device for device in range(devices) if device not in self.lost]

    def to_probe(self) -> list[int]:
        """Lost devices that failed once only: they may compute again."""
        return [device for device in self.lost if device not in self.tried]

    def take_back(self, devices: Sequence[int]) -> None:
        """Returns devices that compute again from the lost ones to use."""
        self.lost = tuple(device for device in self.lost if device not in devices)
        self.tried = (*self.tried, *devices)

    @classmethod
    def read(cls, folder: Path) -> Advice:
        """The advice in the folder; an empty one where nothing has failed."""
        path = folder / ADVICE
        if not path.exists():
            return cls()
        values = json.loads(path.read_text())
        return cls(values["halvings"], tuple(values["lost"]), tuple(values["tried"]))

    def write(self, folder: Path) -> None:
        """Writes the advice into the folder, durably."""
        write_file(folder / ADVICE, [json.dumps(asdict(self)).encode()])


@dataclass(frozen=True)
class Verdict:
    """What all replicas that train together do next, told to each alike.

    `committed`: the step whose gradients all have is taken; else they are reduced again, without what was
    lost. `steps` are those taken then. `members` in the order of their shares, of `epoch`, which tells one
    set of connections from the next. `joining` are those of them that get `donor`'s state first.
    """

    epoch: int
    committed: bool
    steps: int
    members: tuple[int, ...]
    joining: tuple[int, ...] = ()
    donor: int = -1
    stop: bool = False

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Verdict:
        """The verdict that `asdict` has put into JSON."""
        return cls(**{**plain, "members": tuple(plain["members"]), "joining": tuple(plain["joining"])})


def leave_report(folder: Path, rank: int, error: Exception) -> None:
    """Writes a report of the error that ends this rank, for the agent to take."""
    diagnosis = diagnose(error)
    report = Report(
        rank=rank,
        kind=diagnosis.kind,
        detail=diagnosis.detail,
        trace=diagnosis.trace,
        at=time.time(),
        whole=diagnosis.whole,
    )
    reports = folder / REPORTS
    reports.mkdir(parents=True, exist_ok=True)
    partial = reports / f".rank-{rank}.{os.getpid()}"
    write_file(partial, [json.dumps(asdict(report)).encode()])
    partial.replace(reports / f"rank-{rank}.{os.getpid()}.json")


def take_reports(folder: Path, ranks: range | None = None, *, leave: bool = False) -> list[Report]:
    """Reads the reports of all ranks, or of these, oldest first, and removes them, or leaves them there."""
    reports = []
    for path in sorted((folder / REPORTS).glob("rank-*.json")):
        report = Report(**json.loads(path.read_text()))
        if ranks is None or report.rank in ranks:
            reports.append(report)
            if not leave:
                path.unlink()
    return sorted(reports, key=lambda report: report.at)


class AgentConnection:
    """Rank 0's connection to the agent; the process ends when the agent does."""

    def __init__(self, folder: Path, replica: int | None = None) -> None:
        """`replica`: which of several groups this is the rank 0 of; the agent is told first of all."""
        self._socket = _called(folder)
        self._orders: list[dict[str, Any]] = []
        self._verdicts: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self.withdrawn = 0
        if replica is not None:
            self.send({"replica": replica})
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Waits for the next command, and returns it."""
        with self._arrived:
            while not self._orders:
                self._arrived.wait()
            return self._orders.pop(0)

    def verdict(self, number: int) -> dict[str, Any]:
        """Waits for what the agent decides next about the order of this number, and returns it."""
        while (decided := self._verdicts.get())["number"] != number:
            pass
        return decided

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message to the agent."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with self._socket.makefile("r") as lines:
            for line in lines:
                command = json.loads(line)
                if command["do"] == "stop":
                    self.withdrawn = command["number"]
                    continue
                if command["do"] == "verdict":
                    self._verdicts.put(command)
                    continue
                with self._arrived:
                    self._orders.append(command)
                    self._arrived.notify()
        # The agent is gone; training for nobody would only hold the devices.
        os._exit(0)


def _called(folder: Path) -> socket.socket:
    """A line to the agent; ConfigError where nobody answers, as on another node than the agent's."""
    patience = time.monotonic() + CALL_SECONDS
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(_short(folder / SOCKET))
        except OSError as error:
            line.close()
            if time.monotonic() > patience:
                raise ConfigError(
                    f"rank 0 does not reach the agent in {folder} ({error.strerror}): start it on the node "
                    "where the agent runs, and the agent first"
                ) from error
            time.sleep(0.2)
        else:
            return line


def order_of(command: dict[str, Any]) -> Order:
    """The order in a command."""
    return Order.of(command["order"])


def _short(path: Path) -> str:
    """A path that fits a socket's address, which is limited to about 100 bytes."""
    if len(str(path)) < 100:
        return str(path)
    folder = os.open(path.parent, os.O_PATH)
    return f"/proc/self/fd/{folder}/{path.name}"
