"""Whether the logits of a row of tokens, or of an image, follow from it alone, tried before training.

transformers makes heads of classes that read what fills a row up (from its last place, or as a mean over all
places), and says nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundtable.core.errors import TaskError
from roundtable.core.foundation.row_check import check_numbers

_SHORT = 4
_TOLERANCE = {torch.float32: 1e-3}
_HALF = 5e-2
"""As a share of the largest logit, for values that are sums in another order at most."""


def check_padding(model: Any, length: int, filler: int) -> None:
    """TaskError where the logits of a row change with what fills it up to `length`, or with the rows beside
    it, or where no row is as long as that."""
    training = model.training
    model.eval()
    size, short = int(model.config.vocab_size), max(1, min(_SHORT, length - 1))
    tokens = [each for each in range(size) if each != filler]
    row = torch.tensor([tokens[place % len(tokens)] for place in range(5, 5 + short)])
    others = torch.tensor([tokens[(11 + 3 * place) % len(tokens)] for place in range(length)])
    try:
        with torch.no_grad():
            try:
                beside = _logits(model, others[None])
            except (IndexError, RuntimeError) as error:
                raise TaskError(
                    f"length = {length}: a {model.config.model_type} of this config.json takes no row as "
                    f"long as that ({type(error).__name__}); set length to less"
                ) from error
            alone = _logits(model, row[None])
            check_numbers(model, torch.cat([alone, beside]))
            filled = torch.cat([row, row.new_full((length - short,), filler)])
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[0, short:] = 0
            both = _logits(model, torch.stack([filled, others]), mask)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"a {model.config.model_type} does not take rows of tokens with a mask of what fills them up "
            f"({type(error).__name__}: {error}); {_remedy(model, filler)}"
        ) from error
    finally:
        model.train(training)
    wanted = torch.cat([alone, beside])
    bound = _TOLERANCE.get(model.dtype, _HALF) * float(wanted.abs().max())
    # Values that are not finite differ, too.
    if not bool(((both - wanted).abs() <= bound).all()):
        raise TaskError(
            f"a {model.config.model_type} of this config.json gives a row other logits where it is filled up "
            "at its end, or beside a longer row: what it says of a text would follow from its batch; "
            f"{_remedy(model, filler)}"
        )


def _remedy(model: Any, filler: int) -> str:
    """A model of the last token finds it by the token that fills rows up, which config.json names as well."""
    named = getattr(model.config, "pad_token_id", filler)
    if named == filler:
        return "take another base"
    return f"set pad_token_id in config.json, {named} now, to {filler}, the tokenizer's pad_token"


def check_images(model: Any, pixels: Tensor) -> None:
    """TaskError where the logits of an image, float32 [channels, height, width] as the base's processor makes
    one, change with the image beside it, or where the model takes none of that size."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = model(pixel_values=pixels[None].to(model.dtype)).logits.float()
            check_numbers(model, alone)
            beside = torch.stack([pixels, pixels.flip(-1) + 1]).to(model.dtype)
            both = model(pixel_values=beside).logits.float()
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise TaskError(
            f"a {model.config.model_type} of this config.json does not take images of {list(pixels.shape)}, "
            f"as its preprocessor_config.json makes them ({type(error).__name__}: {error}); take another base"
        ) from error
    finally:
        model.train(training)
    bound = _TOLERANCE.get(model.dtype, _HALF) * float(alone.abs().max())
    if not bool(((both[:1] - alone).abs() <= bound).all()):
        raise TaskError(
            f"a {model.config.model_type} of this config.json gives an image other logits beside another "
            "one; take another base"
        )


def _logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    told = {} if mask is None else {"attention_mask": mask}
    return model(input_ids=tokens, **told).logits.float()  # type: ignore[no-any-return]
