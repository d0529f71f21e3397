"""What a single value of another party may be; ProtocolError, naming value and bounds, for any other."""

from __future__ import annotations

import re
from typing import TypeVar

from roundtable.core.errors import ProtocolError
from roundtable.core.foreign_text import printable

MOST_ROUNDS = 1 << 31
MOST_BYTES = 1 << 50
MOST_COUNT = 1 << 53
LATEST = 1e11
"""Unix time, in seconds."""
DIGEST = r"[0-9a-f]{64}"
"""BLAKE3, as a regular expression."""
MOST_TASKS, MOST_LABELS = 1000, 100
"""Of a silo's greeting: the tasks that it offers, and its declared facts."""
CERTIFICATE_BYTES = 1 << 16
SIGNATURE_BYTES = 1 << 10
# Such words become parts of names of files.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_Number = TypeVar("_Number", int, float)


def word(text: str, what: str) -> str:
    """An identifier: up to 128 letters, digits and "_.:-", beginning with a letter or digit."""
    if not is_word(text):
        raise ProtocolError(f"{what} {printable(text, 80)!r} is not a valid identifier")
    return text


def is_word(text: str) -> bool:
    """Whether the text is an identifier."""
    return _WORD.fullmatch(text) is not None


def digest(text: str, what: str) -> str:
    """64 hexadecimal digits."""
    if not is_digest(text):
        raise ProtocolError(f"{what} {printable(text, 80)!r} is no BLAKE3 digest of 64 hexadecimal digits")
    return text


def is_digest(text: str) -> bool:
    """Whether the text is 64 hexadecimal digits."""
    return re.fullmatch(DIGEST, text) is not None


def within(value: _Number, least: _Number, most: _Number, what: str) -> _Number:
    """A number between both; NaN is not."""
    if not least <= value <= most:
        raise ProtocolError(f"{what} is {value!r}; between {least:g} and {most:g} can be")
    return value


def bounded(data: bytes, most: int, what: str) -> bytes:
    """At most so many bytes."""
    if len(data) > most:
        raise ProtocolError(f"{what} has {len(data)} bytes; {most} at most can be")
    return data


def text(value: str, most: int, what: str) -> str:
    """At most so many characters, whichever they are."""
    if len(value) > most:
        raise ProtocolError(f"{what} is {len(value)} characters long; at most {most} are accepted")
    return value


def one_line(value: str, most: int) -> str:
    """Words for people, on one line, printable, cut at `most` characters."""
    return printable(" ".join(value[: 4 * most].split())[:most], most)


def name(value: str, most: int, what: str) -> str:
    """A printable text of 1 to `most` characters."""
    if not value or len(value) > most or not value.isprintable():
        shown = printable(value, 80)
        raise ProtocolError(f"{what} {shown!r} is not a name: 1 to {most} printable characters can be")
    return value
