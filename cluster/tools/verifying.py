"""Runs the verification's ranks on this machine, as the command line asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from roundtable.core.errors import ResourceError


def verify_here(world: int | None = None) -> dict[str, Any]:
    """What rank 0 found; ResourceError, with the ranks' last words, where they failed."""
    gpus = torch.cuda.device_count()
    if gpus and (world or gpus) > gpus:
        raise ResourceError(f"{world} ranks need as many CUDA devices, and this machine has {gpus}")
    world = world or gpus or 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += ["-m", "roundtable.cluster.tools.verify", "cuda" if gpus else "cpu"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return {**json.loads(line.removeprefix("RESULT ")), "torch": torch.__version__}
    said = [line for line in done.stderr.splitlines() if "Error" in line]
    raise ResourceError(f"the ranks failed: {said[-1].strip() if said else done.stderr[-300:]}")
