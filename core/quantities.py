"""Durations and sizes as people write them: 30, "30s", "10m", "2h", "1d"; "8GiB", "500MB"."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1e12
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 1 << 10, "ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?)B?\s*")
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")


def parse_duration(value: Any) -> float:
    """Seconds; a bare number is seconds. Raises ValueError that shows the accepted forms."""
    seconds = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LONGEST:
        seconds = float(value)
    elif isinstance(value, str) and (match := _PATTERN.fullmatch(value)):
        seconds = float(match[1]) * _UNITS[match[2]]
    if not seconds < _LONGEST:
        raise ValueError(f'{value!r} is not a duration; write 30, "30s", "10m", "2h" or "1d"')
    return seconds


def parse_size(text: str) -> int:
    """Bytes, more than none. Raises ValueError that shows the accepted forms."""
    match = _SIZE.fullmatch(text)
    size = 0
    if match and match[2] in _PREFIXES and not text.strip()[-1:].isdigit():
        size = int(float(match[1]) * _PREFIXES[match[2]])
    if size <= 0:
        raise ValueError(f'{text!r} is not a size of memory; examples: "8GiB", "500MB"')
    return size


def format_bytes(count: float) -> str:
    """For people: 1.50 GiB, 312 MiB."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= unit:
            amount = count / unit
            return f"{amount:.0f} {name}" if abs(amount) >= 100 else f"{amount:.2f} {name}"
    return f"{count:.0f} B"
