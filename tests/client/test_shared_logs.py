"""Lines of silos' logs that their policies share, from training processes to the operator's terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from federation import NAMES, Federation, agents, federation_of, run_job, silo

from roundtable.cli.main import run as run_command
from roundtable.client.agent import silo_log
from roundtable.client.agent.silo_log import SiloLog
from roundtable.client.policy.sharing_tables import LogSharingTable
from roundtable.core import JobConfig, load_task
from roundtable.core.initial_model import initial_model
from roundtable.job_archive import download
from roundtable.operator import OperatorClient

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(4, 3)
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(32, 4, generator=g)
        return (x, x[:, :3].argmax(1)), None
    def loss(self, model, batch):
        print("patient Jane Doe \\x1b[2J\\x07" + "x" * 5000, flush=True)
        return F.cross_entropy(model(batch[0]), batch[1])
"""
KINDS = {
    "alder": LogSharingTable(kinds=["agent", "figures", "output"], private_jobs=True),
    "birch": LogSharingTable(kinds=["agent", "figures", "output"]),
    "cedar": LogSharingTable(),
}
PLAIN = {"task": "toy", "rounds": 1, "cohort": {"size": 3}, "evaluation": {"every": 0}}
MASKED = {**PLAIN, "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 10.0}}


@pytest.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    async with federation_of(tmp_path, TASK) as started:
        yield started


def lines_of(federation: Federation, job: str) -> list[tuple[str, str, str]]:
    """(silo, kind, text) of each line of a job's log, followed to its end."""
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        return [(line.silo, line.kind, line.text) for line in operator.job_log(job, follow=True)]


def archived_lines(federation: Federation, job: str) -> list[tuple[str, str, str]]:
    """The same from a folder that `job download` fills."""
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        download(operator, job, folder / "kept")
    lines = [json.loads(line) for line in (folder / "kept/log.jsonl").read_text().splitlines()]
    return [(line["silo"], line["kind"], line["text"]) for line in lines]


def jobs_of(federation: Federation) -> list[str]:
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        return [job.id for job in operator.jobs()]


async def shown_over_archives(federation: Federation, job: str, texts: list[str]) -> None:
    """`roundtable client shared` prints the same before and after the silo's log was archived."""
    address, folder = federation
    state = folder / "state/alder"
    (folder / "agent.toml").write_text(
        f'coordinator = "{address}"\nstate = "{state}"\ncredentials = "{folder / "alder"}"\n'
    )
    command = ["client", "--config", str(folder / "agent.toml"), "shared", job[:8], "--json"]
    for _ in range(2):
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            assert await asyncio.to_thread(run_command, command) == 0
        assert [line["text"] for line in json.loads(told.getvalue())] == texts
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(silo_log, "_GATHERED_DAYS", 0.0)
            log = SiloLog(state / "audit.jsonl", folder / "alder", 1e-9)
            log.note("alder", "drained")
            log.seal()
    assert "log_shared" not in (state / "audit.jsonl").read_text()


async def test_each_silo_shares_what_its_file_says_and_masks_keep_figures_and_output_at_home(
    federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "roundtable")
    _, folder = federation
    jobs = [JobConfig.model_validate(table) for table in (PLAIN, MASKED)]
    model = initial_model(jobs[0], load_task("toy.py", folder))
    async with agents(*(replace(silo(federation, name), log_sharing=KINDS[name]) for name in NAMES)):
        for job in jobs:
            status, _, _ = await asyncio.to_thread(run_job, federation, job, model)
            assert status == "finished"
    masked, plain = await asyncio.to_thread(jobs_of, federation)
    logs = {job: await asyncio.to_thread(lines_of, federation, job) for job in (masked, plain)}
    assert await asyncio.to_thread(archived_lines, federation, plain) == logs[plain]
    kinds = {(silo, kind) for silo, kind, _ in logs[plain]}
    every = {"agent", "figures", "output"}
    assert kinds == {("", ""), *((name, kind) for name in ("alder", "birch") for kind in every)}
    kinds = {(silo, kind) for silo, kind, _ in logs[masked]}
    assert kinds == {("", ""), ("birch", "agent"), *(("alder", kind) for kind in every)}
    said = [text for silo, kind, text in logs[plain] if (silo, kind) == ("alder", "output")]
    assert said[0].startswith(r"task: patient Jane Doe \x1b[2J\x07xxx")
    assert len(said[0]) < 1100
    assert any("trained on 32 examples" in text for _, kind, text in logs[plain] if kind == "figures")
    assert any("round 1 is committed" in text for silo, _, text in logs[masked] if not silo)

    # What has gone is in the silo's own log, and its administrator can read it there.
    noted = [json.loads(line) for line in (folder / "state/alder/audit.jsonl").read_text().splitlines()]
    shared = [
        line["text"]
        for entry in noted
        if entry.get("entry", {}).get("action") == "log_shared" and entry["entry"]["object"] == plain
        for line in entry["entry"]["detail"]["lines"]
    ]
    assert shared == [text for silo, _, text in logs[plain] if silo == "alder"]
    await shown_over_archives(federation, plain, shared)
    assert "log_shared" not in (folder / "state/cedar/audit.jsonl").read_text()
