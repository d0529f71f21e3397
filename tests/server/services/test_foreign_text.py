"""A hostile silo's words, from the wire to the operator's terminal and the coordinator's log."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator

from roundtable.cli.main import run
from roundtable.core.observability.logs import ConsoleFormatter
from roundtable.server import Coordinator

CLIPBOARD, CLEAR, FORGED = "\x1b]52;c;cm0gLXJm\x07", "\x1b[2J\x9b2J", "\n2026-01-01 INFO roundtable: approved"
HOSTILE = f"[/b]{CLIPBOARD}{CLEAR}\u202e{FORGED}"


async def test_words_of_a_silo_reach_terminal_and_log_without_effect(
    coordinator: Coordinator,
    operator: Operator,
    certificates: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="roundtable")
    options = ["--coordinator", f"localhost:{coordinator.port}", "--credentials", str(certificates / "olga")]

    async def command(*words: str) -> str:
        capsys.readouterr()
        code = await asyncio.to_thread(run, [*words, *options])
        captured = capsys.readouterr()
        assert code in (0, 1), captured.err
        assert captured.out.replace("\n", "").isprintable(), captured.out
        assert captured.err.replace("\n", "").isprintable(), captured.err
        assert not [line for line in captured.out.splitlines() if line.startswith("2026-01-01")]
        return captured.out

    alder = ScriptedAgent(coordinator.port, certificates / "alder", metadata_key=HOSTILE)
    await alder.connect(version=HOSTILE, devices=[HOSTILE], tasks=["t", HOSTILE])
    birch = ScriptedAgent(coordinator.port, certificates / "birch")
    refusal = await birch.connect(protocol=99, version=HOSTILE)
    assert refusal.WhichOneof("message") == "refused"
    job = (await operator.submit("[cohort]\nsize = 1\nminimum = 1\n", rounds=1)).id
    train = await alder.expect("instruction")
    await alder.answer(train, torch.ones(4), **{HOSTILE: 1.0})
    # No metric may be called so: the attempt fails, its reason holds those words; the next one goes well.
    again = await alder.expect("instruction")
    assert again.step.attempt == train.step.attempt + 1
    await alder.answer(again, torch.ones(4))
    await alder.evaluate(await alder.expect("instruction"), loss=(1.0, 1))
    await operator.watch_for(job, "round_committed")
    assert r"[/b]\x1b]52" in await command("clients", "list")
    assert r"[/b]\x1b]52" in await command("job", "show", job)
    assert r"[/b]\x1b]52" in await command("job", "watch", job)
    shown = json.loads(await command("job", "show", job, "--json"))
    assert set(shown["history"][0]["evaluation"]) == {"loss"}
    await command("job", "list")
    await command("job", "diagnose", job)
    lines = [ConsoleFormatter().format(record) for record in caplog.records if not record.exc_info]
    assert lines
    assert all(line.isprintable() for line in lines)
    await alder.close()
    await birch.close()
