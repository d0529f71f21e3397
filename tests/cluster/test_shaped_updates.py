"""A cluster sends what one process would, where that takes whole vectors: fragments, encodings, feedback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cluster_silo import ALGORITHM, Silo
from torch import Tensor

from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_trainer import order_of_work
from roundtable.core import Model, open_model, save_model
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.feedback import MEMORY

PRETRAINING = {"optimizer_state": "keep", "momentum": 0.5, "learning_rate": 0.1, "batch_size": 8, "steps": 5}
JOBS: dict[str, dict[str, Any]] = {
    "fragments": {
        "algorithm": {**PRETRAINING, "name": "streaming", "fragments": 2, "overlap": True, "mixing": 0.5},
        "transfer": {"up": "int4(block=64)", "feedback": "on"},
    },
    "eager": {
        "algorithm": {**PRETRAINING, "name": "eager"},
        "cohort": {"size": 2},
        "aggregation": {"weighting": "uniform", "server_optimizer": {"name": "diloco"}},
    },
    "feedback": {"algorithm": ALGORITHM, "transfer": {"up": "topk(ratio=0.2) | int8(block=64)"}},
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "feedback")]


@pytest.mark.parametrize("name", ["fragments", *SLOW])
async def test_it_is_what_one_process_sends(tmp_path: Path, name: str) -> None:
    """In three rounds, of which the first two count; ZeRO-3 on two ranks."""
    strategy = {"data_parallel": "zero3", "fsdp": 2}
    silo = Silo(tmp_path, JOBS[name], table={"strategy": strategy})
    data = {"mark": str(tmp_path / "mark"), "empty": str(tmp_path / "empty.safetensors")}
    alone = Executor(Settings("alder", str(tmp_path), str(tmp_path / "alone"), "cpu", 1, data))
    before = [torch.zeros(silo.model.layout.size)] * 2
    async with silo.trainer() as trainer:
        for round in (1, 2, 3):
            work = silo.work(round, counted=round - 1 or None)
            told = await trainer.train(work, lambda *seen: None)
            order = replace(order_of_work(work), output=str(tmp_path / "alone-update"))
            assert alone.train(order, lambda *seen: None).examples == told.examples
            sent, kept = [], []
            for output, jobs in (("update", "state/jobs"), ("alone-update", "alone")):
                sent.append(decoded(silo, tmp_path / output, round))
                left = safetensors.torch.load_file(tmp_path / jobs / f"job-1/round-{round}.1.safetensors")
                kept.append(left.get(MEMORY, torch.zeros(silo.model.layout.size)))
            # A value that is rounded another way is made up for by what is remembered.
            changes = [s + k - b for s, k, b in zip(sent, kept, before, strict=True)]
            torch.testing.assert_close(*changes, rtol=1e-4, atol=1e-6)
            assert sent[0].abs().max() > 1e-3
            before = kept
            silo.path = moved(silo, sent[0], round)
    assert beside(tmp_path / "update") == []


def decoded(silo: Silo, path: Path, round: int) -> Tensor:
    encoding = get_encoding(silo.job.transfer.up).over(silo.model.layout.sent)
    vector = torch.zeros(silo.model.layout.size)
    encoding.decode(path.read_bytes(), vector, StreamKey(silo.job.seed, "alder", round, 1))
    return vector


def beside(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.*"))


def moved(silo: Silo, change: Tensor, round: int) -> Path:
    model = open_model(silo.path)
    path = silo.folder / f"model-{round}.safetensors"
    save_model(
        path, Model(model.layout, model.vector + 0.5 * change, dict(model.local), dict(model.metadata))
    )
    return path
