"""A process that has loaded what others need, and forks them: none of them loads it again.

Its owner asks over a socket for groups of processes. A group ends with the first of its members that ends,
all groups with this process, and it with its owner: the kernel tells each. It has one thread and touches no
device, ever, so that at any time a fork of it is whole.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from roundtable.core.machine.process_facts import die_with_parent, proc_files
from roundtable.core.machine.stop_signals import leave_signals_to_owner

_LARGEST = 1 << 18
_DESCRIPTORS = 8
_GRACE_SECONDS = 0.2
"""What the others of a group have to say what they know of a member's end, before they are ended."""


@dataclass
class _Members:
    """The processes of one group: places by id, how the first of them ended, and when the rest is ended."""

    leader: int = 0
    places: dict[int, int] = field(default_factory=dict)
    first: tuple[int, int] | None = None
    why: str = ""
    until: float | None = None


class ForkServer:
    """Forks groups as the owner asks, and tells how each ended. Messages are JSON, one a datagram.

    Asked is `{"start": number, "members": [{"NAME": "value"}], "descriptors": ["NAME"]}`, with the descriptor
    that members write to, and then those that they inherit, each under its number in the environment; and
    `{"end": number}`. Told is once `{"ready": true, "threads": count}`, where more than one may hang in a
    fork, and of each group `{"ended": number, "member": place, "status": status, "why": words}`: of its first
    member that ended, its exit status, or less than nothing for a signal. Member -1 could not be forked.
    """

    def __init__(self, control: socket.socket, body: Callable[[], None]) -> None:
        """`body` is what each fork does, in an environment of its own."""
        self._control = control
        self._body = body
        self._groups: dict[int, _Members] = {}
        self._woken, self._waker = socket.socketpair()

    def serve(self) -> None:
        """Serves until the owner is gone. Only in the main thread."""
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *seen: None)
        # The owner has heard of it too, and says what is to end.
        leave_signals_to_owner()
        # Pages that nobody writes to stay the same memory in all forks.
        gc.collect()
        gc.freeze()
        self._tell({"ready": True, "threads": len(proc_files("self/task/[0-9]*"))})
        try:
            while self._attend():
                pass
        finally:
            for members in self._groups.values():
                _kill(members)

    def _attend(self) -> bool:
        """Does what is next to do; False once the owner is gone."""
        waits = [members.until for members in self._groups.values() if members.until is not None]
        patience = max(0.0, min(waits) - time.monotonic()) if waits else None
        ready, _, _ = select.select([self._control, self._woken], [], [], patience)
        with suppress(BlockingIOError):
            while self._woken.recv(1 << 12):
                pass
        self._reap()
        for members in self._groups.values():
            if members.until is not None and members.until <= time.monotonic():
                members.until = None
                _kill(members)
        return self._control not in ready or self._obey()

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST, _DESCRIPTORS)
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if "start" in message:
            self._start(message, descriptors)
        elif (members := self._groups.get(message["end"])) is not None:
            _kill(members)
        for each in descriptors:
            os.close(each)
        return True

    def _start(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        number = message["start"]
        output, *inherited = descriptors
        held = {name: str(each) for name, each in zip(message["descriptors"], inherited, strict=True)}
        members = self._groups[number] = _Members()
        for place, own in enumerate(message["members"]):
            try:
                pid = self._fork(members.leader, {**own, **held}, output)
            except OSError as error:
                members.first = members.first or (-1, error.errno or 1)
                members.why = f"member {place} could not be forked: {error.strerror}"
                if members.places:
                    _kill(members)
                else:
                    self._over(number)
                return
            members.leader = members.leader or pid
            members.places[pid] = place

    def _fork(self, leader: int, environment: Mapping[str, str], output: int) -> int:
        owner = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            self._become(owner, leader, environment, output)
        # Here as well as there: whoever is first.
        with suppress(OSError):
            os.setpgid(pid, leader or pid)
        return pid

    def _become(self, owner: int, leader: int, environment: Mapping[str, str], output: int) -> NoReturn:
        status = 1
        try:
            die_with_parent(owner)
            os.setpgid(0, leader)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (1, 2):
                os.dup2(output, end)
            os.close(output)
            for each in (self._control, self._woken, self._waker):
                each.close()
            os.environ.update(environment)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            self._body()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001 - a fork must never go on as the one that it was forked from
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(status)

    def _reap(self) -> None:
        """Takes the members that have ended; with the last one whatever they have started ends too.

        That is done before the last one is taken, while nobody else can have its number.
        """
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            number = next((one for one, group in self._groups.items() if pid in group.places), None)
            if number is None:
                os.waitpid(pid, 0)
                continue
            members = self._groups[number]
            if len(members.places) == 1:
                _kill(members)
            _, status = os.waitpid(pid, 0)
            place = members.places.pop(pid)
            if members.first is None:
                members.first = (place, os.waitstatus_to_exitcode(status))
                members.until = time.monotonic() + _GRACE_SECONDS
            if not members.places:
                self._over(number)

    def _over(self, number: int) -> None:
        members = self._groups.pop(number)
        place, status = members.first or (-1, 1)
        self._tell({"ended": number, "member": place, "status": status, "why": members.why})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with suppress(ConnectionError):
            self._control.send(json.dumps(message).encode())


def _kill(members: _Members) -> None:
    """Ends all of a group of which one member at least has not been taken."""
    if members.places:
        with suppress(ProcessLookupError):
            os.killpg(members.leader, signal.SIGKILL)
