"""A silo from its invitation to its last round, as people would do it; and no secret is written anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roundtable.administration import Administrator
from roundtable.cli.coordinator.audit import UNPROVEN
from roundtable.demo import free_port

TASK = """
import os
import torch
import roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, site):
        print("seen by the task:", sorted(os.environ))
        return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), None

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
PASSPHRASE = "planted-passphrase-7b1f"


class Stage:
    """Commands in a folder, and everything that they have said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder / "said"
        self.said.mkdir()
        self.seen: list[str] = []
        self.count = 0

    def run(self, *arguments: object, code: int = 0, given: str = "", **environment: str) -> str:
        done = subprocess.run(
            self._command(arguments),
            cwd=self.folder,
            env={**os.environ, **environment},
            input=given,
            capture_output=True,
            text=True,
            timeout=240,
        )
        self.count += 1
        (self.said / f"{self.count}.err").write_text(done.stderr)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        self.count += 1
        with (self.said / f"{self.count}.log").open("wb") as log:
            process = subprocess.Popen(
                self._command(arguments),
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=log,
            )
            try:
                yield process
                self._look_at(process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)

    def _look_at(self, pid: int) -> None:
        """What other users of the machine see of the process and of its children."""
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (str(pid), *children):
            self.seen.append(Path(f"/proc/{one}/cmdline").read_text())
        limits = Path(f"/proc/{pid}/limits").read_text()
        (core,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
        assert core.split()[4:6] == ["0", "0"]

    @staticmethod
    def _command(arguments: tuple[object, ...]) -> list[str]:
        return [sys.executable, "-P", "-m", "roundtable", *map(str, arguments)]


def wait_for(what: Any) -> Any:
    """What a callable gives as soon as it gives something."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def online(address: str, folder: Path) -> bool:
    with Administrator(address, folder) as operator:
        return operator.status().clients_online == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_silos_whole_life_leaves_no_secret_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(
        'task = "small"\nrounds = 2\n[cohort]\nsize = 2\nminimum = 2\nretries = 9\n'
    )
    stage.run("ca", "init", "--passphrase", given="root-secret-91ce\nroot-secret-91ce\n")
    sealed = {"ROUNDTABLE_PASSPHRASE": "root-secret-91ce"}
    hosts = ("--host", "localhost", "--host", "127.0.0.1")
    stage.run("ca", "issue", "hub", "--role", "coordinator", *hosts, "--enrols", **sealed)
    stage.run("ca", "issue", "ada", "--role", "admin", **sealed)
    listen, door = free_port(), free_port()
    address = f"localhost:{listen}"
    me = ("--coordinator", address, "--credentials", "ada")
    places = ("--listen", f"127.0.0.1:{listen}", "--enrolment", f"127.0.0.1:{door}")
    with stage.running("--verbose", "server", *places, "--credentials", "hub", **sealed):
        (tmp_path / "passphrase").write_text(PASSPHRASE)
        wait_for(lambda: _answers(stage, me, sealed))
        tokens = []
        for name in ("north", "south"):
            token = json.loads(stage.run("invite", name, *me, "--json", **sealed))["invitation"]
            tokens.append(token)
            where = ("--coordinator", f"localhost:{door}", "--credentials", f"{name}/credentials")
            given = f"{PASSPHRASE}\n{PASSPHRASE}\n"
            out = stage.run("client", "enroll", *where, "--passphrase", given=given, ROUNDTABLE_TOKEN=token)
            assert f"Enrolled as '{name}'" in out
            again = stage.run("client", "enroll", *where[:2], "--token", "-", code=1, given=token + "\n")
            assert again == ""
            (tmp_path / name / "agent.toml").write_text(
                f'coordinator = "{address}"\n[tasks]\nsmall = "../small.py:Small"\n[policy]\n'
                f"approval = {'true' if name == 'north' else 'false'}\nsubmitters = ['ada']\n"
            )
        tokens.append(stage.run("token", "create", "board", "--role", "viewer", *me, **sealed).strip())
        opened = {"ROUNDTABLE_PASSPHRASE_FILE": str(tmp_path / "passphrase")}
        with (
            stage.running("--verbose", "client", "--config", "north/agent.toml", **opened),
            stage.running("--verbose", "client", "--config", "south/agent.toml", **opened),
        ):
            _work(stage, me, sealed, address, tmp_path)
    texts = [*stage.seen, *(path.read_text(errors="replace") for path in stage.said.iterdir())]
    log = "".join(texts)
    assert "seen by the task:" in log
    assert "'ROUNDTABLE_PASSPHRASE" not in log
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "passphrase"]
    everything = "".join(texts).encode() + b"".join(path.read_bytes() for path in written)
    for secret in (PASSPHRASE, "root-secret-91ce", *tokens, *(one.split(".")[1] for one in tokens)):
        assert secret.encode() not in everything
    for path in written:
        if b"PRIVATE KEY" in path.read_bytes():
            assert path.stat().st_mode & 0o077 == 0, path
            assert path.name in ("ca.key", "issuing.key", "node.key", "identity.key", "installation.key"), (
                path
            )


def _answers(stage: Stage, me: tuple[str, ...], sealed: dict[str, str]) -> bool:
    try:
        stage.run("clients", "list", *me, **sealed)
    except AssertionError:
        return False
    return True


def _work(stage: Stage, me: tuple[str, ...], sealed: dict[str, str], address: str, folder: Path) -> None:
    """A job that one silo lets in only once a person has said yes; then the proof of what happened."""
    found = json.loads(stage.run("job", "submit", "job.toml", *me, "--json", **sealed))
    explained = stage.run("client", "--config", "south/agent.toml", "explain", "job.toml", code=1)
    assert "not signed by its submitter" in explained
    wait_for(lambda: "waits for approval" in stage.run("client", "--config", "north/agent.toml", "jobs"))
    stage.run("client", "--config", "north/agent.toml", "approve", found["id"][:6], "--yes")
    stage.run("job", "resume", found["id"], *me, code=_any_of(stage, found["id"], me, sealed), **sealed)
    assert stage.run("job", "watch", found["id"], *me, **sealed)
    stage.run("audit", "export", "-o", "audit.jsonl", *me, **sealed)
    stage.run("job", "model", found["id"], "-o", "model.safetensors", *me, **sealed)
    statement = "model.safetensors.provenance.json"
    stage.run("model", "provenance", found["id"], "-o", statement, *me, **sealed)
    authority = ("--ca", "ca/ca.crt")
    assert "2 silos under pseudonyms" in stage.run("model", "verify", "model.safetensors", *authority)
    assert "holds together" in stage.run("audit", "verify", "audit.jsonl", *authority)
    own = "north/state/audit.jsonl"
    assert "holds together" in stage.run("audit", "verify", own, "--silo", *authority, code=UNPROVEN)
    assert "Both logs agree on north" in stage.run("audit", "cross-check", "audit.jsonl", own, *authority)
    agreed = json.loads(stage.run("audit", "cross-check", "audit.jsonl", own, *authority, "--json"))
    assert (agreed["silo"], agreed["contradictions"], agreed["lost"]) == ("north", [], [])
    stage.run("client", "revoke", "south", "--reason", "the test is over", *me, **sealed)


def _any_of(stage: Stage, job: str, me: tuple[str, ...], sealed: dict[str, str]) -> int:
    """0 where the job has paused after refusals and can be resumed, 2 where it has ended already."""
    status = json.loads(stage.run("job", "show", job, *me, "--json", **sealed))["job"]["status"]
    return 2 if status == "finished" else 0
