"""`simulate --page` and `demo --page`: the coordinator's page for a run on this machine."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest
from page_world import Browser

from roundtable.core import load_job, parse_job
from roundtable.core.errors import ConfigError
from roundtable.demo import free_port
from roundtable.proto.operator_pb2 import GetJobRequest
from roundtable.run_page import VIEWER, RunPage, run_page
from roundtable.simulation.reporting.run_directory import committed_rounds
from roundtable.starters import BUILT_EXAMPLES

EXAMPLE = BUILT_EXAMPLES["digits"].folder / "job.toml"
LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/sign-in(?:\?next=\S+)?#(\S+)")


@pytest.mark.parametrize("command", ["simulate", pytest.param("demo", marks=pytest.mark.slow)])
async def test_its_link_opens_it_and_it_stays_until_ctrl_c(command: str, tmp_path: Path) -> None:
    what = {
        "simulate": [str(EXAMPLE), "--set", "rounds=2", "--run-dir", str(tmp_path / "run")],
        "demo": ["--dir", str(tmp_path / "demo"), "--rounds", "2"],
    }[command]
    called = [sys.executable, "-m", "roundtable", command, *what, "--page", f"127.0.0.1:{free_port()}"]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*called, **pipes)
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = (await process.stdout.readline()).decode()
            assert line, "it ended without an address"
            found = LINK.search(line)
        browser = Browser(int(found[1]), secure=False)
        stranger = await browser.sign_in("x" * 43)
        assert "why=wrong" in stranger.headers["location"]
        await browser.sign_in(found[2])
        while "stays until Ctrl-C" not in line:
            line = (await process.stdout.readline()).decode()
            assert line, "it ended without waiting"
        job = (await browser.ask("GET", "/api/read/jobs")).values["jobs"][0]
        assert (job["status"], job["rounds_done"]) == ("finished", 2)
        shown = (await browser.ask("GET", f"/api/job/{job['id']}")).values
        assert [sorted(each["evaluation"]) for each in shown["rounds"]] == [["accuracy", "loss"]] * 2
        assert (await browser.ask("GET", f"/api/read/job-privacy?job={job['id']}")).values["level"] == "none"
        # Who looks changes nothing.
        assert (await browser.change("pause", job=job["id"])).status in (403, 404)
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = await process.communicate()
    assert process.returncode == 0, said
    if command == "simulate":
        # A run that goes on shows what was committed before.
        earlier = RunPage(load_job(EXAMPLE), committed_rounds(tmp_path / "run"))
        told = await earlier.call(VIEWER, "", "Operators/GetJob", GetJobRequest(job="run"))
        assert (told.job.rounds_done, len(told.history)) == (2, 2)


def test_it_is_shown_on_this_machine_alone() -> None:
    with (
        pytest.raises(ConfigError, match="this machine itself alone"),
        run_page(RunPage(parse_job('task = "task"')), "0.0.0.0:0"),
    ):
        pass
