"""Pairs of texts, and numbers as labels: what a model is given, what comes out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_bases import with_borders, write_base, write_encoder

from roundtable.core import JobConfig, Site, initial_state
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.base_model import find_base
from roundtable.core.foundation.classifier_head import ClassifierHead
from roundtable.core.foundation.huggingface_classifier import HuggingFaceClassifier
from roundtable.core.foundation.published import Story, load_adapter, publish
from roundtable.core.initial_model import initial_model
from roundtable.core.measures.families import families_in

STORY, LABELS = Story("notes", 3, ("silo 1", "silo 2")), ("neutral", "entails")
ROWS = [
    {"premise": "bed 3 sleeps", "text_pair": "asleep", "label": True},
    {"premise": "bed 4 eats", "text_pair": "a second text that is far longer than the first", "label": False},
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_borders(write_encoder(tmp_path_factory.mktemp("bases") / "bert"))


def task_of(base: Path, **settings: Any) -> HuggingFaceClassifier:
    return HuggingFaceClassifier(
        str(base), **{"labels": ["false", "true"], "length": 32, "inputs": "pairs", **settings}
    )


def site_of(folder: Path, rows: list[dict[str, Any]], **columns: str) -> Site:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return Site("a", options={"file": str(folder / "rows.jsonl"), **columns})


@pytest.mark.parametrize(("kind", "segments"), [("Bert", True), ("DistilBert", False)])
def test_a_pair_gives_the_logits_that_transformers_gives(kind: str, segments: bool, tmp_path: Path) -> None:
    """Of the exported folder, too, with the tokenizer in it; and of the adapter."""
    import peft
    import transformers

    base = with_borders(write_encoder(tmp_path / "base", kind))
    table = {"name": "roundtable:HuggingFaceClassifier", "base": str(base), "length": 32, "inputs": "pairs"}
    table |= {"labels": ["false", "true"], "targets": "all-linear"}
    job = JobConfig.model_validate({"task": table, "cohort": {"size": 2}})
    task = HuggingFaceClassifier(**job.task.parameters)
    model = initial_model(job, task)
    own: Any = initial_state(task, job.seed)
    (batch, test) = task.data(site_of(tmp_path, ROWS, text="premise"))
    assert len(batch) == 3 + segments
    assert len(test[0]) == 0
    assert batch[-1].tolist() == [1, 0]
    with torch.no_grad():
        logits = task.logits(own.eval(), batch)
        publish(job, task, model, tmp_path / "whole", "transformers", STORY)
        publish(job, task, model, tmp_path / "adapter", "peft", STORY)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "whole")
        texts = [row["premise"] for row in ROWS], [row["text_pair"] for row in ROWS]
        told = tokenizer(*texts, padding=True, truncation="longest_first", max_length=32, return_tensors="pt")
        auto: Any = transformers.AutoModelForSequenceClassification
        whole = auto.from_pretrained(tmp_path / "whole")
        taken = dict(told) if segments else {name: told[name] for name in ("input_ids", "attention_mask")}
        torch.testing.assert_close(whole(**taken).logits, logits, rtol=1e-4, atol=1e-5)
        plain = peft.PeftModel.from_pretrained(auto.from_pretrained(base, num_labels=2), tmp_path / "adapter")
        torch.testing.assert_close(plain.eval()(**taken).logits, logits, rtol=1e-5, atol=1e-6)
        if segments:  # They say something.
            taken["token_type_ids"] = torch.zeros_like(taken["input_ids"])
            assert not torch.allclose(whole(**taken).logits, logits, rtol=1e-3, atol=1e-4)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "id2label={0: 'false', 1: 'true'}" in card


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (_, mask, segments, _), _ = task_of(bert, length=12).data(site_of(tmp_path, ROWS, text="premise"))
    # Of twelve three are the tokenizer's, one of them of the second text; of nine the longer keeps five.
    assert mask.sum(1).tolist() == [12, 12]
    assert segments.sum(1).tolist() == [5, 6]
    assert "2 pairs are longer than length = 12: their longer texts were cut" in caplog.text
    with pytest.raises(TaskError, match=r"none for each text of a pair; set length to 5 or more"):
        task_of(bert, length=4).model()
    with pytest.raises(TaskError, match=r"line 1: 'premise' is wanted, .*text = "):
        task_of(bert).data(site_of(tmp_path, [{"text_pair": "b", "label": True}], text="premise"))
    with pytest.raises(TaskError, match=r"line 1: 'text_pair' is wanted, .*text_pair = "):
        task_of(bert).data(site_of(tmp_path, [{"text": "b", "label": True}]))


def test_a_tokenizer_without_a_border_and_other_settings_are_told(bert: Path, tmp_path: Path) -> None:
    plain = write_encoder(tmp_path / "plain")
    with pytest.raises(TaskError, match="puts nothing between the two texts of a pair"):
        task_of(plain).model()
    head = ClassifierHead(LABELS, "pairs")
    own = find_base(str(bert), head).pins().keys()
    other = with_borders(write_encoder(tmp_path / "other"), segments=False)
    assert len(own ^ find_base(str(other), head).pins().keys()) == 2
    told = json.loads((bert / "tokenizer_config.json").read_text())
    with_borders(other)
    (other / "tokenizer_config.json").write_text(json.dumps({**told, "truncation_side": "left"}))
    assert len(own ^ find_base(str(other), head).pins().keys()) == 2


def test_a_model_of_the_last_token_asks_for_one_token_that_fills_rows(tmp_path: Path) -> None:
    """And is written as a program that gives its logits: zeros as segments would be tokens to a GPT-2."""
    base = write_base(tmp_path / "gpt2", "gpt2")
    task = task_of(base, inputs="text")
    model: Any = task.model()
    tokens = torch.arange(3, 11).view(2, 4)
    made = task.traceable(model).module(tokens, torch.ones_like(tokens))
    torch.testing.assert_close(made, model(input_ids=tokens).logits)
    told = json.loads((base / "config.json").read_text())
    for value in (None, 7):
        (base / "config.json").write_text(json.dumps({**told, "pad_token_id": value}))
        with pytest.raises(TaskError, match=f"set pad_token_id in config.json, {value} now, to 2"):
            task_of(base, inputs="text").model()


def test_a_number_is_learnt_by_its_squared_error_and_measured_over_all_silos(
    bert: Path, tmp_path: Path
) -> None:
    import transformers

    table = {"name": "roundtable:HuggingFaceClassifier", "base": str(bert), "length": 32}
    table |= {"labels": ["severity"], "problem_type": "regression", "test_share": 0}
    job = JobConfig.model_validate({"task": table, "cohort": {"size": 2}})
    task = HuggingFaceClassifier(**job.task.parameters)
    model: Any = initial_state(task, job.seed)
    rows: list[dict[str, Any]] = [{"text": f"bed {n}", "label": n * n / 4 - 1} for n in range(20)]
    rows[3]["label"] = 2
    batch, _ = task.data(site_of(tmp_path, rows))
    assert batch[-1].dtype == torch.float32
    truth = batch[-1].double().numpy()
    with torch.no_grad():
        value = task.logits(model.eval(), batch)[:, 0].double().numpy()
        assert float(task.loss(model, batch)) == pytest.approx(((value - truth) ** 2).mean())
        parts = [task.metrics(model, [each[cut] for each in batch]) for cut in (slice(7), slice(7, 20))]
    sums = {name: (float(parts[0][name][0] + parts[1][name][0]), 20) for name in parts[0]}
    found = {name: value for family in families_in(sums) for name, value in family.figures(sums).items()}
    assert found["label_pearson"] == pytest.approx(np.corrcoef(value, truth)[0, 1], rel=1e-3)
    assert found["label_rmse"] == pytest.approx(((value - truth) ** 2).mean() ** 0.5)
    # A simulation's silos with numbers of their own have them by tenths.
    assert task._parts([("", float(n)) for n in range(19, -1, -1)]) == [n // 2 for n in range(19, -1, -1)]
    publish(job, task, initial_model(job, task), tmp_path / "adapter", "peft", STORY)
    assert load_adapter(tmp_path / "adapter", str(bert)).config.num_labels == 1  # type: ignore[union-attr]
    publish(job, task, initial_model(job, task), tmp_path / "whole", "transformers", STORY)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "whole")
    assert (config.problem_type, config.id2label) == ("regression", {0: "severity"})
    for wrong, said in (
        ("0.5", "a text"),
        (True, "true or false"),
        (float("nan"), "a number"),
        (1e39, "a num"),
    ):
        with pytest.raises(TaskError, match=f"line 1: 'label' is wanted, a finite number .* it holds {said}"):
            task.data(site_of(tmp_path, [{"text": "a", "label": wrong}]))
    for labels, problem in ((["a", "b"], "regression"), (["a"], "single_label_classification")):
        with pytest.raises(
            ConfigError, match=r"problem_type = .regression.|a regression names the one number"
        ):
            task_of(bert, labels=labels, problem_type=problem)
