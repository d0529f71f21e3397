"""Groups: each gives the plain sum of its survivors or nothing, and nobody chooses who is in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg import (
    ArraySource,
    GroupedServer,
    Least,
    MemoryReleases,
    SecAggClient,
    SecAggParameters,
    ServerPhase,
    choose_parameters,
    combine_beacon,
    largest_group,
    make_groups,
    overrun,
    plain_groups,
    run_groups_in_memory,
)
from roundtable.privacy.secagg.framing import Envelope, Kind, unseal
from roundtable.privacy.secagg.payloads import Peers

Alter = Callable[[bytes, Callable[[Envelope], bytes]], bytes]
ANY = Least()
LATE = (ServerPhase.SHARES, ServerPhase.MASKED, ServerPhase.CONSENT, ServerPhase.UNMASK)
BEFORE_THE_SUM = (ServerPhase.SHARES, ServerPhase.MASKED)


def plan_of(n: int, size: int, dropout: float = 0.26, corruption: float = 0.26) -> SecAggParameters:
    """Groups of four and more can lose one silo."""
    whole = choose_parameters(size, dropout, corruption)
    return replace(whole, group_size=size, capacity=largest_group(size, n))


@pytest.fixture(scope="session")
def grouped(attempt: Any) -> Callable[..., Any]:
    """An attempt whose coordinator splits the cohort."""

    def begin(n: int, size: int, least: Least = ANY, **given: Any) -> Any:
        run = attempt(n, plan_of(n, size), **given)
        run.server = GroupedServer(run.session, run.plan, run.directory, least)
        return run

    return begin


def groups_of(run: Any) -> list[list[int]]:
    return [[run.names.index(name) for name in g.cohort.names] for g in run.server.groups.values()]


def check_sums(run: Any, gone: Iterable[int]) -> None:
    """Every group that is left has the sum of those of its members whose vector arrived."""
    for number, group in run.server.alive.items():
        members = groups_of(run)[number - 1]
        survivors = [index for index in members if index not in set(gone)]
        assert group.survivors == tuple(run.names[index] for index in survivors)
        np.testing.assert_array_equal(group.total, run.expected(survivors))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_group_sums_exactly_or_is_lost(data: st.DataObject, grouped: Any) -> None:
    size = data.draw(st.sampled_from([3, 4, 5]), label="size")
    n = data.draw(st.integers(2 * size, 14), label="n")
    run = grouped(n, size).until(ServerPhase.SHARES)
    lost = data.draw(st.integers(0, 3), label="lost")
    phases = data.draw(st.lists(st.sampled_from(LATE), min_size=lost, max_size=lost), label="phases")
    drops = dict(zip(data.draw(st.permutations(range(n))), phases, strict=False))
    groups = groups_of(run)
    assert sorted(index for group in groups for index in group) == list(range(n))
    least = [plan_of(n, size).of_group(len(group)).least for group in groups]
    room = {number: len(groups[number - 1]) - least[number - 1] for number in run.server.groups}
    hit = {number: sum(index in drops for index in group) for number, group in enumerate(groups, 1)}
    if all(hit[number] > room[number] for number in hit):
        with pytest.raises(ProtocolError, match="0 groups are left, 1 are needed"):
            run.until(ServerPhase.DONE, drops)
        return
    run.until(ServerPhase.DONE, drops)
    assert set(run.server.lost) == {number for number in hit if hit[number] > room[number]}
    check_sums(run, [index for index, phase in drops.items() if phase in BEFORE_THE_SUM])


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_the_plain_sums_are_those_of_the_protocol(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([3, 4]))
    n = data.draw(st.integers(2 * size, 12))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    plan, least = plan_of(n, size), Least(1, 1)
    vectors = [ArraySource(random.integers(0, 1 << 32, 9, dtype=np.uint32)) for _ in range(n)]
    nonces = [random.bytes(32) for _ in range(n)]
    gone = data.draw(st.sets(st.integers(0, n - 1), max_size=2))
    here = {place: vector for place, vector in enumerate(vectors) if place not in gone}
    drops = dict.fromkeys(gone, ServerPhase.MASKED)
    try:
        plain = plain_groups(here, plan, nonces, least)
    except ProtocolError:
        with pytest.raises(ProtocolError, match="groups are left"):
            run_groups_in_memory(vectors, plan, nonces, least, drops)
        return
    real = run_groups_in_memory(vectors, plan, nonces, least, drops)
    assert (real.members, real.lost.keys()) == (plain.members, plain.lost.keys())
    for number, total in real.sums.items():
        assert total.survivors == plain.sums[number].survivors
        np.testing.assert_array_equal(total.total, plain.sums[number].total)


def test_a_lost_group_hears_and_reveals_nothing_more(grouped: Any) -> None:
    run = grouped(9, 3, Least(2, 6)).until(ServerPhase.MASKED)
    victim = groups_of(run)[0][0]
    run.until(ServerPhase.UNMASK, {victim: ServerPhase.MASKED})
    out = {run.names[index] for index in groups_of(run)[0]}
    assert out.isdisjoint(run.messages)
    assert "2 of 3 silos submitted its vector; 3 are needed" in run.server.lost[1]
    assert run.server.why_lost(run.names[victim]) == run.server.lost[1]
    run.until(ServerPhase.DONE)
    check_sums(run, [victim])
    with pytest.raises(ProtocolError, match="no sum in phase FAILED"):
        _ = run.server.groups[1].total


@pytest.mark.parametrize(
    ("least", "words"),
    [(Least(3, 1), "2 groups are left, 3 are needed"), (Least(1, 7), "6 silos are left in 2 groups, 7 are")],
)
def test_too_little_left_ends_the_attempt_before_shares_are_out(
    grouped: Any, least: Least, words: str
) -> None:
    run = grouped(9, 3, least).until(ServerPhase.MASKED)
    victim = groups_of(run)[2][1]
    with pytest.raises(ProtocolError, match=words):
        run.until(ServerPhase.UNMASK, {victim: ServerPhase.MASKED})
    assert run.server.phase is ServerPhase.FAILED
    assert all(group.phase is not ServerPhase.UNMASK for group in run.server.groups.values())


def test_the_groups_follow_from_everybodys_nonces(grouped: Any) -> None:
    run = grouped(9, 3).until(ServerPhase.REVEAL)
    nonces = [client._nonce for client in run.clients]
    run.until(ServerPhase.SHARES)
    drawn = make_groups(run.names, 3, combine_beacon(nonces))
    assert [group.cohort.names for group in run.server.groups.values()] == drawn
    for index, client in enumerate(run.clients):
        client.handle(run.messages[run.names[index]])
        assert run.names[index] in client.cohort.names
        assert client.cohort.names in drawn


def test_a_silo_that_does_not_open_its_nonce_ends_the_attempt(grouped: Any) -> None:
    with pytest.raises(ProtocolError, match="did not open its nonce"):
        grouped(9, 3).until(ServerPhase.SHARES, {4: ServerPhase.REVEAL})


def test_the_coordinator_does_not_choose_the_groups(grouped: Any, alter: Alter) -> None:
    """A nonce of the coordinator's own would be another draw: it was committed to before."""
    run = grouped(9, 3).until(ServerPhase.SHARES)
    forged = alter(run.messages[run.names[0]], lambda envelope: bytes(32) + envelope.payload[32:])
    with pytest.raises(ProtocolError, match="not the one it committed to"):
        run.clients[0].handle(forged)


def test_a_silo_in_another_group_shares_nothing_with_it(grouped: Any) -> None:
    """What is sealed and signed in one group is worthless in another: each has a binding of its own."""
    run = grouped(9, 3).until(ServerPhase.SHARES)
    one, other = groups_of(run)[0][0], groups_of(run)[1][0]
    here, there = run.server.groups[1].cohort, run.server.groups[2].cohort
    assert here.sid == there.sid
    with pytest.raises(ProtocolError, match="belongs to another round, attempt or cohort"):
        run.server.receive(run.forge(one, Kind.SHARES, bytes(32), there.binding))
    run.until(ServerPhase.MASKED)
    with pytest.raises(ProtocolError, match="belongs to another round, attempt or cohort"):
        run.clients[one].handle(run.messages[run.names[other]])


def test_the_cohort_told_to_two_silos_differs(grouped: Any, alter: Alter) -> None:
    """A roster of the coordinator's choice gives other groups, and keys that fit nobody's."""
    run = grouped(9, 3).until(ServerPhase.REVEAL)
    name = run.names[0]

    def shorter(envelope: Envelope) -> bytes:
        offered = Peers.from_bytes(envelope.payload)
        return Peers(offered.parameters, offered.peers[:6]).to_bytes()

    answer = run.clients[0].handle(alter(run.messages[name], shorter))
    with pytest.raises(ProtocolError, match="belongs to another round, attempt or cohort"):
        run.server.receive(answer)


def test_groups_of_another_size_are_refused(grouped: Any, alter: Alter) -> None:
    run = grouped(12, 4).until(ServerPhase.REVEAL)
    weak = plan_of(12, 3).to_bytes()

    def weaker(envelope: Envelope) -> bytes:
        return Peers(weak, Peers.from_bytes(envelope.payload).peers).to_bytes()

    with pytest.raises(ProtocolError, match=r"the coordinator offers .*, and the job says"):
        run.clients[0].handle(alter(run.messages[run.names[0]], weaker))


def test_one_group_of_all_is_no_substitute_for_groups(attempt: Any, grouped: Any) -> None:
    plain = attempt(9).until(ServerPhase.SHARES)
    client = grouped(9, 3, signers=plain.signers).client(0)
    client.advertise()
    with pytest.raises(ProtocolError):
        client.handle(plain.messages[plain.names[0]])


def test_a_site_demands_larger_groups(grouped: Any) -> None:
    run = grouped(9, 3)
    run.clients[2] = run.client(2, minimum_cohort=4)
    with pytest.raises(ProtocolError, match="groups of 3; this site demands at least 4"):
        run.until(ServerPhase.SHARES)


def test_a_snapshot_goes_on_within_its_group(grouped: Any) -> None:
    run = grouped(8, 4).until(ServerPhase.CONSENT)
    for index in (0, 5):
        snapshot = run.clients[index].snapshot()
        run.clients[index] = SecAggClient.restore(snapshot, run.signers[index], MemoryReleases())
    run.until(ServerPhase.DONE)
    check_sums(run, [])


def test_an_abort_in_a_group_stays_there(grouped: Any) -> None:
    run = grouped(8, 4).until(ServerPhase.MASKED)
    gone = groups_of(run)[1][2]
    assert run.server.receive(run.clients[gone].abort("no more")) == run.names[gone]
    assert run.server.aborted == {run.names[gone]: "no more"}
    assert run.names[gone] not in run.server.missing
    run.until(ServerPhase.DONE, {gone: ServerPhase.MASKED})
    assert not run.server.lost
    check_sums(run, [gone])
    assert unseal(run.clients[0].abort("x")).sender == run.names[0]


def test_the_chance_of_too_many_in_one_group() -> None:
    assert overrun(9, 1, 3, 1) == -np.inf
    # Three of nine in three groups of three: all in one with 3/84, two in one with 54/84, by counting.
    assert 2 ** overrun(9, 3, 3, 2) == pytest.approx(3 / 84)
    assert 2 ** overrun(9, 3, 3, 1) == pytest.approx(3 * (3 * 6 + 1) / 84)
