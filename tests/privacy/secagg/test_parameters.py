"""k and t: against the published table, exact arithmetic, and graphs that are really cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
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
    shares_leak,
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
    """Against a curious coordinator; against a lying one the paper's meet our conditions, ours cost less."""
    n, corruption, dropout = setting
    corrupt, dropped = counted(corruption, n), counted(dropout, n)
    semi_honest, (k, t) = TABLE[setting]
    assert choose_degree(n, corrupt, dropped, malicious=False) == semi_honest
    assert shares_leak(n, k, t, corrupt) <= -41
    assert falls_apart(n, k, t, corrupt, dropped) <= -41
    chosen = choose_degree(n, corrupt, dropped, malicious=True)
    assert chosen is not None
    assert semi_honest[0] <= chosen[0] <= k


def test_the_services_defaults_hide_for_certain() -> None:
    """20 corrupt silos are fewer than t, with 30 dropouts fewer than a cut, and these leave t holders."""
    parameters = choose_parameters(100, 0.3, 0.2)
    assert (parameters.k, parameters.t, parameters.consents) == (52, 21, 61)
    assert parameters.minimum_survivors <= 70
    assert parameters.privacy_failure() == -math.inf
    assert parameters.privacy_failure(21) > -40
    assert parameters.correctness_failure() == -math.inf
    for weaker in (replace(parameters, k=50), replace(parameters, t=20), replace(parameters, consents=60)):
        assert weaker.privacy_failure() > -40


def test_no_smaller_degree_meets_the_conditions() -> None:
    for n, corrupt, dropped in [(100, 20, 30), (150, 15, 15), (300, 99, 30)]:
        k, t = choose_degree(n, corrupt, dropped, malicious=True) or (0, 0)
        assert max(shares_leak(n, k, t, corrupt), falls_apart(n, k, t, corrupt, dropped)) <= -41
        assert too_few_survive(n, k, t, dropped) <= -20
        for threshold in range(1, k - 1):
            privacy = max(
                shares_leak(n, k - 2, threshold, corrupt),
                falls_apart(n, k - 2, threshold, corrupt, dropped),
            )
            assert privacy > -41 or too_few_survive(n, k - 2, threshold, dropped) > -20


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


@given(st.integers(8, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_cuts_agree_with_exact_fractions(n: int, data: st.DataObject) -> None:
    k = data.draw(st.sampled_from(range(2, n - 2, 2)))
    t, lost = data.draw(st.integers(1, k)), data.draw(st.integers(0, n))
    corrupt, half = data.draw(st.integers(0, n)), k // 2
    least = max(0, t - half)
    pairs = Fraction(n * (n - k - 1), 2) / math.comb(n, corrupt)
    exact = pairs * sum(
        math.comb(half, x) * math.comb(half, y) * math.comb(n - k, corrupt - x - y)
        for x, y in itertools.product(range(least, half + 1), repeat=2)
        if max(0, k - lost) <= x + y <= corrupt
    )
    found = falls_apart(n, k, t, corrupt, lost)
    assert found == pytest.approx(math.log2(exact), abs=1e-9) if exact else found == -math.inf


@pytest.mark.parametrize(
    ("n", "k", "t", "corrupt", "lost"),
    [
        (9, 4, 1, 2, 2),
        (9, 4, 3, 3, 1),
        (10, 4, 3, 3, 3),
        (10, 4, 3, 2, 3),
        (11, 6, 4, 3, 3),
        (10, 4, 2, 2, 1),
    ],
)
def test_every_cut_that_can_be_unmasked_has_its_two_runs(
    n: int, k: int, t: int, corrupt: int, lost: int
) -> None:
    """All placements of corrupt silos, all dropouts: the bound is the mean number of pairs of runs."""
    places, half, pairs = range(n), k // 2, 0
    graph = [{(place + step) % n for step in range(-half, half + 1) if step} for place in places]
    placements = list(itertools.combinations(places, corrupt))
    exposed = 0
    for bad in map(set, placements):
        here = _pairs_of_runs(n, half, bad, t, lost)
        pairs += here
        if _somebody_is_cut_off(graph, bad, t, lost):
            exposed += 1
            assert here
    bound = falls_apart(n, k, t, corrupt, lost)
    assert 2**bound == pytest.approx(pairs / len(placements), rel=1e-9)
    assert (bound == -math.inf) <= (exposed == 0)
    if (n, k, t, corrupt, lost) in ((9, 4, 1, 2, 2), (10, 4, 3, 3, 3)):
        assert exposed, "the enumeration must find the attack where there is one"


def _pairs_of_runs(n: int, half: int, bad: set[int], t: int, lost: int) -> int:
    """Pairs of runs, a place or more apart, with the corrupt silos that a cut with them takes."""
    held = [sum((start + step) % n in bad for step in range(half)) for start in range(n)]
    return sum(
        min(held[one], held[two]) >= t - half and held[one] + held[two] >= 2 * half - lost
        for one, two in itertools.combinations(range(n), 2)
        if half < two - one < n - half
    )


def _somebody_is_cut_off(graph: list[set[int]], bad: set[int], t: int, lost: int) -> bool:
    """Whether some dropouts leave honest survivors who can be unmasked without all the others."""
    honest = set(range(len(graph))) - bad
    for count in range(lost + 1):
        for gone in itertools.combinations(honest, count):
            left = honest - set(gone)
            parts = _parts(graph, left)
            if len(parts) > 1 and any(
                all(len(graph[silo] & (left | bad)) >= t for silo in part) for part in parts
            ):
                return True
    return False


def _parts(graph: list[set[int]], left: set[int]) -> list[set[int]]:
    """The connected parts of the graph among those that are left."""
    parts, rest = [], set(left)
    while rest:
        part, queue = set(), [min(rest)]
        while queue:
            silo = queue.pop()
            part.add(silo)
            queue += graph[silo] & rest - part
        parts.append(part)
        rest -= part
    return parts


def test_the_bounds_hold_and_are_not_far_off_in_random_orders() -> None:
    """Monte Carlo over orders: silos with t corrupt holders, and pairs of runs that allow a cut."""
    n, corrupt, orders = 100, 20, 4000
    random = np.random.default_rng(5)
    circle = random.permuted(np.tile(np.arange(n) < corrupt, (orders, 1)), axis=1).astype(np.int64)
    summed = np.cumsum(np.hstack([circle, circle]), axis=1)
    for k, t, lost in ((52, 17, 34), (32, 13, 18), (40, 28, 30)):
        half = k // 2
        held = summed[:, half : half + n] - summed[:, :n]
        leaks = (held + np.roll(held, half + 1, axis=1) >= t).any(axis=1).mean()
        assert leaks <= 2 ** shares_leak(n, k, t, corrupt) + 0.02
        cut = np.zeros(orders, dtype=bool)
        for apart in range(half + 1, n - half):
            other = np.roll(held, apart, axis=1)
            fits = (np.minimum(held, other) >= t - half) & (held + other >= k - lost)
            cut |= fits.any(axis=1)
        bound = 2 ** falls_apart(n, k, t, corrupt, lost)
        assert cut.mean() <= bound + 0.02
        assert bound <= 20 * cut.mean()


def test_corrupt_and_dropped_below_the_degree_can_never_cut() -> None:
    assert falls_apart(100, 32, 1, 10, 10) == -math.inf
    assert falls_apart(100, 20, 15, 10, 10) > falls_apart(100, 20, 15, 10, 9) == -math.inf
    assert falls_apart(100, 16, 9, 10, 10) > -20
    assert too_few_survive(100, 32, 32, 10) > -10


@pytest.mark.parametrize(("n", "t"), [(3, 3), (5, 4), (20, 14), (50, 34)])
def test_small_cohorts_use_the_full_graph_and_two_thirds(n: int, t: int) -> None:
    parameters = choose_parameters(n, 0.1, 0.1)
    assert parameters.full_graph
    assert (parameters.k, parameters.t) == (n - 1, t)
    assert parameters.privacy_failure() == -math.inf


def test_the_sparse_graph_states_its_failure() -> None:
    parameters = choose_parameters(300, 0.1, 0.33)
    assert (parameters.k, parameters.t) == (94, 62)
    assert -60 < parameters.privacy_failure() <= -40
    assert parameters.correctness_failure() <= -20
    assert "2^-4" in parameters.summary()
    assert "malicious" in parameters.summary()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_two_silos_hide_nothing(n: int) -> None:
    with pytest.raises(PrivacyError, match="at least 3"):
        choose_parameters(n, 0, 0)


def test_more_than_a_third_of_each_is_infeasible() -> None:
    """As many consents as silos are left are needed to outvote the corrupt: a third of each is the limit."""
    limit = choose_parameters(100, 0.33, 0.33)
    assert (limit.k, limit.t, limit.consents, limit.minimum_survivors) == (68, 34, 67, 67)
    assert limit.privacy_failure() == -math.inf
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


@pytest.mark.parametrize(
    "offered",
    [
        replace(SPARSE, k=8, t=6),
        replace(SPARSE, k=20),
        replace(SPARSE, t=10),
        replace(SPARSE, t=23),
        replace(SPARSE, minimum_survivors=85),
        replace(SPARSE, consents=55),
    ],
)
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
