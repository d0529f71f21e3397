"""Digits add up without rounding, doubles come down as they were, small cells are hidden with another."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.analyses.exact_sums import MOST_SILOS, Digits, PublicPlaces, SumPlaces
from roundtable.core.analyses.question import HIDDEN
from roundtable.core.analyses.questions_table import ContingencyTable
from roundtable.core.errors import AggregationError, InvalidUpdate
from roundtable.core.tables.table_description import ColumnTable

REALS = st.floats(-(2.0**33), 2.0**33, allow_subnormal=False)
PLACES = SumPlaces({"rows": (1,)}, {"sums": (2,)})
WHOLES = SumPlaces({"rows": (1,)}, {}, {"grains": (2,)})


@given(st.lists(st.tuples(st.integers(0, 2**34 - 1), REALS, REALS), min_size=1, max_size=70), st.booleans())
def test_sums_over_silos_are_those_of_fractions(silos: list[tuple[int, float, float]], fewest: bool) -> None:
    digits = Digits(len(silos) if fewest else MOST_SILOS)
    places = SumPlaces({"rows": (1,)}, {"sums": (2,)}, digits=digits)
    parts = [
        places.encode({"rows": np.array([float(count)]), "sums": np.array([one, two])})
        for count, one, two in silos
    ]
    mean = torch.stack(parts).double().mean(dim=0).float()
    found = places.decode(mean, len(silos))
    assert int(found["rows"][0]) == sum(silo[0] for silo in silos)
    for place in (0, 1):
        cut = sum(Fraction(round(Fraction(silo[place + 1]) * 2**56), 2**56) for silo in silos)
        assert found["sums"][place] == float(cut)


@given(st.lists(st.tuples(*[st.integers(-(2**50), 2**50 - 1)] * 2), min_size=1, max_size=70), st.booleans())
def test_whole_numbers_of_either_sign_add_up(silos: list[tuple[int, int]], fewest: bool) -> None:
    digits = Digits(len(silos) if fewest else MOST_SILOS)
    places = SumPlaces({"rows": (1,)}, {}, {"grains": (2,)}, digits=digits)
    parts = [places.encode({"grains": np.array(silo, dtype=np.float64)}) for silo in silos]
    found = places.decode(torch.stack(parts).double().mean(dim=0).float(), len(silos))
    assert found["grains"].tolist() == [float(sum(silo[place] for silo in silos)) for place in (0, 1)]
    assert found["rows"].tolist() == [0.0]


def test_as_many_silos_as_are_allowed_add_up_to_the_last_bit() -> None:
    largest = PLACES.encode(
        {"rows": np.array([2.0**39 - 1]), "sums": np.array([2.0**34 - 1, -(2.0**34) + 1])}
    )
    found = PLACES.decode((largest.double() * MOST_SILOS / MOST_SILOS).float(), MOST_SILOS)
    assert int(found["rows"][0]) == MOST_SILOS * (2**39 - 1)
    assert found["sums"].tolist() == [MOST_SILOS * (2.0**34 - 1), -MOST_SILOS * (2.0**34 - 1)]


def test_what_does_not_fit_is_named() -> None:
    for value in (2.0**34, np.inf, np.nan):
        with pytest.raises(InvalidUpdate, match="'sums'"):
            PLACES.encode({"sums": np.array([0.0, value])})
    for value in (2.0**51, np.nan):
        with pytest.raises(InvalidUpdate, match="'grains'"):
            WHOLES.encode({"grains": np.array([0.0, value])})
    for mean in (torch.full((PLACES.size,), -1.0), torch.full((PLACES.size,), 8192.0)):
        with pytest.raises(AggregationError, match="none that its silos' digits can have"):
            PLACES.decode(mean, 3)


@given(st.lists(st.floats(-1e30, 1e30, allow_subnormal=False), min_size=1, max_size=5))
def test_public_numbers_come_down_as_they_were(numbers: list[float]) -> None:
    numbers = [number if abs(number) > 1e-20 else 0.0 for number in numbers]
    places = PublicPlaces({"a": (len(numbers),)})
    assert places.unpack(places.pack({"a": np.array(numbers)}))["a"].tolist() == numbers


@given(st.lists(st.integers(0, 12), min_size=9, max_size=9))
def test_no_line_of_a_table_tells_its_hidden_cell_by_subtraction(counted: list[int]) -> None:
    kinds = ColumnTable(kind="category", values=("a", "b", "c"))
    asked = ContingencyTable(ask="table", rows="one", columns="two")
    table = asked.make({"one": kinds, "two": kinds}, 5, "t")
    cells = np.array(counted, float).reshape(3, 3)
    shown = table.step({}, {"cells": cells}, 0)["cells"]
    assert (shown[(cells > 0) & (cells < 5)] == HIDDEN).all()
    for lines, own in ((shown, cells), (shown.T, cells.T)):
        for line, truth in zip(lines, own, strict=True):
            assert (line[line != HIDDEN] == truth[line != HIDDEN]).all()
            alone = (line == HIDDEN).sum() == 1
            assert not alone or (line[line != HIDDEN] == 0).all()
