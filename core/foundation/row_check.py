"""Whether a base gives of rows of tokens what is meant by them, tried before anything is trained.

transformers makes models of causal ones that see what follows (encoders), that tell no packed texts apart
(recurrent ones, and those whose masks are their own), or that count positions otherwise, and says nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundtable.core.errors import TaskError
from roundtable.core.foundation.token_rows import logits_of

_TEXT = 4
_TOLERANCE = 1e-3
"""As a share of the largest logit, for values that are sums in another order at most."""


def check_rows(model: Any, *, packed: bool, positions: bool) -> None:
    """TaskError where a token's logits follow from later ones; with `positions`, where positions from 0 are
    not the model's own; with `packed`, where a text's logits follow from another text of its row."""
    training = model.training
    model.eval()
    size = int(model.config.vocab_size)
    first, second, other = (torch.arange(n * _TEXT, (n + 1) * _TEXT)[None] % size for n in range(3))
    places = torch.arange(_TEXT)[None]
    try:
        with torch.no_grad():
            alone = logits_of(model, second, None)
            check_numbers(model, alone)
            changed = torch.cat([second[:, :-1], other[:, -1:]], 1)
            ahead = _differ(alone[:, :-1], logits_of(model, changed, None)[:, :-1])
            why = "" if ahead or not positions else _misplaced(model, second, places, alone)
            if packed and not ahead and not why:
                row = torch.cat([places, places], 1)
                one, two = (logits_of(model, torch.cat([text, second], 1), row) for text in (first, other))
                if _differ(one[:, _TEXT:], two[:, _TEXT:]):
                    why = "its texts of one row see each other"
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise TaskError(
            f"a {model.config.model_type} does not take rows of tokens as a causal language model does "
            f"({type(error).__name__}: {error}); take another base"
        ) from error
    finally:
        model.train(training)
    if ahead:
        raise TaskError(
            f"a {model.config.model_type} of this config.json sees the tokens that follow, so it would learn "
            "to copy them: it is an encoder; take a causal language model as base"
        )
    if why:
        raise TaskError(
            f"a {model.config.model_type} does not take packed rows: {why}. Set packing = false in the "
            "job's [task] table, by which a row holds one text"
        )


def check_numbers(model: Any, logits: Tensor) -> None:
    """TaskError where the base's logits are NaN or infinite: training could begin with nothing else."""
    if bool((logits < torch.inf).all()):  # NaN is not, and what is never to be said may be minus infinity.
        return
    precision = str(model.dtype).removeprefix("torch.")
    half = model.dtype == torch.float16
    remedy = 'set precision = "bfloat16" or "float32"' if half else "take another base"
    raise TaskError(
        f"a {model.config.model_type} of these weights gives logits that are NaN or infinity in {precision}: "
        f"values between its layers overflow; {remedy}"
    )


def _misplaced(model: Any, tokens: Tensor, places: Tensor, wanted: Tensor) -> str:
    try:
        placed = logits_of(model, tokens, places)
    except TypeError:
        return "it takes no positions"
    return "it counts positions otherwise than from 0" if _differ(placed, wanted) else ""


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > _TOLERANCE * one.abs().max())
