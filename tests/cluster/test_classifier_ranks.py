"""An encoder under a head of classes at a silo with a cluster, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster_silo import Silo, watched
from tiny_bases import write_encoder

from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.cluster.train.frozen_weights import frozen_weights
from roundtable.cluster.train.pretrained_weights import pretrained_weights
from roundtable.core import JobConfig, Layout, Site, initial_state
from roundtable.core.errors import TaskError
from roundtable.core.foundation.huggingface_classifier import HuggingFaceClassifier

LABELS = ["asleep", "better", "worse"]
TASK = """
from pathlib import Path
import torch
import roundtable as rt

LABELS = ["asleep", "better", "worse"]

class Toy(rt.HuggingFaceClassifier):
    def __init__(self):
        base = str(Path(__file__).with_name("base"))
        super().__init__(base, LABELS, 24, targets=TARGETS, method="METHOD")
    def rows(self, site):
        rows = [(f"bed {n % 7}: {LABELS[n % 3]}" + " and more" * (n % 2), LABELS[n % 3]) for n in range(16)]
        return rows, rows[:5]
    def optimizer(self, parameters, context):
        return torch.optim.SGD(parameters, lr=context.learning_rate)
    def model(self):
        made = super().model()
        for part in made.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0  # Ranks draw masks of their own.
        return made
"""
JOB: dict[str, Any] = {"algorithm": {"learning_rate": 0.2, "batch_size": 4, "steps": 4}}


@pytest.mark.parametrize(
    ("kind", "auto", "method"),
    [
        ("Bert", "AutoModelForMaskedLM", "lora"),  # Without a pooler, which trains whole then.
        ("Bert", "AutoModel", "full"),
        ("Bert", "AutoModelForSequenceClassification", "lora"),
        ("Roberta", "AutoModel", "ffa_lora"),
        ("DistilBert", "AutoModelForMaskedLM", "dora"),
    ],
)
def test_ranks_make_the_jobs_model_and_read_what_is_frozen(
    kind: str, auto: str, method: Any, tmp_path: Path
) -> None:
    base, fresh = write_encoder(tmp_path / "base", kind, auto), auto.endswith("SequenceClassification")
    task = HuggingFaceClassifier(
        str(base),
        LABELS,
        24,
        method=method,
        fresh_head=fresh,
        targets=None if method == "full" else "all-linear",
    )
    job = JobConfig.model_validate(
        {"task": {"name": "roundtable:HuggingFaceClassifier"}, "cohort": {"size": 2}}
    )
    real: Any = initial_state(task, job.seed)
    empty, layout = model_on_meta(task, job.seed), Layout.of(real)
    assert all(parameter.is_meta for parameter in empty.parameters())
    trained = [{name for name, p in made.named_parameters() if p.requires_grad} for made in (empty, real)]
    assert trained[0] == trained[1]
    state = real.state_dict()
    assert {name: (v.shape, v.dtype) for name, v in empty.state_dict().items()} == {
        name: (v.shape, v.dtype) for name, v in state.items()
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = pretrained_weights(task.pretrained(Site("silo")), task)
        group: Any = dist.group.WORLD
        found = frozen_weights(task, job.seed, layout, own, tmp_path, group)
        assert all(torch.equal(found[spec.name], state[spec.name]) for spec in layout.frozen)
        read = [spec.name for spec in layout.frozen if spec.name in own]
        # Beside the base: pins, and what peft keeps of a head before it trained.
        assert all(
            ".encoder." in name or "embeddings" in name or ".transformer." in name or "pooler" in name
            for name in read
        )
        assert len(read) > 20 or method == "full"
    finally:
        dist.destroy_process_group()


def test_half_precision_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    task = HuggingFaceClassifier(str(write_encoder(tmp_path / "base")), LABELS, 24, precision="bfloat16")
    with pytest.raises(TaskError, match=r"with \[cluster\], precision = .bfloat16.*set precision = .float32"):
        model_on_meta(task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "strategy"),
    [
        ("Bert", "lora", {"data_parallel": "ddp"}),
        ("Bert", "lora", {"data_parallel": "zero3", "micro_batch": 2}),
        ("DistilBert", "full", {"data_parallel": "zero3", "micro_batch": 2}),
    ],
)
async def test_two_ranks_train_head_and_adapters_as_one_process(
    kind: str, method: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    write_encoder(tmp_path / "base", kind)
    code = TASK.replace("METHOD", method).replace("TARGETS", "None" if method == "full" else '"all-linear"')
    silo = Silo(tmp_path, JOB, code, table={"strategy": strategy, "timeout": 60.0})
    alone = silo.alone()
    async with silo.trainer() as trainer:
        trained = await trainer.train(silo.work(), watched([]))
    assert trained.metrics["loss"][0] > 0
    assert float(alone.abs().max()) > 1e-2
    torch.testing.assert_close(silo.update(), alone, rtol=1e-4, atol=1e-6)
