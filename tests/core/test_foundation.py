"""Models of Hugging Face's libraries: what is pinned, what is learnt from, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_bases import POSITIONS, TEMPLATE, byte_tokenizer, sentences, write_base

from roundtable.core import Layout, Site, initial_state
from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError, LayoutError, TaskError
from roundtable.core.foundation import base_model, four_bits
from roundtable.core.foundation.adapters import plain_name
from roundtable.core.foundation.base_model import BASES, find_base
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.model_difference import model_difference, pins_difference
from roundtable.core.foundation.text_files import Text, read_texts
from roundtable.core.foundation.token_rows import IGNORED, packed, tokens_of
from roundtable.core.layout import LayoutRules


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "llama")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "gpt2", "gpt2")


def task_of(base: Path, **settings: Any) -> HuggingFaceTask:
    length = POSITIONS - 4 if settings.get("method") == "prefix" else POSITIONS
    return HuggingFaceTask(str(base), length=length, virtual_tokens=4, **settings)


def copy_of(base: Path, target: Path, **config: Any) -> Path:
    """The base's files elsewhere, with other values in its config.json."""
    target.mkdir()
    for file in base.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


def test_the_libraries_are_imported_by_those_who_use_them_alone() -> None:
    code = (
        "import sys, roundtable as rt; rt.HuggingFaceTask('x')\n"
        "assert not {'transformers', 'peft', 'accelerate', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora", "ia3", "prefix"])
def test_what_travels_is_what_an_adapters_file_holds(
    kind: str, method: Any, request: pytest.FixtureRequest
) -> None:
    import peft

    model = initial_state(task_of(request.getfixturevalue(kind), method=method), 1)
    layout = Layout.of(model)
    held = set(peft.get_peft_model_state_dict(model))
    travelling = {plain_name(spec.name) for spec in layout.averaged}
    frozen = {plain_name(spec.name) for spec in layout.frozen}
    if method == "ffa_lora":
        assert travelling == {name for name in held if ".lora_B." in name}
        assert {name for name in held if ".lora_A." in name} <= frozen
    else:
        assert travelling == held
    assert all(spec.dtype == "float32" for spec in layout.averaged)
    again = Layout.of(initial_state(task_of(request.getfixturevalue(kind), method=method), 1))
    assert layout.fingerprint == again.fingerprint


def test_adapters_over_a_half_precise_base_are_float32_and_travel_so(llama: Path) -> None:
    layout = Layout.of(initial_state(task_of(llama, precision="bfloat16"), 1))
    assert {spec.dtype for spec in layout.averaged} == {"float32"}
    assert "bfloat16" in {spec.dtype for spec in layout.frozen}


def test_a_base_that_differs_is_named_before_training(llama: Path, gpt2: Path, tmp_path: Path) -> None:
    """Weights, tokenizer, template and configuration, each by itself."""
    layout = Layout.of(initial_state(task_of(llama), 1))

    def refused(base: Path, **settings: Any) -> str:
        task = task_of(base, **settings)
        mine = Layout.of(initial_state(task, 1))
        told = model_difference(mine, layout, task)
        names = [[spec.name for spec in each.tensors] for each in (mine, layout)]
        pinned = pins_difference(*names, task)
        assert (pinned == told) == ("frozen weights" not in told)
        assert f"the base {str(base)!r} here is not the one that the job was submitted with: " in told
        return told.partition("submitted with: ")[2]

    weights = copy_of(llama, tmp_path / "weights")
    state = safetensors.torch.load_file(weights / "model.safetensors")
    state["model.norm.weight"][0] += 1e-6
    safetensors.torch.save_file(state, weights / "model.safetensors", {"format": "pt"})
    assert re.match(
        r"1 of 21 frozen weights have other values, such as 'base_model.model.model.norm.weight' of digest "
        r"\w{12} here and \w{12} in the job; take the revision of the base",
        refused(weights),
    )
    assert re.match(
        r"the digest of its model config is \w{12} here and \w{12} in the job; take config\.json of",
        refused(copy_of(llama, tmp_path / "config", rms_norm_eps=1e-4)),
    )
    tokens = copy_of(llama, tmp_path / "tokens")
    text = (tokens / "tokenizer.json").read_text()
    (tokens / "tokenizer.json").write_text(
        text.replace('"type":"ByteLevel"', '"type":"ByteLevel"').replace(
            '"add_prefix_space": false', '"add_prefix_space": true'
        )
    )
    assert re.match(
        r"the digest of its tokenizer is \w{12} here .*; take tokenizer\.json, [^;]*$", refused(tokens)
    )
    assert re.match(
        r"the digest of its chat template is [^;]*; take [^;]*$", refused(llama, template=TEMPLATE + " ")
    )
    both = refused(tokens, template=TEMPLATE + " ")
    assert "its tokenizer is" in both
    assert "its chat template is" in both


def test_calls_that_pad_do_not_make_a_tokenizer_another_one(llama: Path, tmp_path: Path) -> None:
    other = copy_of(llama, tmp_path / "padded")
    tokenizer = byte_tokenizer()
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    tokenizer.save_pretrained(other)
    assert (other / "tokenizer.json").read_bytes() != (llama / "tokenizer.json").read_bytes()
    torch.testing.assert_close(find_base(str(other)).pins(), find_base(str(llama)).pins(), rtol=0, atol=0)


def test_a_base_that_is_not_whole_or_not_finite_is_refused(llama: Path, gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"missing, such as model\.layers\.2"):
        task_of(copy_of(llama, tmp_path / "deeper", num_hidden_layers=3)).model()
    with pytest.raises(TaskError, match=r"unexpected, such as model\.layers\.1"):
        task_of(copy_of(llama, tmp_path / "flatter", num_hidden_layers=1)).model()
    broken = copy_of(llama, tmp_path / "broken")
    state = safetensors.torch.load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(state, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskError, match=r"'model.norm.weight' holds NaN"):
        task_of(broken).model()
    for base in (llama, gpt2):
        with pytest.raises(TaskError, match=f"has {POSITIONS} positions"):
            HuggingFaceTask(str(base), length=POSITIONS + 1).model()


def test_settings_that_make_no_sense_are_refused(llama: Path) -> None:
    for settings, said in (
        ({"method": "prompt"}, "choose one of lora"),
        ({"method": "prefix", "checkpointing": True}, "which layers that are computed again do not take"),
        ({"precision": "int4"}, "choose one of float32"),
        ({"method": "full", "precision": "bfloat16"}, "rounded away"),
        ({"rank": 0}, "rank at least 1"),
        ({"method": "full", "precision": "nf4"}, "rounded away"),
        ({"method": "ia3", "precision": "nf4"}, 'set precision = "bfloat16", or method = "lora"'),
        ({"method": "prefix", "precision": "nf4"}, "work on a GPU alone"),
        ({"method": "prefix", "targets": "all-linear"}, "has no targets"),
    ):
        with pytest.raises(ConfigError, match=said):
            task_of(llama, **settings)  # type: ignore[arg-type]
    for settings in ({"method": "prefix"}, {"precision": "bfloat16"}):
        with (
            torch.device("meta"),
            pytest.raises(TaskError, match=r"at a silo with \[cluster\], .*one process"),
        ):
            task_of(llama, **settings).model()  # type: ignore[arg-type]


def test_a_base_is_found_by_each_party_itself(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASES, str(llama.parent))
    assert find_base("llama").folder == llama.resolve()
    monkeypatch.setenv(BASES, os.pathsep.join([str(tmp_path), str(llama.parent)]))
    assert find_base("llama").folder == find_base(str(llama)).folder == llama.resolve()
    (tmp_path / "way").symlink_to(llama.parent)
    monkeypatch.setenv(BASES, str(tmp_path / "inside"))
    with pytest.raises(TaskError, match="Nothing is downloaded"):
        find_base(str(tmp_path / "inside" / ".." / "way" / "llama"))
    monkeypatch.setenv(BASES, str(llama))
    for name in ("../llama", "someone/something", "llama", str(llama.parent), "~/llama"):
        with pytest.raises(TaskError, match="Nothing is downloaded"):
            find_base(name)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_texts_give_what_each_gives_alone(kind: str, request: pytest.FixtureRequest) -> None:
    task = task_of(request.getfixturevalue(kind), learn="all")
    model = task.model().eval()
    texts = ["A first text.", "Another one, somewhat longer.", "Third."]
    rows = task.rows(texts)
    assert len(rows.tokens) == 1
    with torch.no_grad():
        together, _ = task._token_losses(model, rows)
        alone = torch.cat([task._token_losses(model, task.rows([text]))[0] for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    # Of a text of n tokens with its end, n − 1 are predicted: nothing crosses from one to the next.
    assert len(together) == sum(len(text.encode()) for text in texts)


def test_the_end_of_a_text_is_learnt_and_the_filler_is_not(llama: Path) -> None:
    rows = task_of(llama).rows(["ab", "c"])
    assert rows.tokens.shape == (1, POSITIONS)
    labels = rows.labels[0].tolist()
    assert labels[0] == labels[3] == IGNORED
    assert labels[2] == labels[4] == 1
    assert set(labels[5:]) == {IGNORED}
    assert rows.positions[0, :6].tolist() == [0, 1, 2, 0, 1, 0]


def test_the_loss_weighs_tokens_alike_over_rows(llama: Path) -> None:
    """A batch's gradient is that of all its tokens, however they lie in rows: it can be cut, and added up."""
    task = task_of(llama)
    model = task.model()
    rows = task.rows([{"prompt": "q" * 40, "completion": "a"}, {"prompt": "q", "completion": "b" * 50}])
    assert len(rows.tokens) == 2
    whole = task.loss(model, rows)
    parts = [task.loss(model, tuple(part[i : i + 1] for part in rows)) for i in range(2)]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    losses, _ = task._token_losses(model, rows)
    assert len(losses) == 2 + 51
    torch.testing.assert_close(whole, losses.sum() / (2 * (POSITIONS - 1)))


def test_answers_alone_are_learnt_from_chats(llama: Path) -> None:
    tokenizer = byte_tokenizer()
    chat: Text = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    found = tokens_of(tokenizer, chat, "answers")
    said = [token for token, learnt in zip(found.ids, found.learnt, strict=True) if learnt]
    assert tokenizer.decode(said) == "yo</s>"
    assert len(found.ids) == len("<hi>yo") + 1
    unmarked = "{{ messages[0]['content'] }}"
    for template, said_of_it in ((None, "no chat template"), (unmarked, "does not mark")):
        with pytest.raises(TaskError, match=said_of_it):
            tokens_of(byte_tokenizer(template), chat, "answers")
    unanswered: Text = {"messages": [{"role": "user", "content": "hi"}]}
    assert len(packed([tokens_of(tokenizer, unanswered, "answers")], 16, 1).tokens) == 0


def test_long_texts_go_on_and_long_questions_are_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    plain = packed([tokens_of(tokenizer, "x" * 20, "answers")], 8, 1)
    assert plain.tokens.shape == (3, 8)
    assert plain.positions[1].tolist() == list(range(8))
    cut = packed([tokens_of(tokenizer, {"prompt": "q" * 4, "completion": "a" * 9}, "answers")], 8, 1)
    assert cut.labels[0].tolist() == [IGNORED] * 4 + cut.tokens[0, 4:].tolist()
    assert "1 texts are longer than length = 8" in caplog.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "an object is wanted"),
        ('{"texts": "a"}', "neither"),
        ('{"messages": [{"role": "user"}]}', 'needs "role" and "content"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(TaskError, match=said):
        read_texts(file)


def test_an_object_may_hold_the_line_separators_of_unicode(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"text": "one\u2028two\x85three"}\n{"text": "four"}\r\n', encoding="utf-8", newline="")
    assert read_texts(file) == [{"text": "one\u2028two\x85three"}, {"text": "four"}]


def test_texts_are_shared_out_and_the_last_ones_kept_for_tests(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("\n\n".join(sentences(20)))
    task = task_of(llama, test_share=0.25)
    training, test = task.texts(Site("one", options={"file": str(file)}))
    assert (len(training), len(test)) == (15, 5)
    assert [*training, *test] == sentences(20)
    with pytest.raises(TaskError, match=r"\[data\] table"):
        task.texts(Site("one"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prefix_is_before_each_text_and_takes_positions(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row holds one text, whose losses are those of the text alone behind keys and values made by hand."""
    import transformers

    base = request.getfixturevalue(kind)
    task = task_of(base, method="prefix", learn="all")
    model: Any = initial_state(task, 1)
    model.eval()
    texts = ["A first text.", "Another one, somewhat longer.", "x" * 70]
    rows = task.rows(texts)
    assert [int((row != IGNORED).sum()) for row in rows.labels] == [13, 29, 59, 10]
    found, _ = task._token_losses(model, rows)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    (prefix,) = (p for p in model.parameters() if p.requires_grad)
    heads = prefix.view(4, 2, 2, 2, 16).permute(1, 2, 3, 0, 4)  # layers, (key, value), heads, tokens, width
    by_hand = []
    for row, labels in zip(rows.tokens, rows.labels, strict=True):
        layers = [(layer[0][None], layer[1][None]) for layer in heads]
        cache = transformers.DynamicCache(layers)
        logits = plain(input_ids=row[None], past_key_values=cache).logits[0, :-1]
        learnt = labels[1:] != IGNORED
        by_hand.append(torch.nn.functional.cross_entropy(logits[learnt], row[1:][learnt], reduction="none"))
    torch.testing.assert_close(found, torch.cat(by_hand), rtol=1e-5, atol=1e-5)
    with pytest.raises(TaskError, match=r"and 5 virtual tokens before it: .* set length to 59 or less"):
        HuggingFaceTask(str(base), POSITIONS, "prefix", virtual_tokens=5).model()
    # A model that drops what it is given, as some do.
    monkeypatch.setattr(type(plain), "forward", forgetful(type(plain).forward))
    with pytest.raises(TaskError, match="leaves a prefix out without a word"):
        task.model()


def forgetful(forward: Any) -> Any:
    def without(self: Any, *given: Any, past_key_values: Any = None, **named: Any) -> Any:
        return forward(self, *given, **named)

    return without


def test_half_precision_that_overflows_is_refused_with_the_precision(llama: Path, tmp_path: Path) -> None:
    """A weight of 1e5 is one in float32 and bfloat16, and infinity in float16."""
    large = copy_of(llama, tmp_path / "large")
    state = safetensors.torch.load_file(large / "model.safetensors")
    state["model.norm.weight"][3] = 1e5
    safetensors.torch.save_file(state, large / "model.safetensors", {"format": "pt"})
    for precision in ("float32", "bfloat16"):
        task_of(large, precision=precision).model()
    with pytest.raises(TaskError, match=r"norm.weight' holds NaN or infinity in float16; another precision"):
        task_of(large, precision="float16").model()
    state["model.norm.weight"][3] = 1.0
    for name in ("up_proj", "down_proj"):  # What is multiplied overflows, and no weight does.
        state[f"model.layers.0.mlp.{name}.weight"] *= 3e4
    safetensors.torch.save_file(state, large / "model.safetensors", {"format": "pt"})
    task_of(large, precision="bfloat16").model()
    with pytest.raises(TaskError, match=r'NaN or infinity in float16: .* set precision = "bfloat16" or "f'):
        task_of(large, precision="float16").model()


def test_a_base_that_does_not_fit_into_memory_is_refused_with_what_fits(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = find_base(str(llama)).values
    assert values == sum(p.numel() for p in find_base(str(llama)).load("float32").parameters())
    for room, precision, said in (
        (4, "float32", ""),
        (2, "float32", r'take \S+ GB in float32.*has \S+ GB for them; precision = "bfloat16" .* would fit'),
        (1, "bfloat16", r'for them; precision = "nf4" \(\S+ GB\) would fit'),
        (0.25, "float16", "no precision fits: take a smaller base"),
    ):
        monkeypatch.setattr(base_model, "physical_memory", lambda room=room: int(values * room))
        if not said:
            task_of(llama, precision=precision).model()
            continue
        with pytest.raises(TaskError, match=said):
            task_of(llama, precision=precision).model()
    monkeypatch.setattr(base_model, "physical_memory", lambda: None)
    task_of(llama).model()


@pytest.mark.parametrize("entry", ["../base/model.safetensors", ["a"], 7, "missing.safetensors"], ids=str)
def test_an_index_that_names_no_files_of_its_folder_counts_nothing(
    llama: Path, tmp_path: Path, entry: object
) -> None:
    base, other = copy_of(llama, tmp_path / "base"), copy_of(llama, tmp_path / "other")
    assert find_base(str(base)).values > 0
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": entry}}))
    assert find_base(str(other)).values == 0


def test_another_major_version_of_transformers_or_special_token_is_another_model(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a silo it is refused by name before anything is trained."""
    import transformers

    job = Layout.of(initial_state(task_of(llama), 1))
    installed = transformers.__version__.partition(".")[0]
    other = copy_of(llama, tmp_path / "other")
    said = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": "<s>"}))
    mine = Layout.of(initial_state(task_of(other), 1))
    assert "the digest of its special tokens is" in model_difference(mine, job, task_of(other))
    # What is frozen may travel by the job's [model] table: then it has no digest, and the names still differ.
    for rules in (
        LayoutRules(travel="all"),
        LayoutRules(local=("pinned.*",)),
        LayoutRules(drop=("pinned.*",)),
    ):
        both = [Layout.of(initial_state(task_of(base), 1), rules) for base in (other, llama)]
        assert "the digest of its special tokens is" in model_difference(*both, task_of(other))
    here = "5" if installed == "4" else "4"
    monkeypatch.setattr(transformers, "__version__", f"{here}.57.6")
    mine = Layout.of(initial_state(task_of(llama), 1))
    assert mine.fingerprint != job.fingerprint
    said = f"transformers is of version {here} here and {installed} in the job; install that"
    assert said in model_difference(mine, job, task_of(llama))


def test_the_jobs_betas_and_decay_are_adamws(llama: Path) -> None:
    context, parameters = Context("j", 1, "a", learning_rate=0.5), [torch.nn.Parameter(torch.ones(2))]
    for settings in ({}, {"betas": [0.8, 0.95], "weight_decay": 0.1}):
        task = task_of(llama, **settings)
        (group,) = task.optimizer(parameters, context).param_groups
        assert group["lr"] == 0.5
        assert group["betas"] == tuple(settings.get("betas", (0.9, 0.999)))  # type: ignore[arg-type]
        assert group["weight_decay"] == settings.get("weight_decay", 0.0)
    for settings in ({"betas": [0.9, 1.0]}, {"betas": [0.9]}, {"weight_decay": -0.1}):
        with pytest.raises(ConfigError, match="of AdamW two betas from 0 to below 1"):
            task_of(llama, **settings)


def test_four_bits_are_refused_where_they_cannot_be(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before round 1: with the value, the machine's lack, and what else to set."""
    task = task_of(llama, precision="nf4")
    monkeypatch.setattr(four_bits.torch.cuda, "is_available", lambda: False)
    for there, said in (
        (None, "is not installed on this machine.*pip install bitsandbytes"),
        (True, "needs a CUDA GPU"),
    ):
        monkeypatch.setattr(four_bits, "find_spec", lambda name, there=there: there)
        with pytest.raises(TaskError, match=rf'precision = "nf4" .*{said}.*set precision = "bfloat16"'):
            initial_state(task, 1)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora"])
def test_a_base_in_four_bits_is_frozen_and_pinned(
    kind: str, method: Any, device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters alone travel, and train; what 4-bit values mean is the same at all parties, or refused."""
    pytest.importorskip("bitsandbytes")
    if device == "cpu":  # As far as it works there: the values are rounded on the CPU anyway.
        monkeypatch.setattr(four_bits.torch.cuda, "is_available", lambda: True)
    base = request.getfixturevalue(kind)
    task = task_of(base, method=method, precision="nf4")
    model: Any = initial_state(task, 1)
    layout = Layout.of(model)
    assert {spec.dtype for spec in layout.averaged} == {"float32"}
    assert {spec.rule for spec in layout.tensors} == {"average", "frozen"}
    assert "uint8" in {spec.dtype for spec in layout.frozen}
    assert (
        layout.fingerprint
        == Layout.of(initial_state(task_of(base, method=method, precision="nf4"), 1)).fingerprint
    )
    model.to(device).train()
    rows = [part.to(device) for part in task.rows(["hello world, this is a text"])]
    chance = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(8):
        chance.zero_grad()
        losses.append(task.loss(model, rows))
        losses[-1].backward()
        chance.step()
    assert losses[-1] < losses[0]
    layout.check_frozen(model.state_dict())
    with torch.no_grad():
        scales = next(
            value for name, value in model.named_parameters() if name.endswith("scales_of_four_bits")
        )
        scales[0] += 1
    with pytest.raises(LayoutError, match="scales_of_four_bits"):
        layout.check_frozen(model.state_dict())


def test_targets_that_the_base_lacks_are_refused(llama: Path) -> None:
    with pytest.raises(TaskError, match="adapters do not fit this base"):
        task_of(llama, targets=["c_attn"]).model()


def test_a_parquet_table_holds_what_lines_of_json_hold(llama: Path, tmp_path: Path) -> None:
    """Texts, questions and chats in one table, whose other columns are empty: the same rows of tokens."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    texts: list[Text] = [
        {"text": "plain", "label": "a"},
        {"prompt": "why", "completion": "so"},
        {"messages": chat},
    ]
    lines, table = tmp_path / "notes.jsonl", tmp_path / "notes.parquet"
    lines.write_text("\n".join(map(json.dumps, texts)))
    parquet.write_table(arrow.Table.from_pylist(texts, names_of(texts)), table)
    assert read_texts(table) == read_texts(lines) == texts
    task = task_of(llama)
    for one, other in zip(task.rows(read_texts(table)), task.rows(texts), strict=True):
        assert torch.equal(one, other)
    parquet.write_table(arrow.table({"text": ["fine", None]}), table)
    with pytest.raises(TaskError, match=r"notes\.parquet, row 2: it has neither"):
        read_texts(table)
    table.write_bytes(b"PAR1")
    with pytest.raises(TaskError, match=r"notes\.parquet cannot be read as Parquet"):
        read_texts(table)
    with pytest.raises(TaskError, match=r"notes\.csv: texts are read from"):
        read_texts(tmp_path / "notes.csv")


def names_of(texts: list[Text]) -> Any:
    import pyarrow

    messages = pyarrow.list_(
        pyarrow.struct([(name, pyarrow.string()) for name in ("role", "content", "name")])
    )
    names = [(name, pyarrow.string()) for name in ("text", "label", "prompt", "completion")]
    return pyarrow.schema([*names, ("messages", messages)])


def test_a_model_writes_on_from_questions_and_from_halves_of_texts(llama: Path) -> None:
    """The likeliest tokens, one after the other, as a loop by hand gives them."""
    task = task_of(llama)
    model: Any = initial_state(task, 1)
    model.train()
    rows = task.rows([{"prompt": "bed 3?", "completion": "stable"}, "x" * POSITIONS, "north ward"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roundtable.core.foundation.generated_texts._MOST_TOKENS", 5)
        found = task.generated(model, tuple(rows), 9)
    assert model.training
    tokenizer = byte_tokenizer()
    assert [each.prompt for each in found] == ["bed 3?", "x" * 7]
    assert found[0].said == "stable"
    for each in found:
        ids = tokenizer(each.prompt)["input_ids"]
        begun = len(ids)
        while len(ids) < begun + 5 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert each.written == tokenizer.decode(ids[begun:], skip_special_tokens=True)
    assert len(task.generated(model, tuple(rows), 1)) == 1

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        task.generated(model, tuple(rows), 1, stop)
    assert HuggingFaceTask(str(llama)).generated(model, object(), 1) == []  # type: ignore[arg-type]
