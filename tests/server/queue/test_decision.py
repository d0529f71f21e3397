"""The queue of jobs: decided by hand for small cases, and played against a naive oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_world import PlayedJob, QueueWorld, a_day, copied

from roundtable.server.queue.decision import basis_of_turns, schedule
from roundtable.server.queue.queue_rules import ProjectTable, QueueRules
from roundtable.server.queue.standing import Contender, Standing

HOUR = 3600.0
ONE = {"jobs": 1.0}
PLAIN = QueueRules(HOUR)


def contender(name: str, silos: str, **changes: object) -> Contender:
    plain = Contender(name, name, name, 0, 0.0, False, frozenset(silos), len(silos), 1, ONE)
    return replace(plain, **changes)  # type: ignore[arg-type]


def decided(
    *contenders: Contender, now: float = 0.0, rules: QueueRules = PLAIN, **capacities: dict[str, float]
) -> dict[str, Standing]:
    return {each.job: each for each in schedule(contenders, capacities, now, rules)}


def verdicts(*contenders: Contender, now: float = 0.0, rules: QueueRules = PLAIN) -> str:
    return " ".join(
        f"{job}:{each.verdict}" for job, each in decided(*contenders, now=now, rules=rules).items()
    )


def test_a_job_has_all_its_silos_or_none() -> None:
    found = decided(
        contender("a", "x", turn=True), contender("b", "xy", since=1.0), contender("c", "y", since=2.0)
    )
    assert (found["a"].verdict, found["b"].verdict, found["c"].verdict) == ("runs", "waits", "begins")
    assert (found["b"].reason, found["b"].place) == ("a has its turn at x", 1)


def test_priority_then_the_smaller_share_then_who_came_first() -> None:
    assert verdicts(contender("a", "x", since=1.0), contender("b", "x", since=2.0)) == "a:begins b:waits"
    later = contender("b", "x", since=2.0, priority=1)
    assert verdicts(contender("a", "x", since=1.0), later) == "b:begins a:waits"
    rich = contender("r", "y", turn=True, project="rich")
    rivals = contender("a", "x", since=1.0, project="rich"), contender("b", "x", since=2.0, project="poor")
    assert verdicts(rich, *rivals) == "r:runs b:begins a:waits"


def test_the_dominant_share_is_of_the_resource_that_a_project_needs_most_of() -> None:
    # Ghodsi et al. 2011, Section 4.1: of <9 CPUs, 18 GB> tasks take <1, 4> of A and <3, 1> of B: 3 and 2 run.
    has = {"jobs": 9.0, "memory": 18.0}
    waiting = [
        contender(f"{who}{number}", "x", project=who, demand=demand, since=0.0)
        for who, demand in (("a", {"jobs": 1.0, "memory": 4.0}), ("b", {"jobs": 3.0, "memory": 1.0}))
        for number in range(5)
    ]
    found = schedule(waiting, {"x": has}, 0.0, PLAIN)
    begun = [each.job[0] for each in found if each.verdict == "begins"]
    assert (begun.count("a"), begun.count("b")) == (3, 2)


def test_waiting_lifts_a_job_above_one_that_has_its_turn_and_takes_it_at_its_rounds_end() -> None:
    at = [contender("a", "x", turn=True, rest=HOUR * 9), contender("b", "x", since=0.0)]
    early = decided(*at, now=HOUR - 1)
    assert (early["a"].verdict, early["b"].verdict, early["b"].expected) == ("runs", "waits", HOUR)
    late = decided(*at, now=HOUR)
    assert late["a"] == Standing("a", "yields", "b goes first")
    assert late["b"].reason == "begins when the rounds of a end"
    # Nobody slips into what it was promised.
    both, third = contender("b", "xy"), contender("c", "y", since=HOUR)
    assert verdicts(replace(at[0], yielding=True), both, third, now=HOUR) == "a:yields b:waits c:waits"


def test_who_waits_behind_one_that_nobody_knows_the_length_of_is_told_the_latest_time() -> None:
    a, b = contender("a", "x", turn=True, rest=10.0), contender("b", "x")
    found = decided(a, b, contender("c", "x", since=1.0, priority=-2))
    assert (found["b"].expected, found["b"].reason) == (10.0, "a has its turn at x")
    assert found["c"].expected == 1.0 + 3 * HOUR
    told = "a has its turn at x; how long b will take is not known, so the time is the latest"
    assert found["c"].reason == told


def test_a_job_that_cannot_begin_keeps_nobody_from_it() -> None:
    starved = contender("a", "xyz", turn=True, starved=True, there=1, least=3)
    assert verdicts(starved, contender("b", "x")) == "a:yields b:waits"
    waiting_for_the_rest_of_its_cohort = replace(starved, there=3)
    assert verdicts(waiting_for_the_rest_of_its_cohort, contender("b", "x")) == "a:runs b:waits"
    found = decided(
        contender("a", "xyz", there=1, least=3, shortage="1 of 3"), contender("b", "x", since=5.0)
    )
    assert (found["a"].reason, found["b"].verdict) == ("1 of 3", "begins")
    held = contender("a", "x", blocked="held by olga", priority=9)
    assert held.level(9 * HOUR, HOUR) == 9, "it stands in no line meanwhile"
    found = decided(held, contender("b", "x"))
    assert (found["a"].reason, found["b"].verdict) == ("held by olga", "begins")


def test_a_job_that_begins_later_keeps_nobody_and_gains_nothing_until_then() -> None:
    later = contender("a", "x", earliest=9 * HOUR, priority=9)
    found = decided(later, contender("b", "x", since=5.0))
    assert (found["b"].verdict, found["a"].verdict, found["a"].expected) == ("begins", "waits", 9 * HOUR)
    assert found["a"].reason == "it begins at 1970-01-01 09:00:00+00:00"
    # It has not waited yet when its time comes.
    assert replace(later, priority=0).level(9 * HOUR, HOUR) == 0
    assert verdicts(replace(later, priority=0), contender("b", "x", since=8 * HOUR), now=9 * HOUR).startswith(
        "b"
    )


def test_a_silo_that_has_less_than_it_gave_away_gets_it_back_from_the_lowest() -> None:
    turns = [contender(name, "x", turn=True, priority=p) for name, p in (("a", 1), ("b", 0), ("c", 2))]
    found = decided(*turns, x={"jobs": 2.0})
    assert [each.verdict for each in found.values()] == ["runs", "runs", "yields"]
    assert found["b"].reason == "x has no room for it any more"
    assert all(each.verdict == "runs" for each in decided(*turns, x={"jobs": 3.0}).values())
    # A silo that has said nothing since the coordinator began has not said that it has less.
    unheard = decided(*turns, contender("d", "x", since=1.0))
    assert [each.verdict for each in unheard.values()] == ["runs", "runs", "runs", "waits"]


def test_who_slips_in_keeps_nobody_from_the_turn_that_is_promised() -> None:
    # `a` has x for an hour more; `b` waits for x and y, and is promised them then.
    a, b = contender("a", "x", turn=True, rest=HOUR), contender("b", "xy", rest=600.0, since=1.0)
    for rest, verdict in ((HOUR, "begins"), (HOUR + 1, "waits"), (None, "waits")):
        found = decided(a, b, contender("c", "y", rest=rest, since=2.0))
        assert (found["b"].verdict, found["b"].expected) == ("waits", HOUR)
        assert found["c"].verdict == verdict
    assert found["c"].reason == "it would keep b from a turn that is promised"
    # Nobody knows how long `a` takes: there is no promise, and nothing is kept free for it.
    found = decided(replace(a, rest=None), b, contender("c", "y", since=2.0))
    assert (found["b"].expected, found["c"].verdict) == (HOUR + 1.0, "begins")
    # Behind each other: one after the other, and who fits in between does.
    found = decided(
        a, b, contender("d", "x", rest=60.0, since=2.0), contender("e", "y", rest=HOUR - 1, since=3.0)
    )
    assert [found[job].expected for job in "bde"] == [HOUR, HOUR + 2.0, 0.0]


def test_projects_have_weights_and_quotas_and_the_coordinator_a_limit() -> None:
    turn = contender("a", "x", turn=True, project="p", rest=HOUR * 9, demand={"jobs": 1.0, "gpus": 2.0})
    rules = replace(PLAIN, projects={"p": ProjectTable(gpus=3), "q": ProjectTable(weight=3.0)})
    more = contender("b", "yz", project="p", demand={"jobs": 1.0, "gpus": 1.0}, since=1.0)
    found = decided(turn, more, rules=rules)
    assert found["b"].reason == "a has its turn at project 'p'"
    assert verdicts(turn, replace(more, silos=frozenset("y")), rules=rules) == "a:runs b:begins"
    whole = decided(replace(more, demand={"jobs": 1.0, "gpus": 2.0}), rules=rules)["b"]
    assert whole.reason == "project 'p' may have 3 gpus at a time, and it takes 4"
    limited = replace(PLAIN, turns=1)
    assert (
        decided(turn, contender("c", "y"), rules=limited)["c"].reason == "a has its turn at the coordinator"
    )
    # Quotas that are set lower take turns back, as silos do that have less.
    both = turn, contender("d", "y", turn=True, priority=1)
    assert verdicts(*both, rules=limited) == "d:runs a:yields"
    # Of two that have one turn each, the one with the greater weight has the smaller share.
    halves = [contender(f"{p}0", s, turn=True, project=p) for p, s in (("q", "x"), ("r", "y"))]
    rivals = contender("r1", "z", project="r", since=0.0), contender("q1", "z", project="q", since=9.0)
    assert verdicts(*halves, *rivals, rules=rules).endswith("q1:begins r1:waits")


RESOURCES = ("jobs", "gpus")
SILOS = "vwxyz"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[PlayedJob], dict[str, dict[str, float]]]:
    capacities = {
        s: {"jobs": float(draw(st.integers(1, 3))), "gpus": float(draw(st.integers(0, 2)))} for s in SILOS
    }
    jobs = []
    for number in range(draw(st.integers(1, 9))):
        demand = {"jobs": 1.0} | ({"gpus": 1.0} if draw(st.booleans()) else {})
        fitting = [s for s in SILOS if all(capacities[s][r] >= amount for r, amount in demand.items())]
        silos = frozenset(draw(st.sets(st.sampled_from(fitting), min_size=1)) if fitting else ())
        if silos:
            job = PlayedJob(
                f"j{number}",
                draw(st.floats(0, 5 * HOUR)),
                silos,
                draw(st.integers(1, 8)),
                draw(st.floats(1.0, HOUR)),
                draw(st.integers(-2, 2)),
                draw(st.sampled_from("pqr")),
                demand,
                known=draw(st.booleans()),
                earliest=draw(st.sampled_from([0.0, 3 * HOUR])),
                every=HOUR,
                runs=draw(st.sampled_from([1, 1, 2])),
            )
            jobs.append(job)
    return jobs, capacities


@settings(max_examples=300, deadline=None)
@given(
    worlds(),
    st.integers(0, 6),
    st.integers(0, 99),
    st.sampled_from([PLAIN, QueueRules(HOUR, 2), QueueRules(HOUR, None, {"p": ProjectTable(jobs=1)})]),
)
def test_no_silo_is_given_away_twice_nobody_waits_for_nothing_and_all_jobs_end_also_over_failovers(
    world: tuple[list[PlayedJob], dict[str, dict[str, float]]], crashes: int, seed: int, rules: QueueRules
) -> None:
    jobs, capacities = world
    played = QueueWorld(copied(jobs), capacities, rules, crashes, seed)
    played.play()
    assert all(job.ended is not None for job in played.jobs.values()), (
        "a job starved, or two wait for each other"
    )
    assert len(played.jobs) == sum(job.runs for job in jobs)
    work = sum(job.rounds * job.seconds * job.runs for job in jobs)
    last = max((job.ended or 0.0 for job in played.jobs.values()), default=0.0)
    idle_steps = HOUR * (2 * len(played.jobs) + 1)
    assert last <= max((max(job.at, job.earliest) for job in jobs), default=0.0) + work + idle_steps
    for job in played.jobs.values():
        # Of one series no two runs overlap, and each begins at a time of its own.
        base, _, number = job.name.partition("#")
        before = played.jobs.get(base if number == "2" else f"{base}#{int(number or 0) - 1}")
        if number and before is not None:
            assert before.ended is not None
            assert job.began is not None
            assert before.ended < job.earliest <= before.ended + HOUR


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_a_promise_is_kept_where_all_take_as_long_as_is_expected_of_them(
    world: tuple[list[PlayedJob], dict[str, dict[str, float]]],
) -> None:
    plain = [
        replace(
            job,
            at=10.0 * round(job.at) + number,  # No two at once: who comes first is then no question of names.
            seconds=1.0 + round(job.seconds),
            priority=0,
            project="p",
            known=True,
            earliest=0.0,
            runs=1,
        )
        for number, job in enumerate(world[0])
    ]
    played = QueueWorld(plain, world[1], QueueRules(1e12))
    played.play()
    for job in played.jobs.values():
        assert job.began is not None
        if job.promised is not None:
            assert job.began <= job.promised, f"{job.name} was passed by"


def test_who_has_low_priority_has_its_turn_too_while_others_keep_coming() -> None:
    stream = [PlayedJob(f"high{n}", 600.0 * n, frozenset("x"), 1, 600.0, priority=3) for n in range(200)]
    low = PlayedJob("low", 1.0, frozenset("xy"), 2, 600.0)
    world = QueueWorld([low, *stream], {"x": {"jobs": 1.0}, "y": {"jobs": 1.0}}, PLAIN)
    world.play(until=12 * HOUR)
    assert low.began is not None
    # Three steps to stand as high as they do, one more to take a turn from one; then its round at the most.
    assert low.began <= 4 * HOUR + 600.0 + HOUR / 2


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [0, 3])
def test_a_day_of_two_hundred_jobs_on_a_hundred_silos(crashes: int) -> None:
    jobs, capacities = a_day(200, 100, seed=7)
    world = QueueWorld(jobs, capacities, PLAIN, crashes, seed=7)
    world.play()
    assert all(job.ended is not None for job in jobs)
    assert world.checks > 400
    assert bool(world.failovers) is bool(crashes)


turns = st.builds(
    contender,
    st.sampled_from("abcd"),
    st.sampled_from(["x", "y", "xy"]),
    turn=st.just(True),
    priority=st.integers(0, 1),
    yielding=st.booleans(),
)
courses = st.fixed_dictionaries(
    {
        "rest": st.none() | st.floats(0, 100),
        "ends": st.none() | st.floats(0, 100),
        "there": st.integers(0, 2),
        "starved": st.booleans(),
        "shortage": st.sampled_from(["", "too few"]),
    }
)


@given(st.lists(st.tuples(turns, courses), unique_by=lambda each: each[0].job), st.floats(0, 1e6))
def test_where_nobody_waits_the_verdicts_follow_from_their_basis_alone(
    given: list[tuple[Contender, dict[str, object]]], now: float
) -> None:
    capacities = {"x": {"jobs": 2.0}, "y": ONE}
    first = [each for each, _ in given]
    later = [replace(each, **course) for each, course in given]  # type: ignore[arg-type]
    assert basis_of_turns(first, capacities) == basis_of_turns(later, capacities) is not None
    assert schedule(first, capacities, 0.0, PLAIN) == schedule(later, capacities, now, PLAIN)
    assert basis_of_turns([*first, contender("z", "x")], capacities) is None
