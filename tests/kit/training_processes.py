"""The training processes of an agent, and rounds that it is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any


def workers(parent: int) -> list[int]:
    """Training processes of an agent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if (
                int(status[1]) == parent
                and b"roundtable.client.worker.worker" in command
                and status[0] != "Z"
            ):
                found.append(int(entry.name))
    return found


async def ask(silo: Any, round: int) -> Any:
    """Orders a round; returns the failure, or None for an update."""
    coordinator = silo.coordinator
    coordinator.say(instruction=silo.instruction(round))
    key = ("job-1", round, 1, "train")
    failed = asyncio.create_task(coordinator.hear("failure"))
    done = asyncio.create_task(coordinator.until(lambda: key in coordinator.receipts))
    await asyncio.wait([failed, done], return_when=asyncio.FIRST_COMPLETED)
    for task in (failed, done):
        task.cancel()
    return failed.result() if failed.done() and not failed.cancelled() else None
