"""Adapters over a pretrained base at a silo with a cluster, against one process."""

from __future__ import annotations

import re
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster_silo import Silo, watched
from tiny_bases import write_base

from roundtable.client.failures import WorkFailed
from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.cluster.train.frozen_weights import frozen_weights
from roundtable.cluster.train.pretrained_weights import pretrained_weights
from roundtable.core import JobConfig, Layout, Site, initial_state
from roundtable.core.errors import MODEL_MISMATCH, LayoutError
from roundtable.core.foundation.base_model import BaseModel
from roundtable.core.foundation.huggingface_task import HuggingFaceTask

TASK = """
from pathlib import Path
import torch
import roundtable as rt

class Toy(rt.HuggingFaceTask):
    def __init__(self):
        super().__init__(str(Path(__file__).with_name("base")), length=40, targets="all-linear")
    def texts(self, site):
        texts = [f"north ward, bed {bed}: stable and fine" for bed in range(16)]
        return texts, texts[:4]
    def optimizer(self, parameters, context):
        return torch.optim.SGD(parameters, lr=context.learning_rate)
    def model(self):
        made = super().model()
        for part in made.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0  # Ranks draw masks of their own.
        return made
"""
JOB: dict[str, Any] = {"algorithm": {"learning_rate": 0.5, "batch_size": 4, "steps": 4}}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora", "ia3", "full"])
def test_a_model_without_weights_has_the_tensors_of_the_real_one(
    kind: Any, method: Any, tmp_path: Path
) -> None:
    """And no parameter takes memory: the base is read by parts."""
    task = HuggingFaceTask(str(write_base(tmp_path / "base", kind)), 40, method=method)
    empty, real = model_on_meta(task), task.model()
    assert all(parameter.is_meta for parameter in empty.parameters())

    def told(model: torch.nn.Module) -> Any:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        return trained, {name: (value.shape, value.dtype) for name, value in model.state_dict().items()}

    assert told(empty) == told(real)
    buffers = dict(empty.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in real.named_buffers())
    assert Layout.of(real).size > 0


@pytest.mark.parametrize(
    ("kind", "method"), [("llama", "lora"), ("gpt2", "lora"), ("llama", "ia3"), ("llama", "ffa_lora")]
)
def test_no_rank_loads_the_whole_base(
    kind: Any, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is frozen is read tensor by tensor out of the base's files, as published under other names; of
    FFA-LoRA alone the first rank makes the model, whose A are drawn layer after layer."""
    base = write_base(tmp_path / "base", kind)
    task = HuggingFaceTask(str(base), 40, method=method, targets=None if method == "ia3" else "all-linear")
    job = JobConfig.model_validate({"task": {"name": "roundtable:HuggingFaceTask"}, "cohort": {"size": 2}})
    model = initial_state(task, job.seed)
    assert isinstance(model, torch.nn.Module)
    layout, real, loaded = Layout.of(model), model.state_dict(), []
    load = BaseModel.load
    monkeypatch.setattr(BaseModel, "load", lambda *given: loaded.append(given) or load(*given))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = pretrained_weights(task.pretrained(Site("silo")), task)
        found = frozen_weights(task, job.seed, layout, own, tmp_path, dist.group.WORLD)  # type: ignore[arg-type]
        assert all(torch.equal(found[spec.name], real[spec.name]) for spec in layout.frozen)
        assert len(loaded) == (method == "ffa_lora")
        if frozen := [s for s in layout.frozen if s.name in own]:
            name = frozen[0].name
            spoiled = ChainMap({name: own[name] + 1}, own)  # type: ignore[arg-type]
            with pytest.raises(LayoutError, match=f"{re.escape(name)}.*other values than the job's"):
                frozen_weights(task, job.seed, layout, spoiled, tmp_path, dist.group.WORLD)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


async def test_ranks_compare_the_base_before_round_1(tmp_path: Path) -> None:
    tokens = write_base(tmp_path / "base") / "tokenizer.json"
    silo = Silo(tmp_path, JOB, TASK, table={"timeout": 60.0})
    tokens.write_text(tokens.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match="the digest of its tokenizer is") as caught:
            await trainer.check(silo.work(phase="check"))
    assert caught.value.kind == MODEL_MISMATCH


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("strategy", [{"data_parallel": "ddp"}, {"data_parallel": "zero3", "micro_batch": 2}])
async def test_two_ranks_train_adapters_as_one_process(
    kind: Any, strategy: dict[str, Any], tmp_path: Path
) -> None:
    write_base(tmp_path / "base", kind)
    silo = Silo(tmp_path, JOB, TASK, table={"strategy": strategy, "timeout": 60.0})
    alone = silo.alone()
    async with silo.trainer() as trainer:
        await trainer.check(silo.work(phase="check"))
        trained = await trainer.train(silo.work(), watched([]))
        assert trainer.launches == 1
    assert trained.metrics["loss"][0] > 0
    assert float(alone.abs().max()) > 1e-2
    torch.testing.assert_close(silo.update(), alone, rtol=1e-4, atol=1e-6)
