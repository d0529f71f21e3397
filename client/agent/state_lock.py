"""Locks a state folder, so that it serves one agent only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roundtable.core.errors import ResourceError
from roundtable.core.machine.file_locks import lock_file


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the system releases it when the process ends, however it ends.

    Raises ResourceError, naming the holder's process, while another agent has it, and where the
    folder cannot be written.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("a+")
    except OSError as error:
        raise ResourceError(
            f"the state folder {folder} cannot be used: {error.strerror}; set state in agent.toml"
        ) from error
    with file:
        try:
            lock_file(file.fileno())
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ResourceError(
                f"the state folder {folder} is in use by another agent (process {holder}); "
                "stop that one, or give this one a state folder of its own"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
