"""Whether a page is within reach of a keyboard and a screen reader."""

from __future__ import annotations

from importlib.resources import files

from playwright.async_api import Page


async def accessible(page: Page) -> None:
    """Fails with everything that axe finds."""
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    session = await page.context.new_cdp_session(page)
    # By the debugger, which the content security policy does not bind.
    await session.send("Runtime.evaluate", {"expression": axe})
    run = (
        "axe.run().then(found => JSON.stringify(found.violations.map(v => [v.id, v.nodes.map(n => n.html)])))"
    )
    found = await session.send("Runtime.evaluate", {"expression": run, "awaitPromise": True})
    assert found["result"]["value"] == "[]"
