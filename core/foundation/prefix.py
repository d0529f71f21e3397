"""Prefix tuning: whether a model takes a prefix at all, before anything is trained."""

from __future__ import annotations

from typing import Any

import torch

from roundtable.core.errors import TaskError
from roundtable.core.foundation.token_rows import logits_of

PROMPT = "prompt_encoder.default.embedding.weight"
"""[virtual tokens, layers · 2 · width of keys]: the prefix, as peft names it in memory."""


def check_prefix(model: Any) -> None:
    """TaskError where the model's attention leaves the prefix out, or cannot take one of peft's shape.

    peft hands a prefix over as a cache, and there are models that drop a cache without a word.
    """
    training = model.training
    model.eval()
    tokens = torch.arange(2)[None]
    try:
        with torch.no_grad():
            plain = model.get_base_model()(input_ids=tokens, use_cache=False).logits
            prefixed = logits_of(model, tokens, tokens)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise TaskError(
            'method = "prefix": this kind of model takes no prefix of peft '
            f'({type(error).__name__}: {error}); train "lora"'
        ) from error
    finally:
        model.train(training)
    if bool((plain == prefixed).all()):
        raise TaskError(
            'method = "prefix": this kind of model leaves a prefix out without a word (its logits are the '
            'same with and without one); train "lora"'
        )
