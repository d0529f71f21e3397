"""What is lost with all processes at once, and what the silo lacks, with real processes and real signals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_silo import TASK, Silo, watched

from roundtable.client.failures import WorkFailed
from roundtable.cluster.train.orders import Advice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "lacking"),
    [
        ("import torch\n", "raise MemoryError('for Jane Doe')\n"),
        ("def model(self):\n", "def model(self):\n        raise MemoryError('for Jane Doe')\n"),
    ],
    ids=["import", "model"],
)
async def test_main_memory_that_is_lacking_is_not_the_tasks_mistake(
    place: str, lacking: str, tmp_path: Path
) -> None:
    """Nor does it halve the micro-batch, which every later round would go on with."""
    silo = Silo(tmp_path, table={"restarts": 1})
    (tmp_path / "toy.py").write_text(TASK.replace(place, lacking, 1))
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match="no smaller batch_size would help") as failed:
            await trainer.train(replace(silo.work(), trouble=lambda *fault: told.append(fault)), watched([]))
    assert failed.value.kind == "out_of_memory"
    assert "Jane" not in failed.value.detail
    assert [(kind, done) for kind, _, done in told] == [("out_of_memory", "started the ranks again")]
    assert Advice.read(silo.config.state / "cluster").halvings == 0
