"""The shards that a pattern with braces stands for: `train-{000..127}.tar`, `{a,b}.tar`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import product

from roundtable.core.errors import TaskError
from roundtable.core.paths import AnyPath

MOST_SHARDS = 1 << 20
_BRACES_WRONG = (
    "TarShards: braces are a range, {000..127}, or words, {a,b}, and do not nest; "
    "give a file whose name has braces as a Path"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def shard_list(urls: AnyPath | Sequence[AnyPath]) -> tuple[str, ...]:
    """The addresses in order, braces expanded; a Path is taken as it is written.

    `{000..127}` counts, with as many digits as its first number; `{a,b}` takes each word. Raises TaskError
    for other braces, for no shard at all, for one named twice, and for more than `MOST_SHARDS`.
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    shards: list[str] = []
    for each in given:
        shards += _expanded(each) if isinstance(each, str) else [os.fspath(each)]
        _check_count(len(shards))
    if not shards:
        raise TaskError("TarShards: the list of shards is empty; name at least one tar file")
    if len(set(shards)) < len(shards):
        twice = next(number for number, shard in enumerate(shards) if shard in shards[:number])
        raise TaskError(f"TarShards: shard {twice + 1} of {len(shards)} is named twice; name each shard once")
    return tuple(shards)


def _expanded(pattern: str) -> list[str]:
    pieces = _BRACES.split(pattern)
    if any("{" in piece or "}" in piece for piece in pieces):
        raise TaskError(_BRACES_WRONG)
    choices = [_choices(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
        _check_count(count)
    return ["".join(parts) for parts in product(*choices)]


def _choices(braces: str) -> list[str]:
    found = _RANGE.fullmatch(braces)
    if found is None:
        words = braces.split(",")
        if len(words) < 2:
            raise TaskError(_BRACES_WRONG)
        return words
    first, last = found[1], found[2]
    if int(last) < int(first):
        raise TaskError(f"TarShards: {{{first}..{last}}} counts down; write the smaller number first")
    _check_count(int(last) - int(first) + 1)
    width = len(first) if first.startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _check_count(count: int) -> None:
    if count > MOST_SHARDS:
        raise TaskError(f"TarShards: more than {MOST_SHARDS:,} shards; make fewer, larger ones")
