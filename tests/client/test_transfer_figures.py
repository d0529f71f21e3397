"""What the way of each update took: in a round's record, in `job show`, in a simulation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from federation import NAMES, agents, federation_of, run_job, silo

from roundtable.cli.main import run as run_command
from roundtable.cli.shared.rounds import figures_of
from roundtable.core import JobConfig, load_task
from roundtable.core.errors import TaskError
from roundtable.core.initial_model import initial_model
from roundtable.core.observability.throughput import TOKENS, Throughput
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    example_tokens = 5
    def model(self):
        return nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 3))
    def data(self, site):
        g = torch.Generator().manual_seed(site.options.get("seed", 7))
        x = torch.randn(48, 4, generator=g)
        return (x[:32], x[:32, :3].argmax(1)), (x[32:], x[32:, :3].argmax(1))
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
TABLE = {
    "task": "toy",
    "rounds": 2,
    "cohort": {"size": 3},
    "evaluation": {"every": 0},
    "transfer": {"up": "topk(ratio=0.1) | int8", "down": "int4"},
}


async def test_bytes_seconds_and_error_of_each_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobConfig.model_validate(TABLE)
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        plain = 4 * model.layout.size
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, _ = await asyncio.to_thread(run_job, federation, job, model)
        assert status == "finished"
        address = ["--coordinator", federation[0], "--credentials", str(tmp_path / "operator")]
        await asyncio.to_thread(run_command, ["job", "show", job.title, "--json", *address])
    shown = json.loads(capsys.readouterr().out)
    assert shown["history"] == history
    for record in history:
        assert sorted(record["transfers"]) == sorted(NAMES)
        for transfer in record["transfers"].values():
            assert transfer["up_plain"] == plain
            assert 8 < transfer["up_plain"] / transfer["up"] < 40
            assert 0.1 < transfer["error"] < 1
            assert {"encoding_seconds", "decoding_seconds", "up_seconds", "down_seconds"} <= transfer.keys()
    first, second = (record["transfers"]["alder"] for record in history)
    assert first["down"] == first["down_plain"]
    assert 4 < second["down_plain"] / second["down"] < 8
    for record, told in zip(history, shown["throughput"], strict=True):
        seconds, ways = record["ended"] - record["started"], record["transfers"].values()
        assert told["tokens"] == 3 * 32 * 5
        assert "tokens" not in shown_means(record)
        assert told["tokens_per_second"] == pytest.approx(480 / seconds)
        assert told["bytes_per_token"] == sum(way["up"] + way["down"] for way in ways) / 480
        assert 0 < told["communication"] < 1
    assert shown["transfer"]["updates"] == 6
    assert shown["transfer"]["up_ratio"] == pytest.approx(6 * plain / shown["transfer"]["up"])


def shown_means(record: dict[str, Any]) -> dict[str, Any]:
    """The training means of a round as a table shows them."""
    found: dict[str, Any] = figures_of(record)["training"]
    return found


@pytest.mark.parametrize("backend", ["sequential", "vectorised", "stacked"])
def test_virtual_rounds_tell_their_tokens_and_the_share_of_transfers(tmp_path: Path, backend: str) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    table = {
        **TABLE,
        "transfer": {},
        "simulation": {
            "clients": 3,
            "backend": backend,
            "devices": {"latency": 2.0, "speed": 16.0, "download": 1e4, "upload": 5e3},
        },
    }
    result = simulate(JobConfig.model_validate(table), load_task("toy.py", tmp_path))
    size = 4 * result.model.layout.size
    ways = size / 1e4 + size / 5e3
    row = result.history[0]
    assert row["tokens"] == 3 * 32 * 5
    assert row["bytes_per_token"] == 3 * 2 * size / 480
    assert row["tokens_per_second"] == pytest.approx(480 / (2.0 + 2.0 + ways))
    assert row["communication"] == pytest.approx(ways / (2.0 + 2.0 + ways))
    assert "train_tokens" not in row


def test_what_some_silos_do_not_tell_is_not_known_of_the_round() -> None:
    whole = {"up": 10, "down": 20, "up_seconds": 1.0, "down_seconds": 2.0}
    training = {TOKENS: (100.0, 4)}

    def of(second: dict[str, Any], seconds: float = 4.0) -> dict[str, Any]:
        return Throughput.of(training, {"a": whole, "b": second}, ("a", "b"), seconds).figures()

    speed = {"tokens": 100, "tokens_per_second": 25.0}
    assert of(whole) == {**speed, "bytes_per_token": 0.6, "communication": 0.75}
    # A model that was not sent took no time.
    assert of({"up": 10, "down": 0, "up_seconds": 1.0})["communication"] == 0.5
    assert of({"up": 10, "down": 20, "up_seconds": 1.0}) == {**speed, "bytes_per_token": 0.6}
    assert of({"down": 20, "down_seconds": 2.0}) == speed
    assert of(whole, 0.0) == {"tokens": 100, "bytes_per_token": 0.6}
    assert Throughput.of({}, {}, (), 4.0).figures() == {}
    # What a silo makes up is no speed below nothing.
    assert Throughput.of({TOKENS: (-40.0, 8)}, {}, (), 4.0).figures() == {}


def test_tokens_of_an_example_are_a_number(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK.replace("example_tokens = 5", "example_tokens = 0"))
    with pytest.raises(TaskError, match="example_tokens is 0"):
        load_task("toy.py", tmp_path)


def test_a_simulation_tells_the_same_without_seconds(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TASK)
    table = {**TABLE, "simulation": {"clients": 3}, "cohort": {"size": 3}}
    result = simulate(JobConfig.model_validate(table), load_task("toy.py", tmp_path))
    first, second = (record.transfers["client-0"] for record in result.history.records)
    assert 8 < first["up_plain"] / first["up"] < 40
    assert 0.1 < first["error"] < 1
    assert first["down"] == first["down_plain"] == 4 * result.model.layout.size
    assert 4 < second["down_plain"] / second["down"] < 8
    assert not any("seconds" in name for name in first)
    sizes = [sum(t["up"] for t in record.transfers.values()) for record in result.history.records]
    assert result.history["up_bytes"] == sizes
