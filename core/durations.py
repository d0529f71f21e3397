"""Durations as people write them: 30, "30s", "10m", "2h", "1d"."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1e12
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
