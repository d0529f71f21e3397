"""A million calls from one caller against a coordinator in a process: it lives, and serves the others."""

from __future__ import annotations

import asyncio
import collections
import socket
import time
from pathlib import Path

import grpc
import pytest

import roundtable as rt
from roundtable.child_processes import Children
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.demo import free_port
from roundtable.proto.channel import CLIENT_OPTIONS

CALLS = 1_000_000
AT_ONCE = 200
CHANNELS = 4


def resident(pid: int) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def socket_of(address: str, children: Children) -> socket.socket:
    """A connection to a coordinator that is starting."""
    host, _, port = address.partition(":")
    while True:
        children.check()
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.1)


async def flood(address: str, folder: Path, calls: int) -> collections.Counter[grpc.StatusCode]:
    """So many calls as fast as they are answered; how they ended."""
    files = [(folder / name).read_bytes() for name in ("ca.crt", "node.key", "node.crt")]
    ended: collections.Counter[grpc.StatusCode] = collections.Counter()
    left = iter(range(calls))

    async def caller(channel: grpc.aio.Channel) -> None:
        call = channel.unary_unary("/roundtable.v1.Operators/Status")
        for _ in left:
            try:
                await call(b"", timeout=60)
                ended[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code()] += 1

    secure = grpc.ssl_channel_credentials(*files)
    channels = [
        # Channels with equal options share a connection.
        grpc.aio.secure_channel(address, secure, options=[*CLIENT_OPTIONS, ("roundtable.place", place)])
        for place in range(CHANNELS)
    ]
    await asyncio.gather(*(caller(channels[place % CHANNELS]) for place in range(AT_ONCE)))
    for channel in channels:
        await channel.close()
    return ended


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_calls(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", ["127.0.0.1"])
    for name in ("ada", "mallory"):
        issue(tmp_path / "ca", name, "operator", tmp_path / name)
    address = f"127.0.0.1:{free_port()}"
    line = ["server", "--listen", address, "--state", str(tmp_path), "--credentials", str(tmp_path / "hub")]
    with Children(tmp_path / "logs") as children, rt.OperatorClient(address, tmp_path / "ada") as honest:
        process = children.start("hub", line).process
        with socket_of(address, children):
            pass
        served = 0

        async def attack() -> collections.Counter[grpc.StatusCode]:
            nonlocal served
            # What a burst leaves behind is there after the first tenth.
            first = await flood(address, tmp_path / "mallory", CALLS // 10)
            before = resident(process.pid)
            rest = asyncio.ensure_future(flood(address, tmp_path / "mallory", CALLS - CALLS // 10))
            while not rest.done():
                await asyncio.to_thread(honest.status)
                served += 1
                await asyncio.wait([rest], timeout=1.0)
            assert resident(process.pid) < before + 50e6
            return first + rest.result()

        ended = asyncio.run(attack())
        print(dict(ended), "while", served, "calls of another were served")
        assert process.poll() is None
        assert sum(ended.values()) == CALLS
        assert ended.keys() <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert ended[grpc.StatusCode.RESOURCE_EXHAUSTED] > CALLS / 2
        assert served > 0
        honest.status()
