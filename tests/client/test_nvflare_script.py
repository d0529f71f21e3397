"""Scripts of NVFLARE's client API run unchanged; those here are written after two of its examples."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from other_frameworks import FLARE_SCRIPT

from roundtable.client.adapters.nvflare_script import FlareSession, FLModel, nvflare_script
from roundtable.core.errors import TaskError

NUMPY = """
import numpy as np
import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

flare.init()
while flare.is_running():
    received = flare.receive()
    assert flare.receive() is received and flare.is_running()
    assert flare.is_train() and not flare.is_evaluate()
    assert all(type(value) is np.ndarray for value in received.params.values())
    change = {"0.bias": np.full(8, 1.0 + received.current_round, np.float32)}
    flare.send(FLModel(params_type=ParamsType.DIFF, params=change))
"""


async def played(silo: Any, script: Path, rounds: int, **options: Any) -> None:
    """The script over this many rounds of the scripted coordinator, until its job is over."""
    running = asyncio.create_task(
        asyncio.to_thread(lambda: nvflare_script(script, config=silo.config, task="toy", **options))
    )
    connected = asyncio.create_task(silo.coordinator.hear("heartbeat"))
    await asyncio.wait([running, connected], return_when=asyncio.FIRST_COMPLETED)
    for number in range(1, rounds + 1):
        key = ("job-1", number, 1, "train")
        silo.coordinator.say(instruction=silo.instruction(number))
        arrived = asyncio.create_task(
            silo.coordinator.until(lambda key=key: key in silo.coordinator.receipts)
        )
        await asyncio.wait([running, arrived], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            arrived.cancel()
            break
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "the job has finished"})
    await running


async def test_a_pytorch_script_sends_what_it_trained(silo, tmp_path, capfd, caplog) -> None:
    script = tmp_path / "client.py"
    script.write_text(FLARE_SCRIPT)
    with caplog.at_level(logging.INFO, "nvflare"):
        await played(silo, script, 2, arguments=["--lr", "0.25"])
    assert capfd.readouterr().out.splitlines() == ["site hospital", "round 0 of 10", "round 1 of 10"]
    assert "train_loss = " in caplog.text
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model.load_state_dict(silo.model.state_dict())
    rows, labels = torch.ones(12, 4), torch.arange(12) % 3
    torch.nn.functional.cross_entropy(model(rows), labels).backward()
    change = silo.model.layout.unflatten(silo.delta().clone())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(change[name], -0.25 * weight.grad, atol=1e-6, rtol=1e-4)
    right = 100 * int((model(rows).argmax(1) == labels).sum()) // 12
    header = silo.coordinator.uploads["job-1", 1, 1, "train"].header
    assert header.examples == 12
    assert {m.name: (m.sum, m.count) for m in header.metrics} == {"accuracy": (12.0 * right, 12)}
    assert "nvflare" not in sys.modules


async def test_a_numpy_script_sends_differences_and_counts_as_one_with_a_warning(
    silo, tmp_path, caplog
) -> None:
    script = tmp_path / "client.py"
    script.write_text(NUMPY)
    await played(silo, script, 2)
    assert caplog.text.count("counts as 1") == 1
    for number in (1, 2):
        assert silo.coordinator.uploads["job-1", number, 1, "train"].header.examples == 1
    change = silo.model.layout.unflatten(silo.delta().clone())
    torch.testing.assert_close(change["0.bias"], torch.ones(8))
    assert not change["0.weight"].any()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("params=change", "params=change, meta={'NUM_STEPS_CURRENT_ROUND': 0}", "whole number of at least 1"),
        ("params_type=ParamsType.DIFF, params=change", "metrics={'accuracy': 1.0}", "without params"),
        ("import numpy as np", "import numpy as np, nvflare.app_opt.pt", "nvflare.app_opt cannot be carried"),
        (
            "import numpy as np",
            "import numpy as np\nfrom nvflare.client.lightning import patch",
            "trainer.fit",
        ),
        ("flare.init()", "flare.init(rank=1)", "one process joins"),
    ],
)
async def test_what_a_script_cannot_have_here_is_refused_with_words(silo, tmp_path, old, new, said) -> None:
    assert old in NUMPY
    script = tmp_path / "client.py"
    script.write_text(NUMPY.replace(old, new))
    with pytest.raises(TaskError, match=said):
        await played(silo, script, 1)


def test_calls_out_of_order_are_told_as_there() -> None:
    session = FlareSession(iter([]), "north", True)
    with pytest.raises(RuntimeError, match="init"):
        session.is_running()
    session.init()
    with pytest.raises(RuntimeError, match="before flare"):
        session.send(FLModel(params={"w": torch.ones(1)}))
    assert session.receive() is None
    assert not session.is_running()
    with pytest.raises(ValueError, match="params must be provided"):
        FLModel(params_type="FULL")
