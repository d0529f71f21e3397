"""Starts Python programs from a process that has imported the large libraries already.

    python nursery.py        (orders as lines of JSON on standard input, process numbers on standard output)

Each program is a process of its own, forked before anything of this project was imported, and runs as if
started afresh: its arguments, environment, output and signals are its own. What is saved is the seconds that
importing takes, which is most of a start: a run with many kills has many starts.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any


class Nursling:
    """A process that the nursery has forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._handle)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None and self._ended(0):
            self.returncode = self._nursery.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; its exit status, negative for a signal."""
        if self.returncode is None:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._nursery.status(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to this process, and to no later one of the same number."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._handle], [], [], timeout)[0])


class Nursery:
    """The process that forks others; closing it ends it alone."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
        self._turn = Lock()

    def start(self, command: list[str], environment: dict[str, str], stdout: Path, stderr: Path) -> Nursling:
        """Runs a program, `command` without Python's own name in front: a file, `-m MODULE` or `-c CODE`."""
        order = {"argv": command, "env": environment, "out": str(stdout), "err": str(stderr)}
        return Nursling(self._ask(order), self)

    def status(self, pid: int) -> int:
        """The exit status of one that has ended, which may be asked for once."""
        return self._ask({"ended": pid})

    def close(self) -> None:
        """Ends the nursery."""
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, order: dict[str, Any]) -> int:
        with self._turn:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())


@cache
def shared() -> Nursery:
    """The one of this test process, which ends with it."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


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


def _look_in(folders: str) -> None:
    """What Python does with PYTHONPATH at its start."""
    if folders:
        sys.path[1:1] = folders.split(os.pathsep)
        sys.modules.pop("sitecustomize", None)
        with suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")


def _become(order: dict[str, Any]) -> None:
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((order[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err"))]
    ):
        descriptor = os.open(path, flags | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    _look_in(order["env"].get("PYTHONPATH", ""))
    what, *rest = order["argv"]
    if what in ("-m", "-c"):
        sys.argv = [what, *rest[1:]]
        sys.path[0] = os.getcwd() if what == "-m" else ""
    else:
        sys.argv = [what, *rest]
        sys.path[0] = str(Path(what).parent)
    if what == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(what, run_name="__main__")


def main() -> None:
    for name in LARGE:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif (pid := os.fork()) == 0:
            _become(order)
            return
        else:
            print(pid, flush=True)


if __name__ == "__main__":
    main()
