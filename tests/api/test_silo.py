"""`roundtable client explain|jobs|approve|hash` and `roundtable ca revoke`, on the command line."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from roundtable.client.policy.known_jobs import KnownJob, KnownJobs
from roundtable.core.config import load_job, override_job
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.identity.signing import job_digest

Command: TypeAlias = Callable[..., Any]


@pytest.fixture
def silo(job_file: Path) -> Path:
    """An agent.toml beside the job, of a silo that wants to be asked."""
    path = job_file.with_name("agent.toml")
    path.write_text(
        'coordinator = "localhost:1"\n[tasks]\nsmall = "small.py:Small"\n'
        "[policy]\napproval = true\nrounds = 5\n"
    )
    return path


def test_explain_says_yes_or_every_reason(roundtable: Command, job_file: Path, silo: Path) -> None:
    said = roundtable("client", "--config", silo, "explain", job_file)
    assert (said.code, said.out) == (0, "yes: this silo would take part, once a person has approved it\n")
    silo.write_text(silo.read_text() + 'submitters = ["ada"]\nbatch_size = 8\n')
    said = roundtable("client", "--config", silo, "explain", job_file)
    assert said.code == 1
    assert said.out.count("no: ") == 2
    said = roundtable("client", "--config", silo, "explain", job_file, "--submitter", "ada")
    assert said.out.count("no: ") == 1
    said = roundtable("client", "--config", silo, "explain", job_file, "--json")
    assert (said.code, len(json.loads(said.out)["objections"])) == (1, 2)


def test_a_job_is_listed_and_approved(roundtable: Command, job_file: Path, silo: Path) -> None:
    assert "has not asked for anything" in roundtable("client", "--config", silo, "jobs").out
    config = load_job(job_file).to_json()
    known = KnownJob("abc123", job_digest(config), config, "small", "ada", "r1", "0" * 64, time.time())
    KnownJobs(silo.parent / "state").remember(known)
    assert "waits for approval" in roundtable("client", "--config", silo, "jobs").out
    assert "not asked for such a job" in roundtable("client", "--config", silo, "approve", "x").err
    assert "Approved job abc123" in roundtable("client", "--config", silo, "approve", "abc", "--yes").out
    assert "approved by" in roundtable("client", "--config", silo, "jobs").out
    silo.write_text(silo.read_text() + 'submitters = ["eve"]\n')
    said = roundtable("client", "--config", silo, "approve", "abc", "--yes")
    assert "The policy refuses it all the same: 'ada' may not submit" in said.out
    (listed,) = json.loads(roundtable("client", "--config", silo, "jobs", "--json").out)
    assert (listed["job"], listed["approved"], len(listed["objections"])) == ("abc123", True, 1)


def test_what_a_person_approves_cannot_rewrite_the_screen(
    roundtable: Command, job_file: Path, silo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b[2J\x9b2J\u202e[/b]\nJob approved by everybody"
    job = override_job(load_job(job_file), {"simulation.data": {"path": hostile, hostile: 1}})
    config = job.to_json()
    known = KnownJob("abc123", job_digest(config), config, hostile, hostile, "r1", "0" * 64, time.time())
    KnownJobs(silo.parent / "state").remember(known)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for words in (("jobs",), ("jobs", "--json"), ("approve", "abc")):
        said = roundtable("client", "--config", silo, *words)
        assert said.code == 0, said.err
        assert said.out.replace("\n", "").isprintable(), said.out
        assert not [line for line in said.out.splitlines() if line.startswith("Job approved by")]


def test_the_hash_of_a_tasks_code(roundtable: Command, silo: Path) -> None:
    before = roundtable("client", "--config", silo, "hash", "small").out
    assert len(before.strip()) == 64
    (silo.parent / "small.py").write_text("# other code\n")
    assert roundtable("client", "--config", silo, "hash", "small").out != before
    assert "names no 'large'" in roundtable("client", "--config", silo, "hash", "large").err


def test_a_certificate_is_put_on_the_list(roundtable: Command, tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "ada", "operator", tmp_path / "ada")
    said = roundtable("ca", "revoke", tmp_path / "ada" / "node.crt", "--ca", tmp_path / "ca")
    assert "crl.pem" in said.out
    assert (tmp_path / "ca" / "crl.pem").exists()


def test_explain_shows_what_training_may_hold(roundtable: Command, job_file: Path, silo: Path) -> None:
    silo.write_text(silo.read_text() + 'max_memory = "8GiB"\n')
    said = roundtable("client", "--config", silo, "explain", job_file)
    assert "training may hold 8GiB of main memory" in said.out
    assert "GPU" not in said.out
    silo.write_text(silo.read_text() + 'max_gpus = 1\nmax_gpu_memory = "20GiB"\n')
    said = roundtable("client", "--config", silo, "explain", job_file)
    assert "training sees at most 1 GPU ([policy] max_gpus)" in said.out
    assert "training may hold 20GiB of each GPU's memory ([policy] max_gpu_memory)" in said.out
