"""Each strategy's distribution, against what it promises."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from roundtable.core.job_tables.cohort_table import CohortTable
from roundtable.engine import STRATEGIES, Candidate, NumberedClients, NumberedNames
from roundtable.engine.diverse_groups import direction_text, histogram
from roundtable.engine.messages import ClientInfo
from roundtable.engine.selection import undeclared

NAMES = ["a", "b", "c", "d"]
PLAIN = CohortTable()


def draw(
    strategy: str, size: int, times: int, cohort: CohortTable = PLAIN, **clients: Candidate
) -> Counter[tuple[str, ...]]:
    def lookup(name: str) -> Candidate:
        return clients.get(name, Candidate(ClientInfo(name)))

    chance = np.random.default_rng(5)
    return Counter(
        tuple(sorted(STRATEGIES[strategy](NAMES, size, chance, lookup, cohort))) for _ in range(times)
    )


def test_uniform_gives_each_subset_equally_often() -> None:
    counts = draw("uniform", 2, 6000)
    assert set(counts) == set(combinations(NAMES, 2))
    assert stats.chisquare(list(counts.values())).pvalue > 0.001


def test_poisson_is_an_independent_coin_for_each_client() -> None:
    cohort = CohortTable(strategy="poisson", probability=0.3)
    counts = draw("poisson", 0, 8000, cohort)
    expected = {
        subset: 8000 * 0.3 ** len(subset) * 0.7 ** (4 - len(subset))
        for size in range(5)
        for subset in combinations(NAMES, size)
    }
    observed = [counts[subset] for subset in expected]
    assert stats.chisquare(observed, list(expected.values())).pvalue > 0.001


def test_data_size_follows_the_examples() -> None:
    sizes = {n: Candidate(ClientInfo(n, examples=e)) for n, e in zip(NAMES, [10, 20, 30, 40], strict=True)}
    counts = draw("data_size", 1, 8000, **sizes)
    observed = [counts[(n,)] for n in NAMES]
    assert stats.chisquare(observed, [800, 1600, 2400, 3200]).pvalue > 0.001


def test_data_size_takes_the_mean_for_who_has_not_said() -> None:
    sizes = {n: Candidate(ClientInfo(n, examples=30)) for n in "abc"}
    counts = draw("data_size", 1, 8000, **sizes)
    assert stats.chisquare([counts[(n,)] for n in NAMES]).pvalue > 0.001


def test_reliability_follows_the_share_of_answers() -> None:
    record = {
        "a": Candidate(ClientInfo("a"), selected=9, completed=0),
        "b": Candidate(ClientInfo("b"), selected=9, completed=4),
    }
    counts = draw("reliability", 1, 8000, **record)
    total = 0.1 + 0.5 + 1 + 1
    expected = [8000 * share / total for share in (0.1, 0.5, 1, 1)]
    assert stats.chisquare([counts[(n,)] for n in NAMES], expected).pvalue > 0.001


def test_diversity_balances_the_label_and_is_uniform_within() -> None:
    cohort = CohortTable(strategy="diversity", label="region")
    regions = {n: Candidate(ClientInfo(n, {"region": r})) for n, r in zip(NAMES, "nnns", strict=True)}
    counts = draw("diversity", 2, 3000, cohort, **regions)
    assert set(counts) == {("a", "d"), ("b", "d"), ("c", "d")}
    assert stats.chisquare(list(counts.values())).pvalue > 0.001


def test_diversity_fills_up_where_a_label_runs_out() -> None:
    cohort = CohortTable(strategy="diversity", label="region")
    regions = {n: Candidate(ClientInfo(n, {"region": r})) for n, r in zip(NAMES, "nnns", strict=True)}
    assert set(draw("diversity", 4, 5, cohort, **regions)) == {tuple(NAMES)}


def test_diversity_by_histogram_takes_one_of_each_mixture() -> None:
    """Two mixtures and two who declare none that can be read: of three wanted each group gives one."""
    cohort = CohortTable(strategy="diversity", label="labels", balance="histogram")
    told = dict(zip(NAMES, ["0:9 1:1", "1:50", "0:95 1:5", "often"], strict=True))
    known = {n: Candidate(ClientInfo(n, {"labels": text})) for n, text in told.items()}
    counts = draw("diversity", 3, 4000, cohort, **known)
    assert set(counts) == {("a", "b", "d"), ("b", "c", "d")}
    assert stats.chisquare(list(counts.values())).pvalue > 0.001


def test_diversity_by_directions_takes_one_of_each_way_and_of_the_unknown() -> None:
    """a and c pointed one way, b the other, of d nothing is known."""
    cohort = CohortTable(strategy="diversity", balance="directions")
    way = np.random.default_rng(1).standard_normal(128)
    ways = dict(zip("abc", (way, -way, 3 * way + 0.1 * way[::-1]), strict=True))
    known = {n: Candidate(ClientInfo(n), direction=direction_text(sketch)) for n, sketch in ways.items()}
    counts = draw("diversity", 3, 1000, cohort, **known)
    assert set(counts) == {("a", "b", "d"), ("b", "c", "d")}
    assert stats.chisquare(list(counts.values())).pvalue > 0.001
    assert not direction_text(np.zeros(128))
    assert not direction_text(np.full(128, np.nan))


@given(st.text(alphabet="01: \u0661x-", max_size=30))
def test_a_histogram_is_read_or_counts_as_none(text: str) -> None:
    counts = histogram(text)
    if counts:
        assert histogram(" ".join(f"{kind}:{count}" for kind, count in counts.items())) == counts
        assert sum(counts.values()) > 0


def test_round_robin_takes_who_waited_longest() -> None:
    past = {n: Candidate(ClientInfo(n), last_round=r) for n, r in zip(NAMES, [3, 1, 2, 0], strict=True)}
    assert set(draw("round_robin", 2, 5, **past)) == {("b", "d")}


def test_a_million_clients_are_a_sequence_that_holds_nothing() -> None:
    names = NumberedNames(1_000_000)
    assert (names[0], names[999_999], len(names)) == ("client-000000", "client-999999", 1_000_000)
    assert "client-000042" in names
    assert "client-1000000" not in names
    assert "someone" not in names
    assert names.index_of(names[77]) == 77
    chosen = STRATEGIES["uniform"](
        names, 1000, np.random.default_rng(0), lambda n: Candidate(ClientInfo(n)), PLAIN
    )
    assert len(set(chosen)) == 1000
    with pytest.raises(IndexError):
        names[1_000_000]


def test_numbered_clients_remember_only_who_is_away() -> None:
    clients = NumberedClients(5)
    clients.leave("client-2")
    assert not clients.is_online("client-2")
    assert list(clients.free()) == ["client-0", "client-1", "client-3", "client-4"]
    clients.join(ClientInfo("client-2"), online=True)
    assert len(clients.free()) == 5


def test_reliability_counts_all_jobs_from_the_first_round_on() -> None:
    others = {n: Candidate(ClientInfo(n, selected=9, completed=9)) for n in "abc"}
    never = {"d": Candidate(ClientInfo("d", selected=9, completed=0))}
    counts = draw("reliability", 1, 8000, **others, **never)
    observed = [counts[(n,)] for n in NAMES]
    assert stats.chisquare(observed, [8000 * share / 31 for share in (10, 10, 10, 1)]).pvalue > 0.001


def test_power_of_choice_takes_the_highest_loss_of_those_drawn() -> None:
    losses = dict(zip(NAMES, [4.0, 3.0, 2.0, 1.0], strict=True))
    known = {n: Candidate(ClientInfo(n, examples=1), 1, 1, 1, loss) for n, loss in losses.items()}
    cohort = CohortTable(strategy="power_of_choice", size=1, candidates=2)
    counts = draw("power_of_choice", 1, 6000, cohort, **known)
    # Of the six pairs `a` is in three, and first in each; `d` is first in none.
    assert stats.chisquare([counts[(n,)] for n in "abc"], [3000, 2000, 1000]).pvalue > 0.001
    untried = {**known, "d": Candidate(ClientInfo("d", examples=1))}
    assert draw("power_of_choice", 1, 100, cohort.model_copy(update={"candidates": 4}), **untried) == {
        ("d",): 100
    }


def test_oort_draws_by_utility_above_the_cut_and_tries_new_ones() -> None:
    """Worked out by hand: a 1, b 0.98, c 0.5, d (1 + s) / 4, with s = √(0.1 · ln 5 / 4) added to each."""

    def client(name: str, examples: int, seconds: float) -> Candidate:
        return Candidate(ClientInfo(name, examples=examples), 4, 4, 4, 1.0, seconds)

    known = {n: client(n, e, t) for n, e, t in [("a", 100, 10.0), ("b", 98, 10.0), ("c", 50, 10.0)]}
    counts = draw("oort", 1, 8000, CohortTable(strategy="oort", size=1), **known, d=client("d", 100, 20.0))
    stale = (0.1 * np.log(5) / 4) ** 0.5
    expected = np.array([1 + stale, 0.98 + stale])
    assert set(counts) == {("a",), ("b",)}
    observed = [counts[(n,)] for n in "ab"]
    assert stats.chisquare(observed, 8000 * expected / expected.sum()).pvalue > 0.001
    # In round 5 a share of 0.9 · 0.98⁴ = 0.83 of three is tried anew, while there are new ones.
    some = {"a": known["a"], "b": known["b"]}
    assert all({"c", "d"} <= set(chosen) for chosen in draw("oort", 3, 100, **some))


@pytest.mark.parametrize("loss", [9.0, 1e300, -1e308])
def test_what_one_client_makes_up_of_itself_hides_no_other(loss: float) -> None:
    """It may win a place for itself: the other places go to those who would have them without it."""
    known = {
        n: Candidate(ClientInfo(n, examples=e), 4, 4, 4, 1.0, 10.0)
        for n, e in zip("abc", (100, 98, 1), strict=True)
    }
    liar = Candidate(ClientInfo("d", examples=10**15), 4, 4, 4, loss, 10.0)
    cohort = CohortTable(strategy="oort", size=2)
    assert set(draw("oort", 2, 500, cohort, **known, d=liar)) == set(combinations("abd", 2))
    # Who has not said counts as the others do, and not as what `d` says.
    counts = draw("data_size", 2, 3000, a=known["a"], b=known["b"], d=liar)
    assert min(counts[(n, "d")] for n in "abc") > 800


def test_a_label_that_nobody_declares_is_told_with_a_few_of_those_that_are() -> None:
    """Silos may declare a hundred each: a reason does not grow with them."""
    cohort = CohortTable(strategy="diversity", label="site")
    told = undeclared(cohort, [{f"key-{number:04d}": "a"} for number in range(5000)])
    assert told is not None
    assert "'key-0009' and 4990 more" in told
    assert len(told) < 400
    assert undeclared(cohort, [{"other": "a"}, {"site": "b"}]) is None
