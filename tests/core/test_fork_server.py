"""Groups of forks: each ends whole, whoever ends first, and none outlives the process or its owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import os, signal, socket, sys, time
from roundtable.core.machine.fork_server import ForkServer
from roundtable.core.machine.process_facts import die_with_parent

def body():
    # A child of its own, which holds the output open as long as it lives.
    child = os.fork()
    if child == 0:
        os.read(HOLD, 1)
        os._exit(0)
    # At once: two members print into one pipe.
    os.write(1, f"{os.environ['PLACE']} {os.getpid()} {child}\\nno end".encode())
    if "RAISES" in os.environ:
        raise ValueError("a mistake")
    if "GIVEN" in os.environ:
        os.write(int(os.environ["GIVEN"]), os.environ["PLACE"].encode())
    if "LEAVES" in os.environ:
        raise SystemExit(3)
    signal.pause()

HOLD, _ = os.pipe()
die_with_parent(int(sys.argv[1]))
ForkServer(socket.socket(fileno=int(sys.argv[2])), body).serve()
"""


class Owner:
    """The other end of a fork server's line."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process = process
        self.control = control
        control.settimeout(60)

    def start(self, number: int, *members: dict[str, str], given: list[int] | None = None) -> int:
        """Asks for a group; the descriptor of what its members print."""
        output, prints = os.pipe()
        environments = [{"PLACE": str(place), **one} for place, one in enumerate(members)]
        asked = {"start": number, "members": environments, "descriptors": ["GIVEN"] if given else []}
        socket.send_fds(self.control, [json.dumps(asked).encode()], [prints, *(given or [])])
        os.close(prints)
        return output

    def told(self) -> dict[str, Any]:
        """What it says next."""
        message: dict[str, Any] = json.loads(self.control.recv(1 << 16))
        assert not message.pop("why", "")
        return message


@contextmanager
def serving() -> Iterator[Owner]:
    """A fork server that is ready."""
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", PROGRAM, str(os.getpid()), str(its.fileno())]
    with its:
        process = subprocess.Popen(command, pass_fds=[its.fileno()], start_new_session=True)
    with ours, process:
        owner = Owner(process, ours)
        assert owner.told() == {"ready": True, "threads": 1}
        try:
            yield owner
        finally:
            # Not only the server: what members have started has no parent that it would end with.
            for pid, _, _ in session(process.pid):
                os.kill(pid, signal.SIGKILL)


def pids(output: int, members: int) -> list[list[int]]:
    """[place, process, its child] of each member, by place, as they print it."""
    text = ""
    while text.count("no end") < members:
        piece = os.read(output, 1 << 16)
        assert piece, text
        text += piece.decode()
    rows = [line.replace("no end", "") for line in text.split("\n")]
    return sorted([int(number) for number in row.split()] for row in rows if row)


def rest(output: int) -> str:
    """What is printed until nobody is left who could print."""
    text = b""
    while piece := os.read(output, 1 << 16):
        text += piece
    os.close(output)
    return text.decode()


def session(leader: int) -> Iterator[tuple[int, str, int]]:
    """(process, state, parent) of all that are in its session."""
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, led = each.read_text().rpartition(")")[2].split()[:4]
            if int(led) == leader:
                yield int(each.parent.name), state, int(parent)


def states(owner: Owner) -> list[str]:
    """The states of all other processes of the server's session; of zombies, those that are its to take."""
    server = owner.process.pid
    others = [(state, parent) for pid, state, parent in session(server) if pid != server]
    return [state for state, parent in others if state != "Z" or parent == server]


def test_a_killed_member_ends_its_group_with_all_that_it_started_and_no_other() -> None:
    with serving() as owner:
        first, second = owner.start(1, {}, {}), owner.start(2, {})
        rows, others = pids(first, 2), pids(second, 1)
        os.kill(rows[1][1], signal.SIGKILL)
        assert owner.told() == {"ended": 1, "member": 1, "status": -signal.SIGKILL}
        # Only once their children are gone too has the pipe an end.
        assert rest(first) == ""
        again = owner.start(3, {})
        assert pids(again, 1)[0][1] != rows[0][1]
        found = states(owner)
        assert len(found) == 4, "two groups with a child each"
        assert "Z" not in found, "and nobody who was not taken"
        os.kill(others[0][1], 0)


def test_members_have_environments_and_descriptors_of_their_own() -> None:
    heard, says = os.pipe()
    with serving() as owner:
        output = owner.start(1, {}, {"LEAVES": ""}, given=[says])
        os.close(says)
        assert [row[0] for row in pids(output, 2)] == [0, 1]
        assert owner.told() == {"ended": 1, "member": 1, "status": 3}
        rest(output)
        assert sorted(rest(heard)) == ["0", "1"]


def test_a_fork_that_raises_says_so_and_never_goes_on_as_the_server() -> None:
    with serving() as owner:
        output = owner.start(1, {"RAISES": ""})
        assert owner.told() == {"ended": 1, "member": 0, "status": 1}
        assert "ValueError: a mistake" in rest(output)
        assert owner.process.poll() is None


def test_a_group_is_ended_even_where_a_member_stands_still() -> None:
    with serving() as owner:
        output = owner.start(1, {}, {})
        for _, process, _ in pids(output, 2):
            os.kill(process, signal.SIGSTOP)
        owner.control.send(json.dumps({"end": 1}).encode())
        ended = owner.told()
        assert (ended["ended"], ended["status"]) == (1, -signal.SIGKILL)
        owner.control.send(json.dumps({"end": 1}).encode())
        rest(output)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_members_end_with_the_server_however_it_ends(number: int) -> None:
    with serving() as owner:
        output = owner.start(1, {}, {})
        rows = pids(output, 2)
        for _, _, child in rows:
            # These are told by nobody.
            os.kill(child, signal.SIGKILL)
        owner.process.send_signal(number)
        assert rest(output) == ""
        assert owner.control.recv(1) == b""


def test_the_server_ends_with_its_owner_and_takes_all_along() -> None:
    with serving() as owner:
        # As at a terminal, whose Ctrl-C everybody hears.
        owner.process.send_signal(signal.SIGINT)
        output = owner.start(1, {}, {})
        pids(output, 2)
        owner.control.shutdown(socket.SHUT_WR)
        assert owner.process.wait(60) == 0
        assert rest(output) == ""
