"""Work beside a job's driver, when the driver ends before it."""

from __future__ import annotations

import logging

import pytest

from roundtable.engine import messages as m
from roundtable.server.jobs.background import BackgroundTasks
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.store.database import LeaseLost


async def test_work_whose_driver_has_ended_is_no_error_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    inbox, tasks = JobInbox(), BackgroundTasks("j")
    with caplog.at_level(logging.INFO):
        told = tasks.spawn(inbox.tell(m.Start()))
        inbox.abandon(await inbox.arrivals())
        with pytest.raises(Exception, match="begins anew"):
            await told
        deposed = tasks.spawn(_raise(LeaseLost("another coordinator has taken the place of this one")))
        with pytest.raises(LeaseLost):
            await deposed
        broken = tasks.spawn(_raise(ValueError("a mistake of ours")))
        with pytest.raises(ValueError, match="a mistake of ours"):
            await broken
    said = [record.levelname for record in caplog.records if record.name.endswith("background")]
    assert said == ["INFO", "INFO", "ERROR"]


async def _raise(error: Exception) -> None:
    raise error
