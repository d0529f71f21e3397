"""Secure aggregation in the service: a real coordinator and real agents, and what each of them can lose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from secure_federation import QUIET, SECURE, Federation

from roundtable.core.models import open_model

COLUMNS = 1500


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation.make(tmp_path, "alder", "birch", "cedar")


async def finished_model(federation: Federation, text: str, request: str) -> tuple[torch.Tensor, list[dict]]:
    async with federation.operator() as operator:
        job = await operator.submit(text, rounds=2, vector=torch.zeros(COLUMNS), request=request)
        await operator.watch_until(job.id, "finished")
        detail = await operator.job(job.id)
        data = await operator.fetch(detail.job.model.digest)
    path = federation.folder / f"{request}.safetensors"
    path.write_bytes(data)
    return open_model(path).vector, [json.loads(record) for record in detail.history]


async def test_the_model_is_the_one_that_all_could_see(federation: Federation) -> None:
    async with federation.coordinator(), federation.agents(federation.trainers(COLUMNS)):
        seen, _ = await finished_model(federation, QUIET + "[cohort]\nsize = 3", "plain")
        hidden, history = await finished_model(federation, SECURE + "[cohort]\nsize = 3", "secure")
    # Two rounds, each off by less than clip_norm / levels: 2 · 2.0 / 10922 for silos of weight 1 and up.
    assert (seen - hidden).abs().max() < 1e-5
    assert not torch.equal(seen, hidden)
    record = history[0]
    assert record["weights"] == {}
    assert record["contributors"] == ["alder", "birch", "cedar"]
    assert record["charge"]["examples"] == 10 + 30 + 50
    assert record["training"] == {"loss": [pytest.approx(45.0, abs=1e-3), 90]}
