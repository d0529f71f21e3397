"""Checks whether a device that failed computes again, by a small sum in a process of its own."""

from __future__ import annotations

import asyncio
import sys

_PROBE = "import torch, sys; assert torch.ones(64, device=sys.argv[1]).sum().item() == 64"
_SECONDS = 60.0


async def computes(kind: str, device: int) -> bool:
    """Whether a device computes; always true of a CPU, whose ranks are processes."""
    if kind != "cuda":
        return True
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROBE,
        f"cuda:{device}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await asyncio.wait_for(process.wait(), _SECONDS) == 0
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
