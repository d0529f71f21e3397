"""What runs on a laptop with macOS or Windows, tried here without what those systems lack.

`other_machine/sitecustomize.py` of the kit takes it away from Roundtable's own code in every process.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Federation

from roundtable.core.machine.file_locks import lock_file
from roundtable.core.machine.possible import must_be_possible

Command = Any
SHIM = Path(__file__).parents[1] / "kit" / "other_machine"
WHATS = ("a coordinator", "a relay", "[cluster]", "[policy] max_memory", "install")


def like(machine: str) -> dict[str, str]:
    """The environment of a process that sees such a machine."""
    return {"ROUNDTABLE_TEST_MACHINE": machine, "PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1"}


def on(machine: str, *words: object) -> subprocess.CompletedProcess[str]:
    """`roundtable` with these words on such a machine."""
    command = [sys.executable, "-P", "-m", "roundtable", *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **like(machine)}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, silos=("elm",))
    yield made
    made.close()


def test_a_simulation_ends_with_the_same_bits_on_every_machine(job_file: Path, tmp_path: Path) -> None:
    ways = {"macos": "processes", "windows": "sequential"}
    digests = set()
    for machine, backend in ways.items():
        run = tmp_path / machine
        line = ("--run-dir", run, "--set", f"simulation.backend={backend}", "--set", "simulation.workers=2")
        done = on(machine, "simulate", job_file, *line)
        assert done.returncode == 0, done.stderr
        assert f"Backend: {backend}" in done.stdout
        digests.add(hashlib.sha256((run / "model.safetensors").read_bytes()).digest())
    assert len(digests) == 1


def test_without_open_files_to_hand_over_one_process_does_the_work(
    roundtable: Command, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "send_fds")
    alone = roundtable("simulate", job_file, "--set", "simulation.workers=2")
    assert "in one process: worker processes are handed open files and memory" in alone.out
    refused = roundtable("simulate", job_file, "--set", "simulation.backend=processes")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert 'set backend = "auto" or "sequential"' in refused.err


@pytest.mark.slow
def test_ctrl_c_ends_a_simulation_in_order(job_file: Path, tmp_path: Path) -> None:
    line = ["simulate", str(job_file), "--run-dir", str(tmp_path / "run"), "--set", "rounds=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "roundtable", *line],
        env={**os.environ, **like("windows")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    next(said for said in process.stdout if "round      3/100000" in said)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--run-dir {tmp_path / 'run'} --resume" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["windows", "macos"])
def test_an_agent_trains_and_stops(
    machine: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.coordinator()
    with monkeypatch.context() as changed:
        for name, value in like(machine).items():
            changed.setenv(name, value)
        agent = federation.installed_agent("elm")
    job = federation.submit(federation.job(rounds=2), "r1")
    assert federation.finish(job).job.status == "finished", federation.log("elm")[-3000:]
    # Nobody else may have the state folder meanwhile: the lock of such a machine holds.
    second = on(machine, "client", "--config", federation.folder / "elm.toml")
    assert second.returncode == 1
    assert f"is in use by another agent (process {agent.pid})" in second.stderr
    agent.send_signal(signal.SIGINT)
    assert federation.died("elm") == 130, federation.log("elm")[-3000:]
    assert "Traceback" not in federation.log("elm")


def test_what_a_machine_cannot_is_refused(
    federation: Federation, roundtable: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what in WHATS:
        must_be_possible(what)
    for name in ("O_DIRECTORY", "O_PATH", "getgrouplist"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr("roundtable.core.machine.possible.held_memory", lambda: None)
    server, agent, relay = (federation.folder / f"{name}.toml" for name in ("server", "elm", "relay"))
    where = f"127.0.0.1:{federation.port}"
    server.write_text(f'listen = "{where}"\ncredentials = "hub"\nstate = "server"\n')
    relay.write_text(f'coordinator = "{where}"\nlisten = "{where}"\ncredentials = "hub"\nstate = "relay"\n')
    text = f'coordinator = "{where}"\ncredentials = "elm"\n[tasks]\ntoy = "toy.py"\n'
    for words, more, reason in (
        (("server", server), "", "a coordinator does not work on this system: it locks and syncs folders"),
        (("demo", "--dir", federation.folder / "demo"), "", "a coordinator does not work on this system"),
        (("relay", "--config", relay), "", "a relay does not work on this system"),
        (("client", "--config", agent), '[policy]\nmax_memory = "1 GiB"\n', "[policy] max_memory does not"),
        (("client", "--config", agent), "[cluster]\n", "[cluster] does not work on this system: its ranks"),
        (("client", "--config", agent, "install", "--systemd"), "", "install does not work on this system"),
    ):
        agent.write_text(text + more)
        refused = roundtable(*words)
        assert (refused.code, refused.err.count("Error: ")) == (1, 1), (words, refused)
        assert reason in refused.err


def test_locks_exclude_others_and_go_with_the_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        lock_file(first.fileno(), shared=True)
        lock_file(second.fileno(), shared=True)
        with pytest.raises(BlockingIOError):
            lock_file(second.fileno())
