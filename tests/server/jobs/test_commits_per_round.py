"""How often a round writes: receipts and the next round wait for each transaction's sync of the disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_agent import ScriptedAgent, header_for
from service import AGENTS, Operator, running

from roundtable.server import ServerConfig
from roundtable.server.services import job_logs

JOB = "[cohort]\nsize = 1\nminimum = 1\n[evaluation]\nevery = 0\n"
ROUNDS = 4
TRANSITIONS = 2
"""The update; the new model with its round's commit and the next round's beginning."""


async def test_a_round_commits_its_update_and_its_end(
    settings: Callable[..., ServerConfig], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_logs, "GATHER_SECONDS", 600.0)
    values = torch.zeros(4).numpy().tobytes()
    seen: list[int] = []
    async with (
        running(settings()) as one,
        Operator(one.port, certificates / "olga") as operator,
        ScriptedAgent(one.port, certificates / AGENTS[0]) as agent,
    ):
        changes = _count_commits(one._database, monkeypatch)
        job = await operator.submit(JOB, rounds=ROUNDS)
        for _ in range(ROUNDS):
            asked = await agent.expect("instruction")
            seen.append(len(changes))
            await agent.upload(header_for(asked, values), values)
        await operator.watch_until(job.id, "finished")
    # What a round leaves is deleted beside the next one: nobody waits for it.
    retired = [work for work in changes if work.startswith("Retention.")]
    assert len(retired) <= ROUNDS, changes
    waited = [
        [work for work in changes[before:after] if work not in retired]
        for before, after in itertools.pairwise(seen[1:])
    ]
    assert waited == [["JobRunner._until_written.<locals>.write"] * TRANSITIONS] * (ROUNDS - 2)


def _count_commits(database: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with each transaction that changes anything, by what it did."""
    found: list[str] = []
    write = database.write

    async def counted(work: Callable[[Any], Any]) -> Any:
        def noted(connection: Any) -> Any:
            before = connection.connection.driver_connection.total_changes
            result = work(connection)
            if connection.connection.driver_connection.total_changes > before:
                found.append(getattr(work, "__qualname__", str(work)))
            return result

        return await write(noted)

    monkeypatch.setattr(database, "write", counted)
    return found
