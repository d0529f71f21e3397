"""What simulated clients are called where people read of them: a hospital, a speaker, a user.

Seeds, order, files of state and every figure go by a client's number (`client-3`): no name changes a bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundtable.core.errors import RoundtableError, TaskError
from roundtable.core.foreign_text import printable
from roundtable.core.plugins.doors import described
from roundtable.core.task import AnyTask

LONGEST = 64
_NUMBERED = re.compile(r"client-\d+")
_TAKEN = frozenset({"global", "mean", "spread", "worst tenth"})
"""What else stands in the column of names."""


@dataclass(frozen=True)
class NaturalNames:
    """Names by number, as in `{"client-3": "Mayo"}`; empty where the clients of a run have none."""

    by_client: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_client)

    def of(self, client: str) -> str:
        """The client's name, or its number where it has none."""
        return self.by_client.get(client, client)

    def said(self, sentence: str) -> str:
        """The sentence with names in the place of numbers."""
        if not self.by_client:
            return sentence
        return re.sub(r"\bclient-\d+\b", lambda found: self.of(found.group()), sentence)


def checked_names(names: Any, count: int) -> tuple[str, ...]:
    """A name for each of `count` clients: a text of 1 to 64 characters that can be printed, each another.

    Raises ValueError that says which is wrong.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"a list of names is wanted, not {printable(repr(names), 80)}")
    if len(names) != count:
        raise ValueError(f"{len(names)} names for {count} clients")
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(f"the name of client {index} is {printable(repr(name), 80)}, which is no text")
        shown = printable(repr(name), 80)
        if not 1 <= len(name) <= LONGEST or name != name.strip():
            raise ValueError(
                f"the name of client {index} is {shown}; it needs 1 to {LONGEST} characters, and no space at "
                "either end"
            )
        if not name.isprintable():
            raise ValueError(f"the name of client {index} is {shown}, which cannot be printed")
        if _NUMBERED.fullmatch(name) or name in _TAKEN:
            raise ValueError(f"the name of client {index} is {shown}, which tables say of something else")
        if (other := seen.setdefault(name, index)) != index:
            raise ValueError(f"clients {other} and {index} are both called {shown}")
    return tuple(names)


def natural_names(
    task: AnyTask, numbered: Sequence[str], keys: tuple[str, ...] | None
) -> tuple[NaturalNames, str]:
    """(what the clients are called, why they keep their numbers although something names them; or "").

    The task's `client_names` comes first; else the `keys` that the partition has for the `numbered` clients.
    Raises TaskError for what `client_names` raises, or for names that cannot be used.
    """
    said = _from_task(task, len(numbered))
    if said is None and keys is not None:
        try:
            said = checked_names(keys, len(numbered))
        except ValueError as error:
            why = f"clients keep their numbers, as the partition's keys do not name them: {error}"
            return NaturalNames(), why
    if said is None:
        return NaturalNames(), ""
    return NaturalNames(dict(zip(numbered, said, strict=True))), ""


def _from_task(task: AnyTask, count: int) -> tuple[str, ...] | None:
    make = getattr(task, "client_names", None)
    if make is None:
        return None
    where = f"{type(task).__name__}.client_names()"
    try:
        names = make(count)
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(f"{where} failed: {described(error)}") from error
    try:
        return None if names is None else checked_names(names, count)
    except ValueError as error:
        raise TaskError(f"{where}: {error}") from None
