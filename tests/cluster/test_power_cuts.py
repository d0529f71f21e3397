"""What is lost with all processes at once, and what the silo lacks, with real processes and real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lost_silo
import pytest
import torch
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


@pytest.mark.slow
async def test_after_a_power_cut_a_round_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Agent, launcher and ranks are killed at once in the middle of a round. The newest checkpoint has no
    description yet, and the one before a file of which not all reached the disk. The update has the bits of a
    round that nothing disturbed."""
    lost, whole = tmp_path / "lost", tmp_path / "whole"
    lost.mkdir()
    whole.mkdir()
    kit = [sys.executable, lost_silo.__file__, str(lost)]
    ended = subprocess.run(kit, capture_output=True, text=True, timeout=200, check=False)  # noqa: ASYNC221
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    folders = sorted((lost / "state" / "cluster" / "checkpoints" / "job-1").iterdir())
    sealed = [folder for folder in folders if (folder / "state.json").exists()]
    assert len(sealed) >= 3, folders
    (sealed[-1] / "state.json").rename(sealed[-1] / ".state.json.partial")
    file = next(sealed[-2].glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-512] + bytes(512))
    silo = Silo(lost, code=lost_silo.CODE, table=lost_silo.TABLE)
    seen: list[int] = []
    async with silo.trainer() as trainer:
        assert (await trainer.train(silo.work(), watched(seen))).examples == 64
    assert seen[0] == 8 * (1 + int(sealed[-3].name[-8:]))
    undisturbed = Silo(whole, code=lost_silo.CODE, table=lost_silo.TABLE)
    async with undisturbed.trainer() as trainer:
        await trainer.train(undisturbed.work(), watched([]))
    assert torch.equal(silo.update(), undisturbed.update())


@pytest.mark.slow
async def test_ranks_load_a_task_anew_once_its_file_was_changed(tmp_path: Path) -> None:
    silo, told = Silo(tmp_path), list[str]()
    work = replace(silo.work(phase="evaluate"), trouble=lambda kind, detail, done: told.append(detail))
    path = tmp_path / "toy.py"
    async with silo.trainer() as trainer:
        assert "accuracy" in await trainer.evaluate(work, watched([]))
        path.write_text(path.read_text().replace('{"accuracy":', '{"mended":'))
        assert "mended" in await trainer.evaluate(work, watched([]))
        assert trainer.launches == 2
    assert [each[:40] for each in told] == ["the code of task toy.py has changed: it "]
