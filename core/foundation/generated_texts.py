"""What a language model writes on from the beginnings of texts: for people to read, where the texts are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from roundtable.core.foundation.token_rows import IGNORED

_MOST_TOKENS = 64


class GeneratedText(NamedTuple):
    """A text's beginning, what the model writes on, and what the text says there."""

    prompt: str
    written: str
    said: str


def generated_texts(
    model: Any, tokenizer: Any, rows: Any, count: int, before_text: Callable[[], None] | None = None
) -> list[GeneratedText]:
    """Of the first text of each of the first `count` rows, [rows, length] or preferences' [rows, 2, length].

    A text begins with its question, or, where all of it is learnt, with its first half. The likeliest token
    follows, until the text ends, the row is full, or after 64 tokens. `before_text` is called before each
    text, and may raise.
    """
    found: list[GeneratedText] = []
    for tokens, labels, positions in zip(*rows, strict=True):
        if len(found) == count:
            break
        parts = (part[0] if part.dim() == 2 else part for part in (tokens, labels, positions))
        text = _first_text(*parts)
        if text is not None:
            if before_text is not None:
                before_text()
            found.append(_written(model, tokenizer, *text, int(tokens.shape[-1])))
    return found


def _first_text(tokens: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """The beginning and the rest of a row's first text; None for one of fewer than two tokens."""
    starts = (positions == 0).nonzero().flatten().tolist()
    end = starts[1] if len(starts) > 1 else len(tokens)
    if end < 2:
        return None
    learnt = (labels[:end] != IGNORED).nonzero().flatten().tolist()
    begun = learnt[0] if learnt and learnt[0] > 1 else max(1, end // 2)
    return tokens[:begun], tokens[begun:end]


def _written(model: Any, tokenizer: Any, prompt: Tensor, rest: Tensor, length: int) -> GeneratedText:
    device = next(nn.Module.parameters(model)).device
    ids = prompt[None].to(device)
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=min(_MOST_TOKENS, max(1, length - len(prompt))),
        do_sample=False,
        pad_token_id=int(tokenizer.eos_token_id),
    )[0, len(prompt) :]
    texts = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, made, rest))
    return GeneratedText(*texts)
