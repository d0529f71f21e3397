"""Takes from Roundtable's own code what a system lacks that ROUNDTABLE_TEST_MACHINE names: macos or windows.

Python loads it by itself where its folder is on PYTHONPATH, so that child processes have it too. Only modules
of Roundtable see the system so; the standard library and others go on with what is here.
"""

from __future__ import annotations

import asyncio.unix_events
import builtins
import ctypes
import errno
import fcntl
import os
import signal
import socket
import sys
from types import ModuleType
from typing import Any

WINDOWS = os.environ["ROUNDTABLE_TEST_MACHINE"] == "windows"
_OF_LINUX = "memfd_create sched_getaffinity O_DIRECT O_PATH posix_fadvise sendfile splice"
_OF_POSIX = (
    "fork getuid geteuid getgid getloadavg getgrouplist killpg setsid pread preadv pwrite pwritev sysconf "
    "statvfs uname chown O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC"
)
_SIGNALS = "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGPIPE SIGQUIT"
_SOCKETS = "AF_UNIX send_fds recv_fds MSG_DONTWAIT"
_ABSENT = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"} if WINDOWS else {"msvcrt"}


class Lacking(ModuleType):
    """A module without some of its names, and with others in their place."""

    def __init__(self, real: ModuleType, lacks: str, instead: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        vars(self).update(_real=real, _lacks=set(lacks.split()), _instead=instead)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(f"this machine has no {self._real.__name__}.{name}")
        return self._instead[name] if name in self._instead else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def _open(path: Any, flags: int, mode: int = 0o777, **named: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return os.open(path, flags, mode, **named)


def _library(name: Any, *arguments: Any, **named: Any) -> ctypes.CDLL:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return ctypes.CDLL(name, *arguments, **named)


def _locking(file: int, mode: int, count: int) -> None:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(file, 0, os.SEEK_CUR))


def _no_handler(*arguments: object) -> None:
    raise NotImplementedError


MSVCRT = ModuleType("msvcrt")
vars(MSVCRT).update(LK_NBLCK=2, locking=_locking)
SEEN: dict[str, ModuleType] = {
    "os": Lacking(os, _OF_LINUX, {}),
    "sys": Lacking(sys, "", {"platform": "darwin"}),
}
if WINDOWS:
    SEEN = {
        "os": Lacking(os, f"{_OF_LINUX} {_OF_POSIX}", {"open": _open, "name": "nt", "O_BINARY": 0}),
        "sys": Lacking(sys, "", {"platform": "win32"}),
        "signal": Lacking(signal, _SIGNALS, {}),
        "socket": Lacking(socket, _SOCKETS, {}),
        "ctypes": Lacking(ctypes, "", {"CDLL": _library}),
        "msvcrt": MSVCRT,
    }
    asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = _no_handler  # type: ignore[assignment]
_import = builtins.__import__
_LOOKING: set[int] = set()


def _of_this_machine(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    ours = level == 0 and str((globals or {}).get("__name__", "")).partition(".")[0] == "roundtable"
    if ours and name.partition(".")[0] in _ABSENT:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if ours and name in SEEN:
        return SEEN[name]
    return _import(name, globals, locals, fromlist, level)


def _no_such_folder(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        not _LOOKING
        and event in ("open", "os.listdir", "os.scandir")
        and str(arguments[0]).startswith(("/proc", "/sys"))
    ):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _in_use(path: Any) -> bool:
    """Whether this process has the file open or mapped: Windows then neither removes nor replaces it."""
    try:
        wanted = os.stat(path)
    except OSError:
        return False
    _LOOKING.add(wanted.st_ino)
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            if any(line.split()[4] == str(wanted.st_ino) for line in maps):
                return True
    finally:
        _LOOKING.discard(wanted.st_ino)
    for number in range(3, 256):
        try:
            found = os.fstat(number)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def _asked_by_roundtable() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("pathlib", "pathlib._local"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("roundtable")


def _guarded(real: Any, places: tuple[int, ...]) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        for place in places:
            if _asked_by_roundtable() and _in_use(arguments[place]):
                raise PermissionError(errno.EACCES, "in use by this process", str(arguments[place]))
        return real(*arguments, **named)

    return call


builtins.__import__ = _of_this_machine
sys.addaudithook(_no_such_folder)
if WINDOWS:
    os.replace, os.rename = _guarded(os.replace, (0, 1)), _guarded(os.rename, (0, 1))
    os.unlink, os.remove = _guarded(os.unlink, (0,)), _guarded(os.remove, (0,))
