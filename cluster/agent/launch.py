"""The process that a silo's ranks are forked from: it dies with the silo's agent, and they die with it.

It loads Python, PyTorch and the trainer once, for every group and every replica of the machine, whenever one
starts, and starts again. It touches no device, and runs no thread: its forks may.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from roundtable.core.allocator import importing
from roundtable.core.machine.fork_server import ForkServer
from roundtable.core.machine.process_facts import die_with_parent

_RANK = "roundtable.cluster.train.rank"


def main() -> None:
    """`launch PARENT CONTROL FOLDER`: the silo's agent, a descriptor of its line, where ranks find it."""
    parent, control, folder = sys.argv[1:]
    die_with_parent(int(parent))
    with importing():
        import_module(_RANK)
    with socket.socket(fileno=int(control)) as line:
        ForkServer(line, partial(serve_rank, Path(folder))).serve()


def serve_rank(folder: Path) -> None:
    """What each fork does."""
    import_module(_RANK).main(folder)


if __name__ == "__main__":
    main()
