"""The page in a real browser, before a real coordinator with agents: what people see and what they click."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accessible import accessible
from page_world import page_world
from playwright.async_api import expect
from real_browser import BROWSER, opened
from scripted_agent import ScriptedAgent
from service import Operator

from roundtable.proto import agent_pb2
from roundtable.server import ServerConfig

HOSTILE = "<img src=x onerror=alert(1)>"
SPARE = "document.documentElement.clientWidth - document.documentElement.scrollWidth"

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium"),
    pytest.mark.timeout(600),
]


async def test_a_job_is_followed_paused_and_resumed_in_the_browser(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        page_world(settings()) as world,
        Operator(world.coordinator.port, certificates / "olga") as operator,
        opened(world, world.tokens["operator"]) as page,
    ):
        kept = '[keep]\nbest = true\n[stop]\nmetric = "loss"'
        job = await operator.submit(f"{kept}\n[cohort]\nsize = 2\nminimum = 2", rounds=3)
        # The overview shows it without being loaded again.
        await page.get_by_role("link", name=job.name, exact=True).first.click()
        await page.get_by_role("heading", level=1, name=job.name).wait_for()
        await page.get_by_role("button", name="Pause").click()
        await page.locator("dialog").get_by_role("button", name="Pause").click()
        await page.get_by_role("button", name="Resume").wait_for()
        assert (await operator.job(job.id)).job.status == "paused"
        await page.get_by_role("button", name="Resume").click()
        await page.locator("dialog").get_by_role("button", name="Resume").click()
        async with (
            ScriptedAgent(world.coordinator.port, certificates / "alder", ward=HOSTILE) as alder,
            ScriptedAgent(world.coordinator.port, certificates / "birch") as birch,
        ):
            work = [
                asyncio.create_task(agent.take_part(torch.full((4,), float(number))))
                for number, agent in enumerate((alder, birch), 1)
            ]
            await page.get_by_role("heading", level=1, name=f"{job.name} ✓ finished").wait_for()
            for task in work:
                task.cancel()
        async with (
            ScriptedAgent(world.coordinator.port, certificates / "alder", ward=HOSTILE),
            ScriptedAgent(world.coordinator.port, certificates / "birch") as birch,
        ):
            await operator.submit("seed = 5\n[cohort]\nsize = 2\nminimum = 2", request="refused")
            await birch.expect("withdraw")
            asked = await birch.expect("instruction")
            failure = {"step": asked.step, "kind": "refused", "detail": "not with our data"}
            await birch.say(failure=agent_pb2.Failure(**failure))
            await page.get_by_role("navigation").get_by_role("link", name="Silos").click()
            await page.get_by_role("cell", name="not with our data").wait_for()
            await page.go_back()
        await page.get_by_text("Where the newest model comes from").click()
        await page.get_by_role("rowheader", name="Submitted by").wait_for()
        async with page.expect_download() as kept:
            await page.get_by_role("button", name="Signed statement as JSON").click()
        signed = json.loads(await asyncio.to_thread(Path(await (await kept.value).path()).read_text))
        assert signed["purpose"] == "provenance"
        assert [each["round"] for each in signed["statement"]["rounds"]] == [1, 2, 3]
        await page.locator("figure.chart").first.wait_for()
        await page.get_by_text("round 3 is committed").first.wait_for()
        await expect(page.locator(".heat td.counted")).to_have_count(6)
        # Who opens the page finds the model that `roundtable job model` gives, and how it serves each silo.
        await page.get_by_role("rowheader", name="best: round 1, loss 1").wait_for()
        measured = page.get_by_role("region", name="What each silo measured")
        assert await measured.get_by_role("row").all_inner_texts() == [
            "Silo\tloss",
            "alder\t1",
            "birch\t1",
            "Mean\t1",
            "Spread\t0",
            "Worst tenth\t1",
        ]
        await page.get_by_role("region", name="Who is protected against whom").wait_for()
        before = page.viewport_size
        await page.set_viewport_size({"width": 390, "height": 800})
        await page.wait_for_function(f"{SPARE} >= 0")
        await page.set_viewport_size(before)
        # A stretch of rounds is asked for anew, and the whole again.
        await page.get_by_label("Rounds from").fill("3")
        async with page.expect_response("**/rounds?first=3&last=0") as closer:
            await page.get_by_role("button", name="Look closer").click()
        assert [each["round"] for each in (await (await closer.value).json())["rounds"]] == [3]
        await page.get_by_role("button", name="All rounds").click()
        await expect(page.get_by_label("Rounds from")).to_have_value("")
        await accessible(page)
        await page.get_by_role("navigation").get_by_role("link", name="Silos").click()
        # What a silo says of itself is shown as it wrote it.
        await page.get_by_role("cell", name=f"ward={HOSTILE}").wait_for()
        await accessible(page)
        # What is not today has its day.
        await operator.submit("[queue]\nstart = 2099-06-15T12:00:00Z", request="far")
        await page.get_by_role("navigation").get_by_role("link", name="Overview").click()
        await page.get_by_role("cell", name="turn about Jun 15, 2099").wait_for()


async def test_every_page_of_a_viewer_on_a_small_screen_and_after_a_restart(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    config = settings()
    small = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    async with (
        page_world(config) as world,
        Operator(world.coordinator.port, certificates / "olga") as operator,
    ):
        first = await operator.submit("", request="one")
        await operator.submit("seed = 5\n[cohort]\nsize = 1", request="two")
        await operator.submit("seed = 6\n[cohort]\nsize = 1", request="three")
        async with opened(world, world.tokens["viewer"], "/jobs", **small) as page:
            await page.get_by_role("link", name=first.name, exact=True).first.wait_for()
            for name in ("Overview", "Jobs", "Analyses", "Silos", "Privacy", "Compare", "Audit"):
                await page.get_by_role("navigation").get_by_role("link", name=name).click()
                await page.get_by_role("heading", level=1).wait_for()
                assert await page.evaluate(SPARE) >= 0, name
                await accessible(page)
            await page.get_by_text("Only operators and administrators").wait_for()
            await page.get_by_role("navigation").get_by_role("link", name="Compare").click()
            boxes = page.get_by_role("group", name="Jobs").get_by_role("checkbox")
            await expect(boxes).to_have_count(3)
            for box in await boxes.all():
                await box.check()
            await page.get_by_role("rowheader", name="cohort.size").wait_for()
            heads = page.get_by_role("region", name="Side by side").get_by_role("columnheader")
            await expect(heads).to_have_count(4)
            # A lane for the size of the cohort and one for the seed; three jobs go through them.
            await expect(page.locator("svg.parallel path:not(.grid)")).to_have_count(3)
            await page.get_by_label("Jobs that differ in their seed alone").check()
            await expect(heads).to_have_count(3)
            await accessible(page)
            await page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
            await page.get_by_role("link", name=first.name, exact=True).first.click()
            await page.get_by_role("heading", level=1, name=first.name).wait_for()
            assert await page.get_by_role("button", name="Cancel").count() == 0
            await page.get_by_role("button", name="Sign out").click()
            await page.get_by_label("Token").wait_for()


async def test_an_open_page_goes_on_after_a_restart_and_ends_with_its_token(
    settings: Callable[..., ServerConfig],
) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = settings(listen=f"127.0.0.1:{port}")
    async with page_world(config) as world:
        opening = opened(world, world.tokens["operator"])
        page = await opening.__aenter__()
    await page.get_by_role("status").filter(has_text="does not answer").first.wait_for()
    async with page_world(config) as world:
        await page.get_by_role("status").filter(has_text="live").first.wait_for()
        admin = world.browser()
        await admin.sign_in(world.tokens["admin"])
        assert (await admin.change("revoke-token", name="t-operator")).status == 200
        await page.get_by_text("Your session has ended").wait_for()
        await opening.__aexit__(None, None, None)
