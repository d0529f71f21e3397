"""Text that another party wrote, made fit to be shown: on a terminal, in a table, in a line of a log.

Names, messages and versions arrive from silos, coordinators, identity providers and tasks. Shown as they are
they could move the cursor, fill the clipboard, reorder a line (bidirectional overrides) or forge the next.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

LINE = 2_000
"""Characters of a line beyond which it is cut."""
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What begins a formula; the last four are the same characters in full width."""
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|!~&@$]")
_ADDRESS = re.compile(r"://|\bwww\.", re.IGNORECASE)


def printable(text: object, limit: int = LINE) -> str:
    """The text as one line: what is not printable is escaped as Python writes it, `\\x1b`, `\\n`, `\\u202e`.

    After `limit` characters it is cut, and the number of those left out stands in their place.
    """
    whole = str(text)
    shown = whole[:limit]
    if not shown.isprintable():
        shown = "".join(map(_escaped, shown))
    return shown if len(whole) <= limit else f"{shown}… ({len(whole) - limit:,} more characters)"


def printable_lines(text: object, limit: int = LINE) -> list[str]:
    """Each line of a text of ours that may hold foreign words, as `printable` makes it."""
    return [printable(line, limit) for line in str(text).split("\n")]


def json_text(value: Any, indent: int | None = None) -> str:
    """The value as JSON that a terminal can show: control and format characters are escaped, other
    alphabets are not, and a number that is not finite, which JSON cannot say, is null."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, default=str)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def spreadsheet_cell(value: Any) -> Any:
    """A value for a CSV file: numbers as they are, text `printable`, and behind an apostrophe where a
    spreadsheet would take it for a formula and run it (OWASP, CSV Injection)."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def markdown_text(value: Any, limit: int = LINE) -> str:
    """The value as text within a line or a table's cell of Markdown, which it cannot leave: no mark-up, no
    HTML, and no link, which readers also make of bare addresses (CommonMark 0.31, 2.4; GFM, 6.9)."""
    marked = _MARKUP.sub(r"\\\g<0>", printable(value, limit))
    return _ADDRESS.sub(lambda found: found[0].replace(":", "\\:").replace(".", "\\."), marked)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
