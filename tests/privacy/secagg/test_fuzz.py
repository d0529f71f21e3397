"""Every parser: whatever arrives, the answer is ProtocolError or acceptance, and refusal changes nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg import SecAggClient, SecAggParameters, ServerPhase, choose_parameters
from roundtable.privacy.secagg.framing import MAXIMUM_MESSAGE, Kind, seal, unseal
from roundtable.privacy.secagg.payloads import (
    Advert,
    Evidence,
    Inbox,
    Peer,
    Peers,
    Shares,
    Survivors,
    members_from_bytes,
    members_to_bytes,
    nonces_from_bytes,
    reason_from_bytes,
    unmask_from_bytes,
)
from roundtable.privacy.secagg.snapshot import from_snapshot

N = 4
TO_SILO = (ServerPhase.SHARES, ServerPhase.MASKED, ServerPhase.CONSENT, ServerPhase.UNMASK)
FROM_SILO = (ServerPhase.ADVERTISE, *TO_SILO)


def damaged(data: st.DataObject, message: bytes) -> bytes:
    """A message cut, lengthened, with bytes changed, or with another payload in a sound frame."""
    kind = data.draw(st.sampled_from(["cut", "longer", "flip", "payload", "noise"]))
    if kind == "cut":
        return message[: data.draw(st.integers(0, len(message) - 1))]
    if kind == "longer":
        return message + data.draw(st.binary(min_size=1, max_size=9))
    if kind == "noise":
        return data.draw(st.binary(max_size=300))
    changed = bytearray(message)
    if kind == "flip":
        for place in data.draw(st.sets(st.integers(0, len(message) - 1), min_size=1, max_size=4)):
            changed[place] ^= data.draw(st.integers(1, 255))
        return bytes(changed)
    envelope = unseal(message)
    payload = bytearray(envelope.payload)
    for place in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        payload[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    return seal(envelope.kind, envelope.binding, bytes(payload[:cut]) + data.draw(st.binary(max_size=70)))


@pytest.mark.parametrize("phase", TO_SILO)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_silo_survives_any_message(attempt: Any, phase: ServerPhase, data: st.DataObject) -> None:
    run = prepared(attempt, phase)
    message = run.messages[run.names[0]]
    accepted = False
    with contextlib.suppress(ProtocolError):
        run.clients[0].handle(damaged(data, message))
        accepted = True
    if accepted:
        # The damage was a valid message, such as another survivor set: this attempt is used up.
        prepared.cache_clear()


@functools.cache
def prepared(attempt: Any, phase: ServerPhase) -> Any:
    return attempt(N, choose_parameters(N, 0.25, 0.0)).until(phase)


@pytest.mark.parametrize("phase", TO_SILO)
def test_after_refusals_the_true_message_is_taken(attempt: Any, phase: ServerPhase) -> None:
    run = attempt(N).until(phase)
    message = run.messages[run.names[0]]
    for place in range(0, len(message), 7):
        with pytest.raises(ProtocolError):
            run.clients[0].handle(message[:place])
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(N)))


@pytest.mark.parametrize("phase", FROM_SILO)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_coordinator_survives_any_message(attempt: Any, phase: ServerPhase, data: st.DataObject) -> None:
    """Damaged in transit, and, the harder case, signed by a malicious silo as it is."""
    run = answered(attempt, phase)
    genuine = run.received[-1][0]
    take: Callable[[bytes], str] = run.server.receive
    if phase is ServerPhase.MASKED:
        take = functools.partial(run.server.fold, body=bytes(4 * run.session.length))
    with pytest.raises(ProtocolError):
        take(damaged(data, genuine))
    kind = data.draw(st.sampled_from(sorted(Kind)))
    payload = data.draw(st.binary(max_size=400))
    if kind is Kind.ABORT:
        return
    binding = data.draw(st.sampled_from([unseal(genuine).binding, bytes(32)]))
    with pytest.raises(ProtocolError):
        take(run.forge(0, kind, payload, binding))


@functools.cache
def answered(attempt: Any, phase: ServerPhase) -> Any:
    """An attempt in which silo 0 has answered already, so that nothing more of it can be right."""
    run = attempt(N, choose_parameters(N, 0.25, 0.0)).until(phase)
    run.answer(0)
    return run


READERS: dict[str, Callable[[bytes], object]] = {
    "envelope": unseal,
    "advert": Advert.from_bytes,
    "peers": Peers.from_bytes,
    "shares": lambda raw: Shares.from_bytes(raw, 3),
    "inbox": lambda raw: Inbox.from_bytes(raw, 11),
    "evidence": Evidence.from_bytes,
    "parameters": SecAggParameters.from_bytes,
    "members": lambda raw: members_from_bytes(raw, 11),
    "survivors": lambda raw: Survivors.from_bytes(raw, 11),
    "nonces": lambda raw: nonces_from_bytes(raw, 5),
    "unmask": lambda raw: unmask_from_bytes(raw, 5),
    "snapshot": from_snapshot,
}


@pytest.mark.parametrize("name", READERS)
@given(raw=st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_readers_refuse_noise(name: str, raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        READERS[name](raw)


@given(raw=st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_a_reason_is_harmless_to_print(raw: bytes) -> None:
    reason = reason_from_bytes(raw)
    assert reason.isprintable()
    assert len(reason) <= 1000


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_snapshot_is_refused_or_whole(attempt: Any, data: st.DataObject) -> None:
    run, snapshot = with_snapshot(attempt)
    with contextlib.suppress(ProtocolError):
        SecAggClient.restore(damaged(data, snapshot), run.signers[0], run.releases[0])


@functools.cache
def with_snapshot(attempt: Any) -> Any:
    run = attempt(N).until(ServerPhase.CONSENT)
    return run, run.clients[0].snapshot()


@given(
    names=st.lists(st.text(min_size=1, max_size=20), max_size=5),
    members=st.sets(st.integers(0, 10)),
    noise=st.binary(min_size=400, max_size=400),
)
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_again(names: list[str], members: set[int], noise: bytes) -> None:
    parameters = choose_parameters(11, 0.1, 0.1).to_bytes()
    peers = Peers(parameters, tuple(Peer(name, noise[:96], noise[:64]) for name in names))
    assert Peers.from_bytes(peers.to_bytes()) == peers
    inbox = Inbox(frozenset(members), (noise[:80], noise[80:160]))
    assert Inbox.from_bytes(inbox.to_bytes(11), 11) == inbox
    shares = Shares(noise[:32], (noise[:80], noise[80:160], noise[160:240]))
    assert Shares.from_bytes(shares.to_bytes(), 3) == shares
    evidence = Evidence(((3, noise[:64]), (65535, noise[64:128])))
    assert Evidence.from_bytes(evidence.to_bytes()) == evidence
    assert members_from_bytes(members_to_bytes(frozenset(members), 11), 11) == members
    told = Survivors(frozenset(members), ((noise[:32], noise[:64]),))
    assert Survivors.from_bytes(told.to_bytes(11), 11) == told
    envelope = unseal(seal(Kind.SHARES, noise[:32], noise))
    assert (envelope.kind, envelope.binding, envelope.payload) == (Kind.SHARES, noise[:32], noise)


def test_an_oversized_message_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="cannot be one"):
        unseal(bytes(MAXIMUM_MESSAGE + 1))


def test_a_message_for_the_other_side_is_refused(attempt: Any) -> None:
    run = attempt(3, choose_parameters(3, 0.0, 0.0))
    advert = run.clients[0].advertise()
    with pytest.raises(ProtocolError, match="not a message for a silo"):
        run.clients[1].handle(advert)
    with pytest.raises(ProtocolError, match="unnamed sender"):
        run.server.receive(seal(Kind.PEERS, run.session.digest(), b""))
    with pytest.raises(ProtocolError, match="use fold"):
        run.server.receive(run.forge(0, Kind.MASKED, bytes(32), run.session.digest()))
