"""k and t: against the published table, exact arithmetic, and graphs that are really cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg import SecAggParameters, choose_parameters
from roundtable.privacy.secagg.graph import Graph
from roundtable.privacy.secagg.tails import (
    choose_degree,
    counted,
    exceeds,
    falls_apart,
    falls_apart_unmasked,
    too_few_survive,
)

# Bell et al. 2020's conditions at security 2^-40 and correctness 2^-20, computed independently with
# SciPy's hypergeometric distribution: (n, corruption, dropout) → semi-honest and malicious (k, t).
TABLE = {
    (20, 0.1, 0.1): ((6, 3), (8, 6)),
    (50, 0.1, 0.1): ((12, 6), (16, 11)),
    (100, 0.1, 0.1): ((22, 11), (32, 22)),
    (300, 0.1, 0.1): ((36, 21), (66, 46)),
    (20, 0.33, 0.1): ((10, 7), (12, 10)),
    (50, 0.33, 0.1): ((22, 17), (28, 23)),
    (100, 0.33, 0.1): ((42, 32), (54, 44)),
    (300, 0.33, 0.1): ((78, 55), (130, 103)),
    (20, 0.2, 0.3): ((12, 5), (18, 12)),
    (50, 0.2, 0.3): ((26, 11), (42, 27)),
    (100, 0.2, 0.3): ((48, 21), (82, 52)),
    (300, 0.2, 0.3): ((98, 47), (236, 149)),
}


@pytest.mark.parametrize("setting", TABLE)
def test_degree_and_threshold_are_those_of_the_paper(setting: tuple[int, float, float]) -> None:
    n, corruption, dropout = setting
    corrupt, dropped = counted(corruption, n), counted(dropout, n)
    semi_honest, malicious = TABLE[setting]
    assert choose_degree(n, corrupt, dropped, malicious=False) == semi_honest
    assert choose_degree(n, corrupt, dropped, malicious=True) == malicious


@pytest.mark.parametrize(("setting", "paper"), [((0.1, 0.1), 96), ((0.33, 0.1), 218), ((0.2, 0.3), 642)])
def test_at_a_thousand_adaptive_dropouts_may_cost_degree_but_never_save_it(
    setting: tuple[float, float], paper: int
) -> None:
    corruption, dropout = setting
    chosen = choose_degree(1000, counted(corruption, 1000), counted(dropout, 1000), malicious=True)
    assert chosen is not None
    assert paper <= chosen[0] <= 1.6 * paper


@given(st.integers(3, 60), st.data())
@settings(max_examples=40, deadline=None)
def test_tails_agree_with_exact_fractions(n: int, data: st.DataObject) -> None:
    marked, drawn = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
    at_least = data.draw(st.integers(0, drawn))
    exact = sum(
        Fraction(math.comb(marked, x) * math.comb(n - marked, drawn - x), math.comb(n, drawn))
        for x in range(at_least, drawn + 1)
    )
    found = exceeds(n, marked, drawn, at_least)
    assert found == pytest.approx(math.log2(exact), abs=1e-9) if exact else found == -math.inf


@given(st.integers(6, 14), st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_needs_two_runs_of_absent_silos(n: int, data: st.DataObject) -> None:
    """The claim that the bound against chosen dropouts stands on, checked on small graphs."""
    k = data.draw(st.sampled_from(range(2, n - 1, 2)))
    absent = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 2))
    graph = Graph(n, k, data.draw(st.binary(max_size=4)))
    alive = set(range(n)) - absent
    start = min(alive)
    reached, queue = {start}, [start]
    while queue:
        fresh = set(graph.neighbours(queue.pop())) & alive - reached
        reached |= fresh
        queue += fresh
    runs, circle = 0, [silo in absent for silo in graph._order]
    for place in range(n):
        length = next(ahead for ahead in range(n + 1) if not circle[(place + ahead) % n])
        if not circle[place - 1] and length >= k // 2:
            runs += 1
    assert (reached != alive) == (runs >= 2)


def test_corrupt_and_dropped_below_the_degree_can_never_cut() -> None:
    assert falls_apart(100, 32, 10, 10) == -math.inf
    assert falls_apart_unmasked(100, 32, 22, 10) == -math.inf
    assert falls_apart(100, 16, 10, 10) > -20
    assert too_few_survive(100, 32, 32, 10) > -10


@pytest.mark.parametrize(("n", "t"), [(3, 3), (5, 4), (20, 14), (50, 34)])
def test_small_cohorts_use_the_full_graph_and_two_thirds(n: int, t: int) -> None:
    parameters = choose_parameters(n, 0.1, 0.1)
    assert parameters.full_graph
    assert (parameters.k, parameters.t) == (n - 1, t)
    assert parameters.privacy_failure() == -math.inf


def test_the_sparse_graph_states_its_failure() -> None:
    parameters = choose_parameters(300, 0.1, 0.33)
    assert (parameters.k, parameters.t) == (130, 103)
    assert -60 < parameters.privacy_failure() <= -40
    assert parameters.correctness_failure() <= -20
    assert "2^-4" in parameters.summary()
    assert "malicious" in parameters.summary()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_two_silos_hide_nothing(n: int) -> None:
    with pytest.raises(PrivacyError, match="at least 3"):
        choose_parameters(n, 0, 0)


def test_a_third_of_each_is_infeasible_for_the_sparse_graph() -> None:
    """A third corrupt and a third lost: no k works at 100; the full graph has just one threshold left."""
    assert choose_degree(100, 33, 33, malicious=True) is None
    assert choose_parameters(100, 0.33, 0.33).full_graph
    with pytest.raises(PrivacyError, match="no threshold"):
        choose_parameters(100, 0.34, 0.34)
    with pytest.raises(PrivacyError, match="no threshold"):
        choose_parameters(10, 0.5, 0.3)
    with pytest.raises(PrivacyError, match="no threshold serves 3 silos"):
        choose_parameters(3, 0.34, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ring_bits": 20}, "20 bits"),
        ({"clip_norm": 0.0}, "clip norm"),
        ({"clip_norm": math.inf}, "clip norm"),
        ({"weight_bound": 0}, "weight bound"),
        ({"dropout": 1.0}, "dropout"),
        ({"corruption": -0.1}, "corruption"),
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(PrivacyError, match=words):
        choose_parameters(**{"cohort_size": 5, "dropout": 0.1, "corruption": 0.1, **changes})  # type: ignore[arg-type]


@given(st.integers(3, 120), st.sampled_from([0.0, 0.1, 0.2]), st.sampled_from([0.0, 0.1, 0.3]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_parameters_survive_the_wire(n: int, corruption: float, dropout: float, malicious: bool) -> None:
    parameters = choose_parameters(n, dropout, corruption, malicious, weight_bound=7, clip_norm=0.3)
    assert SecAggParameters.from_bytes(parameters.to_bytes()) == parameters
    parameters.check_against(parameters)
    assert parameters.minimum_survivors <= n - parameters.dropped
    if malicious:
        assert 2 * parameters.consents > n + parameters.corrupt


def test_a_smaller_cohort_keeps_the_ring_and_gets_its_own_threshold() -> None:
    plan = choose_parameters(20, 0.1, 0.1, weight_bound=9, ring_bits=24)
    smaller = plan.with_cohort(12)
    assert (smaller.n, smaller.t, smaller.capacity) == (12, 9, 20)
    assert (smaller.weight_bound, smaller.ring_bits) == (9, 24)
    smaller.check_against(plan)
    with pytest.raises(PrivacyError, match="room for 20"):
        plan.with_cohort(21)


PLAN = choose_parameters(20, 0.1, 0.1)
SPARSE = choose_parameters(100, 0.1, 0.1)


@pytest.mark.parametrize(
    "offered",
    [
        replace(PLAN, t=1),
        replace(PLAN, t=11),
        replace(PLAN, consents=10),
        replace(PLAN, malicious=False),
        replace(PLAN, corrupt=0, t=10, consents=11),
        replace(PLAN, k=8, t=5),
        replace(PLAN, k=8, t=9),
        replace(PLAN, k=7),
        replace(PLAN, n=21, k=20),
        replace(PLAN, n=2, k=2, t=1),
        replace(PLAN, n=0, k=0, t=0),
        replace(PLAN, clip_norm=2.0),
        replace(PLAN, weight_bound=2),
        replace(PLAN, ring_bits=24),
    ],
    ids=lambda offered: f"n{offered.n}k{offered.k}t{offered.t}c{offered.consents}r{offered.ring_bits}",
)
def test_weaker_parameters_are_refused(offered: SecAggParameters) -> None:
    with pytest.raises(ProtocolError):
        offered.check_against(PLAN)


@pytest.mark.parametrize("offered", [replace(SPARSE, k=8, t=6), replace(SPARSE, t=12), replace(SPARSE, t=33)])
def test_weaker_sparse_graphs_are_refused(offered: SecAggParameters) -> None:
    with pytest.raises(ProtocolError):
        offered.check_against(SPARSE)


def test_bytes_that_are_no_parameters_are_refused() -> None:
    raw = PLAN.to_bytes()
    for damaged in (b"", raw[:-1], raw + b"\0", replace_byte(raw, 16, 20), replace_byte(raw, 17, 7)):
        with pytest.raises(ProtocolError):
            SecAggParameters.from_bytes(damaged)


def replace_byte(raw: bytes, place: int, value: int) -> bytes:
    return raw[:place] + bytes([value]) + raw[place + 1 :]


def test_all_corrupt_silos_are_taken_to_be_among_those_that_came() -> None:
    """A coordinator says who came: two corrupt silos of twenty are two of five as well."""
    plan = choose_parameters(20, 0.1, 0.1)
    few = plan.with_cohort(5)
    assert (few.corrupt, few.t) == (2, 4)
    with pytest.raises(PrivacyError, match="2 of 3 silos corrupt"):
        plan.with_cohort(3)
    with pytest.raises(ProtocolError, match="2 corrupt ones"):
        replace(choose_parameters(3, 0.0, 0.0), capacity=20).check_against(plan)


def test_as_many_dropouts_are_provided_for_as_are_possible() -> None:
    plan = choose_parameters(20, 0.4, 0.1)
    assert [plan.with_cohort(n).dropped for n in (20, 10, 6, 4)] == [8, 3, 1, 0]


def test_no_single_threshold_is_missed() -> None:
    """On the full graph the chosen threshold serves both assumptions wherever any threshold does."""
    for n, corrupt, dropped in itertools.product(range(3, 20), range(0, 8), range(0, 8)):
        possible = [t for t in range(3, n + 1) if 2 * t > n + corrupt and n - dropped >= t]
        corruption, dropout = corrupt / n, dropped / n
        if corruption >= 1 or dropout >= 1:
            continue
        if possible and corrupt <= n - 2:
            assert choose_parameters(n, dropout, corruption).t in possible
        else:
            with pytest.raises(PrivacyError):
                choose_parameters(n, dropout, corruption)
