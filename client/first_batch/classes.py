"""The classes of a batch, where it has any: whole-number labels beside scores for each class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100  # torch.nn.functional.cross_entropy leaves such labels out.
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Classes:
    """`scores`: how many the model gives for each label. lowest, highest: of the labels in the batch."""

    scores: int
    lowest: int
    highest: int


def classes_of(batch: Any, outputs: Sequence[Tensor]) -> Classes | None:
    """Of the last whole-number tensor whose shape is that of the scores without their classes: labels stand
    behind inputs, and tokens may have the same shape."""
    for scores in reversed(outputs):
        for labels in reversed(list(_whole_numbers(batch))):
            counts = _classes(scores, labels)
            if counts is None:
                continue
            told = labels[labels != _IGNORED]
            if told.numel():
                return Classes(counts, int(told.min()), int(told.max()))
    return None


def scores_in(output: Any) -> Tensor | None:
    """The scores in what a module returned: itself, its `logits`, or the first of several."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, (tuple, list)) and output:
        return scores_in(output[0])
    return None


def _classes(scores: Tensor, labels: Tensor) -> int | None:
    shape = tuple(scores.shape)
    if len(shape) < 2:
        return None
    for place in (1, len(shape) - 1):
        if tuple(labels.shape) == (*shape[:place], *shape[place + 1 :]) and shape[place] > 1:
            return int(shape[place])
    return None


def _whole_numbers(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dtype in _WHOLE:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _whole_numbers(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _whole_numbers(value)
