"""What imports do to Python's search for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from roundtable.core.allocator import importing


@pytest.fixture(autouse=True)
def searched() -> Iterator[None]:
    """Whatever other tests have frozen, and whatever a test leaves, the search goes on."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def runs() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_searched_within_and_what_was_made_counts_as_old() -> None:
    gc.collect()
    before = runs()
    with importing():
        made: list[list[int]] = [[] for _ in range(20_000)]
        assert runs() == before
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert {id(each) for each in made} <= old


def test_what_was_made_is_still_searched_later() -> None:
    with importing():
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
    assert gc.collect() > 0


def test_nested_ones_begin_to_search_with_the_outer_one() -> None:
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_search_on() -> None:
    with pytest.raises(ZeroDivisionError), importing():
        _ = 1 // 0
    assert gc.isenabled()


def test_what_others_have_said_stays() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with importing():
        pass
    # Of what is frozen, other threads let go a little meanwhile.
    assert gc.get_freeze_count() > 0.9 * frozen
