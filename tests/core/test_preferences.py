"""Preference tuning against sums that are worked out token by token, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bases import POSITIONS, TEMPLATE, byte_tokenizer, write_base
from torch import Tensor

from roundtable.core import JobConfig, initial_state
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.preferences import preference_of, preference_rows, rewards
from roundtable.core.foundation.text_files import Text, read_texts
from roundtable.core.foundation.token_rows import IGNORED
from roundtable.simulation import simulate

PAIRS: list[Text] = [
    {"prompt": f"bed {number}?", "chosen": "stable", "rejected": "no idea at all"} for number in range(8)
]
BEGUN = TEMPLATE + "{% if add_generation_prompt %}{{ '=' }}{% endif %}"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 drops values out while it trains."""
    return write_base(tmp_path_factory.mktemp("bases") / "gpt2", "gpt2")


def task_of(base: Path, **settings: Any) -> HuggingFaceTask:
    length = POSITIONS - 4 if settings.get("method") == "prefix" else POSITIONS
    return HuggingFaceTask(str(base), length=length, objective="dpo", virtual_tokens=4, **settings)


def moved(task: HuggingFaceTask) -> Any:
    """A model whose adapters do something."""
    model: Any = initial_state(task, 1)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=chance))
    return model.eval()


def by_hand(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """log π(answer | prompt): token by token, each from a sequence of its own."""
    ids = tokenizer(prompt)["input_ids"]
    total = 0.0
    for token in [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]:
        logits: Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
        ids = [*ids, token]
    return total


@pytest.mark.parametrize("method", ["lora", "ffa_lora", "dora", "ia3", "prefix"])
@torch.no_grad()
def test_the_loss_is_equation_7_token_by_token(gpt2: Path, method: Any) -> None:
    task = task_of(gpt2, method=method, beta=0.25)
    model, tokenizer = moved(task), byte_tokenizer()
    rows = tuple(task.rows(PAIRS[:2]))
    margins = []
    for pair in PAIRS[:2]:
        assert isinstance(pair, dict)
        gains = []
        for answer in (pair["chosen"], pair["rejected"]):
            own = by_hand(model, tokenizer, pair["prompt"], answer)
            with model.disable_adapter():
                gains.append(own - by_hand(model, tokenizer, pair["prompt"], answer))
        margins.append(0.25 * (gains[0] - gains[1]))
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert float(task.loss(model, rows)) == pytest.approx(expected, rel=1e-4)
    found = task.metrics(model, rows)
    assert float(found["reward_margin"][0]) == pytest.approx(sum(margins), rel=1e-3)
    assert float(found["reward_accuracy"][0]) == sum(margin > 0 for margin in margins)
    assert found["reward_margin"][1] == found["reward_accuracy"][1] == 2
    fresh = initial_state(task, 1)
    assert isinstance(fresh, torch.nn.Module)
    if method != "prefix":  # One does something from the first on.
        assert float(task.loss(fresh.eval(), rows)) == pytest.approx(math.log(2))


def test_the_reference_is_one_while_the_base_drops_values_out(gpt2: Path) -> None:
    """In training the policy differs from look to look, and the reference does not: it has no gradient."""
    task = task_of(gpt2)
    model = moved(task).train()
    rows = tuple(task.rows(PAIRS[:1]))
    with torch.no_grad():
        policy = [rewards(model, rows, 1.0) for _ in range(2)]
    assert not torch.equal(*policy)
    assert model.training
    assert all(module.training for module in model.modules())
    model.eval()
    task.loss(model, rows).backward()
    named = dict(model.named_parameters())
    assert all((p.grad is not None) == p.requires_grad for p in named.values())
    # A step against the gradient makes the margin larger.
    before = rewards(model, rows, 1.0)
    with torch.no_grad():
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad)
        after = rewards(model, rows, 1.0)
    margins = [float((found[0, 0] - found[0, 1]).detach()) for found in (before, after)]
    assert margins[1] > margins[0]


def test_answers_follow_their_prompts_by_the_template() -> None:
    messages: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "hi"}],
        "chosen": [{"role": "assistant", "content": "yo"}],
        "rejected": [{"role": "assistant", "content": "go away"}],
    }
    with pytest.raises(TaskError, match="does not begin with the tokens of its prompt"):
        preference_of(byte_tokenizer(BEGUN), messages)
    with pytest.raises(TaskError, match="no chat template"):
        preference_of(byte_tokenizer(None), messages)
    tokenizer = byte_tokenizer()
    rows = preference_rows([preference_of(tokenizer, messages)], 16, 1)
    said = [tokenizer.decode(side[side != IGNORED]) for side in rows.labels[0]]
    assert said == ["yo</s>", "go away</s>"]
    assert [tokenizer.decode(side[:4]) for side in rows.tokens[0]] == ["<hi>", "<hi>"]
    assert rows.positions[0, 0].tolist() == [*range(7), *range(9)]


def test_what_does_not_fit_a_row_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    found = [preference_of(byte_tokenizer(), pair) for pair in (PAIRS[0], {**PAIRS[1], "rejected": "x" * 40})]  # type: ignore[dict-item]
    assert preference_rows(found, 24, 1).tokens.shape == (1, 2, 24)
    assert "1 preferences are longer than length = 24" in caplog.text
    assert preference_rows(found[1:], 24, 1).tokens.shape == (0, 2, 24)


def test_texts_of_the_other_objective_are_refused(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match='set objective = "sft"'):
        task_of(gpt2).rows(["a text"])
    with pytest.raises(TaskError, match='set objective = "dpo"'):
        HuggingFaceTask(str(gpt2), length=POSITIONS).rows(PAIRS)
    for settings in ({"method": "full"}, {"beta": 0.0}):
        with pytest.raises(ConfigError, match="it compares with the base"):
            task_of(gpt2, **settings)
    file = tmp_path / "pairs.jsonl"
    for line in ('{"prompt": "a", "chosen": "b"}', '{"prompt": [], "chosen": "b", "rejected": "c"}'):
        file.write_text(line)
        with pytest.raises(TaskError, match="line 1: a preference has"):
            read_texts(file)


@pytest.mark.parametrize("algorithm", ["fedavg", "flora"])
def test_a_federation_learns_what_is_preferred(gpt2: Path, tmp_path: Path, algorithm: str) -> None:
    """Also over the whole ΔW of earlier rounds, which is no part of the reference."""
    import json

    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    job = {
        "task": {
            "name": "roundtable:HuggingFaceTask",
            **{"base": str(gpt2), "length": POSITIONS, "objective": "dpo", "test_share": 0.25},
        },
        "rounds": 3,
        "cohort": {"size": 2},
        "algorithm": {"name": algorithm, "batch_size": 2, "epochs": 2, "learning_rate": 0.01},
        "simulation": {
            **{"clients": 2, "backend": "sequential"},
            "data": {"file": str(tmp_path / "pairs.jsonl")},
        },
    }
    history = simulate(JobConfig.model_validate(job), folder=tmp_path).history
    margins = [record["reward_margin"] for record in history]
    assert margins[0] > 0
    assert margins == sorted(margins)
    assert history[-1]["reward_accuracy"] == 1
