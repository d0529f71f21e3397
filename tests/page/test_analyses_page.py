"""The answers of an analysis on the page: asked of real silos, shown in a real browser."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accessible import accessible
from federation import agents, silo
from page_world import page_world
from playwright.async_api import expect
from real_browser import BROWSER, opened
from service import Operator

from roundtable.cli.main import run as run_command
from roundtable.operator import OperatorClient
from roundtable.server import ServerConfig

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium"),
    pytest.mark.timeout(600),
]

SURVEY = """
table = "people"
secure_aggregation = false

[columns.age]
least = 0
most = 120

[columns.years]
least = 0
most = 50

[columns.one]
least = 0
most = 2

[columns.died]
kind = "category"
values = ["no", "yes"]

[columns."<b>ward"]
kind = "category"
values = ["north", "south"]

[[questions]]
ask = "histogram"
column = "age"
bins = 6

[[questions]]
ask = "survival"
time = "years"
event = "died"
by = "<b>ward"
every = 10

[[questions]]
ask = "logistic"
outcome = "died"
on = ["age", "years"]

[[questions]]
ask = "linear"
outcome = "years"
on = ["one"]
"""


def write(folder: Path, name: str, first: int) -> None:
    rows = []
    for each in range(first, first + 480):
        died, ward = "yes" if each % 3 else "no", ("north", "south")[each % 2]
        rows.append(f"{20 + (7 * each) % 70},{1 + (3 * each) % 40},{died},{ward},1")
    (folder / f"{name}.csv").write_text("\n".join(["age,years,died,<b>ward,one", *rows]) + "\n")


def wait_for_silos(address: str, credentials: Path) -> None:
    """Until both are connected."""
    with OperatorClient(address, credentials) as operator:
        while sum(client.online for client in operator.clients()) < 2:
            time.sleep(0.01)


async def test_answers_are_tables_and_pictures_for_those_who_may_read_them(
    settings: Callable[..., ServerConfig],
    certificates: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "survey.toml").write_text(SURVEY)
    config = settings()
    async with (
        page_world(config) as world,
        Operator(world.coordinator.port, certificates / "olga") as operator,
    ):
        training = await operator.submit("", request="training")
        address = f"127.0.0.1:{world.coordinator.port}"
        both = []
        for number, name in enumerate(("alder", "birch")):
            write(tmp_path, name, 1000 * number)
            table: dict[str, Any] = {"people": {"file": f"{name}.csv"}}
            made = silo((address, tmp_path), name)
            made = replace(made, credentials=certificates / name, tasks={"analysis": "analysis"}, data=table)
            both.append(made)
        async with agents(*both):
            await asyncio.to_thread(wait_for_silos, address, certificates / "olga")
            asked = ["analyse", str(tmp_path / "survey.toml"), "--coordinator", address, "--json"]
            credentials = ["--credentials", str(certificates / "olga"), "--set", "cohort=2"]
            await asyncio.to_thread(run_command, [*asked, *credentials])
        said = capsys.readouterr()
        assert said.out, said.err
        found = json.loads(said.out)
        assert [each["answered"] for each in found["answers"]] == [True, True, True, False], found
        async with opened(world, world.tokens["operator"], "/analyses", ("400", "404")) as page:
            await page.get_by_role("link", name="people", exact=True).click()
            # Texts of the study are texts; what could not be answered says why.
            await page.get_by_role("columnheader", name="<b>ward").wait_for()
            await page.get_by_text("Not answered: the sums are singular").wait_for()
            await expect(page.locator("svg.drawn")).to_have_count(3)
            rows = found["answers"][0]["values"]["counts"]
            assert sum(sum(each) for each in rows.values()) == 960
            await accessible(page)
            job = page.url.rpartition("/")[2]
            for wanted, said in ((training.id, "trains"), ("nothing", "no job")):
                refused = await page.evaluate(
                    "(id) => fetch('/api/analysis/' + id).then((answer) => answer.json())", wanted
                )
                assert said in refused["error"]
        viewer = world.browser()
        await viewer.sign_in(world.tokens["viewer"])
        assert (await viewer.ask("GET", f"/api/analysis/{job}")).status == 403
