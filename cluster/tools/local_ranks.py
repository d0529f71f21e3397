"""Runs a module on ranks of this machine under torchrun, and takes the document that rank 0 prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from roundtable.core.errors import ResourceError

_MARK = "RESULT "


def print_result(result: dict[str, Any]) -> None:
    """Prints rank 0's document, for `run_ranks` to take."""
    print(_MARK + json.dumps(result), flush=True)


def check_world(world: int) -> None:
    """Raises ResourceError for more ranks than this machine has GPUs; on CPUs any number may run."""
    gpus = torch.cuda.device_count()
    if gpus and world > gpus:
        raise ResourceError(f"{world} ranks need as many CUDA devices, and this machine has {gpus}")


def run_ranks(world: int, module: str, argument: str) -> dict[str, Any]:
    """Starts `world` ranks of `module`, and returns what rank 0 gave to `print_result`.

    Raises ResourceError as `check_world` does, and with the last error of a rank where they fail.
    """
    check_world(world)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [*command, "-m", module, argument], capture_output=True, text=True, env=environment, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    errors = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
    raise ResourceError(f"{world} ranks failed: {errors[-1] if errors else done.stderr[-300:]}")
