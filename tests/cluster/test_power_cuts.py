"""What is lost with all processes at once, and what the silo lacks, with real processes and real signals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_silo import TASK, Silo, watched

from roundtable.client.failures import WorkFailed
from roundtable.cluster.train.orders import Advice


@pytest.mark.slow
@pytest.mark.parametrize("place", ["def model(self):", "def data(self, site):", "class Toy(Task):"])
async def test_main_memory_that_is_lacking_is_not_the_tasks_mistake(place: str, tmp_path: Path) -> None:
    """Nor does it halve the micro-batch, which every later round would go on with."""
    code = TASK.replace(place, f"{place}\n        raise MemoryError('{place[:9]}')")
    silo = Silo(tmp_path, table={"restarts": 1})
    (tmp_path / "toy.py").write_text(code)
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match="no smaller batch_size would help") as failed:
            await trainer.train(replace(silo.work(), trouble=lambda *fault: told.append(fault)), watched([]))
    assert failed.value.kind == "out_of_memory"
    assert [(kind, done) for kind, _, done in told] == [("out_of_memory", "started the ranks again")]
    assert Advice.read(silo.config.state / "cluster").halvings == 0
