"""When a job that is repeated is due: the times of a cron expression in a time zone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

MOST_RUNS = 10_000
"""Runs of one series; then it is submitted again."""
_FIELDS = 5
_CHECKED_FROM = 1735689600.0
"""From when on an expression must ever come due: the first of January 2025."""


def due_times(repeat: str, zone: str, after: float) -> Iterator[float]:
    """The Unix times later than `after` at which the expression is due, in order; to the second.

    `repeat` has five fields: minute, hour, day of the month, month, day of the week. In a night in which the
    zone's clock goes forward, what would fall into the missing hour comes right after it; when it goes back,
    what is due at stated hours comes once (as Debian's cron does it).
    """
    start = datetime.fromtimestamp(int(after), ZoneInfo(zone))
    return (moment.timestamp() for moment in CronSim(repeat, start))


def next_due(repeat: str, zone: str, after: float) -> float:
    """The first of these times."""
    return next(due_times(repeat, zone, after))


def came_due(repeat: str, zone: str, after: float, number: int, now: float) -> bool:
    """Whether the expression has come due so often between `after` and now."""
    times = due_times(repeat, zone, after)
    return any(moment <= now for moment in islice(times, number - 1, number))


def check_repetition(repeat: str, zone: str, earliest: float) -> None:
    """Raises ValueError for an expression or a zone that is none, and for one that never comes due from
    `earliest` (Unix time) on."""
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{zone!r} is no time zone that this machine knows; example: Europe/Zurich, or UTC"
        ) from None
    try:
        if (fields := len(repeat.split())) != _FIELDS:
            raise CronSimError(f"it has {fields} fields")
        next_due(repeat, zone, max(_CHECKED_FROM, earliest))
    except (CronSimError, StopIteration, OverflowError) as error:
        why = f" ({error})" if str(error) else ", or never comes due"
        raise ValueError(
            f'{repeat!r} is no cron expression{why}; example: "0 3 * * *", minute, hour, day of the month, '
            "month and day of the week"
        ) from error
