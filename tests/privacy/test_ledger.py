"""What is released is charged once, over every job; the budget stops the round before it starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import BudgetExceeded, PrivacyError
from roundtable.core.privacy_table import NoPrivacy, privacy_from
from roundtable.privacy import (
    Budget,
    Charge,
    Entry,
    accountant_for,
    check,
    compose,
    gaussian_charge,
    local_gaussian_charge,
    reserved,
    solve_steps,
    spent,
    statement,
)

ROUND = gaussian_charge("client", {"sampling": "none"}, 10.0)


def entry(round_: int, *, job: str = "a", attempt: int = 1, released: bool = True, **more: object) -> Entry:
    fields = {"population": "p", "silo": "", "charge": ROUND} | more
    return Entry(job=job, round=round_, attempt=attempt, released=released, **fields)  # type: ignore[arg-type]


def test_jobs_over_one_population_add_up() -> None:
    entries = [entry(1), entry(2), entry(1, job="b"), entry(1, population="other")]
    total = spent(entries, "p", 1e-5)
    assert total.epsilon == compose([ROUND.repeated(3)], 1e-5)
    assert total.jobs == ("a", "b")
    assert total.releases == 3


def test_an_entry_read_twice_is_charged_once_and_two_different_ones_are_refused() -> None:
    assert spent([entry(1), entry(1)], "p", 1e-5).releases == 1
    with pytest.raises(PrivacyError, match="two different entries"):
        spent([entry(1), entry(1, charge=ROUND.scaled(5.0))], "p", 1e-5)


def test_what_a_failed_attempt_released_is_charged_too() -> None:
    assert spent([entry(1, attempt=1), entry(1, attempt=2)], "p", 1e-5).epsilon == compose(
        [ROUND.repeated(2)], 1e-5
    )


def test_rounds_in_flight_reserve_but_are_not_spent() -> None:
    entries = [entry(1), entry(2, released=False)]
    budget = Budget("p", 10.0, 1e-5)
    assert spent(entries, "p", 1e-5).releases == 1
    assert reserved(entries, budget).releases == 2


def test_the_budget_stops_the_round_before_it() -> None:
    budget = Budget("p", 2.0, 1e-5)
    entries: list[Entry] = []
    for round_ in range(1, solve_steps(ROUND, 2.0, 1e-5) + 1):
        after = check(budget, entries, ROUND)
        entries.append(entry(round_))
        assert spent(entries, "p", 1e-5).epsilon == pytest.approx(after)
    with pytest.raises(BudgetExceeded, match="above its budget of 2"):
        check(budget, entries, ROUND)
    assert 1.9 < spent(entries, "p", 1e-5).epsilon <= 2.0


def test_two_jobs_cannot_both_take_the_last_round() -> None:
    one = compose([ROUND], 1e-5)
    budget = Budget("p", one * 1.01, 1e-5)
    assert check(budget, [], ROUND) == one
    with pytest.raises(BudgetExceeded):
        check(budget, [entry(1, job="other", released=False)], ROUND)


def test_each_silo_has_its_own_account_and_shares_the_common_one() -> None:
    own = entry(1, silo="north", charge=local_gaussian_charge(4.0))
    entries = [own, entry(1, silo="south", charge=local_gaussian_charge(4.0)), entry(2)]
    assert spent(entries, "p", 1e-5, silo="north").releases == 2
    assert spent(entries, "p", 1e-5, silo="east").releases == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from(["a", "b"]), st.booleans()),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_epsilon_never_falls_whatever_happens_next(history: list[tuple[int, int, str, bool]]) -> None:
    seen: dict[tuple[int, int, str], Entry] = {}
    last = 0.0
    for round_, attempt, job, released in history:
        key = (round_, attempt, job)
        before = seen.get(key)
        seen[key] = entry(
            round_, job=job, attempt=attempt, released=released or bool(before and before.released)
        )
        now = spent(seen.values(), "p", 1e-5).epsilon
        assert now >= last
        assert now <= reserved(seen.values(), Budget("p", 100.0, 1e-5)).epsilon
        last = now


def test_budgets_that_promise_nothing_are_refused() -> None:
    for bad in (
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"delta": 0.0},
        {"size": 100, "delta": 0.01},
        {"accountant": "x"},
    ):
        with pytest.raises(PrivacyError):
            Budget(**{"population": "p", "epsilon": 1.0, "delta": 1e-5} | bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["client", "client_local", "distributed", "example", "dp_ftrl"])
def test_the_statement_names_unit_neighbours_and_trust(level: str) -> None:
    config = privacy_from({"level": level, "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0})
    assert not isinstance(config, NoPrivacy)
    charge: Charge = gaussian_charge(config.unit, {"sampling": "none"}, 10.0)
    total = spent([entry(1, charge=charge)], "p", 1e-5)
    text = statement(config, total, accountant_for("poisson", 10, 2).sentence)
    assert f"epsilon = {total.epsilon:.3f}" in text
    assert "absent" in text
    assert ("one record" if level == "example" else "one participating organisation") in text
    assert "trust" in text
    assert ("Poisson" in text) == (level == "client")
    assert "NO GUARANTEE" not in text
    relies = "No trust is placed in how silos are sampled" in text
    assert relies == (level == "dp_ftrl")
    assert statement(config, total, guarantee=False).startswith("NO GUARANTEE")
