"""The tree of errors is the one that its page draws."""

from __future__ import annotations

import re

from roundtable.core import SiteFailure, errors


def test_the_drawing_shows_every_error_below_its_parent() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│├└─ ]*)([A-Z]\w+)(  .*)?$", line):
            depth = len(found[1]) // 4
            above[depth:] = [found[2]]
            drawn[found[2]] = above[depth - 1] if depth else "Exception"
    classes = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__base__ is not None
    }
    assert drawn == classes


def test_an_invalid_update_carries_its_reason() -> None:
    error = errors.InvalidUpdate("norm", "the update's norm is 1e9, the job allows 10")
    assert (error.reason, str(error)) == ("norm", "the update's norm is 1e9, the job allows 10")


def test_a_site_failure_reads_as_a_sentence() -> None:
    failure = SiteFailure("north", 3, 1, "train", "out_of_memory", "CUDA out of memory")
    assert str(failure) == "north failed in round 3, attempt 1, train: CUDA out of memory"
