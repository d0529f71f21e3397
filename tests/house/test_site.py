"""The site: its reference says what the code says, each page has its place, the check finds faults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import pytest
from handbook import table_reference
from handbook.build_site import build
from handbook.built_site import faults_of
from handbook.code_reference import metrics_of
from handbook.notebook_pages import NOTEBOOKS, executed, notebook_page
from handbook.reference_pages import PAGES
from handbook.site_sources import DOCS, FROM_THE_TOP, navigation
from handbook.site_versions import LATEST, LISTED, add, add_release, releases
from playwright.sync_api import Browser, expect, sync_playwright
from pydantic import TypeAdapter

from roundtable.client.policy.config import AgentTable
from roundtable.client.policy.health_table import HealthTable
from roundtable.client.policy.policy_table import TaskTable
from roundtable.core.algorithms.known_algorithms import BUILTINS, FACTORED
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.core.tables.table_description import ColumnTable
from roundtable.relay.config import RelayTable
from roundtable.server.config import RootTable, ServerConfig

FILES = (JobConfig, AgentTable, ServerConfig, RelayTable, TaskTable, HealthTable, RootTable, ColumnTable)
CHOICES = (NoPrivacy, *get_args(Private), *(each.Table for each in (*BUILTINS.values(), *FACTORED.values())))
QUESTIONS = get_args(get_args(AnyQuestion)[0])
KINDS = ["Tutorials", "How to", "Reference", "Explanations"]


def every_key() -> Iterator[table_reference.Key]:
    for model in (*FILES, *CHOICES, *QUESTIONS):
        for path, table in table_reference.tables(model):
            yield from table_reference.keys(table, path)


def test_every_key_says_what_it_is_for_and_shows_a_value_that_is_accepted() -> None:
    for key in every_key():
        where = f"{key.model.__name__}.{key.name}"
        assert key.info.description, f"{where} has no description"
        # A key that is new may have no example yet; what is shown is accepted.
        if key.example is None:
            continue
        field = Annotated[(key.info.annotation, *key.info.metadata, "of a field")]  # type: ignore[valid-type]
        TypeAdapter(field).validate_python(key.example)


def test_the_pages_of_files_hold_every_key() -> None:
    job = "\n".join(PAGES["job-file.md"]())
    for model in (JobConfig, *CHOICES):
        for path, table in table_reference.tables(model):
            for key in table_reference.keys(table, path):
                assert f"| `{key.name}` |" in job, f"{table.__name__}.{key.name}"


def test_metrics_are_read_out_of_the_code_or_refused() -> None:
    names = [line.split("`")[1] for line in PAGES["metrics.md"]() if line.startswith("| `")]
    assert {"roundtable_updates_refused_total", "roundtable_agent_step_loss", "roundtable_jobs"} <= set(names)
    with pytest.raises(ValueError, match="cannot be read"):
        list(metrics_of("def page(families):\n    families.gauge(made_up(), 'text', {})\n"))


def test_every_page_has_one_place_under_one_of_the_four_kinds() -> None:
    places = navigation()
    committed = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    pages = Counter(page for _, page in places)
    made = {f"reference/{name}" for name in PAGES} | {f"notebooks/{each.stem}.md" for each in NOTEBOOKS}
    assert set(pages) == committed | set(FROM_THE_TOP.values()) | made
    assert max(pages.values()) == 1
    assert [section for section in dict.fromkeys(section for section, _ in places) if section in KINDS] == [
        kind for kind in KINDS if kind in {section for section, _ in places}
    ]
    for section, page in places:
        folder = page.split("/")[0] if "/" in page else ""
        assert {
            "tutorials": "Tutorials",
            "notebooks": "Tutorials",
            "how-to": "How to",
            "reference": "Reference",
        }.get(folder, section) == section


def test_the_check_finds_each_kind_of_fault(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="there.html#no">x</a><a href="gone.html">x</a><img src="gone.png">'
        '<script src="//cdn/x.js"></script>'
    )
    (tmp_path / "there.html").write_text('<h1 id="yes">x</h1>')
    (tmp_path / "alone.html").write_text("<p>nobody knows</p>")
    (tmp_path / "look.css").write_text("a { background: url(https://cdn/x.png) }")
    assert faults_of(tmp_path) == [
        "index.html loads //cdn/x.js from elsewhere",
        "index.html leads to there.html#no: no such anchor",
        "index.html leads to gone.html, which is not there",
        "index.html leads to gone.png, which is not there",
        "alone.html: nothing leads to it from the start",
        "look.css loads https://cdn/x.png from elsewhere",
    ]


@pytest.mark.parametrize(
    "notebook",
    [
        NOTEBOOKS[0],
        *(pytest.param(notebook, marks=pytest.mark.slow) for notebook in NOTEBOOKS[1:]),
    ],
    ids=[notebook.stem for notebook in NOTEBOOKS],
)
def test_a_notebook_runs_and_is_stored_without_what_it_shows(notebook: Path) -> None:
    stored = json.loads(notebook.read_text())
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
    assert re.match(r"# .+\n\nFor ", "".join(stored["cells"][0]["source"])), "it begins with who needs it"
    pytest.importorskip("nbclient", reason="the extra docs is not installed")
    shown = [each for cell in executed(notebook).cells for each in cell.get("outputs", ())]
    assert len(shown) > 3
    assert [each for each in shown if each.output_type == "error" or each.get("name") == "stderr"] == []
    page = notebook_page(notebook)
    assert page.count("\n```python\n") == len(code)
    for each in shown:
        assert each.get("text", "").rstrip() in page


# A tree that builds its site as ours does: one page that says which release it is of, one that came later.
BUILDER = """
import json, pathlib, sys
import release
site = pathlib.Path("build/site")
(site / "how-to").mkdir(parents=True)
head = '<html><head></head><body><header class="md-header__topic">Site</header>'
for page in ["index.html", *release.LATER]:
    (site / page).write_text(head + release.NAME)
"""


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Releases 0.2.0 and 0.10.0 of a project, and a tag that marks none."""
    tree = tmp_path / "project"
    (tree / "tools" / "handbook").mkdir(parents=True)
    (tree / "tools" / "tree.py").write_text(
        "from pathlib import Path; Path('build/tree').mkdir(parents=True)"
    )
    (tree / "tools" / "handbook" / "build_site.py").write_text(BUILDER)

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    git("init")
    for version, later in (("0.2.0", []), ("0.10.0", ["how-to/new.html"])):
        release = f"NAME, LATER = 'of {version}', {later}"
        (tree / "tools" / "handbook" / "release.py").write_text(release)
        git("add", ".")
        git("commit", "-m", version)
        git("tag", f"v{version}")
    git("tag", "vintage")
    return tree


def test_releases_stand_side_by_side_and_lead_to_the_same_page_without_a_network(
    history: Path, tmp_path: Path, browser: Browser
) -> None:
    folder = tmp_path / "versions"
    assert releases(history) == ["0.10.0", "0.2.0"]
    for version in ("0.2.0", "0.10.0", "0.2.0"):
        add_release(version, folder, history)
    ours = tmp_path / "site"
    (ours / "how-to").mkdir(parents=True)
    for name in ("index.html", "how-to/new.html"):
        (ours / name).write_text('<html><head></head><body><header class="md-header__topic">Site</header>')
    add(ours, LATEST, folder)
    with pytest.raises(
        SystemExit, match=r"no tag v0\.3\.0: the releases of this history are 0\.10\.0, 0\.2\.0"
    ):
        add_release("0.3.0", folder, history)
    worktrees = subprocess.run(
        ["git", "worktree", "list"], cwd=history, capture_output=True, text=True, check=True
    )
    assert len(worktrees.stdout.splitlines()) == 1
    assert [each["version"] for each in json.loads((folder / LISTED).read_text())] == [
        "latest",
        "0.10.0",
        "0.2.0",
    ]
    page = browser.new_page()
    page.goto((folder / "index.html").as_uri())
    page.wait_for_url("**/0.10.0/index.html")
    page.goto((folder / "0.10.0" / "how-to" / "new.html").as_uri())
    expect(page.get_by_role("button", name="shown is 0.10.0")).to_be_visible()
    page.get_by_role("link", name="latest").click()
    page.wait_for_url("**/latest/how-to/new.html")
    page.get_by_role("link", name="0.2.0").click()
    page.wait_for_url("**/0.2.0/index.html")
    expect(page.get_by_text("of 0.2.0")).to_be_visible()


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A real one; skips where there is none."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site, in which the check has found no fault."""
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    return build()


def test_the_site_is_built_without_a_fault(site: Path) -> None:
    assert (site / "index.html").is_file()


def test_the_site_is_searched_and_its_versions_chosen_without_a_network(
    site: Path, tmp_path: Path, browser: Browser
) -> None:
    add(site, "0.1.0", tmp_path)
    add(site, LATEST, tmp_path)
    asked: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / LATEST / "how-to" / "upgrade.html").as_uri())
    page.get_by_role("button", name="Search").first.click()
    page.get_by_placeholder("Search").fill("trimmed mean")
    page.get_by_text("Groups and a robust rule").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="shown is latest").focus()
    page.get_by_role("link", name="0.1.0").click()
    page.wait_for_url("**/0.1.0/how-to/upgrade.html")
    page.set_viewport_size({"width": 380, "height": 700})
    for notebook in NOTEBOOKS:
        page.goto((tmp_path / LATEST / "notebooks" / f"{notebook.stem}.html").as_uri())
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 380, f"{notebook.stem} is pushed wide by what a cell shows"
    assert [address for address in asked if not address.startswith("file:") and "data:" not in address] == []
