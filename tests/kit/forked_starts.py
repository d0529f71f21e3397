"""Starts of one module as forks of a process that has imported it already.

Most of what a training process costs a test is its imports. `ForkedStarts` answers `subprocess` (and
asyncio, which goes through it) for one command, `python -P -m MODULE ARGUMENT ...`: a nursery, which has
imported the module and done nothing else, forks the process. It is a child of the test's own process, as one
that was started is, so that waiting for it, signals to it, and its death with its parent are the system's.
Its command line, environment, folder, pipes, umask and limits are those of a start; Python's hash seed is the
nursery's, and /proc/PID/environ shows what the nursery was started with.

Any other command, environment or option is started, and so are the first ones of a run, until a nursery is
there: it is begun with the second start, and nobody waits for it.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

_SET_CHILD_SUBREAPER = 36
_LARGEST = 1 << 20
_ROOM = 1024
_NOT_READ = ("PYTEST_CURRENT_TEST", "GRPC_SSL_CIPHER_SUITES", "GRPC_VERBOSITY")
"""Variables that no import of a training process reads; connections of the test's process set the latter."""
_MAY_DIFFER = ("OMP_NUM_THREADS",)
"""Variables that are read when libraries are loaded: there is a nursery for each value."""
_USUAL: dict[str, Any] = {
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "restore_signals": True,
    "start_new_session": False,
    "process_group": -1,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
}


class ForkedStarts:
    """Forks in the place of starts of one module, within `in_place`; `forked` says how many there were."""

    def __init__(self, module: str) -> None:
        """The environment of now is the one in which starts are forked."""
        self.forked = 0
        self._module = module
        self._environment = _lasting(os.environ)
        self._asked: Counter[str | None] = Counter()
        self._nurseries: dict[str | None, _TestNursery] = {}
        self._started: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        self._names = inspect.signature(self._started)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it they are forked, on Linux."""
        with self._answering(self._begin if sys.platform == "linux" else self._started):
            yield

    @contextmanager
    def as_installed(self) -> Iterator[None]:
        """Within it, inside the other, they are started."""
        with self._answering(self._started):
            yield

    def wait(self) -> None:
        """Returns once every nursery that was begun is there."""
        for nursery in self._nurseries.values():
            nursery.ready(None)

    def close(self) -> None:
        """Ends the nurseries, and none of the processes."""
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()

    @contextmanager
    def _answering(self, how: Any) -> Iterator[None]:
        before = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        @wraps(before)
        def execute(popen: Any, *given: Any, **named: Any) -> None:
            how(popen, *given, **named)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        try:
            yield
        finally:
            subprocess.Popen._execute_child = before  # type: ignore[attr-defined]

    def _begin(self, popen: Any, *given: Any, **named: Any) -> None:
        asked = self._names.bind(popen, *given, **named).arguments
        if (nursery := self._nursery(asked)) is None:
            self._started(popen, *given, **named)
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        order = {
            "argv": list(map(os.fspath, asked["args"])),
            "env": dict(os.environ if asked["env"] is None else asked["env"]),
            "cwd": os.path.abspath(asked["cwd"] or "."),
            "umask": _umask(),
            "limits": _limits(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        popen.pid = nursery.fork(order, pipes)
        popen._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(asked[name] for name in ends))
        self.forked += 1

    def _nursery(self, asked: dict[str, Any]) -> _TestNursery | None:
        """The one that this start is forked from, if there is one."""
        command = [sys.executable, "-P", "-m", self._module]
        if isinstance(asked["args"], str | bytes) or list(asked["args"])[:4] != command:
            return None
        usual = all(asked[name] == value for name, value in _USUAL.items() if name in asked)
        piped = -1 not in (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        environment = _lasting(os.environ if asked["env"] is None else asked["env"])
        apart = {name for name, _ in environment.items() ^ self._environment.items()}
        there = os.path.isdir(asked["cwd"] or ".")
        if not (usual and piped and there and apart <= {*_MAY_DIFFER}):
            return None
        key = environment.get(*_MAY_DIFFER)
        self._asked[key] += 1
        if key not in self._nurseries:
            if self._asked[key] > 1:
                with self.as_installed():
                    self._nurseries[key] = _TestNursery(self._module, environment)
            return None
        nursery = self._nurseries[key]
        return nursery if nursery.ready(0.0) else None


class _TestNursery:
    """A process that has imported the module, and its line; it ends when the line does."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._line, its):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        # Its command line does not name the module, and leaves room for one that does.
        command = [sys.executable, "-P", __file__, str(its.fileno()), "-" * _ROOM]
        with its:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[its.fileno()],
            )
        self._line.send(module.encode())
        self._ready = False
        self._turn = Lock()

    def ready(self, timeout: float | None) -> bool:
        """Whether it has imported the module."""
        with self._turn:
            if not self._ready and select.select([self._line], [], [], timeout)[0]:
                assert self._line.recv(_LARGEST) == b"ready", "the nursery ended while it imported"
                self._ready = True
            return self._ready

    def fork(self, order: dict[str, Any], pipes: list[int]) -> int:
        """The number of a process that is a child of this one, with these as its standard files."""
        with self._turn:
            # A process whose parent has ended goes to its nearest ancestor that takes orphans.
            _take_orphans(True)
            try:
                socket.send_fds(self._line, [json.dumps(order).encode()], pipes)
                answer = self._line.recv(_LARGEST)
            finally:
                _take_orphans(False)
        assert answer, "the nursery ended"
        return int(answer)

    def close(self) -> None:
        self._line.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _lasting(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _NOT_READ}


def _take_orphans(those: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(those), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system gives orphans to no process but the first")


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def _resource() -> Any:
    """Absent on Windows, where tests import this file and fork nothing."""
    return importlib.import_module("resource")


def _limits() -> list[list[int]]:
    kinds = {value for name, value in vars(_resource()).items() if name.startswith("RLIMIT_")}
    return [[kind, *_resource().getrlimit(kind)] for kind in sorted(kinds)]


def _become(order: dict[str, Any], files: list[int]) -> None:
    """Makes this fork what a start would have made."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.umask(order["umask"])
    os.sched_setaffinity(0, order["cores"])
    for kind, soft, hard in order["limits"]:
        _resource().setrlimit(kind, (soft, hard))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = b"".join(os.fsencode(word) + b"\0" for word in order["argv"])
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)
    sys.orig_argv[:] = order["argv"]
    sys.argv[:] = ["-m", *order["argv"][4:]]
    if "numpy" in sys.modules:
        # A process that starts has a global generator of its own; so has one of `random`, by itself.
        sys.modules["numpy"].random.seed()


def _fork(line: socket.socket, order: dict[str, Any], files: list[int]) -> tuple[int, bool]:
    """A grandchild whose parent has ended, and whether this is it: it goes on once it has its new parent."""
    numbers, number = os.pipe()
    waiting, given = os.pipe()
    if (between := os.fork()) == 0:
        if (grandchild := os.fork()) != 0:
            os.write(number, str(grandchild).encode())
            os._exit(0)
        line.close()
        for each in (numbers, number, given):
            os.close(each)
        # Closed by the one that has seen the parent's end.
        os.read(waiting, 1)
        os.close(waiting)
        return 0, True
    os.waitpid(between, 0)
    found = int(os.read(numbers, 32))
    for each in (numbers, number, waiting, given, *files):
        os.close(each)
    return found, False


def main() -> None:
    """`forked_starts.py LINE`: the module's name, then orders with their standard files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    module = line.recv(_LARGEST).decode()
    importlib.import_module(module)
    # It is run, as `__main__`, and so is not there under its name.
    del sys.modules[module]
    package, _, name = module.rpartition(".")
    if package:
        with suppress(AttributeError):
            delattr(sys.modules[package], name)
    line.send(b"ready")
    while True:
        data, files, _, _ = socket.recv_fds(line, _LARGEST, 3)
        if not data:
            return
        order = json.loads(data)
        found, is_it = _fork(line, order, files)
        if is_it:
            _become(order, files)
            break
        line.send(str(found).encode())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
