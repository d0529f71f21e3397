"""Logs as JSON: every line of a coordinator and an agent, through faults of theirs and of libraries."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from processes import Federation
from small_task import SMALL

LIBRARY = """
# A library that does at SIGUSR1 what libraries do wrong.
import logging, signal, threading, warnings

class Leaves:
    def __del__(self):
        raise ValueError("left behind")

def fails():
    raise RuntimeError("a thread's own")

def misbehave(number, frame):
    warnings.warn("this goes\\nout of use")
    logging.getLogger("some.library").error("wanted %d", "words")
    logging.getLogger("some.library").error("twice\\nas \\x1b[2J long", stack_info=True)
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    Leaves()

signal.signal(signal.SIGUSR1, misbehave)
"""


def start(federation: Federation, name: str, *arguments: str) -> Any:
    return federation.start(name, ["-m", "roundtable", *arguments], "")


def lines(federation: Federation, name: str) -> list[dict[str, Any]]:
    """Standard error and output of a process, over all its lives; each line must be a JSON object."""
    whole = (federation.log(name) + federation.said(name)).splitlines()
    return [json.loads(line) for line in whole]


def test_every_line_is_json_and_says_where_it_belongs(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "sitecustomize.py").write_text(LIBRARY)
    path = os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    federation = Federation(tmp_path, silos=("elm",), task=SMALL)
    address = f"127.0.0.1:{federation.port}"
    hub, elm = tmp_path / "hub.toml", tmp_path / "elm.toml"
    hub.write_text(
        f'listen = "{address}"\nstate = "server"\ncredentials = "hub"\nlog_format = "json"\nheartbeat = 1.0\n'
    )
    elm.write_text(
        f'coordinator = "{address}"\ncredentials = "elm"\nstate = "silos/elm"\nlog_format = "json"\n'
        '[limits]\ndevice = "cpu"\nthreads = 1\n[tasks]\ntoy = "toy.py:Toy"\n'
    )
    agent, table = ("client", "--config", str(elm)), {"rounds": 2, "cohort": {"size": 1}}
    try:
        # Nobody is there yet: that is said, too.
        start(federation, "elm", *agent)
        federation.until(lambda: "waiting for it" in federation.log("elm"))
        start(federation, "hub", "server", str(hub))
        federation.until(lambda: "elm is here" in federation.log("hub"))
        job = federation.submit(federation.job(**table), "first")
        assert federation.finish(job).job.status == "finished"
        for name, file in (("hub", hub), ("elm", elm)):
            federation.processes[name].send_signal(signal.SIGUSR1)
            federation.until(lambda name=name: "left behind" in federation.log(name))
            file.write_text(file.read_text() + '[log_levels]\nroundtable = "debug"\n')
            federation.processes[name].send_signal(signal.SIGHUP)
            federation.until(lambda name=name: "log levels are roundtable = debug" in federation.log(name))
        federation.kill("hub")
        federation.until(lambda: "not connected" in federation.log("elm"))
        start(federation, "hub", "server", str(hub))
        job = federation.submit(federation.job(**table), "second")
        assert federation.finish(job).job.status == "finished"
        settings = hub.read_text()
        hub.write_text("log_levels = 3\n")
        federation.processes["hub"].send_signal(signal.SIGHUP)
        federation.until(lambda: "SIGHUP: nothing is changed" in federation.log("hub"))
        for name in ("elm", "hub"):
            federation.processes[name].terminate()
            assert federation.died(name) == 0
        # The settings that are wrong could not say what the log is like; credentials that are missing can.
        hub.write_text(settings)
        start(federation, "hub", "server", str(hub), "--credentials", str(tmp_path / "nowhere"))
        assert federation.died("hub") == 1
    finally:
        federation.close()
    found = {name: lines(federation, name) for name in ("hub", "elm")}
    for name, said in found.items():
        messages = [line["message"] for line in said]
        assert not [line for line in said if "never retrieved" in json.dumps(line)]
        assert {"py.warnings", "some.library"} <= {line["logger"] for line in said}
        assert "'wanted %d' does not fit its arguments ('words',): TypeError" in messages, name
        assert any("a thread's own" in line.get("traceback", "") for line in said), name
        assert any("stack" in line for line in said)
    assert {line["level"] for line in found["elm"] if line["logger"] == "roundtable.agent"} >= {"debug"}
    _check_that_calls_are_found_on_both_sides(found["hub"], found["elm"], job)


def _check_that_calls_are_found_on_both_sides(
    hub: list[dict[str, Any]], elm: list[dict[str, Any]], job: str
) -> None:
    served = {line["request"]: line["message"] for line in hub if " by agent/elm" in line["message"]}
    made = [line for line in elm if line["message"].startswith("calls the coordinator")]
    uploads = [line for line in made if "the upload broke off" in line["message"] and line["job"] == job]
    assert len(uploads) == 2
    assert all(served[line["request"]].startswith("Agents/Upload") for line in uploads)
    (here,) = {line["request"] for line in hub if line["message"] == "elm is here"} & {
        line["request"] for line in elm if line["message"].startswith("connected again")
    }
    assert here
    places = {(line["job"], line["round"], line["attempt"]) for line in hub if line["job"] == job}
    assert {(job, 1, 1), (job, 2, 1)} <= places
    assert {(job, 1, 1), (job, 2, 1)} <= {(line["job"], line["round"], line["attempt"]) for line in elm}
