"""Bases that the libraries load in silence, and that give of rows of tokens something else than is meant."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bases import POSITIONS, byte_tokenizer, write_base

from roundtable.core.errors import TaskError
from roundtable.core.foundation.base_model import find_base
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.row_check import check_rows
from roundtable.core.foundation.text_files import read_texts

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
OPT = {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}
MAMBA = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}


def base_of(folder: Path, kind: str, **settings: Any) -> Path:
    """A random model of this kind, its weights as it draws them, with a tokenizer of bytes."""
    import transformers

    known = {"vocab_size": 259, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind != "Mamba":
        known["max_position_embeddings"] = POSITIONS + 2
    config = getattr(transformers, f"{kind}Config")(**known, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        auto: Any = transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def task_of(base: Path, **settings: Any) -> HuggingFaceTask:
    return HuggingFaceTask(str(base), length=16, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("OPT", OPT, "a opt does not take packed rows: its texts of one row see each other"),
        ("Mamba", MAMBA, "a mamba does not take packed rows: its texts of one row see each other"),
        ("Roberta", {**SMALL, "is_decoder": True}, "counts positions otherwise than from 0"),
    ],
)
def test_a_base_whose_packed_texts_see_each_other_takes_one_text_a_row(
    tmp_path: Path, kind: str, settings: dict[str, Any], said: str
) -> None:
    base = base_of(tmp_path / "base", kind, **settings)
    with pytest.raises(TaskError, match=rf"{said}.*packing = false"):
        task_of(base, method="full").model()
    task = task_of(base, method="full", packing=False, learn="all")
    model = task.model().eval()
    rows = task.rows(["ab", "cde"])
    assert rows.tokens.shape == (2, 16)
    with torch.no_grad():
        losses, _ = task._token_losses(model, rows)
        own = [
            model(input_ids=torch.tensor([byte_tokenizer()(text)["input_ids"] + [1]])).logits[0, :-1]
            for text in ("ab", "cde")
        ]
    wanted = torch.cat([rows.labels[0, 1:3], rows.labels[1, 1:4]])
    torch.testing.assert_close(
        losses, torch.nn.functional.cross_entropy(torch.cat(own), wanted, reduction="none")
    )


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_an_encoder_that_would_see_what_it_is_to_predict_is_refused(tmp_path: Path, kind: str) -> None:
    base = base_of(tmp_path / "base", kind, **SMALL)
    for packing in (True, False):
        with pytest.raises(TaskError, match="sees the tokens that follow"):
            task_of(base, targets="all-linear", packing=packing).model()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_causal_models_are_taken_in_every_precision(tmp_path: Path, kind: Any, precision: str) -> None:
    model: Any = find_base(str(write_base(tmp_path / "base", kind))).load(precision)
    check_rows(model.train(), packed=True, positions=True)
    assert model.training


def test_no_code_of_a_models_author_runs_whatever_is_answered_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on standard input, which is where a silo's worker gets its orders."""
    base, ran = write_base(tmp_path / "base"), tmp_path / "ran"
    (base / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig as C\n")
    told = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**told, "model_type": "own", "auto_map": {"AutoConfig": "own.C"}})
    )
    answers = io.StringIO("y\ny\ny\n")
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(TaskError, match=r"config\.json cannot be used"):
        task_of(base).model()
    (base / "config.json").write_text(json.dumps(told))
    tokens = json.loads((base / "tokenizer_config.json").read_text())
    tokens |= {"tokenizer_class": "C", "auto_map": {"AutoTokenizer": [None, "own.C"]}}
    (base / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(TaskError, match="tokenizer cannot be used"):
        task_of(base).model()
    assert answers.tell() == 0
    assert not ran.exists()


def test_a_base_that_the_libraries_would_make_another_one_of_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    told = json.loads((base / "config.json").read_text())
    for changed, said in (
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq"),
        ({"num_hidden_layers": "two"}, r"config\.json cannot be used"),
    ):
        (base / "config.json").write_text(json.dumps({**told, **changed}))
        with pytest.raises(TaskError, match=said):
            task_of(base).model()
    (base / "config.json").write_text(json.dumps(told))
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(TaskError, match="an adapter as well"):
        task_of(base).model()
    (base / "adapter_config.json").unlink()
    (base / "tokenizer.json").unlink()
    with pytest.raises(TaskError, match=r"no tokenizer\.json.*save_pretrained"):
        task_of(base).model()


def test_settings_beside_one_tokenizer_file_make_another_tokenizer(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    pinned = set(find_base(str(base)).pins())
    path = base / "tokenizer_config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "padding_side": "left"}))
    assert set(find_base(str(base)).pins()) == pinned
    path.write_text(json.dumps({**told, "split_special_tokens": True}))
    changed = find_base(str(base))
    assert changed.tokenizer("</s>")["input_ids"] != [1]
    assert [name.rpartition("_")[0] for name in changed.pins().keys() - pinned] == ["tokenizer"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a", "messages": "b"}', '"messages" is a list'),
        ('{"prompt": "a", "completion": 3}', "both texts"),
        ('{"text": "a\\ud800b"}', "half of a surrogate pair"),
        ('{"text": ' + "[" * 100_000, "no JSON"),
        ('{"text": "a", "number": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_an_odd_row_is_named_by_its_place(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "notes.jsonl").write_text(line)
    with pytest.raises(TaskError, match=rf"notes\.jsonl, line 1: .*{said}"):
        read_texts(tmp_path / "notes.jsonl")


def test_what_is_null_is_not_there_and_one_of_two_forms_is_read(tmp_path: Path) -> None:
    task = task_of(write_base(tmp_path / "base"))
    rows = [
        {"text": "a", "messages": None, "chosen": None},
        {"text": "b", "prompt": "no answer"},
        {"prompt": "c", "completion": "d", "messages": None},
        {"text": "\ud83d\ude42"},
    ]
    (tmp_path / "notes.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = task.rows(read_texts(tmp_path / "notes.jsonl"))
    assert task.pretrained_base.tokenizer.decode(found.tokens[0][:12]) == "a</s>b</s>cd</s>🙂</s>"


def test_what_a_template_says_of_a_chat_stays_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = write_base(tmp_path / "base")
    chat = [{"role": "user", "content": "Jane Doe"}]
    for template in (
        "{{ raise_exception(messages[0]['content']) }}",
        "{{ messages[0].nothing.more }}",
        "{{ ",
    ):
        task = task_of(base, template=template, learn="all")
        with pytest.raises(TaskError, match="chat template does not take a chat") as refused:
            task.rows([{"messages": chat}])
        assert "Jane" not in str(refused.value)
        with pytest.raises(TaskError, match="chat template does not take a chat"):
            task_of(base, template=template, objective="dpo").rows(
                [{"prompt": chat, "chosen": chat, "rejected": chat}]
            )
    assert "Jane Doe" in caplog.text
