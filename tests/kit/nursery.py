"""Starts Python programs from a process that has imported the large libraries already.

    python nursery.py        (orders as lines of JSON on standard input, process numbers on standard output)

Each program is a process of its own, forked before anything of this project was imported, and runs as if
started afresh: its arguments, environment, output and signals are its own. What is saved is the seconds that
importing takes, which is most of a start: a run with many kills has many starts.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any


class Nursling:
    """A process that the nursery has forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 once it has ended, in whatever way; None until then."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end."""
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return 0

    def send_signal(self, number: int) -> None:
        """Sends a signal to this process, and to no later one of the same number."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)


class Nursery:
    """The process that forks others; closing it ends it alone."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
        self._turn = Lock()

    def start(self, command: list[str], environment: dict[str, str], stdout: Path, stderr: Path) -> Nursling:
        """Runs a program, `command` without Python's own name in front."""
        order = {"argv": command, "env": environment, "out": str(stdout), "err": str(stderr)}
        with self._turn:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return Nursling(int(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the nursery."""
        self._process.stdin.close()
        self._process.wait()


LARGE = (
    "aiobotocore.session",
    "alembic.command",
    "cryptography.x509",
    "grpc.aio",
    "prometheus_client",
    "psycopg",
    "pydantic",
    "s3fs",
    "safetensors.torch",
    "scipy.stats",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite",
    "torch",
)


def _become(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((order[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err"))]
    ):
        descriptor = os.open(path, flags | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = order["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    for name in LARGE:
        importlib.import_module(name)
    # Nobody waits for the children: they leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        if (pid := os.fork()) == 0:
            _become(json.loads(line))
            return
        print(pid, flush=True)


if __name__ == "__main__":
    main()
