"""A round over a line of 1 Gbit/s and 100 ms beside bare TCP with the same bytes over the same line.

    sudo python benchmarks/wide_link.py                    # 256 MB down and up, three rounds, two minutes
    sudo python benchmarks/wide_link.py --megabytes 1024 --rounds 2
    sudo python benchmarks/wide_link.py --buffers 0        # the kernel's own limits of TCP's buffers

Linux, as root: the coordinator has a network namespace, the agent and an operator another one. Each has one
device (TUN), and the script carries packets between the two: each direction lets so many bits a second
through, holds each packet back for half of the round trip, and drops what does not fit a queue as long as a
round trip. So TCP is the kernel's, with slow start, windows and losses. Training is left out.

From a round's start to its update's receipt counts: the model down, hashed and written by the agent, the
update up, checked and durable. The operator's turn is `put_artifact` and `get_artifact`. Bare TCP moves as
many bytes down and up over one connection, neither encrypted, stored nor checked. Each first turn begins with
slow start, and is compared with the first ones of bare TCP; later turns with later ones.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transport import run_agent, transfer_seconds

from roundtable.core import Layout, Model, parse_job, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient
from roundtable.proto.common_pb2 import Artifact

COORDINATOR, SILO = "10.77.0.1", "10.77.0.2"
PORT, BARE_PORT = 7443, 7444
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PI, _VNET_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS_AND_SEGMENTS = 0b11
"""The kernel hands over up to 64 KiB of one connection at once, cut into packets behind the other device."""
_LARGEST = 1 << 17


class Direction:
    """One direction of the line: `rate` bytes a second, each packet `delay` seconds late."""

    def __init__(self, source: int, target: int, rate: float, delay: float, most: float) -> None:
        self.source = source
        self._target = target
        self._rate = rate
        self._delay = delay
        self._most = most
        self._free = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.dropped = 0

    def take(self, now: float) -> None:
        """Takes a packet in, or drops it."""
        packet = os.read(self.source, _LARGEST)
        free = max(self._free, now)
        if (free - now) * self._rate > self._most:
            self.dropped += 1
            return
        self._free = free + len(packet) / self._rate
        self._under_way.append((self._free + self._delay, packet))

    def deliver(self, now: float) -> float:
        """Delivers what is due; when the next packet is."""
        while self._under_way and self._under_way[0][0] <= now:
            os.write(self._target, self._under_way.popleft()[1])
        return self._under_way[0][0] if self._under_way else now + 1.0


def carry(here: int, there: int, rate: float, round_trip: float) -> None:
    """Both directions, until the process is ended."""
    most = rate * round_trip
    ways = [
        Direction(here, there, rate, round_trip / 2, most),
        Direction(there, here, rate, round_trip / 2, most),
    ]
    while True:
        now = time.monotonic()
        due = min(way.deliver(now) for way in ways)
        ready, _, _ = select.select([here, there], [], [], max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.take(now)


def device(name: str) -> int:
    """A TUN device of this process."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_PI | _VNET_HEADER))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS)
    return file


def told(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def namespaces(bits: float, round_trip: float, buffers: int) -> Iterator[tuple[str, str]]:
    """Two namespaces with the line between them: of the coordinator, of the silo."""
    names = (f"rt-hub-{os.getpid()}", f"rt-silo-{os.getpid()}")
    devices = (f"rth{os.getpid()}", f"rts{os.getpid()}")
    with ExitStack() as stack:
        files = [device(each) for each in devices]
        for name, each, own in zip(names, devices, (COORDINATOR, SILO), strict=True):
            told("ip", "netns", "add", name)
            stack.callback(told, "ip", "netns", "delete", name)
            told("ip", "link", "set", each, "netns", name)
            inside = ("ip", "-n", name)
            told(*inside, "link", "set", "lo", "up")
            told(*inside, "addr", "add", f"{own}/24", "dev", each)
            told(*inside, "link", "set", each, "mtu", "1500", "up")
            if buffers:
                for kind in ("rmem", "wmem"):
                    value = f"net.ipv4.tcp_{kind}=4096 131072 {buffers}"
                    told("ip", "netns", "exec", name, "sysctl", "-qw", value)
        command = part("line", *files, bits / 8, round_trip)
        carrying = stack.enter_context(subprocess.Popen(command, pass_fds=files))
        stack.callback(carrying.terminate)
        for file in files:
            os.close(file)
        yield names


def bare_server(size: int) -> None:
    """Bytes down, then bytes up, for whoever connects; tells at the end of each."""
    block = memoryview(bytes(1 << 20))
    with socket.create_server((COORDINATOR, BARE_PORT)) as server:
        print("ready", flush=True)
        while True:
            line, _ = server.accept()
            with line:
                while line.recv(1):
                    for place in range(0, size, len(block)):
                        line.sendall(block[: size - place])
                    swallow(line, size)
                    line.sendall(b"!")


def swallow(line: socket.socket, size: int) -> None:
    """Receives so many bytes."""
    room = memoryview(bytearray(1 << 20))
    while size:
        count = line.recv_into(room[: min(size, len(room))])
        assert count, "the line broke"
        size -= count


def bare_client(size: int, repeats: int) -> None:
    """Prints the seconds of each turn, (down, up)."""
    block = memoryview(bytes(1 << 20))
    with socket.create_connection((COORDINATOR, BARE_PORT)) as line:
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            line.sendall(b"?")
            swallow(line, size)
            turned = time.perf_counter()
            for place in range(0, size, len(block)):
                line.sendall(block[: size - place])
            swallow(line, 1)
            seconds.append((turned - started, time.perf_counter() - turned))
    print(json.dumps(seconds), flush=True)


@contextmanager
def within(namespace: str, *command: str, said: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process in the namespace while the block lasts, once its first line says that."""
    whole = ["ip", "netns", "exec", namespace, *command]
    child = subprocess.Popen(whole, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        if said:
            assert said in child.stdout.readline(), f"{command} did not begin"
        yield child
    finally:
        child.terminate()
        child.wait()


def part(*arguments: object) -> list[str]:
    """The command of a part of this script."""
    return [sys.executable, __file__, "--part", *map(str, arguments)]


def bare_rounds(hub: str, silo: str, size: int, repeats: int) -> list[tuple[float, float]]:
    with (
        within(hub, *part("bare-server", size), said="ready"),
        within(silo, *part("bare-client", size, repeats)) as child,
    ):
        return [(float(down), float(up)) for down, up in json.loads(child.communicate()[0])]


def our_rounds(folder: str, size: int, rounds: int) -> None:
    """In the silo's namespace: runs the job, and prints what its rounds took."""
    elements = size // 4
    state = {"w": torch.zeros(elements)}
    layout = Layout.of(state)
    path = Path(folder) / "model.safetensors"
    save_model(path, Model(layout, layout.flatten(state)))
    job = parse_job(
        f'task = "ready"\nrounds = {rounds}\n[cohort]\nsize = 1\nwait = 60\ndeadline = 600\n'
        "[evaluation]\nevery = 0"
    )
    with OperatorClient(f"{COORDINATOR}:{PORT}", Path(folder) / "operator") as operator:
        began = time.perf_counter()
        model = Artifact(digest=operator.put_artifact(path), size=path.stat().st_size)
        put = time.perf_counter() - began
        submitted = operator.start(job, model)
        began_job = time.perf_counter() - began - put
        events = [event for update in operator.watch(submitted.id) for event in update.events]
        detail = operator.job(submitted.id)
        assert detail.job.status == "finished", detail.job.reason
        began = time.perf_counter()
        operator.get_artifact(detail.job.model.digest, detail.job.model.size, path)
        got = time.perf_counter() - began
    records = [json.loads(record) for record in detail.history]
    found = {
        "rounds": transfer_seconds(events),
        "whole": [record["ended"] - record["started"] for record in records],
        "ways": [record["transfers"]["alder"] for record in records],
        "operator": put + got,
        "operator_ways": {"put": put, "start": began_job, "get": got},
    }
    print(json.dumps(found), flush=True)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, over one line."""
    size = options.megabytes * 1_000_000
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", (COORDINATOR,))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    issue(folder / "ca", "alder", "agent", folder / "alder")
    server = [sys.executable, "-m", "roundtable", "server", "--listen", f"{COORDINATOR}:{PORT}"]
    server += ["--state", str(folder / "state"), "--credentials", str(folder / "coordinator")]
    with namespaces(options.megabits * 1e6, options.milliseconds / 1e3, options.buffers) as (hub, silo):
        before = bare_rounds(hub, silo, size, options.rounds)
        with (
            within(hub, *server, said="is listening"),
            within(silo, *part("agent", folder, size)),
            within(silo, *part("rounds", folder, size, options.rounds)) as child,
        ):
            found: dict[str, Any] = json.loads(child.communicate()[0])
        after = bare_rounds(hub, silo, size, options.rounds)
    found["bare"] = [before, after]
    found["line_s"] = 2 * size * 8 / options.megabits / 1e6
    found["bare_first_s"] = statistics.mean((sum(before[0]), sum(after[0])))
    found["bare_later_s"] = statistics.median(map(sum, before[1:] + after[1:]))
    found["first_ratio"] = found["rounds"][0] / found["bare_first_s"]
    found["later_s"] = statistics.median(found["rounds"][1:])
    found["later_ratio"] = found["later_s"] / found["bare_later_s"]
    found["operator_ratio"] = found["operator"] / found["bare_first_s"]
    return found


def parts(name: str, *arguments: str) -> None:
    """One of the processes of a measurement."""
    if name == "bare-server":
        bare_server(int(arguments[0]))
    elif name == "bare-client":
        bare_client(*map(int, arguments))
    elif name == "agent":
        run_agent(Path(arguments[0]), PORT, "alder", int(arguments[1]) // 4, COORDINATOR)
    elif name == "line":
        carry(int(arguments[0]), int(arguments[1]), float(arguments[2]), float(arguments[3]))
    else:
        our_rounds(arguments[0], *map(int, arguments[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="of the model, and of each update")
    parser.add_argument(
        "--rounds", type=int, default=3, help="so many, and as many of bare TCP before and after"
    )
    parser.add_argument("--megabits", type=float, default=1000.0, help="a second that the line carries")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a round trip")
    parser.add_argument(
        "--buffers",
        type=int,
        default=64 << 20,
        help="most bytes of a buffer of TCP; 0: the kernel's own limits",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        parts(*options.part)
        return
    with tempfile.TemporaryDirectory(prefix="roundtable-wide-link-") as folder:
        found = measure(Path(folder), options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{options.megabytes} MB down and up over {options.megabits:g} Mbit/s and "
        f"{options.milliseconds:g} ms; the line alone {found['line_s']:.2f} s"
    )
    for what, ours, bare, ratio in (
        ("the first round, until its update is durable", "rounds", "bare_first_s", "first_ratio"),
        ("later rounds", "later_s", "bare_later_s", "later_ratio"),
        ("an operator's model there, the last one back", "operator", "bare_first_s", "operator_ratio"),
    ):
        took = found[ours][0] if ours == "rounds" else found[ours]
        print(f"{what:<46} {took:6.2f} s, bare TCP {found[bare]:6.2f} s: {found[ratio]:.2f} (≤ 1.15)")


if __name__ == "__main__":
    sys.exit(main())
