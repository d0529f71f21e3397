"""Blocking work on files beside the event loop, when whoever wanted it goes."""

from __future__ import annotations

import asyncio
import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from roundtable.server.services.transfer import Turnstile, in_thread


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


async def test_a_few_pass_at_a_time_and_one_that_takes_long_gives_its_place_back() -> None:
    turnstile, inside, go = Turnstile(places=2, seconds=0.05), list[int](), asyncio.Event()

    async def upload(number: int) -> None:
        async with turnstile.passing():
            inside.append(number)
            await go.wait()

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(upload(number))
        await asyncio.sleep(0)
        assert inside == [0, 1]
        # They do not end, and the others get in all the same: two after each moment.
        while len(inside) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        go.set()
    # Every place is free again, and only once.
    assert turnstile.free == 2


async def test_a_place_is_given_back_by_one_that_is_cut_off() -> None:
    turnstile = Turnstile(places=1, seconds=600.0)
    async with turnstile.passing():
        waiting = asyncio.create_task(turnstile.passing().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert turnstile.free == 0
    assert turnstile.free == 1
