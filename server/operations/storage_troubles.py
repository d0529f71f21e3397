"""What of a job cannot be stored for now: told to whoever asks for the job, to the log and to the alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from typing_extensions import override

from roundtable.core.errors import ResourceError, StorageError
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.incidents import storage_incident

log = logging.getLogger("roundtable.server.operations.storage_troubles")

_UPDATES = "no update can be taken"


class StorageTroubles:
    """The database, the disk and the bucket that one job waits for; `notify` wakes those who follow it.

    A trouble is noted under what it keeps from being done, however often that is tried, until it is done.
    """

    def __init__(
        self, job: str, name: str, alerts: Alerts, clock: Callable[[], float], notify: Callable[[], None]
    ) -> None:
        self._job = job
        self._name = name
        self._alerts = alerts
        self._clock = clock
        self._notify = notify
        self._found: dict[str, str] = {}

    @override
    def __str__(self) -> str:
        """The oldest one in words, "" for none."""
        return next(iter(self._found.values()), "")

    def note(self, what: str, error: Exception) -> None:
        """Something could not be done; alerts at the first time, and logs what was not logged last."""
        if what not in self._found:
            self._alerts.tell(storage_incident(str(error)), str(error), self._clock(), self._job, self._name)
        told = f"{what}: {error}; trying again"
        if self._found.get(what) != told:
            log.error("%s: %s", self._name, told, extra={"job": self._job})
        self._found[what] = told
        self._notify()

    def over(self, what: str) -> None:
        """It was done, or nobody tries it any more."""
        if self._found.pop(what, None) is not None:
            self._notify()

    @contextmanager
    def of_updates(self) -> Iterator[None]:
        """Notes what keeps the update that is taken within from being stored; once one is, it is over."""
        try:
            yield
        except (ResourceError, StorageError) as error:
            self.note(_UPDATES, error)
            raise
        self.over(_UPDATES)
