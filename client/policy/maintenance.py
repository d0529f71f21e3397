"""Whether a person has drained the silo: it finishes the rounds that it was asked for, and takes no new one.

    maintenance.json    in the state folder: written by `roundtable client drain`, deleted by `... resume`

The running agent looks at the file; it holds over restarts, of the agent and of the machine.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from roundtable.client.durable_files import explained, replace_synced, sync
from roundtable.core.errors import ConfigError, ResourceError

_log = logging.getLogger("roundtable.agent")
_LOOK_SECONDS = 0.5
MOST_REASON = 200


@dataclass(frozen=True)
class Drained:
    """Why, by whom (an account of this machine) and since when (Unix time) the silo takes no new rounds."""

    reason: str
    by: str
    since: float


class Maintenance:
    """The file, for the command that writes it and for the agent that looks at it."""

    def __init__(self, state: Path) -> None:
        self._path = state / "maintenance.json"
        self._looked = -1
        self._now: Drained | None = None

    def drain(self, reason: str) -> Drained | None:
        """Takes no new rounds from now on; returns what held before.

        ConfigError for a reason that is too long or not printable: operators are shown it.
        """
        if len(reason) > MOST_REASON or not reason.isprintable():
            raise ConfigError(f"--reason: at most {MOST_REASON} printable characters, on one line")
        before = self.now()
        if before is None or before.reason != reason:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            drained = Drained(reason, getpass.getuser(), time.time())
            replace_synced(self._path, [json.dumps(asdict(drained)).encode()])
        return before

    def resume(self) -> Drained | None:
        """Takes part again; returns what held before."""
        try:
            before = self.now()
        except ResourceError:
            before = Drained("", "", 0.0)
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise explained(error, self._path) from error
        if before is not None:
            sync(self._path.parent)
        return before

    def now(self) -> Drained | None:
        """What holds now. ResourceError for a file that cannot be read: whether to take part is not known."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._looked:
                self._now, self._looked = Drained(**json.loads(self._path.read_bytes())), changed
        except FileNotFoundError:
            self._now, self._looked = None, -1
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ResourceError(
                f"{self._path} cannot be read: {error}; `roundtable client resume` deletes it"
            ) from error
        return self._now

    async def watch(self, changed: Callable[[Drained | None], None]) -> None:
        """Calls `changed` with what holds at first, if the silo is drained, and whenever that changes."""
        told: Drained | None = None
        complaint = ""
        while True:
            try:
                found = self.now()
            except ResourceError as error:
                # A file that is there says that somebody wanted maintenance.
                found = Drained("its maintenance file cannot be read", "", 0.0)
                if str(error) != complaint:
                    complaint = str(error)
                    _log.error("no new round is taken: %s", error)
            if found != told:
                told = found
                changed(found)
            await asyncio.sleep(_LOOK_SECONDS)
