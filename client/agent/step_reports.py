"""Reports on a step while it is worked on, to the coordinator and to the agent's own page of metrics."""

from __future__ import annotations

import asyncio
import logging
import time

from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.door import outgoing
from roundtable.client.door.outgoing import ProgressFigures
from roundtable.client.step_key import StepKey, about
from roundtable.core.observability.released import Told, public
from roundtable.core.observability.training_setup import TrainingSetup

_log = logging.getLogger("roundtable.agent")
_PROGRESS_SECONDS = 0.5
_MOMENT_SECONDS = 0.1
"""So long what a step does is not told yet: what is over by then nobody sees, and a message costs both sides
more than a short step's own work."""
_BEGINS = public(ProgressFigures())


class StepReporter:
    """Reports progress, seldom enough that the control stream stays small. All is asked on the event loop."""

    def __init__(self, link: Link, observer: AgentObserver) -> None:
        self._link = link
        self._observer = observer
        self._told: dict[StepKey, float] = {}
        self._untold: dict[StepKey, tuple[str, Told[ProgressFigures]]] = {}
        self._moment: asyncio.TimerHandle | None = None

    def report(
        self,
        step: StepKey,
        activity: str,
        told: Told[ProgressFigures] | None = _BEGINS,
        seen: ProgressFigures | None = None,
    ) -> None:
        """Shows `seen` on the agent's own page, and sends what of it may be told, if anything.

        A training step's figures go at once. The rest is told within a moment, if by then it is still so.
        """
        now = time.monotonic()
        self._observer.doing(step, activity)
        if seen is not None and seen.figures is not None:
            self._observer.stepped(seen.loss, seen.figures)
        if told is None or (told.value.done and now - self._told.get(step, 0.0) < _PROGRESS_SECONDS):
            return
        self._told[step] = now
        if told.value.figures is not None:
            self._untold.pop(step, None)
            self._link.send(outgoing.progress(step, activity, told))
            return
        self._untold[step] = activity, told
        if self._moment is None:
            self._moment = asyncio.get_running_loop().call_later(_MOMENT_SECONDS, self._tell)

    def transferred(self, step: StepKey, activity: str, done: int, total: int) -> None:
        """Reports how many bytes of an artifact have gone: that follows from the model's size alone."""
        self.report(step, activity, public(ProgressFigures(done, total)))

    def set_up(self, step: StepKey, setup: TrainingSetup) -> None:
        """Tells what a step is trained on."""
        self._link.send(outgoing.accepted(step, setup=setup))

    def trouble(self, step: StepKey, kind: str, detail: str, action: str) -> None:
        """Reports an incident that the silo deals with itself."""
        _log.warning("%s: %s (%s); %s", step, detail, kind, action, extra=about(step))
        self._link.send(outgoing.trouble(step, kind, detail, action))

    def forget(self, step: StepKey) -> None:
        """Forgets a step that is over."""
        self._told.pop(step, None)
        self._untold.pop(step, None)

    def _tell(self) -> None:
        self._moment = None
        for step, (activity, told) in self._untold.items():
            self._link.send(outgoing.progress(step, activity, told))
        self._untold.clear()
