"""Rows with a label: read from files, checked, and brought to numbers that all silos understand alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.text_files import objects_of

_log = logging.getLogger(__name__)


LabelledRow = tuple[str, str]
"""A text, and the name of its label."""


class LabelledTokens(NamedTuple):
    """Tokens int64 and which of them are of the text [rows, length], the labels' numbers int64 [rows]."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


def check_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """ConfigError for labels that are not two names at least, each once and not empty."""
    if isinstance(labels, str) or len(labels) < 2 or not all(isinstance(each, str) for each in labels):
        raise ConfigError(
            f"task: labels = {labels!r}; name two at least, each as a text, in the order that all silos are "
            'to have: labels = ["no", "yes"]',
            key=("task", "labels"),
        )
    for place, each in enumerate(labels):
        if not each.strip() or each in labels[:place]:
            raise ConfigError(
                f"task: labels: {each!r} is empty, or there twice: each names one class",
                key=("task", "labels"),
            )
    return tuple(labels)


def read_labelled(path: Path, labels: Sequence[str], content: str, label: str) -> list[LabelledRow]:
    """The rows of a .jsonl or .parquet file, of its keys or columns `content` and `label`.

    A whole number is the label of its digits. TaskError with file and line or row for one that lacks either,
    or whose label is none of the job's; the value itself is said in this machine's log alone.
    """
    return list(_checked(path, set(labels), labels, content, label))


def _checked(
    path: Path, known: set[str], labels: Sequence[str], content: str, label: str
) -> Iterator[LabelledRow]:
    for place, value in objects_of(path):
        where = f"{path.name}, {place}"
        if not isinstance(value, dict):
            raise TaskError(f"{where}: an object is wanted")
        text, named = value.get(content), value.get(label)
        if not isinstance(text, str) or not text.strip():
            raise TaskError(
                f"{where}: {content!r} is wanted, and not empty; where it has another name at this silo, say "
                'it beside the file: text = "..." (or image = "...")'
            )
        if isinstance(named, bool) or not isinstance(named, str | int):
            raise TaskError(
                f"{where}: {label!r} is wanted, a text or a whole number; where it has another name at this "
                'silo, say it beside the file: label = "..."'
            )
        if str(named) not in known:
            # It may be what is in a wrong column: that stays here.
            _log.error("%s: the label %r is none of the job's", where, named)
            raise TaskError(
                f"{where}: its label is none of the job's, {', '.join(labels[:20])} (this machine's log has "
                "it): correct the data, or name it in labels of the job's [task] table"
            )
        yield text, str(named)


def numbers_of(rows: Sequence[LabelledRow], labels: Sequence[str]) -> Tensor:
    """The places of the rows' labels among the job's: int64 [rows]. TaskError for a label that is none."""
    places = {label: place for place, label in enumerate(labels)}
    for number, (_, label) in enumerate(rows):
        if label not in places:
            _log.error("rows, number %d: the label %r is none of the job's", number, label)
            raise TaskError(
                f"rows, number {number}: its label is none of the job's, {', '.join(labels[:20])} (this "
                "machine's log has it): correct what rows(site) gives"
            )
    return torch.tensor([places[label] for _, label in rows], dtype=torch.int64)


def labelled_tokens(
    tokenizer: Any, rows: Sequence[LabelledRow], labels: Sequence[str], length: int
) -> LabelledTokens:
    """Rows of `length` tokens, filled up at their ends; what is longer is cut there as the tokenizer does,
    and said."""
    filler = int(tokenizer.pad_token_id)
    tokens = torch.full((len(rows), length), filler, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    cut = 0
    for place, (text, _) in enumerate(rows):
        ids = tokenizer(text)["input_ids"]
        if len(ids) > length:
            cut += 1
            ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        tokens[place, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[place, : len(ids)] = 1
    if cut:
        _log.warning("%d texts are longer than length = %d, and were cut there", cut, length)
    return LabelledTokens(tokens, mask, numbers_of(rows, labels))
