"""Sessions of the page in PostgreSQL: the coordinator that takes over finds them, and how they end."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_world import page_world
from postgresql import PostgreSQL

from roundtable.server import ServerConfig


@pytest.fixture
def database() -> Iterator[str]:
    server = PostgreSQL()
    yield server.fresh()
    server.remove()


async def test_who_is_signed_in_stays_so_at_the_coordinator_that_takes_over(
    settings: Callable[..., ServerConfig], database: str, tmp_path: Path
) -> None:
    first = settings().model_copy(update={"database": database})
    standby = first.model_copy(update={"state": str(tmp_path / "standby")})
    async with page_world(first) as world:
        viewer, admin = world.browser(), world.browser()
        await viewer.sign_in(world.tokens["viewer"])
        await admin.sign_in(world.tokens["admin"])
    # It finds the tokens that were made.
    await asyncio.to_thread(shutil.copytree, first.state, standby.state)
    async with page_world(standby) as world:
        viewer.port = admin.port = world.dashboard.port
        assert (await viewer.ask("GET", "/api/session")).values["role"] == "viewer"
        _, writer = await viewer.listen("/api/live?topics=overview")
        writer.close()
        # What needs the token against forged requests, which follows from the session's secret, goes on too.
        assert (await admin.change("revoke-token", name="t-viewer")).status == 200
        assert (await viewer.ask("GET", "/api/session")).status == 401
        assert (await admin.ask("GET", "/api/session")).status == 200
