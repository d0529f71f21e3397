"""The sum is the plain sum to the bit, whoever drops out and when, and restarts reuse nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg import (
    ArraySource,
    ClientPhase,
    SecAggClient,
    SecAggServer,
    ServerPhase,
    Session,
    choose_parameters,
    plain_sum,
    run_in_memory,
)
from roundtable.privacy.secagg.framing import Kind
from roundtable.privacy.secagg.masks import (
    PIECE_BYTES,
    RING_BITS,
    add_wire,
    pack,
    reduce_ring,
    ring_dtype,
    wire_bytes,
)

PHASES = (
    ServerPhase.ADVERTISE,
    ServerPhase.SHARES,
    ServerPhase.MASKED,
    ServerPhase.CONSENT,
    ServerPhase.UNMASK,
)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_sum_is_exact_for_every_pattern_of_dropouts(data: st.DataObject, attempt: Any) -> None:
    n = data.draw(st.integers(3, 9), label="n")
    dropout = data.draw(st.sampled_from([0.0, 0.2, 0.34] if n > 3 else [0.0]), label="dropout")
    corruption = data.draw(st.sampled_from([0.0, 0.2]), label="corruption")
    ring_bits = data.draw(st.sampled_from(RING_BITS), label="ring")
    length = data.draw(st.integers(1, 40), label="length")
    plan = choose_parameters(n, dropout, corruption, ring_bits=ring_bits)
    lost = data.draw(st.integers(0, n - plan.t), label="lost")
    late = data.draw(st.lists(st.sampled_from(PHASES[2:]), min_size=lost, max_size=lost), label="phases")
    drops = dict(zip(data.draw(st.permutations(range(n))), late, strict=False))
    run = attempt(n, plan, session=Session("job", 3, 1, length)).until(ServerPhase.DONE, drops)
    survivors = [index for index in range(n) if drops.get(index) is not ServerPhase.MASKED]
    assert run.server.survivors == tuple(run.names[index] for index in survivors)
    np.testing.assert_array_equal(run.server.total, run.expected(survivors))
    answered = {index for index in range(n) if index not in drops}
    assert all(run.clients[index].phase is ClientPhase.DONE for index in answered)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sums_of_sums_give_the_bits_of_the_flat_sum(data: st.DataObject, attempt: Any) -> None:
    """Relays add vectors, and what relays below them have added; some silos come by themselves, some never,
    and some that are in a sum are lost once it has left."""
    n = data.draw(st.integers(4, 9), label="n")
    ring_bits = data.draw(st.sampled_from(RING_BITS), label="ring")
    plan = choose_parameters(n, 0.34, 0.0, ring_bits=ring_bits)
    session = Session("job", 3, 1, data.draw(st.integers(1, 40), label="length"))
    run = attempt(n, plan, session=session).until(ServerPhase.MASKED)
    lost = data.draw(st.permutations(range(n)))[: data.draw(st.integers(0, n - plan.least), label="lost")]
    never = set(lost[: data.draw(st.integers(0, len(lost)), label="never")])
    for index, name in enumerate(run.names):
        run.clients[index].handle(run.messages[name]) if index not in never else None
    uploads = {index: run.masked(index) for index in range(n) if index not in never}
    parts = [([header], body) for header, body in uploads.values()]
    while len(parts) > 1 and data.draw(st.booleans()):
        count = data.draw(st.integers(2, len(parts)), label="added")
        taken, parts = parts[:count], parts[count:]
        total = np.zeros(session.length, ring_dtype(ring_bits))
        for _, body in taken:
            add_wire(total, memoryview(body), ring_bits)
        reduce_ring(total, ring_bits)
        parts.append(([header for headers, _ in taken for header in headers], bytes(pack(total, ring_bits))))
    for headers, body in parts:
        for _ in range(2):
            run.server.fold(headers[0], body) if len(headers) == 1 else run.server.fold_sum(headers, body)
    run.messages = run.server.advance()
    run.until(ServerPhase.DONE, dict.fromkeys(set(lost) - never, ServerPhase.CONSENT))
    assert run.server.survivors == tuple(run.names[index] for index in sorted(uploads))
    np.testing.assert_array_equal(run.server.total, run.expected(uploads))


def test_a_sum_is_of_vectors_that_are_not_counted_yet(attempt: Any) -> None:
    run = attempt(5).until(ServerPhase.MASKED)
    for index, name in enumerate(run.names):
        run.clients[index].handle(run.messages[name])
    headers, bodies = zip(*(run.masked(index) for index in range(5)), strict=True)
    run.server.fold(headers[0], bodies[0])
    forged = run.forge(1, Kind.MASKED, bytes(32))
    for mistaken in ([*headers[:2]], [headers[1]] * 2, [], [forged, headers[2]]):
        with pytest.raises(ProtocolError, match=r"counted already|another round"):
            run.server.fold_sum(mistaken, bodies[1])
    with pytest.raises(ProtocolError, match="ring elements"):
        run.server.fold_sum(headers[1:], bodies[1][1:])
    for header, body in zip(headers, bodies, strict=True):
        run.server.fold(header, body)
    run.messages = run.server.advance()
    np.testing.assert_array_equal(run.until(ServerPhase.DONE).server.total, run.expected(range(5)))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_sum_is_exact_when_silos_are_lost_before_they_mask(data: st.DataObject, attempt: Any) -> None:
    """Whoever never advertised shrinks the cohort; whoever shared nothing is masked with by nobody."""
    n = data.draw(st.integers(6, 10), label="n")
    drops = {
        0: data.draw(st.sampled_from(PHASES), label="first"),
        1: data.draw(st.sampled_from(PHASES), label="second"),
    }
    plan = choose_parameters(n, 0.34, 0.0)
    run = attempt(n, plan).until(ServerPhase.DONE, drops)
    before = (ServerPhase.ADVERTISE, ServerPhase.SHARES, ServerPhase.MASKED)
    survivors = [index for index in range(n) if drops.get(index) not in before]
    np.testing.assert_array_equal(run.server.total, run.expected(survivors))


@pytest.mark.parametrize("malicious", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_sparse_graph_sums_exactly(attempt: Any, seed: int, malicious: bool) -> None:
    plan = choose_parameters(60, 0.15, 0.1, malicious)
    assert not plan.full_graph
    random = np.random.default_rng(seed)
    lost = random.permutation(60)[: plan.dropped].tolist()
    drops = dict(zip(lost, random.choice(np.array(PHASES[1:]), len(lost)).tolist(), strict=True))
    run = attempt(60, plan).until(ServerPhase.DONE, drops)
    before = (ServerPhase.SHARES, ServerPhase.MASKED)
    survivors = [index for index in range(60) if drops.get(index) not in before]
    np.testing.assert_array_equal(run.server.total, run.expected(survivors))


@pytest.mark.parametrize("ring_bits", RING_BITS)
def test_vectors_of_several_pieces_stream(attempt: Any, ring_bits: int) -> None:
    length = 2 * PIECE_BYTES + 77
    run = attempt(
        4, choose_parameters(4, 0.25, 0.0, ring_bits=ring_bits), session=Session("job", 0, 0, length)
    )
    run.until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    chunks = [len(chunk) for chunk in run.clients[0].masked_chunks(ArraySource(run.vectors[0]))]
    assert sum(chunks) == wire_bytes(length, ring_bits)
    assert max(chunks) <= PIECE_BYTES
    assert len(chunks) >= 3
    # The pieces were used up above without being kept, so this silo has dropped out.
    run.until(ServerPhase.DONE, {0: ServerPhase.MASKED})
    np.testing.assert_array_equal(run.server.total, run.expected([1, 2, 3]))


def test_memory_maps_are_folded_and_masked(attempt: Any, tmp_path: Path) -> None:
    length = PIECE_BYTES // 4 + 5
    run = attempt(3, choose_parameters(3, 0.0, 0.0), session=Session("job", 0, 0, length))
    run.until(ServerPhase.MASKED)
    for index, name in enumerate(run.names):
        np.save(tmp_path / f"{name}.npy", run.vectors[index])
        run.clients[index].handle(run.messages[name])
        source = ArraySource(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
        with (tmp_path / name).open("wb") as file:
            for chunk in run.clients[index].masked_chunks(source):
                file.write(chunk)
        run.server.fold(run.clients[index].masked(), np.memmap(tmp_path / name, dtype=np.uint8, mode="r"))
    run.messages = run.server.advance()
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(3)))


def test_the_sum_can_be_built_in_a_memory_map(attempt: Any, tmp_path: Path) -> None:
    run = attempt(4)
    mapped = np.memmap(tmp_path / "sum", dtype=np.uint32, mode="w+", shape=(6,))
    mapped[:] = 99
    run.server = SecAggServer(run.session, run.plan, run.directory, mapped)
    run.until(ServerPhase.DONE)
    assert run.server.total is mapped
    np.testing.assert_array_equal(mapped, run.expected(range(4)))
    with pytest.raises(PrivacyError, match="workspace"):
        SecAggServer(run.session, run.plan, run.directory, np.zeros(5, dtype=np.uint32))
    with pytest.raises(PrivacyError, match="workspace"):
        SecAggServer(run.session, run.plan, run.directory, np.zeros(6, dtype=np.uint64))


def test_coordinator_and_silo_hold_less_than_three_vectors(attempt: Any) -> None:
    """Peaks above idle while folding a caller's buffer and while masking, in vectors of 2 M elements."""
    length, vector = 2_000_000, 8_000_000
    plan = choose_parameters(4, 0.25, 0.0)
    shared = np.arange(length, dtype=np.uint32)
    run = attempt(4, plan, session=Session("job", 0, 0, length), vectors=[shared] * 4)
    body = bytearray(vector)
    tracemalloc.start()
    try:
        idle = tracemalloc.get_traced_memory()[0]
        run.server = SecAggServer(run.session, plan, run.directory)
        run.until(ServerPhase.MASKED)
        for index, name in enumerate(run.names[:3]):
            run.clients[index].handle(run.messages[name])
            at = 0
            for chunk in run.clients[index].masked_chunks(ArraySource(shared)):
                body[at : at + len(chunk)] = chunk
                at += len(chunk)
            run.server.fold(run.clients[index].masked(), body)
        run.messages = run.server.advance()
        run.until(ServerPhase.DONE, {3: ServerPhase.MASKED})
        peak = tracemalloc.get_traced_memory()[1] - idle
    finally:
        tracemalloc.stop()
    assert vector <= peak < 2 * vector
    np.testing.assert_array_equal(run.server.total, shared * np.uint32(3))


def test_run_in_memory_is_the_plain_sum() -> None:
    plan = choose_parameters(7, 0.3, 0.1)
    random = np.random.default_rng(0)
    vectors = [ArraySource(random.integers(0, 1 << 32, 9, dtype=np.uint32)) for _ in range(7)]
    drops = {2: ServerPhase.MASKED, 5: ServerPhase.UNMASK}
    secure = run_in_memory(vectors, plan, drops)
    plain = plain_sum(vectors, plan, secure.survivors)
    assert secure.survivors == plain.survivors == (0, 1, 3, 4, 5, 6)
    np.testing.assert_array_equal(secure.total, plain.total)
    assert secure.total.dtype == plain.total.dtype
    with pytest.raises(PrivacyError, match="room for 7"):
        plain_sum([*vectors, vectors[0]], plan)


def test_negative_integers_are_their_residues() -> None:
    plan = choose_parameters(3, 0.0, 0.0, ring_bits=24)
    vectors = [
        ArraySource(np.array([-1, -5, 7])),
        ArraySource(np.array([1, 2, 3])),
        ArraySource(np.array([0, 1, -11])),
    ]
    assert run_in_memory(vectors, plan).total.tolist() == [0, (1 << 24) - 2, (1 << 24) - 1]


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_cohort_below_threshold_fails_and_reveals_nothing(attempt: Any, phase: ServerPhase) -> None:
    run = attempt(6)
    assert run.plan.t == 5
    with pytest.raises(ProtocolError, match=r"needed|must"):
        run.until(ServerPhase.DONE, dict.fromkeys((0, 1), phase))
    assert run.server.phase is ServerPhase.FAILED
    with pytest.raises(ProtocolError, match="no sum"):
        _ = run.server.total
    with pytest.raises(ProtocolError, match="over"):
        run.server.advance()
    revealed = [client for client in run.clients if client.phase is ClientPhase.DONE]
    assert len(revealed) < run.plan.t


def test_a_cohort_of_two_never_starts(attempt: Any) -> None:
    with pytest.raises(PrivacyError, match="at least 3"):
        attempt(4).until(ServerPhase.DONE, dict.fromkeys((0, 1), ServerPhase.ADVERTISE))


def test_a_silo_that_does_not_open_its_nonce_ends_the_attempt(attempt: Any) -> None:
    run = attempt(60, choose_parameters(60, 0.1, 0.1)).until(ServerPhase.REVEAL)
    with pytest.raises(ProtocolError, match=r"silo-004 .*nonce"):
        run.step([4])


def test_unmasking_can_end_as_soon_as_every_secret_has_its_shares(attempt: Any) -> None:
    run = attempt(9, choose_parameters(9, 0.3, 0.0)).until(ServerPhase.UNMASK)
    for index in range(run.plan.t):
        assert not run.server.ready
        run.answer(index)
    assert run.server.ready
    assert run.server.missing == frozenset(run.names[run.plan.t :])
    run.server.advance()
    np.testing.assert_array_equal(run.server.total, run.expected(range(9)))


def test_a_silo_that_gives_up_is_left_out_and_says_why(attempt: Any) -> None:
    run = attempt(6).until(ServerPhase.SHARES)
    run.server.receive(run.clients[2].abort("the site's policy forbids \x1b[2J this job"))
    assert run.server.aborted == {"silo-002": "the site's policy forbids  [2J this job"}
    assert "silo-002" not in run.server.missing
    run.until(ServerPhase.DONE, {2: ServerPhase.SHARES})
    np.testing.assert_array_equal(run.server.total, run.expected([0, 1, 3, 4, 5]))


def test_giving_up_after_the_upload_leaves_the_vector_in(attempt: Any) -> None:
    run = attempt(6).until(ServerPhase.MASKED)
    for index in range(6):
        run.answer(index)
    run.server.receive(run.clients[2].abort("going down"))
    run.messages = run.server.advance()
    run.until(ServerPhase.DONE, {2: ServerPhase.CONSENT})
    np.testing.assert_array_equal(run.server.total, run.expected(range(6)))


def test_a_silo_resumes_from_its_snapshots(attempt: Any) -> None:
    """Killed after masking, and again after consenting: the stored bytes and snapshot are enough."""
    run = attempt(5).until(ServerPhase.MASKED)
    name = run.names[1]
    run.clients[1].handle(run.messages[name])
    _, stored = run.masked(1)
    header_before = run.clients[1].masked()
    run.clients[1] = reborn(run, 1, run.clients[1].snapshot())
    assert run.clients[1].masked() == header_before
    run.take(header_before, stored)
    for index in (0, 2, 3, 4):
        run.answer(index)
    run.messages = run.server.advance()
    alive = run.messages[name]
    consent = run.clients[1].handle(alive)
    run.clients[1] = reborn(run, 1, run.clients[1].snapshot())
    assert run.clients[1].phase is ClientPhase.CONSENTED
    assert run.clients[1].handle(alive) == consent
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(5)))


def reborn(run: Any, index: int, snapshot: bytes) -> SecAggClient:
    return SecAggClient.restore(snapshot, run.signers[index], run.releases[index])


def test_a_restored_silo_cannot_mask_again(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    seed, mask_keys = run.clients[0]._seed, run.clients[0]._mask_keys
    secrets = [bytes(seed), bytes(mask_keys.private_bytes())]
    run.masked(0)
    snapshot = run.clients[0].snapshot()
    assert not any(secret in snapshot for secret in secrets)
    again = reborn(run, 0, snapshot)
    with pytest.raises(ProtocolError, match="cannot do this now"):
        again.masked_chunks(ArraySource(run.vectors[0]))
    with pytest.raises(ProtocolError, match="cannot do this now"):
        again.advertise()


@pytest.mark.parametrize("phase", [ServerPhase.ADVERTISE, ServerPhase.SHARES, ServerPhase.MASKED])
def test_before_masking_there_is_nothing_to_restore(attempt: Any, phase: ServerPhase) -> None:
    run = attempt(4).until(phase)
    with pytest.raises(ProtocolError, match="cannot do this now"):
        run.clients[0].snapshot()


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_lost_answer_is_given_again(attempt: Any, phase: ServerPhase) -> None:
    """The coordinator repeats its message: the silo repeats its bytes, and neither goes astray."""
    run = attempt(4).until(phase)
    message = run.messages[run.names[0]]
    answer = run.clients[0].handle(message)
    assert run.clients[0].handle(message) == answer
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(4)))


def test_an_interrupted_mask_is_abandoned(attempt: Any) -> None:
    """Half a masked vector is out: neither a snapshot nor a second mask, only a new attempt."""
    run = attempt(4, session=Session("job", 0, 0, PIECE_BYTES)).until(ServerPhase.MASKED)
    client = run.clients[0]
    client.handle(run.messages[run.names[0]])
    stream = client.masked_chunks(ArraySource(run.vectors[0]))
    next(stream)
    stream.close()
    for call in (client.snapshot, client.masked, lambda: client.masked_chunks(ArraySource(run.vectors[0]))):
        with pytest.raises(ProtocolError, match="cannot do this now"):
            call()


def test_every_attempt_has_fresh_keys_and_masks(attempt: Any) -> None:
    bodies, adverts = set(), set()
    for number in range(5):
        run = attempt(3, choose_parameters(3, 0.0, 0.0), session=Session("job", 1, number, 6)).until(
            ServerPhase.MASKED
        )
        run.clients[0].handle(run.messages[run.names[0]])
        bodies.add(run.masked(0)[1])
        adverts.add(run.clients[0]._advert().to_bytes())
    assert len(bodies) == len(adverts) == 5


def test_secrets_are_gone_once_the_round_is_over(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.MASKED)
    seeds = [bytes(client._seed) for client in run.clients]
    run.until(ServerPhase.DONE)
    for client, seed in zip(run.clients, seeds, strict=True):
        assert bytes(client._seed) == bytes(32) != seed
        assert client._custody is not None
        assert not client._custody.held
        for pair in (client._box_keys, client._mask_keys):
            with pytest.raises(ProtocolError, match="erased"):
                pair.private_bytes()
        with pytest.raises(ProtocolError, match="cannot do this now"):
            client.snapshot()


def test_the_coordinator_is_a_function_of_its_messages(attempt: Any) -> None:
    """Restarted in the middle, it takes the stored messages again and says the same."""
    run = attempt(6).until(ServerPhase.UNMASK, {3: ServerPhase.MASKED})
    sent = run.messages
    counts = [6, 6, 5, 5]
    again = SecAggServer(run.session, run.plan, run.directory)
    stored = iter(run.received)
    for count in counts:
        for _ in range(count):
            message, body = next(stored)
            again.receive(message) if body is None else again.fold(message, body)
        messages = again.advance()
    assert messages == sent
    run.server = again
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(again.total, run.expected([0, 1, 2, 4, 5]))


def test_a_vector_of_another_length_is_refused(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    with pytest.raises(ProtocolError, match="7 elements"):
        run.clients[0].masked_chunks(ArraySource(np.zeros(7, dtype=np.uint32)))
    assert run.clients[0].phase is ClientPhase.READY


def test_more_silos_than_the_ring_has_room_for_are_not_invited(attempt: Any) -> None:
    with pytest.raises(PrivacyError, match="room for 5"):
        attempt(6, choose_parameters(5, 0.0, 0.0))
