"""Encoders under a head of classes: what is fresh, what travels, what is read, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_bases import POSITIONS, byte_tokenizer, write_base, write_encoder

from roundtable.core import JobConfig, Layout, Site, initial_state
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.adapters import plain_name
from roundtable.core.foundation.huggingface_classifier import HuggingFaceClassifier
from roundtable.core.foundation.model_difference import model_difference
from roundtable.core.foundation.padding_check import check_padding
from roundtable.core.foundation.published import Story, load_adapter, publish
from roundtable.core.initial_model import initial_model
from roundtable.core.models import Model

STORY, TOKENS = Story("notes", 3, ("silo 1", "silo 2")), torch.arange(3, 30).view(3, 9)
LABELS = ["better", "stable", "worse"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("bases") / "bert")


def task_of(base: Path, **settings: Any) -> HuggingFaceClassifier:
    return HuggingFaceClassifier(str(base), **{"labels": LABELS, "length": 32, **settings})


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("kind", "auto", "whole", "targets"),
    [
        ("Bert", "AutoModelForMaskedLM", {"bert.pooler", "classifier"}, None),
        ("Bert", "AutoModel", {"classifier"}, "all-linear"),
        ("Roberta", "AutoModel", {"classifier"}, None),
        ("DistilBert", "AutoModelForMaskedLM", {"classifier", "pre_classifier"}, ["q_lin", "v_lin"]),
    ],
)
def test_the_head_and_a_fresh_pooler_travel_with_the_adapter(
    kind: str, auto: str, whole: set[str], targets: Any, tmp_path: Path
) -> None:
    import peft

    task = task_of(write_encoder(tmp_path / "base", kind, auto), targets=targets)
    model: Any = initial_state(task, 1)
    layout = Layout.of(model)
    travelling = {plain_name(spec.name) for spec in layout.averaged}
    assert travelling == set(peft.get_peft_model_state_dict(model))
    start = "base_model.model."
    heads = {name.removeprefix(start) for name in travelling if ".lora_" not in name}
    assert whole == {part for part in whole if any(name.startswith(part + ".") for name in heads)}
    assert all(any(name.startswith(part + ".") for part in whole) for name in heads)
    name = next(spec.name for spec in layout.averaged if "classifier" in spec.name and len(spec.shape) == 2)
    assert 0.015 < float(model.state_dict()[name].std()) < 0.025  # The configuration's is 0.02.


def test_a_fresh_head_is_drawn_by_the_jobs_seed_alone(bert: Path) -> None:
    task = task_of(bert)
    made: list[Any] = []
    for seed in (1, 1, 2):
        torch.rand(7)
        made.append(initial_state(task, seed))
    first, again, other = (model.state_dict() for model in made)
    assert Layout.of(made[0]).fingerprint == Layout.of(made[1]).fingerprint
    for name, value in first.items():
        assert torch.equal(value, again[name])
        drawn = "lora_A" in name or (("pooler" in name or "classifier" in name) and value.dim() == 2)
        assert torch.equal(value, other[name]) != drawn, name


def test_a_base_that_is_a_classifier_keeps_its_head_or_is_refused(bert: Path, tmp_path: Path) -> None:
    import transformers

    before = transformers.logging.get_verbosity()
    made: Any = task_of(bert, method="full").model()
    del made.pinned
    made.save_pretrained(tmp_path / "own")
    byte_tokenizer(None).save_pretrained(tmp_path / "own")
    again: Any = task_of(tmp_path / "own").model()
    kept = again.get_base_model().classifier.modules_to_save["default"].weight
    assert torch.equal(kept, made.classifier.weight)
    for labels in (LABELS[::-1], LABELS[:2]):
        with pytest.raises(
            TaskError, match="it is a classifier already, of the labels better, stable, worse, "
        ):
            task_of(tmp_path / "own", labels=labels).model()
    state = safetensors.torch.load_file(tmp_path / "own" / "model.safetensors")
    del state["bert.pooler.dense.bias"]
    safetensors.torch.save_file(state, tmp_path / "own" / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskError, match=r"1 missing, such as bert\.pooler\.dense\.bias"):
        task_of(tmp_path / "own").model()
    assert transformers.logging.get_verbosity() == before


def test_an_encoder_that_is_not_whole_is_refused(bert: Path, tmp_path: Path) -> None:
    for layers, said in (
        ("3", r"missing, such as bert\.encoder\.layer\.2"),
        ("1", r"unexpected, such as bert"),
    ):
        folder = tmp_path / layers
        folder.mkdir()
        for file in bert.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, "num_hidden_layers": int(layers)}))
        with pytest.raises(TaskError, match=said):
            task_of(folder).model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        TaskError, match=r"Pickles \(\.bin\) are not read: .*save_pretrained\(FOLDER\) writes"
    ):
        task_of(folder).model()


@pytest.mark.parametrize("kind", ["Roberta", "DistilBert"])
def test_a_rows_logits_follow_from_it_alone(kind: str, tmp_path: Path) -> None:
    task = task_of(write_encoder(tmp_path / "base", kind), targets="all-linear")
    model = task.model().eval()
    rows = [{"text": "ab", "label": "worse"}, {"text": "longer text here", "label": "better"}]
    file = written(tmp_path / "rows.jsonl", rows)
    (tokens, mask, labels), _ = task.data(Site("a", options={"file": str(file)}))
    assert tokens.shape == mask.shape == (2, 32)
    assert labels.tolist() == [2, 0]
    with torch.no_grad():
        both = task.logits(model, (tokens, mask))
        plain: Any = model
        own = [plain(input_ids=tokens[None, i, :n]).logits for i, n in enumerate(mask.sum(1).tolist())]
    torch.testing.assert_close(both, torch.cat(own), rtol=1e-5, atol=1e-6)


def test_rows_of_a_class_of_ones_own_are_checked_too(bert: Path, tmp_path: Path) -> None:
    class Triage(HuggingFaceClassifier):
        def rows(self, site: Site) -> Any:
            return [("a", "worse"), ("b", "dead")], []

    with pytest.raises(TaskError, match="rows, number 1: its label is none of the job's"):
        Triage(str(bert), LABELS).data(Site("a"))


class Meaning(torch.nn.Module):
    """A head over the mean of all places, those that fill a row up among them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("C", (), {"vocab_size": 50, "model_type": "meaning"})
        self.dtype = torch.float32
        self.table = torch.nn.Embedding(50, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return type("O", (), {"logits": self.table(input_ids).mean(1)})


def test_models_that_read_what_fills_a_row_up_or_take_no_such_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="gives a row other logits where it is filled up"):
        check_padding(Meaning(), 8, 0)
    roberta = write_encoder(tmp_path / "roberta", "Roberta")
    task_of(roberta, length=POSITIONS).model()
    with pytest.raises(TaskError, match="takes no row as long as that"):
        task_of(roberta, length=POSITIONS + 2).model()
    with pytest.raises(TaskError, match=f"has {POSITIONS + 3} positions"):
        task_of(roberta, length=POSITIONS + 4).model()


def test_labels_are_the_jobs_and_a_row_with_another_is_named(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(bert, labels=["0", "1"])
    rows: list[dict[str, Any]] = [{"note": "a", "who": 1}, {"note": "b", "who": "0"}, {"note": "c", "who": 1}]
    file = written(tmp_path / "rows.jsonl", rows)
    options = {"file": str(file), "text": "note", "label": "who"}
    (_, _, labels), _ = task.data(Site("a", options=options))
    assert labels.tolist() == [1, 0, 1]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"note": "d", "who": "Smith"}, "line 4: its label is none of the job's, 0, 1"),
        ({"note": "d", "who": True}, "line 4: its label is none of the job's"),
        (
            {"note": "d", "who": 1.0},
            "line 4: 'who' is wanted, .* it holds a number with a decimal point: pandas",
        ),
        ({"note": "d", "who": ["0", "1"]}, "it holds a list; a row has one label here, not several"),
        ({"note": "d", "who": None}, "line 4: 'who' is wanted, .* it has none, or an empty one"),
        ({"note": " ", "who": 1}, "line 4: 'note' is wanted, a text, not empty; it holds a text"),
        ({"note": 7, "who": 1}, "line 4: 'note' is wanted, a text, not empty; it holds a whole number"),
        ({"who": 1}, "'note' is wanted, .* has another name at this silo, say it beside the file: text ="),
    ]
    for row, said in cases:
        written(file, [*rows, row])
        with caplog.at_level(logging.ERROR), pytest.raises(TaskError, match=said) as caught:
            task.data(Site("a", options=options))
        assert "Smith" not in str(caught.value)  # An error leaves the silo; its log does not.
    assert "'Smith'" in caplog.text
    for wrong in (["a"], ["a", "a"], ["a", " "], "ab", [0, 1]):
        with pytest.raises(ConfigError, match="labels"):
            task_of(bert, labels=wrong)
    with pytest.raises(TaskError, match="this is neither"):
        task.data(Site("a", options={"file": "rows.csv"}))


def test_texts_that_are_cut_and_tests_of_one_label_are_told(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(
        tmp_path / "rows.jsonl", [{"text": "x", "label": label} for label in LABELS for _ in "1234"]
    )
    task_of(bert, test_share=0.3).data(Site("a", options={"file": str(file)}))
    assert "all 4 rows that are kept for tests, the last ones, have one label" in caplog.text
    file = written(tmp_path / "rows.jsonl", [{"text": "x" * 40, "label": "worse"}] * 2)
    (tokens, mask, _), _ = task_of(bert, length=8).data(Site("a", options={"file": str(file)}))
    assert int(mask.sum()) == 16
    assert "2 texts are longer than length = 8" in caplog.text
    assert tokens.shape == (2, 8)


def test_other_labels_or_another_order_are_told(bert: Path) -> None:
    one, two = task_of(bert), task_of(bert, labels=LABELS[::-1])
    own, turned = (Layout.of(initial_state(task, 1)) for task in (one, two))
    assert "labels are others here than in the job" in model_difference(own, turned, one)
    seeds = Layout.of(initial_state(one, 2))
    assert "drawn by the job's seed" in model_difference(own, seeds, one)


def test_settings_that_do_not_fit_are_refused(bert: Path) -> None:
    nothing = write_encoder(bert.parent / "distil", "DistilBert")
    with pytest.raises(TaskError, match=r'name them as targets in .*, or "all-linear"'):
        task_of(nothing).model()
    with pytest.raises(TaskError, match=r'it knows alone: set method = "lora"'):
        task_of(nothing, method="ia3", targets="all-linear").model()
    for settings, said in (
        ({"method": "prefix"}, "choose one of lora, ffa_lora, dora, ia3, full"),
        ({"precision": "nf4"}, "choose one of float32"),
        ({"method": "full", "precision": "bfloat16"}, "rounded away"),
    ):
        with pytest.raises(ConfigError, match=said):
            task_of(bert, **settings)
    with pytest.raises(TaskError, match="No modules were targeted"):
        task_of(bert, targets=["classifier"]).model()


def test_a_causal_model_needs_a_token_that_fills_rows(tmp_path: Path) -> None:
    """It takes a head, too: of its last token, which it finds by what fills rows up."""
    base = write_base(tmp_path / "llama")
    task_of(base).model()
    tokens = json.loads((base / "tokenizer_config.json").read_text())
    del tokens["pad_token"]
    (base / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(TaskError, match=r"names no token that fills up a row \(pad_token\)"):
        task_of(base).model()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_head_is_float32_and_its_metrics_add_up(bert: Path, precision: Any, tmp_path: Path) -> None:
    task = task_of(bert, precision=precision, checkpointing=precision == "float32", test_share=0.0)
    model = task.model()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    rows = [{"text": text, "label": label} for text, label in zip("abcdef", LABELS * 2, strict=True)]
    file = written(tmp_path / "rows.jsonl", rows)
    batch, _ = task.data(Site("a", options={"file": str(file)}))
    task.loss(model.train(), batch).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    found = task.metrics(model.eval(), batch)
    assert found["accuracy"][1] == 6
    assert sum(value for name, (value, _) in found.items() if "..confusion_3.." in name) == 6
    many = task_of(bert, labels=[str(n) for n in range(17)])
    assert set(many.metrics(many.model(), batch)) == {"accuracy"}


@pytest.mark.parametrize(
    "method",
    ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ffa_lora", "dora", "ia3", "full"))],
)
def test_what_comes_out_opens_elsewhere(bert: Path, method: str, tmp_path: Path) -> None:
    import peft
    import transformers

    job, task, model = trained(bert, method)
    own: Any = initial_state(task, job.seed)
    model.layout.load(own, model.vector)
    wanted = logits(own)
    publish(job, task, model, tmp_path / "whole", "transformers", STORY)
    auto = transformers.AutoModelForSequenceClassification
    whole = auto.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(whole), wanted, rtol=1e-4, atol=1e-5)
    assert whole.config.id2label == dict(enumerate(LABELS))
    assert whole.config.label2id == {label: n for n, label in enumerate(LABELS)}
    if method == "full":
        return
    publish(job, task, model, tmp_path / "adapter", "peft", STORY)
    plain = peft.PeftModel.from_pretrained(auto.from_pretrained(bert, num_labels=3), tmp_path / "adapter")
    torch.testing.assert_close(logits(plain), wanted, rtol=0, atol=0)
    loaded = load_adapter(tmp_path / "adapter", str(bert))
    torch.testing.assert_close(logits(loaded), wanted, rtol=0, atol=0)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained(\"bert\", id2label={0: 'better'," in card
    assert "a head of 3 labels: better, stable, worse" in card
    assert str(bert.parent) not in card


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
def test_programs_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    job, task, model = trained(write_encoder(tmp_path / "base", kind), "full")
    for format in ("traced", "onnx"):
        publish(job, task, model, tmp_path / format, format, STORY)
    own: Any = initial_state(task, job.seed)
    model.layout.load(own, model.vector)
    program: Any = torch.export.load(tmp_path / "traced" / "model.pt2").module()
    torch.testing.assert_close(program(TOKENS, torch.ones_like(TOKENS)), logits(own), rtol=1e-4, atol=1e-5)


def trained(base: Path, method: str) -> tuple[JobConfig, HuggingFaceClassifier, Model]:
    """A job's model as the coordinator has it, and some training done."""
    table = {"name": "roundtable:HuggingFaceClassifier", "base": str(base), "labels": LABELS, "length": 32}
    job = JobConfig.model_validate({"task": {**table, "method": method}, "cohort": {"size": 2}})
    task = HuggingFaceClassifier(**job.task.parameters)
    model = initial_model(job, task)
    step = torch.randn(model.layout.size, generator=torch.Generator().manual_seed(5))
    return job, task, replace(model, vector=model.vector + 0.02 * step)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits  # type: ignore[no-any-return]
