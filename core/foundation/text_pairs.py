"""Two texts as one row of tokens: a premise and a hypothesis, a question and an answer.

As Devlin et al. 2019 (section 3) have it: what the tokenizer puts between both, and, where the model looks
them up, segments that tell the first from the second. What is too long loses tokens of the longer text first.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from roundtable.core.errors import TaskError

TRUNCATION = "longest_first"
"""Of the texts of a pair the longer one is cut, token by token, until both fit."""
SEGMENTS = "token_type_ids"


def takes_segments(tokenizer: Any, config: Any, kind: type) -> bool:
    """Whether the tokenizer tells two texts apart by numbers that a model of this class looks up."""
    return (
        SEGMENTS in tokenizer.model_input_names
        and getattr(config, "type_vocab_size", 2) > 1
        and SEGMENTS in signature(kind.forward).parameters  # type: ignore[attr-defined]
    )


def check_room(tokenizer: Any, length: int, pairs: bool) -> None:
    """TaskError for a `length` in which no token of a text, or of each of two, is left."""
    added = int(tokenizer.num_special_tokens_to_add(pair=pairs))
    least = added + (2 if pairs else 1)
    if length < least:
        what = "each text of a pair" if pairs else "the text"
        raise TaskError(
            f"length = {length}: the base's tokenizer adds {added} tokens of its own to a row, which leaves "
            f"none for {what}; set length to {least} or more"
        )


def check_border(tokenizer: Any, segments: bool) -> None:
    """TaskError for a tokenizer that leaves no sign of where the first text of a pair ends."""
    made = tokenizer("a", "b")
    texts = made.sequence_ids(0)
    first, second = (texts.index(part) if part in texts else -1 for part in (0, 1))
    if min(first, second) < 0:
        return  # It knows neither letter: both are tokens of its own.
    between = texts[max(n for n, text in enumerate(texts) if text == 0) + 1 : second]
    told = segments and made[SEGMENTS][first] != made[SEGMENTS][second]
    if not between and not told:
        raise TaskError(
            "the base's tokenizer puts nothing between the two texts of a pair, so that nobody could tell "
            "where the first one ends: write both into one text, with words between them, and set inputs = "
            '"text"; or take a base whose tokenizer tells them apart, such as a BERT'
        )


def read_otherwise(tokenizer: Any, sample: str, pairs: bool) -> list[Any]:
    """What a tokenizer's settings make of rows of a classifier, for its digest; empty as most of them are."""
    made: list[Any] = [] if tokenizer.truncation_side == "right" else [tokenizer.truncation_side]
    if pairs:
        both = tokenizer(sample, "A second one.")
        made += [both["input_ids"], both.get(SEGMENTS)]
    return made
