"""Runs torchrun for the agent: it dies with the agent, and its ranks die with it."""

from __future__ import annotations

import os
import sys

from torch.distributed.run import main as torchrun

from roundtable.core.machine.process_facts import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ["ROUNDTABLE_LAUNCHER"] = "1"
    torchrun(sys.argv[2:])
