"""The page in a real browser, signed in."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from page_world import PageWorld
from playwright.async_api import Page, async_playwright

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 60_000.0


@asynccontextmanager
async def opened(
    world: PageWorld, token: str, path: str = "/", refusals: Sequence[str] = (), **device: Any
) -> AsyncIterator[Page]:
    """The page after signing in. Any error of the browser, and any request elsewhere, fails the test.

    `refusals`: words of errors in the console that the test means to cause.
    """
    wrong: list[str] = []
    origin = f"https://localhost:{world.dashboard.port}"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--ignore-certificate-errors"]
        )
        context = await browser.new_context(**device)
        context.set_default_timeout(PATIENCE)
        page = await context.new_page()
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: wrong.append(f"a script has run: {dialog.message}"))
        page.on("request", lambda sent: wrong.append(sent.url) if not sent.url.startswith(origin) else None)
        await page.goto(f"{origin}{path}")
        await page.get_by_label("Token").fill(token)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("status").filter(has_text="live").first.wait_for()
        yield page
        await browser.close()
    # The answer to a session that is over is an error in the console, and meant to be.
    meant = ("401", "ERR_", "blob:", *refusals)
    assert [text for text in wrong if not any(each in text for each in meant)] == []
