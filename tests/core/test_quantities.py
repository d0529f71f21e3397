"""Durations as people write them."""

from __future__ import annotations

import pytest

from roundtable.core.quantities import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30.0),
        (0.5, 0.5),
        ("250ms", 0.25),
        ("30s", 30.0),
        (" 10 m ", 600.0),
        ("1.5h", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_accepted_forms(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "ten minutes",
        "10 min",
        "-5s",
        "1h30m",
        True,
        None,
        [],
        float("nan"),
        float("inf"),
        10**400,
        "9" * 400 + "d",
    ],
)
def test_refused_forms_say_what_is_accepted(text: object) -> None:
    with pytest.raises(ValueError, match='is not a duration; write 30, "30s", "10m", "2h" or "1d"'):
        parse_duration(text)
