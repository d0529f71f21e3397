"""Every acknowledgement is cut off somewhere: no update counts twice, and the silo has a proof of each."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from constant_trainer import Constant
from federation import federation_of, run_job, silo
from wires import Wires

from roundtable.administration import Administrator
from roundtable.client.agent.agent import Agent
from roundtable.client.agent.silo_log import NAME
from roundtable.core import JobConfig, Layout, Model
from roundtable.core.evidence.audit_log import Log, read_log
from roundtable.core.evidence.cross_check import LogComparison, compare_logs
from roundtable.server.services import uploads

PLACES = [0, 60, 300, 1 << 20, 0]
"""After how many bytes that come back the connection is closed, in each round; the last ends the job."""


def log_of(lines: list[str], folder: Path, role: Any) -> Log:
    return read_log(lines, (folder / "ca" / "ca.crt").read_bytes(), role)


def wait_until_proven(log: Path, rounds: int = len(PLACES)) -> None:
    """Returns when there is a receipt of each round: the agent goes on asking when the job is over."""
    end = time.monotonic() + 30
    while log.read_text().count('"status":"ACCEPTED"') < rounds:
        assert time.monotonic() < end, "no receipt came"
        time.sleep(0.05)


async def test_a_silo_proves_each_update_although_every_acknowledgement_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires, cut = Wires(), iter(PLACES)
    table: dict[str, Any] = {"task": "toy", "rounds": len(PLACES), "cohort": {"size": 1, "minimum": 1}}
    job = JobConfig.model_validate({**table, "evaluation": {"every": 0}})
    layout = Layout.of({"w": torch.zeros(4)})
    async with federation_of(tmp_path, "") as (address, folder):
        wire = wires.lay(int(address.rpartition(":")[2]))

        def durable(place: str, *_: object) -> None:
            if place == "receipt_due":
                wire.left = next(cut)

        monkeypatch.setattr(uploads, "failpoint", durable)
        config = silo((f"127.0.0.1:{wire.port}", folder), "alder")
        agent = Agent(config, Constant())
        running = asyncio.create_task(agent.run())
        model = Model(layout, torch.zeros(4))
        status, history, _ = await asyncio.to_thread(run_job, (address, folder), job, model)
        assert status == "finished"
        assert [record["contributors"] for record in history] == [["alder"]] * len(PLACES)
        await asyncio.to_thread(wait_until_proven, config.state / NAME)
        agent.stop()
        await running
        with Administrator(address, folder / "operator") as admin:
            lines = await asyncio.to_thread(lambda: list(admin.audit()))
    wires.close()
    own = log_of((config.state / NAME).read_text().splitlines(), folder, "agent")
    theirs = log_of(lines, folder, "coordinator")
    found = compare_logs(theirs, own, "alder", (folder / "ca" / "ca.crt").read_bytes())
    assert found == LogComparison(), json.dumps(found.__dict__, indent=1)
    receipts = [entry.detail for entry in own.entries if entry.action == "receipt"]
    assert {detail["round"] for detail in receipts if detail["status"] == "ACCEPTED"} == set(
        range(1, len(PLACES) + 1)
    )
    assert all(detail["signed"] for detail in receipts)


async def test_a_silo_that_has_lost_its_spool_asks_for_the_receipt_by_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The acknowledgement is cut off, the agent ends, and what described the update is gone."""
    wires, reached = Wires(), threading.Event()
    table: dict[str, Any] = {"task": "toy", "rounds": 1, "cohort": {"size": 1, "minimum": 1}}
    job = JobConfig.model_validate({**table, "evaluation": {"every": 0}})
    async with federation_of(tmp_path, "") as (address, folder):
        wire = wires.lay(int(address.rpartition(":")[2]))

        def durable(place: str, *_: object) -> None:
            if place == "receipt_due":
                wire.left = 0
                reached.set()

        monkeypatch.setattr(uploads, "failpoint", durable)
        config = silo((f"127.0.0.1:{wire.port}", folder), "alder")
        agent = Agent(config, Constant())
        running = asyncio.create_task(agent.run())
        model = Model(Layout.of({"w": torch.zeros(4)}), torch.zeros(4))
        submitted = asyncio.create_task(asyncio.to_thread(run_job, (address, folder), job, model))
        await asyncio.to_thread(reached.wait, 60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await submitted
        log = config.state / NAME
        assert '"action":"sent"' in log.read_text()
        assert '"action":"receipt"' not in log.read_text()
        shutil.rmtree(config.state / "spool")

        again = Agent(silo((address, folder), "alder"), Constant())
        running = asyncio.create_task(again.run())
        await asyncio.to_thread(wait_until_proven, log, 1)
        again.stop()
        await running
    wires.close()
    receipts = [each.detail for each in log_of(log.read_text().splitlines(), folder, "agent").entries]
    (receipt,) = [detail for detail in receipts if "status" in detail]
    assert (receipt["round"], receipt["status"], receipt["signed"]) == (1, "ACCEPTED", True)
