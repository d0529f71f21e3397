"""Runs torchrun's agent for a silo's cluster: it dies with the silo's agent, and its ranks die with it.

The ranks are forked from one process that loads Python, PyTorch and the trainer, while torchrun is loaded
beside it. Started one by one, as torchrun does it, each would load them again, one after the other where
cores are few, and so would a group that is started anew. That process touches no device: its forks may.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

from roundtable.core.machine.fork_server import LAUNCHER
from roundtable.core.machine.process_facts import die_with_parent

_RANK = "roundtable.cluster.train.rank"
_LOADED = ["roundtable.core.machine.fork_server", _RANK]


def main() -> None:
    """`launch PARENT FOLDER ...`: the silo's agent, the folder where it listens, and torchrun's options."""
    parent, folder, *options = sys.argv[1:]
    die_with_parent(int(parent))
    os.environ[LAUNCHER] = str(os.getpid())
    multiprocessing.set_forkserver_preload(_LOADED)
    forkserver.ensure_running()
    run = import_module("torch.distributed.run")
    config, _, _ = run.config_from_args(run.parse_args([*options, "-m", _RANK]))
    config.start_method = "forkserver"
    run.elastic_launch(config=config, entrypoint=serve_rank)(folder)


def serve_rank(folder: str) -> None:
    """What each fork does."""
    import_module(_RANK).main(Path(folder))


if __name__ == "__main__":
    main()
