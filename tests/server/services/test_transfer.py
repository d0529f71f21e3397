"""Blocking work on files beside the event loop, when whoever wanted it goes."""

from __future__ import annotations

import asyncio
import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from roundtable.server.services.transfer import in_thread


async def test_work_that_fails_after_nobody_wants_it_is_not_logged_by_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, go = Event(), Event()

    def work() -> None:
        begun.set()
        go.wait()
        raise OSError("the bucket is away")

    with ThreadPoolExecutor(1) as threads, caplog.at_level(logging.ERROR):
        task = asyncio.create_task(in_thread(threads, work))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "the thread still has the file"
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        del task
        gc.collect()
    assert caplog.messages == []
