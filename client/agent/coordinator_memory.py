"""Remembers the silo's coordinator, and how far each job had come, in a file that survives restarts.

A coordinator whose database was restored from an old backup knows of less than its silos do. Were it to go
on, it would ask for steps that were answered already, in another course of events. So the silo says what it
has seen, and the coordinator refuses it; after a restore that was meant, it has another identity, and the
silo forgets what belongs to the old one.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from roundtable.client.door.incoming import Message, StepInstruction, Withdrawal
from roundtable.client.durable_files import write_file
from roundtable.core.errors import ResourceError

_log = logging.getLogger("roundtable.agent")
_JOBS_KEPT = 200
MEMORY_FILE = "coordinator.json"


class CoordinatorMemory:
    """A small file in the agent's state folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._coordinator = ""
        self._seen: dict[str, tuple[int, int]] = {}
        try:
            values = json.loads(path.read_bytes())
            self._coordinator = str(values["coordinator"])
            self._seen = {job: (int(round), int(attempt)) for job, (round, attempt) in values["seen"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("what is remembered of the coordinator cannot be read and is dropped: %s", error)

    @property
    def coordinator(self) -> str:
        """The identity of the coordinator that the silo worked for last; empty before the first."""
        return self._coordinator

    @property
    def seen(self) -> dict[str, tuple[int, int]]:
        """The newest (round, attempt) that the silo was asked for, by job."""
        return dict(self._seen)

    def meet(self, coordinator: str) -> list[Withdrawal]:
        """Remembers this coordinator; returns messages that end the jobs of another one before it."""
        if coordinator == self._coordinator:
            return []
        old, self._coordinator, self._seen = list(self._seen), coordinator, {}
        self._write()
        reason = "the coordinator's database was replaced"
        return [Withdrawal(job, None, reason) for job in old]

    def note(self, message: Message) -> None:
        """Remembers the step that the silo is asked for, before it begins."""
        if not isinstance(message, StepInstruction):
            return
        step = message.step
        if (step.round, step.attempt) > self._seen.get(step.job, (0, 0)):
            self._seen[step.job] = (step.round, step.attempt)
            for job in list(self._seen)[:-_JOBS_KEPT]:
                del self._seen[job]
            self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        text = json.dumps({"coordinator": self._coordinator, "seen": self._seen})
        try:
            write_file(partial, [text.encode()])
            partial.replace(self._path)
        except (ResourceError, OSError) as error:
            # Work goes on: only that an old backup was restored would not be noticed.
            _log.warning("what was asked for last cannot be kept: %s", error)
