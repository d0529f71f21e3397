"""Reports on a step while it is worked on, to the coordinator and to the agent's own page of metrics."""

from __future__ import annotations

import logging
import math
import time

from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.door import outgoing
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import Figures

_log = logging.getLogger("roundtable.agent")
_PROGRESS_SECONDS = 0.5


class StepReporter:
    """Reports progress, seldom enough that the control stream stays small."""

    def __init__(self, link: Link, observer: AgentObserver) -> None:
        self._link = link
        self._observer = observer
        self._told: dict[StepKey, float] = {}

    def report(
        self,
        step: StepKey,
        activity: str,
        done: int,
        total: int,
        loss: float = math.nan,
        figures: Figures | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """Reports `done` of `total`, in examples or bytes; a `quiet` report stays on the agent's own page."""
        now = time.monotonic()
        self._observer.doing(step, activity)
        if figures is not None:
            self._observer.stepped(loss, figures)
        if quiet or (done and now - self._told.get(step, 0.0) < _PROGRESS_SECONDS):
            return
        self._told[step] = now
        self._link.send(outgoing.progress(step, activity, done, total, loss, figures))

    def trouble(self, step: StepKey, kind: str, detail: str, action: str) -> None:
        """Reports an incident that the silo deals with itself."""
        _log.warning("%s: %s (%s); %s", step, detail, kind, action)
        self._link.send(outgoing.trouble(step, kind, detail, action))

    def forget(self, step: StepKey) -> None:
        """Forgets a step that is over."""
        self._told.pop(step, None)
