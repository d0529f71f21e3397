"""Preference tuning: of two answers to a prompt the chosen one becomes likelier (Rafailov et al. 2023).

    loss    −log σ(β (log π(y_w|x)/π_ref(y_w|x) − log π(y_l|x)/π_ref(y_l|x)))      equation 7

π_ref is the base with its adapters off: it is beside the model already, and one for all silos and rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundtable.core.errors import TaskError
from roundtable.core.foundation.text_files import Text
from roundtable.core.foundation.token_rows import IGNORED, TokenRows, logits_of, plain_ids, templated

_log = logging.getLogger(__name__)


class Preference(NamedTuple):
    """Two answers to one prompt: tokens of prompt and answer, and how many of them are the prompt's."""

    chosen: Sequence[int]
    rejected: Sequence[int]
    prompts: tuple[int, int]


def preference_of(tokenizer: Any, text: Text) -> Preference:
    """The tokens of a preference; each answer ends with the end of text, or as the chat template has it.

    TaskError for a text that is no preference, and for a template by which the answer does not follow the
    prompt.
    """
    if not isinstance(text, dict) or "chosen" not in text:
        raise TaskError(
            'objective = "dpo" learns from preferences, of "prompt", "chosen" and "rejected", and the data '
            'hold other texts: set objective = "sft"'
        )
    if isinstance(text["prompt"], str):
        prompt = plain_ids(tokenizer, text["prompt"])
        chosen, rejected = (
            [*prompt, *tokenizer(text[name], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for name in ("chosen", "rejected")
        )
        return Preference(chosen, rejected, (len(prompt), len(prompt)))
    if not tokenizer.chat_template:
        raise TaskError("the data are chats and the tokenizer has no chat template: give the task a template")
    prompt = _templated(tokenizer, text["prompt"], begin=True)
    chosen, rejected = (
        _templated(tokenizer, [*text["prompt"], *text[name]]) for name in ("chosen", "rejected")
    )
    for answer in (chosen, rejected):
        if answer[: len(prompt)] != prompt or len(answer) == len(prompt):
            raise TaskError(
                "by the tokenizer's chat template an answer does not begin with the tokens of its prompt "
                "(add_generation_prompt): give the task a template by which it does"
            )
    return Preference(chosen, rejected, (len(prompt), len(prompt)))


def _templated(tokenizer: Any, messages: list[dict[str, str]], *, begin: bool = False) -> list[int]:
    return list(templated(tokenizer, messages, add_generation_prompt=begin)["input_ids"])


def preference_rows(found: Iterable[Preference], length: int, filler: int) -> TokenRows:
    """All [preferences, 2, length]: the chosen answer, then the rejected one, each in a row of its own.

    Preferences of which an answer is longer than a row are left out, and said: cut, it would be another one.
    """
    rows, left = [], 0
    for each in found:
        if max(len(each.chosen), len(each.rejected)) > length:
            left += 1
            continue
        sides = zip((each.chosen, each.rejected), each.prompts, strict=True)
        rows.append([_row(list(ids), prompt, length, filler) for ids, prompt in sides])
    if left:
        _log.warning("%d preferences are longer than length = %d, and were left out", left, length)
    if not rows:
        empty = torch.empty(0, 2, length, dtype=torch.int64)
        return TokenRows(empty, empty.clone(), empty.clone())
    return TokenRows(*(torch.tensor([[side[part] for side in row] for row in rows]) for part in range(3)))


def _row(ids: list[int], prompt: int, length: int, filler: int) -> tuple[list[int], list[int], list[int]]:
    room = length - len(ids)
    labels = [IGNORED] * prompt + ids[prompt:]
    return (
        ids + [filler] * room,
        labels + [IGNORED] * room,
        [*range(len(ids)), *range(room)],
    )


def rewards(model: nn.Module, rows: Any, beta: float, *, placed: bool = True) -> Tensor:
    """β log π(y|x)/π_ref(y|x) of the chosen and of the rejected answers, float32 [preferences, 2].
    `placed`: the model is told positions.

    Gradients are of π alone. TaskError for a model without adapters that can be off.
    """
    off = getattr(model, "disable_adapter", None)
    if off is None:
        raise TaskError('objective = "dpo" compares with the base, and the model has no adapters to put off')
    training = model.training
    model.eval()  # A base with dropout is one reference, not another with each look.
    try:
        with torch.no_grad(), off():
            reference = log_probabilities(model, rows, placed=placed)
    finally:
        model.train(training)
    return beta * (log_probabilities(model, rows, placed=placed) - reference)


def log_probabilities(model: nn.Module, rows: Any, *, placed: bool = True) -> Tensor:
    """log π(y|x), summed over the tokens of each answer, float32 of the shape of `rows` less its last."""
    tokens, labels, positions = (part.flatten(0, 1) for part in rows)
    logits = logits_of(model, tokens, positions if placed else None)[:, :-1]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="none"
    )
    return -losses.view(len(tokens), -1).sum(1).view(rows[0].shape[:2])


def preference_loss(found: Tensor) -> Tensor:
    """Equation 7 over the rewards [preferences, 2], its mean over the preferences."""
    return -functional.logsigmoid(found[:, 0] - found[:, 1]).mean()
