"""What a job fine-tuned, opened by the libraries themselves; adapters that they would take, refused here."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from tiny_bases import POSITIONS, byte_tokenizer, write_base

from roundtable.core import JobConfig, initial_state
from roundtable.core.errors import ConfigError, EncodingError, LayoutError, ModelMismatch, TaskError
from roundtable.core.foundation.checkpoint_files import CheckpointTensors
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.logits_program import LogitsOf, Traceable, write_program
from roundtable.core.foundation.published import Story, load_adapter, publish
from roundtable.core.initial_model import initial_model, whole_model
from roundtable.core.models import Model

STORY = Story("notes", 3, ("silo 1", "silo 2"), '{"statement": {}}', "coordinator")
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
    length = POSITIONS // 2  # A prefix has positions of its own.
    table = {"name": "roundtable:HuggingFaceTask", "base": str(base), "length": length, **settings}
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


@pytest.mark.parametrize("frozen", [True, False], ids=["of a simulation", "of a coordinator"])
def test_a_model_is_not_published_with_another_tokenizer_or_template(
    bases: Path, tmp_path: Path, frozen: bool
) -> None:
    """Also where the model holds all its weights: the tokenizer beside it would be of this machine."""
    job, task, model = trained(bases / "llama")
    model = whole_model(job, task, model) if frozen else model
    other = HuggingFaceTask(**{**job.task.parameters, "template": "{{ messages }}"})
    with pytest.raises(ModelMismatch, match="the digest of its chat template is"):
        publish(job, other, model, tmp_path / "adapter", "peft", STORY)
    assert not (tmp_path / "adapter").exists()


def test_a_whole_model_is_written_as_shards_with_their_digests(bases: Path, tmp_path: Path) -> None:
    import transformers

    job, task, model = trained(bases / "llama")
    publish(job, task, model, tmp_path / "whole", "transformers", STORY)
    publish(job, task, model, tmp_path / "shards", "transformers", STORY, 20_000)
    shards, whole = CheckpointTensors(tmp_path / "shards"), CheckpointTensors(tmp_path / "whole")
    assert len(shards.files) > 2
    assert shards.keys() == whole.keys()
    assert all(torch.equal(value, shards[name]) for name, value in whole.items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    torch.testing.assert_close(logits_of(loaded), expected_of(job, task, model), rtol=1e-4, atol=1e-5)
    shards.verify()
    (tmp_path / "shards" / shards.files[1]).write_bytes(b"")
    with pytest.raises(EncodingError, match="is damaged"):
        shards.verify()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora", "ia3", "prefix", "full"])
def test_the_libraries_load_what_is_written(bases: Path, kind: str, method: str, tmp_path: Path) -> None:
    import peft
    import transformers

    base = bases / kind
    job, task, model = trained(base, method=method)
    wanted = expected_of(job, task, model)
    auto = transformers.AutoModelForCausalLM
    if method == "prefix":
        with pytest.raises(ConfigError, match=r"no change of weights.*--format peft, not transformers"):
            publish(job, task, model, tmp_path / "whole", "transformers", STORY)
    else:
        publish(job, task, model, tmp_path / "whole", "transformers", STORY)
        whole = auto.from_pretrained(tmp_path / "whole")
        torch.testing.assert_close(logits_of(whole), wanted, rtol=1e-4, atol=1e-5)
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


def test_what_a_tied_head_learnt_is_not_merged_into_the_embedding(bases: Path, tmp_path: Path) -> None:
    import transformers

    job, task, model = trained(bases / "gpt2", targets=["lm_head", "c_attn"])
    publish(job, task, model, tmp_path / "whole", "transformers", STORY)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits_of(whole), expected_of(job, task, model), rtol=1e-4, atol=1e-5)
    with pytest.raises(TaskError, match="a factor of an embedding's"):
        trained(bases / "gpt2", targets=["wte", "c_attn"])


def test_nothing_that_is_written_names_this_machine_or_a_silo(bases: Path, tmp_path: Path) -> None:
    job, task, model = trained(bases / "llama")
    here = (bases, tmp_path, Path.home(), Path(torch.__file__).parent.parent, Path.cwd())
    for kind in ("peft", "transformers"):
        publish(job, task, model, tmp_path / kind, kind, STORY)  # type: ignore[arg-type]
        check_places(tmp_path / kind, here)
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "epsilon 3 at delta 0.001" in card
    assert "silo 1, silo 2 |" in card
    assert 'base_model: "llama"' in card
    assert "| trained | lora, rank 8, alpha 16;" in card
    assert "signed by coordinator: provenance.json" in card
    assert (tmp_path / "peft" / "provenance.json").read_text() == STORY.statement + "\n"
    with pytest.raises(ConfigError, match="not empty"):
        publish(job, task, model, tmp_path / "peft", "peft", STORY)


def check_places(folder: Path, places: Sequence[Path]) -> None:
    """No file of the folder, nor a member of one that is a ZIP archive, holds one of these paths."""
    for file in folder.iterdir():
        parts = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                parts += [archive.read(name) for name in archive.namelist()]
        for place in places:
            assert not any(str(place).encode() in part for part in parts), (file, place)


@pytest.mark.slow
def test_a_program_gives_the_logits_for_any_number_of_tokens(bases: Path, tmp_path: Path) -> None:
    """Of adapters over a base in half precision: merged in float32."""
    job, task, model = trained(bases / "llama", precision="bfloat16")
    publish(job, task, model, tmp_path / "out", "traced", STORY)
    check_places(tmp_path / "out", (bases, Path.home(), Path(torch.__file__).parent.parent, Path.cwd()))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    whole: Any = initial_state(task, job.seed)
    model.layout.load(whole, model.vector)
    merged = whole.float().merge_and_unload().eval()
    for shape in ((1, 1), (1, 37), (3, POSITIONS)):
        tokens = torch.randint(259, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(program(tokens), merged(tokens).logits, rtol=1e-4, atol=1e-5)
    assert 'torch.export.load("FOLDER/model.pt2")' in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_onnx_gives_the_logits_for_any_number_of_tokens(bases: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    job, task, model = trained(bases / "gpt2")
    publish(job, task, model, tmp_path / "out", "onnx", STORY)
    check_places(tmp_path / "out", (bases, Path.home(), Path(torch.__file__).parent.parent, Path.cwd()))
    tokens = torch.arange(3, 40)[None]
    evaluator = onnx.ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    (found,) = evaluator.run(None, {"input_ids": tokens.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected_of(job, task, model), rtol=1e-4, atol=1e-5)


def test_a_model_that_gives_other_logits_as_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EncodingError, match="other logits: by 1 of the largest"):
        write_program(of_tokens(Forgetful()), "traced", tmp_path)
    with pytest.raises(EncodingError, match="torch cannot write this model as traced"):
        write_program(of_tokens(Branching()), "traced", tmp_path)


@torch.library.custom_op("somebodys::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return 2 * values


@twice.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


def test_a_program_that_another_process_could_not_load_is_refused(tmp_path: Path) -> None:
    """It would need the library that brought the operation along."""
    with pytest.raises(EncodingError, match=r"as traced: it computes somebodys\.twice\.default"):
        write_program(of_tokens(Foreign()), "traced", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_mixture_of_experts_is_written_as_programs(tmp_path: Path) -> None:
    """Its experts compute by an operation of transformers, which no other process has."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    more = {"num_key_value_heads": 1, "num_local_experts": 4, "pad_token_id": 2, "vocab_size": 259}
    config = transformers.MixtralConfig(**sizes, **more, bos_token_id=0, eos_token_id=1)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(TaskError, match=r'name them as targets in .*, or "all-linear"'):
        trained(tmp_path / "base")
    job, task, model = trained(tmp_path / "base", targets="all-linear")
    for kind in ("traced", "onnx"):
        publish(job, task, model, tmp_path / kind, kind, STORY)
    program = torch.export.load(tmp_path / "traced" / "model.pt2")
    assert "transformers" not in str(program.graph)
    found = program.module()(torch.arange(3, 40)[None])
    torch.testing.assert_close(found, expected_of(job, task, model), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_takes_fewer_indices_than_values(tmp_path: Path) -> None:
    """As DeBERTa gathers, and ONNX describes it; its own evaluator does not take them."""
    pytest.importorskip("onnxscript")
    write_program(of_tokens(Gathering()), "onnx", tmp_path)


def of_tokens(model: torch.nn.Module) -> Traceable:
    example, other = ({"input_ids": torch.arange(rows * 4).view(rows, 4) % 7} for rows in (2, 3))
    module = LogitsOf(model, ("input_ids",), use_cache=False)
    return Traceable(module, example, other, {0: "rows", 1: "tokens"})


class Logits(NamedTuple):
    logits: torch.Tensor


class Forgetful(torch.nn.Module):
    """Gives zeros once it has been looked at by an exporter, and never again what it gave."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Logits:
        scale = 0.0 if torch.compiler.is_exporting() else 1.0
        return Logits(scale * torch.nn.functional.one_hot(input_ids, 7).float())


class Foreign(torch.nn.Module):
    """Computes by an operation that is registered in this process alone."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Logits:
        return Logits(twice(torch.nn.functional.one_hot(input_ids, 7).float()))


class Gathering(torch.nn.Module):
    """Takes a value of each of the first two tokens of a row."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Logits:
        values = torch.nn.functional.one_hot(input_ids, 7).float()
        return Logits(values.gather(2, input_ids[:, :2, None]))


class Branching(torch.nn.Module):
    """Goes by values, which no trace can follow."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Logits:
        logits = torch.nn.functional.one_hot(input_ids, 7).float()
        return Logits(logits if logits.sum() > 3 else -logits)


def test_a_model_is_put_over_its_own_base_alone(bases: Path, tmp_path: Path) -> None:
    """What is wrong of the base is said in one way, whether the model brings the job's weights or not."""
    job, task, model = trained(bases / "llama")
    _, other, _ = trained(bases / "other")
    said = (
        r"the base '\S+other' here is not .*: \d+ of \d+ frozen weights have other values, .* take the revis"
    )
    for each in (model, whole_model(job, task, model)):
        with pytest.raises(ModelMismatch, match=said):
            publish(job, other, each, tmp_path / "out", "peft", STORY)
    wider = HuggingFaceTask(**{**job.task.parameters, "rank": 4})
    with pytest.raises(LayoutError, match=r"lora_A.* has shape \[4, 32\], .* \[8, 32\]"):
        publish(job, wider, model, tmp_path / "out", "peft", STORY)
    half = HuggingFaceTask(**{**job.task.parameters, "precision": "nf4"})
    with pytest.raises(ConfigError, match=r"base is in 4 bits.*--format peft, not transformers"):
        publish(job, half, model, tmp_path / "out", "transformers", STORY)
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
