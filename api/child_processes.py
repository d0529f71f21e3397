"""Child processes of this command line: started together, watched, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from roundtable.core.errors import ResourceError
from roundtable.core.machine.stop_signals import kill_group

_PATIENCE = 5.0
_TAIL = 8


@dataclass(frozen=True)
class Child:
    """A running `roundtable` command, and the file that holds its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL:])


class Children:
    """Starts `roundtable` commands; on leaving the block all of them are stopped, whatever happened."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Starts `roundtable ARGUMENTS`, its output in `NAME.log`."""
        log = self._logs / f"{name}.log"
        # Several processes on few cores: threads of their own would only get in each other's way.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "roundtable", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the terminal is for us; we then stop the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises ResourceError, with the end of its log, if a child has ended."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise ResourceError(
                    f"the process {child.name!r} ended with code {code}; "
                    f"the end of {child.log}:\n{child.tail()}"
                )

    def stop(self) -> None:
        """Asks all to stop, the youngest first; who has not after 5 s is killed with all that it started.

        Ctrl-C while it waits does not leave anything behind either: it only cuts the waiting short.
        """
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
        for child in reversed(self._children):
            try:
                child.process.wait(_PATIENCE)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                kill_group(child.process)
                child.process.wait()
        self._children.clear()
