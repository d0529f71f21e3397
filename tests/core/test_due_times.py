"""When a job that is repeated is due: against a walk through all minutes, and at changes of the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.due_times import came_due, due_times, next_due

FIELDS = st.tuples(
    st.sampled_from([None, 0, 17, 59]),
    st.sampled_from([None, 0, 3, 23]),
    st.sampled_from([None, 1, 29]),
    st.sampled_from([None, 2, 12]),
)


@settings(max_examples=40, deadline=None)
@given(FIELDS, st.integers(1_700_000_000, 1_760_000_000))
def test_the_next_time_is_the_first_minute_that_fits(fields: tuple[int | None, ...], after: int) -> None:
    moment = datetime.fromtimestamp(after - after % 60, UTC)
    wanted = dict(zip(("minute", "hour", "day", "month"), fields, strict=True))
    for _ in range(60 * 24 * 10):
        moment += timedelta(minutes=1)
        if all(value in (None, getattr(moment, name)) for name, value in wanted.items()):
            break
    else:
        return  # Later than the walk goes.
    repeat = " ".join("*" if value is None else str(value) for value in fields)
    assert next_due(f"{repeat} *", "UTC", after) == moment.timestamp()


def test_summer_time_neither_loses_nor_doubles_a_night() -> None:
    def days(start: str) -> list[str]:
        begun = datetime.fromisoformat(start).timestamp()
        times = islice(due_times("30 2 * * *", "Europe/Zurich", begun), 3)
        return [datetime.fromtimestamp(t, UTC).strftime("%d %H:%M") for t in times]

    assert days("2026-03-28T00:00+01:00") == ["28 01:30", "29 01:00", "30 00:30"]
    assert days("2026-10-24T00:00+02:00") == ["24 00:30", "25 00:30", "26 01:30"]


def test_a_run_is_one_of_those_that_have_come_due() -> None:
    start = datetime(2026, 5, 1, tzinfo=UTC).timestamp()
    third = datetime(2026, 5, 3, 3, tzinfo=UTC).timestamp()
    assert came_due("0 3 * * *", "UTC", start, 3, third)
    assert not came_due("0 3 * * *", "UTC", start, 3, third - 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('repeat = "0 3 * *"', "'0 3 \\* \\*' is no cron expression"),
        ('repeat = "0 25 * * *"', "is no cron expression"),
        ('repeat = "0 0 30 2 *"', "is no cron expression"),
        ('repeat = "0 3 * * *"\nzone = "Europe/Atlantis"', "'Europe/Atlantis' is no time zone"),
        ('repeat = "0 3 * * *"\nzone = "../etc/passwd"', "is no time zone"),
        ('zone = "Europe/Zurich"', "zone belongs to repeat"),
        ('repeat = "0 0 3 * * *"', "it has 6 fields"),
        ('repeat = "0 3 * * *"\nstart = 9999-12-31T23:59:00Z', "is no cron expression"),
        ("start = 0001-01-01T00:00:00+14:00", "is beyond all years"),
        (
            'start = 2026-12-01T20:00:00Z\n[resources]\nlabels = { region = "north" }\n'
            'at_least = [{ silos = 1, labels = { region = "south" } }]',
            "at_least waits for silos with region = 'south'",
        ),
    ],
)
def test_what_never_comes_due_is_refused(table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job(f'task = "t"\n[queue]\n{table}\n')
