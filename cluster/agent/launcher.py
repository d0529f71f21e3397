"""The agent's side of the process that all ranks of this machine are forked from."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.gpus import VISIBLE, gpu_names
from roundtable.cluster.agent.rank_group import Printed, RankGroup
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.fellow_replicas import FIRST_RANK
from roundtable.cluster.train.rank import STORE
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.stop_signals import kill_group

_log = logging.getLogger("roundtable.agent")
_END_SECONDS = 10.0
_AGAIN_SECONDS = 0.05
_MESSAGE = 1 << 16


@dataclass
class _Forker:
    """One such process, what it has been asked and is not yet told, and the groups that it has."""

    process: asyncio.subprocess.Process
    control: socket.socket
    printed: Printed
    ready: bool = False
    unsent: deque[tuple[dict[str, Any], list[int]]] = field(default_factory=deque)
    groups: dict[int, RankGroup] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class Launcher:
    """Starts groups of ranks: forks of one process that has loaded all that they need, and outlives them.

    It is started with the first group, and again where it is gone; its groups are then lost. `loads` says how
    often that was.
    """

    def __init__(self, cwd: Path, folder: Path, table: ClusterTable) -> None:
        """`cwd` is where ranks run, `folder` where the agent listens for them."""
        self._cwd = cwd
        self._folder = folder
        self._table = table
        self._forker: _Forker | None = None
        self._starting = asyncio.Lock()
        self.loads = 0
        self._number = 0

    async def start(
        self, resources: Resources, devices: Sequence[int], replica: Mapping[str, str] | None = None
    ) -> RankGroup:
        """Starts a group with a rank on each of these devices; of a `replica`, told of by these variables."""
        async with self._starting:
            forker = self._forker or await self._load()
        self._number += 1
        number, output, prints = self._number, *os.pipe()
        group = RankGroup(
            number,
            output,
            lambda: self._end(forker, number),
            lambda: forker.printed.error or forker.printed.last,
            range(first := int((replica or {}).get(FIRST_RANK, "0")), first + len(devices)),
            in_parts=resources.device == "cpu",
        )
        forker.groups[number] = group
        # Bound here, so that nobody else can take the port before the first rank listens.
        store = socket.create_server(("127.0.0.1", 0), backlog=len(devices) + 128)
        members = _members(resources, devices, store.getsockname()[1], replica or {})
        asked = {"start": number, "members": members, "descriptors": [STORE]}
        forker.unsent.append((asked, [prints, store.detach()]))
        self._send(forker)
        return group

    async def close(self) -> None:
        """Ends the process, and all ranks with it."""
        if (forker := self._forker) is None:
            return
        if forker.ready:
            # It ends all groups, with whatever their ranks have started, and then itself.
            with suppress(OSError):
                forker.control.shutdown(socket.SHUT_WR)
            await asyncio.wait({asyncio.ensure_future(forker.process.wait())}, timeout=_END_SECONDS)
        if forker.process.returncode is None:
            kill_group(forker.process)
        await asyncio.wait(forker.tasks, timeout=_END_SECONDS)

    async def _load(self) -> _Forker:
        ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with its:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "roundtable.cluster.agent.launch",
                str(os.getpid()),
                str(its.fileno()),
                str(self._folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._cwd,
                env=_environment(self._folder, self._table),
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        assert process.stdout is not None
        self.loads += 1
        forker = self._forker = _Forker(process, ours, Printed("launcher"))
        reading = asyncio.create_task(forker.printed.read(process.stdout))
        forker.tasks |= {reading, asyncio.create_task(self._mourn(forker, reading))}
        asyncio.get_running_loop().add_reader(ours, self._hear, forker)
        return forker

    def _end(self, forker: _Forker, number: int) -> None:
        if number not in forker.groups:
            return
        for one in forker.unsent:
            if one[0].get("start") == number:
                forker.unsent.remove(one)
                _close(one[1])
                forker.groups.pop(number).lost("it was ended before it was started")
                return
        forker.unsent.append(({"end": number}, []))
        self._send(forker)
        forker.tasks.add(asyncio.create_task(self._see_to_it(forker, forker.groups[number])))

    async def _see_to_it(self, forker: _Forker, group: RankGroup) -> None:
        """Ends the process where it does not end a group: one that stands still ends nothing."""
        if not await group.settled(_END_SECONDS):
            _log.warning("cluster: the launcher does not answer, and is ended")
            kill_group(forker.process)

    def _send(self, forker: _Forker) -> None:
        """Sends what there is to send once the process hears; before that it may have no room for it."""
        while forker.ready and forker.unsent:
            message, descriptors = forker.unsent[0]
            try:
                socket.send_fds(forker.control, [json.dumps(message).encode()], descriptors)
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._send, forker)
                return
            except OSError:
                # It is gone, and `_mourn` hears of it.
                return
            forker.unsent.popleft()
            _close(descriptors)

    def _hear(self, forker: _Forker) -> None:
        try:
            data = forker.control.recv(_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(forker.control)
            return
        message = json.loads(data)
        if "ready" in message:
            if message["threads"] > 1:
                _log.warning(
                    "cluster: %d threads run where ranks are forked, and may hang", message["threads"]
                )
            forker.ready = True
            self._send(forker)
        elif (group := forker.groups.pop(message["ended"], None)) is not None:
            group.over(message["member"], message["status"], message["why"])

    async def _mourn(self, forker: _Forker, reading: asyncio.Task[None]) -> None:
        """The process is gone, and so are its groups: the kernel has ended them."""
        status = await forker.process.wait()
        if self._forker is forker:
            self._forker = None
        asyncio.get_running_loop().remove_reader(forker.control)
        forker.control.close()
        await asyncio.wait({reading}, timeout=1.0)
        for _, descriptors in forker.unsent:
            _close(descriptors)
        forker.unsent.clear()
        groups, forker.groups = list(forker.groups.values()), {}
        for group in groups:
            group.lost(f"the launcher of the ranks ended with status {status}")


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _members(
    resources: Resources, devices: Sequence[int], port: int, replica: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each rank of a group, under the names that torchrun gives them."""
    shared = {
        **replica,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_WORLD_SIZE": str(len(devices)),
    }
    if resources.device == "cuda":
        shared[VISIBLE] = ",".join(gpu_names(devices, os.environ))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(devices))]


def _environment(folder: Path, table: ClusterTable) -> dict[str, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
        "PYTHONSAFEPATH": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "flight-recorder-"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    if table.interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = table.interface
    return environment
