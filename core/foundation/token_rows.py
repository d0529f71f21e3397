"""Texts as rows of tokens, all of one length, in which no text sees another.

Positions begin at 0 with each text: transformers tells texts apart by that, as long as no cache is used and
no mask is given. So what fills up a row is a text of its own from which nothing is learnt, and which token
that is does not matter.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from roundtable.core.errors import TaskError
from roundtable.core.foundation.text_files import Text, is_answered

IGNORED = -100
"""The label of a token from whose prediction nothing is learnt."""
Learn = Literal["answers", "all"]
_log = logging.getLogger(__name__)


class TokenRows(NamedTuple):
    """All [rows, length] of int64; the label of a token is itself, or IGNORED."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Tokens:
    """A text's tokens, the last of which ends it, and from which something is learnt."""

    ids: Sequence[int]
    learnt: Sequence[bool]
    may_be_cut: bool


def tokens_of(tokenizer: Any, text: Text, learn: Learn) -> Tokens:
    """The text as the tokenizer has it. TaskError for a chat that no template can mark the answers of."""
    if isinstance(text, dict) and "messages" in text:
        return _chat(tokenizer, text["messages"], learn)
    if isinstance(text, dict) and "chosen" in text:
        raise TaskError(
            'the data are preferences, of "chosen" and "rejected" answers: set objective = "dpo" in the '
            "job's [task] table"
        )
    if isinstance(text, dict) and is_answered(text):
        prompt = plain_ids(tokenizer, text["prompt"])
        said = tokenizer(text["completion"], add_special_tokens=False)["input_ids"]
        answer = [*said, tokenizer.eos_token_id]
        return Tokens([*prompt, *answer], [learn == "all"] * len(prompt) + [True] * len(answer), False)
    ids = [*plain_ids(tokenizer, text if isinstance(text, str) else text["text"]), tokenizer.eos_token_id]
    return Tokens(ids, [True] * len(ids), True)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without one that ends it."""
    ids = list(tokenizer(text)["input_ids"])
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _chat(tokenizer: Any, messages: list[dict[str, str]], learn: Learn) -> Tokens:
    template = tokenizer.chat_template
    if not template:
        raise TaskError("the data are chats and the tokenizer has no chat template: give the task a template")
    marked = "generation %}" in str(template)
    if learn == "answers" and not marked:
        raise TaskError(
            "the tokenizer's chat template does not mark what the assistant says ({% generation %}), so "
            'answers alone cannot be learnt: give the task a template that does, or set learn = "all"'
        )
    made = templated(tokenizer, messages, return_assistant_tokens_mask=learn == "answers")
    ids = list(made["input_ids"])
    learnt = [bool(each) for each in made["assistant_masks"]] if learn == "answers" else [True] * len(ids)
    return Tokens(ids, learnt, False)


def templated(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> Any:
    """What the chat template makes of the messages. TaskError for one that cannot, or will not."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **how)
    except Exception as error:  # A template is somebody's program.
        # What it says may be what the messages say: that stays in this log.
        _log.error("the chat template says of a chat: %s", error)
        raise TaskError(
            f"the chat template does not take a chat as the data have it ({type(error).__name__}; this "
            "machine's log has what it says): change the data, or the template"
        ) from error


def logits_of(model: Any, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """[rows, length, vocabulary] of such rows; without positions of rows of one text each.

    With a prefix a model has a cache, and tells no texts apart: rows are of one text each then, whose
    positions follow those of the prefix by themselves.
    """
    config = getattr(model, "active_peft_config", None)
    if config is None or not config.is_prompt_learning:
        told = {} if positions is None else {"position_ids": positions}
        return model(input_ids=tokens, use_cache=False, **told).logits  # type: ignore[no-any-return]
    with warnings.catch_warnings():  # peft's own way of handing a prefix over.
        warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
        return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def packed(texts: Iterable[Tokens], length: int, filler: int, *, apart: bool = False) -> TokenRows:
    """Rows of `length` tokens with the texts in their order; rows from which nothing is learnt are left out.
    `apart`: no row holds more than one text.

    A plain text goes on in the next row, from position 0. One of questions and answers stays whole; what is
    longer than a row is cut there, and said.
    """
    rows: list[tuple[list[int], list[int], list[int]]] = []
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    cut = 0

    def close() -> None:
        nonlocal tokens, labels, positions
        room = length - len(tokens)
        if any(label != IGNORED for label in labels):
            rows.append(
                (
                    tokens + [filler] * room,
                    labels + [IGNORED] * room,
                    positions + list(range(room)),
                )
            )
        tokens, labels, positions = [], [], []

    for text in texts:
        ids, learnt = list(text.ids), list(text.learnt)
        if apart and tokens:
            close()
        if not text.may_be_cut:
            cut += len(ids) > length
            ids, learnt = ids[:length], learnt[:length]
            if len(ids) > length - len(tokens):
                close()
        while len(ids) > 1:
            # A single token in a row's last place has nothing before it to be predicted from.
            if length - len(tokens) < 2:
                close()
            here = min(length - len(tokens), len(ids))
            tokens += ids[:here]
            labels += [
                token if known and place else IGNORED
                for place, (token, known) in enumerate(zip(ids[:here], learnt[:here], strict=True))
            ]
            positions += range(here)
            ids, learnt = ids[here:], learnt[here:]
    close()
    if cut:
        _log.warning("%d texts are longer than length = %d, and were cut there", cut, length)
    if not rows:
        empty = torch.empty(0, length, dtype=torch.int64)
        return TokenRows(empty, empty.clone(), empty.clone())
    return TokenRows(*(torch.tensor([row[part] for row in rows], dtype=torch.int64) for part in range(3)))
