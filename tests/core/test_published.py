"""What a job fine-tuned, opened by the libraries themselves; adapters that they would take, refused here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_bases import POSITIONS, write_base

from roundtable.core import JobConfig, initial_state
from roundtable.core.errors import ConfigError, EncodingError, LayoutError
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.published import Story, load_adapter, publish
from roundtable.core.initial_model import initial_model
from roundtable.core.models import Model

STORY = Story("notes", 3, 2)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    write_base(folder / "llama")
    write_base(folder / "other", seed=1)
    write_base(folder / "gpt2", "gpt2")
    return folder


def trained(base: Path, **settings: Any) -> tuple[JobConfig, HuggingFaceTask, Model]:
    """A job's model as the coordinator has it, without what is frozen, and some training done."""
    table = {"name": "roundtable:HuggingFaceTask", "base": str(base), "length": POSITIONS, **settings}
    job = JobConfig.model_validate({"task": table, "cohort": {"size": 2}})
    task = HuggingFaceTask(**job.task.parameters)
    model = initial_model(job, task)
    step = torch.randn(model.layout.size, generator=torch.Generator().manual_seed(5))
    told = {**model.metadata, "privacy": "epsilon 3 at delta 0.001"}
    return job, task, replace(model, vector=model.vector + 0.02 * step, metadata=told)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits  # type: ignore[no-any-return]


def expected_of(job: JobConfig, task: HuggingFaceTask, model: Model) -> torch.Tensor:
    own: Any = initial_state(task, job.seed)
    model.layout.load(own, model.vector)
    return logits_of(own)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora", "ia3", "full"])
def test_the_libraries_load_what_is_written(bases: Path, kind: str, method: str, tmp_path: Path) -> None:
    import peft
    import transformers

    base = bases / kind
    job, task, model = trained(base, method=method)
    wanted = expected_of(job, task, model)
    publish(job, task, model, tmp_path / "whole", "transformers", STORY)
    auto = transformers.AutoModelForCausalLM
    torch.testing.assert_close(
        logits_of(auto.from_pretrained(tmp_path / "whole")), wanted, rtol=1e-4, atol=1e-5
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "whole").decode([1]) == "</s>"
    if method == "full":
        with pytest.raises(ConfigError, match="no adapter"):
            publish(job, task, model, tmp_path / "adapter", "peft", STORY)
        return
    publish(job, task, model, tmp_path / "adapter", "peft", STORY)
    plain = peft.PeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(plain), wanted, rtol=0, atol=0)
    torch.testing.assert_close(
        logits_of(load_adapter(tmp_path / "adapter", str(base))), wanted, rtol=0, atol=0
    )


def test_nothing_that_is_written_names_this_machine_or_a_silo(bases: Path, tmp_path: Path) -> None:
    job, task, model = trained(bases / "llama")
    for kind in ("peft", "transformers"):
        publish(job, task, model, tmp_path / kind, kind, STORY)  # type: ignore[arg-type]
        for file in (tmp_path / kind).iterdir():
            for place in (bases, tmp_path, Path.home()):
                assert str(place).encode() not in file.read_bytes(), file
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "epsilon 3 at delta 0.001" in card
    assert "silo 1, silo 2 |" in card
    assert "base_model: llama" in card
    with pytest.raises(ConfigError, match="not empty"):
        publish(job, task, model, tmp_path / "peft", "peft", STORY)


def test_a_model_is_put_over_its_own_base_alone(bases: Path, tmp_path: Path) -> None:
    job, _, model = trained(bases / "llama")
    _, other, _ = trained(bases / "other")
    with pytest.raises(LayoutError, match=r"model\.embed_tokens"):
        publish(job, other, model, tmp_path / "out", "peft", STORY)
    broken = replace(model, vector=model.vector.clone().index_fill_(0, torch.tensor([7]), float("nan")))
    with pytest.raises(EncodingError, match="NaN"):
        publish(job, trained(bases / "llama")[1], broken, tmp_path / "out", "peft", STORY)
    assert not (tmp_path / "out").exists()


def changed(values: Tensors, change: Callable[[Tensors, str], None]) -> Tensors:
    change(values, min(values))
    return values


def test_adapters_that_peft_would_take_are_refused_with_what_differs(bases: Path, tmp_path: Path) -> None:
    job, task, model = trained(bases / "llama")
    folder = tmp_path / "adapter"
    publish(job, task, model, folder, "peft", STORY)
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    good, settings = file.read_bytes(), config.read_text()
    with safetensors.safe_open(file, framework="pt") as opened:
        notes = opened.metadata()

    def refused(said: str, base: str = "llama") -> None:
        with pytest.raises(EncodingError, match=said):
            load_adapter(folder, str(bases / base))
        file.write_bytes(good)
        config.write_text(settings)

    def write(change: Callable[[Tensors, str], None]) -> None:
        values = {name: value.clone() for name, value in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(changed(values, change), file, notes)

    refused("another base: its weights have the digest", "other")
    refused("no adapter of .*gpt2.*: adapters do not fit", "gpt2")
    write(lambda values, name: values[name].view(-1)[3:4].fill_(float("nan")))
    refused("holds NaN")
    write(lambda values, name: values.__setitem__("stranger", torch.ones(1)))
    refused("it has 'stranger'")
    write(lambda values, name: values.__delitem__(name))
    refused("it lacks")
    config.write_text(json.dumps({**json.loads(settings), "r": 4}))
    refused("ask for .*another rank")
    file.write_bytes(good[:100])
    refused("cannot be read")
    config.write_text("{")
    refused("cannot be used")
    for trainable in (False, True):
        ready = load_adapter(folder, str(bases / "llama"), trainable=trainable)
        assert ready.training == trainable
        assert any(parameter.requires_grad for parameter in ready.parameters()) == trainable
