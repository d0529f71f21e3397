"""Every tutorial, typed from its first line to its last, as a reader would.

Blocks are told apart by their titles: the name of a file; "... terminal" for what runs in the background;
"exit code 2" for a command that fails. A `text` block behind a command is what that shows, with …
for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright
from processes import free_port
from real_browser import BROWSER

from roundtable.cli.main import run
from roundtable.client.policy.config import load_agent_config
from roundtable.core.config import load_job
from roundtable.engine import make_plan
from roundtable.server.config import load_server_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
SLOW = {
    "three-silos": "a coordinator and three agents; the demonstration, which does the same, is in every run",
    "fine-tune-llm": "the template's own test, which trains the same, is in every run",
}
TUTORIALS = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
    for page in sorted((DOCS / "tutorials").glob("*.md"))
]
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PORTS = (7443, 7445)


class Reader:
    """Somebody who types a tutorial into an empty folder."""

    def __init__(
        self, folder: Path, patched: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self.patched = patched
        self.capture = capture
        self.shown = ""
        self.running: list[subprocess.Popen[bytes]] = []
        self.seen: Page | None = None
        self.stack = ExitStack()
        self.ports = {str(port): str(free_port()) for port in PORTS}
        patched.setenv("PYTHONPATH", "")

    def follow(self, page: Path) -> int:
        """How many lines of commands were typed."""
        typed = 0
        for language, title, text in BLOCK.findall(page.read_text()):
            for port, free in self.ports.items():
                text = text.replace(f":{port}", f":{free}")
            if language == "text":
                self.compare(text)
            elif language == "sh" and title.endswith("terminal"):
                self.start(text.strip())
            elif language == "sh":
                lines = text.strip().splitlines()
                self.shown = "".join(self.type(line, 2 if title == "exit code 2" else 0) for line in lines)
                typed += len(lines)
            elif title:
                (self.folder / title).write_text(text)
        return typed

    def type(self, line: str, expected: int) -> str:
        """What a command shows; it must end with the expected exit code."""
        words = shlex.split(line)
        if words[0] == "pip":
            return ""
        if words[0] == "cd":
            self.folder = self.folder / words[1]
            self.patched.chdir(self.folder)
            return ""
        if words[0] == "export":
            for each in words[1:]:
                self.patched.setenv(*each.split("=", 1))
            return ""
        if words[0] == "roundtable":
            if words[1] in ("simulate", "sweep"):
                # The same bits as by processes, whose start would take most of the time.
                words += ["--set", "simulation.backend=sequential"]
            self.capture.readouterr()
            code = run(words[1:])
            out, err = self.capture.readouterr()
        else:
            command = line.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, check=False
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        assert code == expected, f"{line}\n{out}\n{err}"
        if words[:2] == ["roundtable", "page"]:
            self.open(out.split()[-1])
        return out + err

    def open(self, address: str) -> None:
        """The page in a browser, as the page asks: the address signs in, once."""
        if BROWSER is None:
            return
        playwright = self.stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--ignore-certificate-errors"]
        )
        self.stack.callback(browser.close)
        self.seen = browser.new_page()
        self.seen.goto(address)
        self.seen.get_by_role("status").filter(has_text="live").first.wait_for()

    def start(self, line: str) -> None:
        """A process in a terminal of its own."""
        words = shlex.split(line)
        assert words[0] == "roundtable"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ROUNDTABLE_C")}
        with open(self.folder / f"terminal-{len(self.running)}.log", "wb") as log:
            command = [sys.executable, "-P", "-m", "roundtable", *words[1:]]
            self.running.append(
                subprocess.Popen(command, cwd=self.folder, env=environ, stdout=log, stderr=log)
            )
        if words[1] == "server":
            for free in self.ports.values():
                self.wait_for(int(free))

    def wait_for(self, port: int) -> None:
        """Until somebody listens there, as a reader waits for the coordinator to say so."""
        end = time.monotonic() + 120.0
        while True:
            try:
                socket.create_connection(("localhost", port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < end, (self.folder / "terminal-0.log").read_text()
                time.sleep(0.05)

    def compare(self, text: str) -> None:
        """Each line of the block is somewhere in what the last commands showed."""
        shown = " ".join(self.shown.split())
        for line in text.strip().splitlines():
            parts = [re.escape(" ".join(part.split())) for part in line.split("…")]
            assert re.search(".*".join(parts), shown), f"nothing shows {line!r} in:\n{self.shown}"

    def end(self) -> None:
        """Closes the browser and stops what runs, the agents before the coordinator."""
        self.stack.close()
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            process.wait(30)


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    someone = Reader(tmp_path, monkeypatch, capsys)
    yield someone
    someone.end()


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_tutorial_works_as_it_is_written(page: Path, reader: Reader) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn (extra examples)")
    if page.stem == "fine-tune-llm":
        pytest.importorskip("peft", reason="fine-tuning takes the extra huggingface")
    assert reader.follow(page) > 2
    if page.stem == "three-silos" and BROWSER is not None:
        assert reader.seen is not None, "the tutorial ends in a browser"
        reader.seen.get_by_role("link", name="Silos", exact=True).click()
        for silo in ("north", "south", "west"):
            reader.seen.get_by_role("main").get_by_text(silo, exact=True).first.wait_for()
        reader.seen.get_by_role("link", name="Jobs", exact=True).click()
        reader.seen.get_by_role("main").get_by_text("finished").first.wait_for()


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_the_files_of_a_how_to_page_are_accepted(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    assert re.match(r"# .+\n\nFor ", text), "a page begins with who needs it"
    for language, title, block in BLOCK.findall(text):
        if language != "toml":
            continue
        file = tmp_path / title
        file.write_text(block if title != "job.toml" or "task = " in block else f'task = "digits"\n\n{block}')
        if title == "job.toml":
            make_plan(load_job(file), 20)
        elif title == "agent.toml":
            load_agent_config(file)
        else:
            assert title == "coordinator.toml"
            load_server_config(file)
