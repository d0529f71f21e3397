"""What the agent says of a step while it works on it, to the coordinator and to those who watch the agent."""

from __future__ import annotations

import logging
import math
import time

from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import Figures
from roundtable.proto import agent_pb2, common_pb2

_log = logging.getLogger("roundtable.agent")
_PROGRESS_SECONDS = 0.5
_EXACT = ("step", "steps", "memory_bytes")


class StepReporter:
    """Tells of progress, seldom enough that the control stream stays small."""

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
        """`done` of `total`, in examples or bytes. What is `quiet` stays on the agent's own page."""
        now = time.monotonic()
        self._observer.doing(step, activity)
        if figures is not None:
            self._observer.stepped(loss, figures)
        if quiet or (done and now - self._told.get(step, 0.0) < _PROGRESS_SECONDS):
            return
        self._told[step] = now
        progress = agent_pb2.Progress(
            step=step.message(), done=done, total=total, loss=loss, activity=activity
        )
        if figures is not None:
            progress.figures.CopyFrom(message_of(figures))
        self._link.send(agent_pb2.FromAgent(progress=progress))

    def trouble(self, step: StepKey, kind: str, detail: str, action: str) -> None:
        """Tells of an incident that the silo deals with itself."""
        _log.warning("%s: %s (%s); %s", step, detail, kind, action)
        trouble = agent_pb2.Trouble(step=step.message(), kind=kind, detail=detail, action=action)
        self._link.send(agent_pb2.FromAgent(trouble=trouble))

    def forget(self, step: StepKey) -> None:
        """The step is over."""
        self._told.pop(step, None)


def message_of(figures: Figures) -> common_pb2.StepFigures:
    """Figures by name as they travel."""
    values = {name: int(value) if name in _EXACT else value for name, value in figures.items()}
    return common_pb2.StepFigures(**values)  # type: ignore[arg-type]
