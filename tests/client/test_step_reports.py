"""What an agent reports on its steps, and what is over before anybody is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roundtable.client.agent import step_reports
from roundtable.client.agent.agent_observer import AgentObserver
from roundtable.client.agent.connection import Link
from roundtable.client.agent.step_reports import StepReporter
from roundtable.client.door.outgoing import ProgressFigures
from roundtable.client.step_key import StepKey
from roundtable.core.observability.released import public

STEP, OTHER = StepKey("a" * 12, 1, 1, "train"), StepKey("b" * 12, 1, 1, "evaluate")


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[Any]:
    # The moment is over as soon as the loop has nothing else to do.
    monkeypatch.setattr(step_reports, "_MOMENT_SECONDS", 0.0)
    return asyncio.Queue()


def reporter_to(outbox: asyncio.Queue[Any]) -> StepReporter:
    link = Link()
    link.attach(None, outbox)  # type: ignore[arg-type]
    return StepReporter(link, AgentObserver("alder"))


async def told(outbox: asyncio.Queue[Any]) -> list[tuple[str, str]]:
    """(phase, activity) of what was sent once a moment is over."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [
        (message.progress.step.phase, message.progress.activity)
        for message in iter(lambda: None if outbox.empty() else outbox.get_nowait(), None)
    ]


async def test_of_a_moment_the_newest_activity_of_each_step_is_told(outbox: asyncio.Queue[Any]) -> None:
    reporter = reporter_to(outbox)
    reporter.transferred(STEP, "downloading", 0, 4)
    reporter.report(OTHER, "evaluating")
    reporter.report(STEP, "training")
    assert outbox.empty()
    assert await told(outbox) == [("train", "training"), ("evaluate", "evaluating")]
    assert await told(outbox) == []
    reporter.report(STEP, "uploading")
    assert await told(outbox) == [("train", "uploading")]


async def test_a_step_that_is_over_within_a_moment_is_not_told_of(outbox: asyncio.Queue[Any]) -> None:
    reporter = reporter_to(outbox)
    reporter.report(STEP, "training")
    reporter.report(OTHER, "evaluating")
    reporter.forget(STEP)
    assert await told(outbox) == [("evaluate", "evaluating")]


async def test_figures_of_training_are_told_at_once(
    outbox: asyncio.Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reports, "_PROGRESS_SECONDS", 0.0)
    reporter = reporter_to(outbox)
    reporter.report(STEP, "training")
    seen = ProgressFigures(3, 10, 0.5, {"learning_rate": 0.1})
    reporter.report(STEP, "training", public(seen), seen)
    assert outbox.get_nowait().progress.done == 3
    assert await told(outbox) == [], "what it began with is older"
