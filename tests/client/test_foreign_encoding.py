"""An installed encoding of others, between a real coordinator and real agents, each with its approval."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation import NAMES, agents, federation_of, run_job, silo
from installed import install

from roundtable.core import JobConfig, load_task
from roundtable.core.encodings.foreign.foreign_codec import ENTRY_POINT_GROUP
from roundtable.core.errors import RoundtableError
from roundtable.core.initial_model import initial_model
from roundtable.core.plugins.code_hash import hash_of_code

TASK = """
import torch
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return torch.nn.Linear(9, 7)
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(48, 9, generator=g)
        return (x, x[:, :7].argmax(1)), None
    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
TABLE = {
    "task": "toy",
    "rounds": 3,
    "cohort": {"size": 3, "minimum": 2},
    "algorithm": {"learning_rate": 0.3, "steps": 3, "batch_size": 8},
    "evaluation": {"every": 0},
}


async def test_it_runs_only_where_people_have_approved_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "hospital_steps", CODE, {ENTRY_POINT_GROUP: {"steps": "Steps"}})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    digest = hash_of_code("encoding", "steps", ENTRY_POINT_GROUP, None)
    plain = JobConfig.model_validate(TABLE)
    small = JobConfig.model_validate(
        {**TABLE, "transfer": {"up": "steps(levels=120)", "down": "steps", "feedback": "on"}}
    )
    model = initial_model(plain, load_task("toy.py", _with_task(tmp_path)))
    (tmp_path / "without").mkdir()
    async with federation_of(tmp_path / "without", TASK) as federation:
        with pytest.raises(RoundtableError, match=rf"coordinator has not approved.*steps = \"{digest}\""):
            await asyncio.to_thread(run_job, federation, small, model)
    async with federation_of(tmp_path, TASK, encodings={"steps": digest}) as federation:
        silos = [replace(silo(federation, name), encodings={"steps": digest}) for name in NAMES]
        silos[2] = replace(silos[2], encodings={"steps": "0" * 64})
        async with agents(*silos):
            status, history, _ = await asyncio.to_thread(run_job, federation, small, model)
            assert status == "finished"
            assert [record["contributors"] for record in history] == [["alder", "birch"]] * 3
            refused = (tmp_path / "state" / "cedar" / "audit.jsonl").read_text()
            assert "the code of the encoding 'steps' is not what this silo has approved" in refused
        # With the same silos the encoded job comes as near as its error says to the one that is not.
        async with agents(*(replace(each, encodings={"steps": digest}) for each in silos)):
            _, _, near = await asyncio.to_thread(run_job, federation, small, model)
            _, _, exact = await asyncio.to_thread(run_job, federation, plain, model)
    moved = (exact.vector - model.vector).norm()
    assert 0 < (near.vector - exact.vector).norm() < 0.05 * moved
    assert not torch.equal(near.vector, exact.vector)


def _with_task(folder: Path) -> Path:
    (folder / "toy.py").write_text(TASK)
    return folder
