"""Starts torchrun, which starts the ranks of one job, as a child of the agent."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from roundtable.client.device_faults import DeviceFault, device_fault
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.gpus import VISIBLE, gpu_names
from roundtable.cluster.plan.resources import Resources
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.stop_signals import KILL, kill_group

_log = logging.getLogger("roundtable.agent")
_END_SECONDS = 10.0
_LINE = 2000
_ENDS = re.compile(r"[\r\n]+")
# NCCL's watchdog ends a rank whose device has failed before Python hears of it; this is all that it leaves.
_WATCHDOG = re.compile(r"Rank (\d+)\] .{0,200}?watchdog thread terminated with exception: (.*)")


class Launcher:
    """A running torchrun; when a rank fails it restarts the group, up to `[cluster] restarts` times."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._output: deque[str] = deque(maxlen=40)
        self._watchdog: list[tuple[int, str]] = []
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        cwd: Path,
        folder: Path,
        table: ClusterTable,
        resources: Resources,
        devices: Sequence[int],
        replica: Mapping[str, str] | None = None,
    ) -> Launcher:
        """Starts the ranks of this node; of a `replica`, told of by these variables, once only."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "roundtable.cluster.agent.launch",
            str(os.getpid()),
            str(folder),
            *_options(table.restarts if replica is None else 0, resources),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=cwd,
            env={**_environment(folder, table, resources, devices), **(replica or {})},
            start_new_session=True,
        )
        return cls(process)

    async def ended(self) -> int:
        """Waits until torchrun gives up, and returns its exit status."""
        return await self._process.wait()

    async def restarting(self) -> bool:
        """Whether torchrun still runs, after a rank failed; it needs a moment to notice."""
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), 2.0)
        except TimeoutError:
            return True
        return False

    def last_failure(self) -> str:
        """The last line of torchrun's output that names a failure, else the last one."""
        lines = [
            line for line in self._output if "rror" in line or "exitcode" in line or "signal" in line.lower()
        ]
        return lines[-1].strip() if lines else (self._output[-1].strip() if self._output else "")

    def device_fault(self) -> tuple[int, DeviceFault] | None:
        """(rank, fault) of the first device that ended its rank unreported since this was asked last."""
        ended, self._watchdog = self._watchdog, []
        faults = ((rank, device_fault(text)) for rank, text in ended)
        return next(((rank, fault) for rank, fault in faults if fault is not None), None)

    async def end(self) -> None:
        """Ends torchrun; the ranks end with it, as the kernel signals them."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
            except TimeoutError:
                self._signal(KILL)
                await self._process.wait()
        self._listener.cancel()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            kill_group(self._process, number)

    async def _listen(self) -> None:
        """Logs what the ranks print, however it is printed: who does not read blocks who writes.

        A progress bar ends its lines with carriage returns, or with nothing at all; what has no end is cut.
        """
        assert self._process.stdout is not None
        rest = ""
        while piece := await self._process.stdout.read(1 << 16):
            *lines, rest = _ENDS.split(rest + piece.decode(errors="replace"))
            if len(rest) > _LINE:
                lines, rest = [*lines, rest[:_LINE]], ""
            for line in lines:
                self._hear(line)
        self._hear(rest)

    def _hear(self, line: str) -> None:
        if text := line.strip()[:_LINE]:
            self._output.append(text)
            if (ended := _WATCHDOG.search(text)) and len(self._watchdog) < 1000:
                self._watchdog.append((int(ended[1]), ended[2]))
            _log.info("ranks: %s", text)


def _options(restarts: int, resources: Resources) -> list[str]:
    return [
        "--nnodes=1",
        f"--nproc-per-node={resources.devices}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--monitor-interval=0.2",
    ]


def _environment(
    folder: Path, table: ClusterTable, resources: Resources, devices: Sequence[int]
) -> dict[str, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
        # With a shared store a restarted group finds the keys of the one before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONSAFEPATH": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "flight-recorder-"),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    if resources.device == "cuda":
        environment[VISIBLE] = ",".join(gpu_names(devices, os.environ))
    if table.interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = table.interface
    return environment
