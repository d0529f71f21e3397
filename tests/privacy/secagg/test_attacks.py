"""Each attack on secure aggregation that we know of, tried against real silos or the real coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roundtable.core.errors import ProtocolError
from roundtable.privacy import subject_of
from roundtable.privacy.secagg import (
    ArraySource,
    ClientPhase,
    Ed25519Signer,
    SecAggClient,
    ServerPhase,
    Session,
    choose_parameters,
    keys,
    shamir,
)
from roundtable.privacy.secagg.custody import Custody
from roundtable.privacy.secagg.framing import Kind, seal, unseal
from roundtable.privacy.secagg.graph import NONCE_BYTES, combine_beacon
from roundtable.privacy.secagg.keys import BOX_BYTES, KEY_BYTES, KeyPair
from roundtable.privacy.secagg.masks import MaskSum
from roundtable.privacy.secagg.payloads import (
    Advert,
    Evidence,
    Inbox,
    Peer,
    Peers,
    Shares,
    Survivors,
    members_from_bytes,
)

Alter = Callable[..., bytes]


def survivors_told(message: bytes, survivors: set[int], n: int, alter: Alter) -> bytes:
    return alter(message, lambda _: Survivors(frozenset(survivors)).to_bytes(n))


def test_two_halves_are_told_different_survivors(attempt: Any, alter: Alter) -> None:
    """One half is told that the victim dropped out, the other that it survived. Neither half reveals."""
    run = attempt(10).until(ServerPhase.CONSENT)
    victim, everybody = 9, set(range(10))
    consents: dict[int, bytes] = {}
    for index, name in enumerate(run.names):
        told = everybody - {victim} if index < 5 else everybody
        message = survivors_told(run.messages[name], told, 10, alter)
        consents[index] = unseal(run.clients[index].handle(message)).signature
    evidence = Evidence(tuple(consents.items())[: run.plan.consents]).to_bytes()
    for client in run.clients:
        with pytest.raises(ProtocolError, match=r"signed by a silo outside|tells two stories"):
            client.handle(seal(Kind.EVIDENCE, run.server.cohort.binding, evidence))
    honest_half = Evidence(tuple(consents.items())[:5]).to_bytes()
    with pytest.raises(ProtocolError, match="5 silos signed"):
        run.clients[0].handle(seal(Kind.EVIDENCE, run.server.cohort.binding, honest_half))


def test_a_silo_is_asked_for_both_kinds_of_share(attempt: Any, alter: Alter) -> None:
    """A second survivor set, with the victim moved to the other side, is refused before and after."""
    run = attempt(6).until(ServerPhase.UNMASK)
    client, name = run.clients[0], run.names[0]
    binding = run.server.cohort.binding
    other = seal(Kind.ALIVE, binding, Survivors(frozenset(range(5))).to_bytes(6))
    with pytest.raises(ProtocolError, match="another survivor set"):
        client.handle(other)
    answer = client.handle(run.messages[name])
    assert len(unseal(answer).payload) == 6 * KEY_BYTES
    with pytest.raises(ProtocolError, match="cannot do this now"):
        client.handle(other)
    assert client.handle(run.messages[name]) == answer


def test_a_restart_does_not_make_a_silo_reveal_the_other_kind(attempt: Any) -> None:
    """Restored from the snapshot of its consent, it stands by the set that it signed."""
    run = attempt(6).until(ServerPhase.CONSENT)
    run.clients[0].handle(run.messages[run.names[0]])
    again = SecAggClient.restore(run.clients[0].snapshot(), run.signers[0], run.releases[0])
    other = Survivors(frozenset(range(5))).to_bytes(6)
    with pytest.raises(ProtocolError, match="another survivor set"):
        again.handle(seal(Kind.ALIVE, run.server.cohort.binding, other))


def test_a_round_is_not_unmasked_twice_with_one_silo_fewer(attempt: Any) -> None:
    """The first attempt is unmasked and called a failure; the difference of two sums would be the victim."""
    first = attempt(6).until(ServerPhase.DONE)
    second = attempt(
        5,
        choose_parameters(5, 0.2, 0.2),
        session=replace(first.session, attempt=1),
        signers=first.signers[:5],
        releases=first.releases[:5],
    ).until(ServerPhase.UNMASK)
    for client, name in zip(second.clients, second.names, strict=True):
        with pytest.raises(ProtocolError, match="another attempt of round 1 was unmasked"):
            client.handle(second.messages[name])


def test_on_a_sparse_graph_the_consent_binds_already(attempt: Any) -> None:
    """Who holds a silo's shares differs from attempt to attempt there; those who consent meet for certain."""
    plan = choose_parameters(60, 0.1, 0.1)
    first = attempt(60, plan).until(ServerPhase.UNMASK)
    again = {
        "session": replace(first.session, attempt=1),
        "signers": first.signers,
        "releases": first.releases,
    }
    second = attempt(60, plan, **again).until(ServerPhase.CONSENT)
    with pytest.raises(ProtocolError, match="another attempt of round 1 was unmasked"):
        second.clients[0].handle(second.messages[second.names[0]])


def test_keys_of_an_old_round_are_replayed(attempt: Any, alter: Alter) -> None:
    old = attempt(5, session=Session("job", 1, 0, 6)).until(ServerPhase.SHARES)
    new = attempt(5, session=Session("job", 2, 0, 6), signers=old.signers).until(ServerPhase.SHARES)
    replayed = Peers.from_bytes(unseal(old.messages[old.names[0]]).payload).peers[3]

    def with_old_keys(envelope: Any) -> bytes:
        peers = Peers.from_bytes(envelope.payload)
        return replace(peers, peers=(*peers.peers[:3], replayed, *peers.peers[4:])).to_bytes()

    with pytest.raises(ProtocolError, match="ADVERTISE in the name of silo-003 is not signed"):
        new.clients[0].handle(alter(new.messages[new.names[0]], with_old_keys))
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        new.clients[0].handle(old.messages[old.names[0]])


def test_silos_are_told_to_train_by_different_models(attempt: Any, alter: Alter) -> None:
    """With a model that moves nobody else the sum would be one silo's update (Pasquini et al. 2022)."""
    told = [subject_of("job", model) for model in ("good", "dead")]
    assert len({*told, subject_of("jobg", "ood"), subject_of("other", "good")}) == 4
    run = attempt(5, session=Session("job", 1, 0, 6, told[0])).until(ServerPhase.SHARES)
    other = replace(run.session, subject=told[1])
    misled = attempt(5, session=other, signers=run.signers).until(ServerPhase.SHARES)
    theirs = Peers.from_bytes(unseal(misled.messages[run.names[3]]).payload).peers[3]

    def with_one_of_them(envelope: Any) -> bytes:
        peers = Peers.from_bytes(envelope.payload)
        return replace(peers, peers=(*peers.peers[:3], theirs, *peers.peers[4:])).to_bytes()

    with pytest.raises(ProtocolError, match="ADVERTISE in the name of silo-003 is not signed"):
        run.clients[0].handle(alter(run.messages[run.names[0]], with_one_of_them))
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        misled.clients[3].handle(run.messages[run.names[3]])
    advert = attempt(5, session=other, signers=run.signers).clients[3].advertise()
    honest = attempt(5, session=run.session, signers=run.signers).server
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        honest.receive(advert)


def test_an_old_advertisement_is_sent_to_the_coordinator_again(attempt: Any) -> None:
    old = attempt(5, session=Session("job", 1, 0, 6))
    new = attempt(5, session=Session("job", 1, 1, 6), signers=old.signers)
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        new.server.receive(old.clients[0].advertise())


def changed_peer(envelope: Any, index: int, **changes: Any) -> bytes:
    peers = Peers.from_bytes(envelope.payload)
    changed = replace(peers.peers[index], **changes)
    return replace(peers, peers=(*peers.peers[:index], changed, *peers.peers[index + 1 :])).to_bytes()


@pytest.mark.parametrize("field", ["box_key", "mask_key", "commitment"])
def test_a_public_key_is_swapped(attempt: Any, alter: Alter, field: str) -> None:
    """The coordinator puts itself in the place of a peer, for one key or both."""
    run = attempt(5).until(ServerPhase.SHARES)
    message = run.messages[run.names[0]]
    advert = Advert.from_bytes(Peers.from_bytes(unseal(message).payload).peers[2].advert)
    mine = replace(advert, **{field: KeyPair().public}).to_bytes()
    with pytest.raises(ProtocolError, match="silo-002 is not signed"):
        run.clients[0].handle(alter(message, lambda envelope: changed_peer(envelope, 2, advert=mine)))


def test_a_peer_signs_with_a_key_that_nobody_enrolled(attempt: Any, alter: Alter) -> None:
    """A coordinator that controls the directory of names but not the silos' pinned keys gets nowhere."""
    run = attempt(5)
    stranger = Ed25519Signer()
    mallory = run.client(4, signer=stranger, directory={**run.directory, run.names[4]: stranger.public})
    forged = unseal(mallory.advertise())
    run.until(ServerPhase.SHARES)
    with pytest.raises(ProtocolError, match="silo-004 is not signed by its enrolled key"):
        run.clients[0].handle(
            alter(
                run.messages[run.names[0]],
                lambda envelope: changed_peer(envelope, 4, advert=forged.payload, signature=forged.signature),
            )
        )


def test_the_cohort_is_filled_with_silos_of_the_coordinators_making(attempt: Any) -> None:
    run = attempt(5).until(ServerPhase.SHARES)
    pinned = {name: key for name, key in run.directory.items() if name != run.names[3]}
    victim = run.client(0, directory=pinned)
    victim.advertise()
    with pytest.raises(ProtocolError, match="silo-003 is not a silo that this site has pinned"):
        victim.handle(run.messages[run.names[0]])


def test_one_identity_plays_two_silos(attempt: Any, alter: Alter) -> None:
    signer = Ed25519Signer()
    signers = [Ed25519Signer() for _ in range(4)]
    run = attempt(5, signers=[*signers[:3], signer, signer])
    run.until(ServerPhase.SHARES)
    with pytest.raises(ProtocolError, match="one identity key"):
        run.clients[0].handle(run.messages[run.names[0]])


@pytest.mark.parametrize("case", ["twice", "unsorted", "absent", "not own keys", "copied keys"])
def test_the_cohort_is_announced_wrongly(attempt: Any, alter: Alter, case: str) -> None:
    run = attempt(5).until(ServerPhase.SHARES)
    message = run.messages[run.names[0]]

    def announce(envelope: Any) -> bytes:
        peers = Peers.from_bytes(envelope.payload)
        given = list(peers.peers)
        if case == "twice":
            given[1] = given[0]
        elif case == "unsorted":
            given.reverse()
        elif case == "absent":
            given = given[1:]
            return Peers(run.plan.with_cohort(4).to_bytes(), tuple(given)).to_bytes()
        elif case == "not own keys":
            fresh = unseal(run.client(0).advertise())
            given[0] = Peer(fresh.sender, fresh.payload, fresh.signature)
        else:
            mine = run.forge(1, Kind.ADVERTISE, given[0].advert, run.session.digest())
            given[1] = Peer(run.names[1], given[0].advert, unseal(mine).signature)
        return replace(peers, peers=tuple(given)).to_bytes()

    words = {
        "twice": "twice",
        "unsorted": "not sorted",
        "absent": "lacks it",
        "not own keys": "other keys for silo-000",
        "copied keys": "advertised twice",
    }
    with pytest.raises(ProtocolError, match=words[case]):
        run.clients[0].handle(alter(message, announce))


def test_a_threshold_of_one_of_five_is_offered(attempt: Any, alter: Alter) -> None:
    run = attempt(5).until(ServerPhase.SHARES)
    weak = replace(run.plan, t=1).to_bytes()
    with pytest.raises(ProtocolError, match="t = 1 among 5"):
        run.clients[0].handle(
            alter(
                run.messages[run.names[0]],
                lambda envelope: replace(Peers.from_bytes(envelope.payload), parameters=weak).to_bytes(),
            )
        )


def test_a_site_demands_a_larger_cohort(attempt: Any) -> None:
    run = attempt(5).until(ServerPhase.SHARES)
    client = run.client(0, minimum_cohort=6)
    client.advertise()
    with pytest.raises(ProtocolError, match="demands at least 6"):
        client.handle(run.messages[run.names[0]])


def test_a_site_demands_as_many_survivors(attempt: Any) -> None:
    """Enough silos at the start, too few in the sum: the site's minimum is for what is revealed."""
    run = attempt(8, choose_parameters(8, 0.3, 0.0))
    demanding = [run.client(index, minimum_cohort=8) for index in range(8)]
    run.clients = demanding
    run.until(ServerPhase.CONSENT, {7: ServerPhase.MASKED})
    with pytest.raises(ProtocolError, match="7 silos survive, 8 are needed"):
        run.clients[0].handle(run.messages[run.names[0]])


def test_the_victim_is_put_among_the_corrupt(attempt: Any, alter: Alter) -> None:
    """Of ten invited, two of them corrupt, the coordinator lets three come: those two and the victim."""
    plan = choose_parameters(10, 0.2, 0.2)
    run = attempt(10, plan).until(ServerPhase.SHARES)

    def three(envelope: Any) -> bytes:
        weak = replace(choose_parameters(3, 0.0, 0.0), capacity=10).to_bytes()
        return Peers(weak, Peers.from_bytes(envelope.payload).peers[:3]).to_bytes()

    with pytest.raises(ProtocolError, match="among 3 silos protect against 2 corrupt"):
        run.clients[0].handle(alter(run.messages[run.names[0]], three))


def test_a_graph_isolates_the_victim(attempt: Any, alter: Alter) -> None:
    """The coordinator wants an order in which the victim has chosen neighbours: no nonce can be replaced."""
    run = attempt(60, choose_parameters(60, 0.1, 0.1)).until(ServerPhase.SHARES)
    victim, message = run.clients[0], run.messages[run.names[0]]
    for index in (0, 1, 59):
        start = index * NONCE_BYTES
        with pytest.raises(ProtocolError, match=f"nonce opened for silo-{index:03d}"):
            victim.handle(
                alter(
                    message,
                    lambda envelope, at=start: (
                        envelope.payload[:at] + bytes(NONCE_BYTES) + envelope.payload[at + NONCE_BYTES :]
                    ),
                )
            )
    victim.handle(message)
    nonces = [
        unseal(message).payload[at : at + NONCE_BYTES] for at in range(0, 60 * NONCE_BYTES, NONCE_BYTES)
    ]
    assert victim.cohort.beacon == combine_beacon(nonces)


def test_a_sparser_graph_is_offered(attempt: Any, alter: Alter) -> None:
    run = attempt(60, choose_parameters(60, 0.1, 0.1)).until(ServerPhase.REVEAL)
    sparse = replace(run.plan, k=2, t=2).to_bytes()
    with pytest.raises(ProtocolError, match="k = 2"):
        run.clients[0].handle(
            alter(
                run.messages[run.names[0]],
                lambda envelope: replace(Peers.from_bytes(envelope.payload), parameters=sparse).to_bytes(),
            )
        )


def test_neighbours_are_hidden_from_a_silo(attempt: Any, alter: Alter) -> None:
    """Shares of some neighbours are held back so that fewer masks protect the victim."""
    run = attempt(6).until(ServerPhase.MASKED)
    message = run.messages[run.names[0]]

    def hide(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 6)
        return Inbox(inbox.members, inbox.boxes[1:]).to_bytes(6)

    with pytest.raises(ProtocolError, match="4 shares for this silo where 5"):
        run.clients[0].handle(alter(message, hide))

    def shrink(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 6)
        return Inbox(frozenset({0, 1, 2, 3}), inbox.boxes[:3]).to_bytes(6)

    with pytest.raises(ProtocolError, match="4 silos shared their secrets; 5 are needed"):
        run.clients[0].handle(alter(message, shrink))


def test_silos_are_told_different_members(attempt: Any, alter: Alter) -> None:
    """The victim believes in five members, the rest in six: it signs what nobody else does."""
    run = attempt(6).until(ServerPhase.MASKED)

    def without_last(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 6)
        return Inbox(frozenset(range(5)), inbox.boxes[:4]).to_bytes(6)

    run.messages[run.names[0]] = alter(run.messages[run.names[0]], without_last)
    binding, uploads, signatures = run.server.cohort.binding, [], []
    for index, client in enumerate(run.clients[:5]):
        client.handle(run.messages[run.names[index]])
        uploads.append(run.masked(index))
        consent = client.handle(seal(Kind.ALIVE, binding, Survivors(frozenset(range(5))).to_bytes(6)))
        signatures.append((index, unseal(consent).signature))
    with pytest.raises(ProtocolError, match="MASKED from silo-000 belongs to another"):
        run.server.fold(*uploads[0])
    for upload in uploads[1:]:
        run.server.fold(*upload)
    run.answer(5)
    run.server.advance()
    with pytest.raises(ProtocolError, match="signed another survivor set"):
        run.server.receive(run.forge(1, Kind.CONSENT, bytes(32)))
    evidence = seal(Kind.EVIDENCE, run.server.cohort.binding, Evidence(tuple(signatures)).to_bytes())
    for client in run.clients[:5]:
        with pytest.raises(ProtocolError, match="tells two stories"):
            client.handle(evidence)


class Lied:
    """60 silos on a sparse graph; half of the victim's 14 neighbours are hidden from it, half dropped later.

    All others know all members. So the victim masks towards `seen` alone, whose mask keys `seen` being
    "dropped" gives away, while `hidden` hold enough shares of its seed. No silo is corrupt.
    """

    def __init__(self, attempt: Any, alter: Alter) -> None:
        self.run = run = attempt(60, choose_parameters(60, 0.1, 0.1)).until(ServerPhase.MASKED)
        self.cohort = run.server.cohort
        self.everybody = run.server._members
        around = self.cohort.graph.neighbours(0)
        assert (len(around), self.cohort.parameters.t) == (14, 7)
        self.hidden, self.seen = set(around[:7]), set(around[7:])
        told = run.messages[run.names[0]]
        boxes = dict(zip(around, Inbox.from_bytes(unseal(told).payload, 60).boxes, strict=True))
        inbox = Inbox(self.everybody - self.hidden, tuple(boxes[peer] for peer in sorted(self.seen)))
        run.messages[run.names[0]] = alter(told, lambda _: inbox.to_bytes(60))
        self.uploads = {}
        for index, client in enumerate(run.clients):
            client.handle(run.messages[run.names[index]])
            self.uploads[index] = run.masked(index)

    def alive(self, index: int, survivors: frozenset[int], **replaced: tuple[bytes, bytes]) -> bytes:
        """What the coordinator tells a silo, with the announcements that it has or makes up."""
        signed = {peer: unseal(header) for peer, (header, _) in self.uploads.items()}
        found = {
            peer: (signed[peer].payload, signed[peer].signature)
            for peer in self.cohort.attested(index, survivors)
        }
        found |= {0: replaced["victim"]} if replaced else {}
        return seal(Kind.ALIVE, self.cohort.binding, Survivors(survivors, tuple(found.values())).to_bytes(60))


def test_on_a_sparse_graph_the_victim_alone_is_told_other_members(attempt: Any, alter: Alter) -> None:
    lied = Lied(attempt, alter)
    run, survivors = lied.run, lied.everybody - lied.seen
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        run.server.fold(*lied.uploads[0])
    witness = min(lied.hidden)
    client = run.clients[witness]
    digest = unseal(lied.uploads[0][0]).payload
    true = lied.cohort.masked_among(lied.everybody)
    mallory = unseal(run.forge(1, Kind.MASKED, digest, true)).signature
    for forged in ({}, {"victim": (digest, mallory)}, {"victim": (bytes(32), bytes(64))}):
        with pytest.raises(ProtocolError, match="silo-000 did not sign that it masked among the members"):
            client.handle(lied.alive(witness, survivors, **forged))
    payload = unseal(lied.alive(witness, survivors)).payload
    for count, changed in ((0, payload[:8]), (len(payload) // 96 + 1, payload + bytes(96))):
        with pytest.raises(ProtocolError, match=f"{count} announcements came where"):
            client.handle(seal(Kind.ALIVE, lied.cohort.binding, changed))
    with pytest.raises(ProtocolError, match="too early"):
        client.handle(seal(Kind.ALIVE, lied.cohort.binding, payload[:-1]))
    assert client.phase is ClientPhase.COMMITTED


def test_without_the_announcements_that_lie_would_bare_the_victim(
    attempt: Any, alter: Alter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check is for: holders that skip it give away all that covers the victim's vector."""
    monkeypatch.setattr(Custody, "_check_announcements", lambda *_: None)
    lied = Lied(attempt, alter)
    run, cohort, survivors = lied.run, lied.cohort, lied.everybody - lied.seen
    consents = {
        index: unseal(run.clients[index].handle(lied.alive(index, survivors))).signature
        for index in sorted(survivors - {0})
    }
    evidence = Evidence(tuple(consents.items())[: cohort.parameters.consents]).to_bytes()
    shares: dict[int, dict[int, bytes]] = {}
    for index in consents:
        payload = unseal(run.clients[index].handle(seal(Kind.EVIDENCE, cohort.binding, evidence))).payload
        for place, owner in enumerate(cohort.peers_held_by(index, lied.everybody)):
            shares.setdefault(owner, {})[index] = payload[place * KEY_BYTES : (place + 1) * KEY_BYTES]
    secret = {}
    for owner in (0, *sorted(lied.seen)):
        held = list(shares[owner].items())[: cohort.parameters.t]
        points = shamir.lagrange([index + 1 for index, _ in held])
        secret[owner] = shamir.combine(points, [share for _, share in held])
    bare = np.frombuffer(lied.uploads[0][1], dtype="<u4").copy()
    victim = run.server._adverts[0].mask_key
    pairwise = [
        keys.mask_key(KeyPair(secret[peer]).agree(victim, "victim"), cohort.binding, 0, peer)
        for peer in sorted(lied.seen)
    ]
    MaskSum(32, [], [keys.self_mask_key(secret[0], cohort.binding, 0), *pairwise]).add_to(bare)
    np.testing.assert_array_equal(bare, run.vectors[0])


@pytest.mark.parametrize(
    ("survivors", "words"),
    [
        ({0, 1, 2}, "3 silos survive, 5 are needed"),
        ({1, 2, 3, 4, 5}, "counts this silo as dropped"),
        (set(range(7)), "counts silo-006 as a survivor"),
    ],
)
def test_a_silo_checks_the_survivors(attempt: Any, alter: Alter, survivors: set[int], words: str) -> None:
    """Below the threshold, without itself, or with somebody who shared nothing."""
    plan = choose_parameters(7, 0.3, 0.2)
    assert plan.t == 5
    run = attempt(7, plan).until(ServerPhase.CONSENT, {6: ServerPhase.SHARES})
    told = survivors_told(run.messages[run.names[0]], survivors, 7, alter)
    with pytest.raises(ProtocolError, match=words):
        run.clients[0].handle(told)
    assert run.clients[0].phase is ClientPhase.COMMITTED


def test_one_signature_counts_only_once(attempt: Any, alter: Alter) -> None:
    run = attempt(6).until(ServerPhase.UNMASK)
    message = run.messages[run.names[0]]

    def repeat(envelope: Any) -> bytes:
        signatures = Evidence.from_bytes(envelope.payload).signatures
        return Evidence((*signatures[:3], *signatures[:3])).to_bytes()

    with pytest.raises(ProtocolError, match="twice"):
        run.clients[0].handle(alter(message, repeat))

    def under_another_name(envelope: Any) -> bytes:
        signatures = Evidence.from_bytes(envelope.payload).signatures
        return Evidence((*signatures[:4], (5, signatures[0][1]))).to_bytes()

    with pytest.raises(ProtocolError, match="silo-005 did not sign"):
        run.clients[0].handle(alter(message, under_another_name))

    def too_few(envelope: Any) -> bytes:
        return Evidence(Evidence.from_bytes(envelope.payload).signatures[:4]).to_bytes()

    with pytest.raises(ProtocolError, match="4 silos signed"):
        run.clients[0].handle(alter(message, too_few))


def test_shares_are_asked_for_before_a_set_is_agreed(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.CONSENT)
    evidence = seal(Kind.EVIDENCE, run.server.cohort.binding, Evidence(()).to_bytes())
    with pytest.raises(ProtocolError, match="cannot do this now"):
        run.clients[0].handle(evidence)


def test_shares_of_another_round_are_replayed(attempt: Any, alter: Alter) -> None:
    """The same silos, keys kept by a careless peer: the associated data names the attempt."""
    run = attempt(4).until(ServerPhase.MASKED)
    other = attempt(4, session=Session("job", 2, 0, 6), signers=run.signers).until(ServerPhase.MASKED)
    stolen = Inbox.from_bytes(unseal(other.messages[other.names[0]]).payload, 4).boxes

    def replay(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 4)
        return Inbox(inbox.members, (stolen[0], *inbox.boxes[1:])).to_bytes(4)

    with pytest.raises(ProtocolError, match="shares from silo-001 were altered"):
        run.clients[0].handle(alter(run.messages[run.names[0]], replay))


def test_a_share_is_sent_twice(attempt: Any, alter: Alter) -> None:
    """A share in the place of another, or beside it, opens nothing; the same inbox changes nothing."""
    run = attempt(5).until(ServerPhase.MASKED)
    name = run.names[0]

    def instead(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 5)
        return Inbox(inbox.members, (inbox.boxes[0], inbox.boxes[0], *inbox.boxes[2:])).to_bytes(5)

    def beside(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 5)
        return Inbox(inbox.members, (*inbox.boxes, inbox.boxes[0])).to_bytes(5)

    with pytest.raises(ProtocolError, match="were altered, or made for another attempt or receiver"):
        run.clients[0].handle(alter(run.messages[name], instead))
    with pytest.raises(ProtocolError, match="5 shares for this silo where 4 silos hold it"):
        run.clients[0].handle(alter(run.messages[name], beside))
    assert run.clients[0].handle(run.messages[name]) is None
    held = bytes(run.clients[0]._held().held)
    assert run.clients[0].handle(run.messages[name]) is None
    assert bytes(run.clients[0]._held().held) == held


def test_a_share_that_is_given_out_twice_counts_once(attempt: Any) -> None:
    """A repeated answer does not make up for a silo that is missing below the threshold."""
    run = attempt(7).until(ServerPhase.UNMASK)
    threshold = run.server.cohort.parameters.t
    for index in range(threshold - 1):
        run.answer(index)
        run.server.receive(run.received[-1][0])
    assert not run.server.ready
    with pytest.raises(ProtocolError, match=f"{threshold - 1} shares of a secret"):
        run.server.advance()


def test_shares_are_delivered_to_the_wrong_silo(attempt: Any, alter: Alter) -> None:
    run = attempt(4).until(ServerPhase.MASKED)

    def swap(envelope: Any) -> bytes:
        inbox = Inbox.from_bytes(envelope.payload, 4)
        return Inbox(inbox.members, (inbox.boxes[1], inbox.boxes[0], inbox.boxes[2])).to_bytes(4)

    with pytest.raises(ProtocolError, match="altered"):
        run.clients[0].handle(alter(run.messages[run.names[0]], swap))


def test_a_masked_chunk_is_altered(attempt: Any) -> None:
    run = attempt(4, choose_parameters(4, 0.25, 0.0)).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    header, body = run.masked(0)
    for damaged in (bytes([body[0] ^ 1]) + body[1:], body[:-4], body + bytes(4), b""):
        with pytest.raises(ProtocolError, match="silo-000"):
            run.server.fold(header, damaged)
    other = run.forge(1, Kind.MASKED, unseal(header).payload)
    with pytest.raises(ProtocolError, match="is not signed"):
        run.server.fold(header[:-1] + bytes([header[-1] ^ 1]), body)
    run.server.fold(header, body)
    before = run.server._sum.copy()
    run.server.fold(header, body)
    np.testing.assert_array_equal(run.server._sum, before)
    bound = run.server.cohort.masked_among(frozenset(range(4)))
    reused = run.forge(0, Kind.MASKED, bytes(32), bound)
    with pytest.raises(ProtocolError, match="silo-000"):
        run.server.fold(reused, body)
    assert run.server.announced(other) == ("silo-001", unseal(header).payload.hex())
    with pytest.raises(ProtocolError, match="announces no upload"):
        run.server.announced(run.forge(1, Kind.CONSENT, bytes(32)))


def test_a_refused_upload_leaves_no_trace_in_the_sum(attempt: Any) -> None:
    run = attempt(5).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    header, body = run.masked(0)
    with pytest.raises(ProtocolError, match="not the one that it signed"):
        run.server.fold(header, body[:-1] + bytes([body[-1] ^ 255]))
    run.until(ServerPhase.DONE, {0: ServerPhase.MASKED})
    np.testing.assert_array_equal(run.server.total, run.expected([1, 2, 3, 4]))


def test_a_late_upload_of_a_dropped_silo_is_refused(attempt: Any) -> None:
    """Its mask key is being reconstructed: its vector must not arrive any more."""
    run = attempt(5).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    late = run.masked(0)
    run.until(ServerPhase.UNMASK, {0: ServerPhase.MASKED})
    with pytest.raises(ProtocolError, match="does not belong in phase"):
        run.server.fold(*late)


def test_the_mask_key_of_a_dropped_silo_does_not_open_its_late_vector(attempt: Any) -> None:
    """A malicious coordinator keeps the late upload: the self mask, never revealed, still covers it."""
    run = attempt(5).until(ServerPhase.MASKED)
    run.clients[0].handle(run.messages[run.names[0]])
    _, body = run.masked(0)
    run.until(ServerPhase.UNMASK, {0: ServerPhase.MASKED})
    shares: dict[int, list[bytes]] = {}
    for index in range(1, 5):
        payload = unseal(run.clients[index].handle(run.messages[run.names[index]])).payload
        for owner in range(5):
            shares.setdefault(owner, []).append(payload[owner * KEY_BYTES : (owner + 1) * KEY_BYTES])
    private = shamir.combine(shamir.lagrange([2, 3, 4, 5]), shares[0])
    adverts, binding = run.server._adverts, run.server.cohort.binding
    pair = keys.KeyPair(private)
    assert pair.public == adverts[0].mask_key
    pairwise = [
        keys.mask_key(pair.agree(adverts[peer].mask_key, "peer"), binding, 0, peer) for peer in range(1, 5)
    ]
    left = np.frombuffer(body, dtype="<u4").copy()
    MaskSum(32, [], pairwise).add_to(left)
    assert not np.array_equal(left, run.vectors[0])
    wrong_seed = keys.self_mask_key(private, binding, 0)
    MaskSum(32, [], [wrong_seed]).add_to(left)
    assert not np.array_equal(left, run.vectors[0])


@pytest.mark.parametrize(
    "size", [0, 1, BOX_BYTES - 1, BOX_BYTES * 3 + KEY_BYTES - 1, BOX_BYTES * 4 + KEY_BYTES]
)
def test_shares_of_the_wrong_length_are_refused(attempt: Any, size: int) -> None:
    run = attempt(4).until(ServerPhase.SHARES)
    with pytest.raises(ProtocolError, match="bytes too"):
        run.server.receive(run.forge(1, Kind.SHARES, bytes(size)))
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(4)))


def test_malformed_shares_are_noticed_and_their_sender_named(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.SHARES)
    garbage = Shares(bytes(KEY_BYTES), (bytes(BOX_BYTES),) * 3)
    run.server.receive(run.forge(1, Kind.SHARES, garbage.to_bytes()))
    for index in (0, 2, 3):
        run.answer(index)
    messages = run.server.advance()
    with pytest.raises(ProtocolError, match="shares from silo-001 were altered"):
        run.clients[0].handle(messages[run.names[0]])


@pytest.mark.parametrize(
    "phase", [ServerPhase.ADVERTISE, ServerPhase.SHARES, ServerPhase.CONSENT, ServerPhase.UNMASK]
)
def test_a_silo_answers_twice(attempt: Any, phase: ServerPhase) -> None:
    """A second answer that differs is refused; the same one again counts once."""
    run = attempt(4).until(phase)
    run.answer(0)
    first = run.received[-1][0]
    missing = run.server.missing
    assert run.server.receive(first) == "silo-000"
    assert run.server.missing == missing
    envelope = unseal(first)
    other = bytes(len(envelope.payload))
    with pytest.raises(ProtocolError, match="answered twice"):
        run.server.receive(run.forge(0, envelope.kind, other, envelope.binding))
    for index in (1, 2, 3):
        run.answer(index)
    run.messages = run.server.advance()
    run.until(ServerPhase.DONE)
    np.testing.assert_array_equal(run.server.total, run.expected(range(4)))


def test_two_halves_are_told_different_cohorts(attempt: Any, alter: Alter) -> None:
    """The sub-cohorts are valid each on their own; silos of one cannot read or join the other."""
    run = attempt(8, choose_parameters(8, 0.3, 0.0)).until(ServerPhase.SHARES)

    def without(hidden: int) -> bytes:
        def announce(envelope: Any) -> bytes:
            peers = Peers.from_bytes(envelope.payload).peers
            kept = tuple(peer for index, peer in enumerate(peers) if index != hidden)
            return Peers(run.plan.with_cohort(7).to_bytes(), kept).to_bytes()

        return alter(run.messages[run.names[0]], announce)

    one, other = run.clients[0], run.clients[1]
    shares = [Shares.from_bytes(unseal(one.handle(without(7))).payload, 6)]
    shares.append(Shares.from_bytes(unseal(other.handle(without(6))).payload, 6))
    assert one.cohort.binding != other.cohort.binding
    boxes = (shares[0].boxes[0], *([bytes(BOX_BYTES)] * 5))
    inbox = Inbox(frozenset(range(7)), boxes).to_bytes(7)
    with pytest.raises(ProtocolError, match="shares from silo-000 were altered"):
        other.handle(seal(Kind.INBOX, other.cohort.binding, inbox))
    with pytest.raises(ProtocolError, match="another round, attempt or cohort"):
        other.handle(seal(Kind.INBOX, one.cohort.binding, inbox))


def test_a_silo_speaks_for_another(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.CONSENT)
    payload = run.server.cohort.consent_payload(frozenset(range(4)), frozenset(range(4)))
    forged = seal(Kind.CONSENT, run.server.cohort.binding, payload, run.names[1], run.signers[0])
    with pytest.raises(ProtocolError, match="silo-001 is not signed"):
        run.server.receive(forged)
    stranger = seal(Kind.CONSENT, run.server.cohort.binding, payload, "nobody", run.signers[0])
    with pytest.raises(ProtocolError, match="nobody is not a silo"):
        run.server.receive(stranger)


@pytest.mark.parametrize("liars", [1, 2])
def test_false_shares_at_unmasking_are_outvoted_and_named(attempt: Any, liars: int) -> None:
    run = attempt(9, choose_parameters(9, 0.25, 0.0)).until(ServerPhase.UNMASK, {8: ServerPhase.MASKED})
    for index in range(8):
        payload = unseal(run.clients[index].handle(run.messages[run.names[index]])).payload
        if index in (0, 3)[:liars]:
            payload = bytes(byte ^ 85 for byte in payload)
        if liars == 2 and index == 5:
            continue
        run.server.receive(run.forge(index, Kind.UNMASK, payload))
    if liars == 2:
        with pytest.raises(ProtocolError, match="do not fit together"):
            run.server.advance()
        assert run.plan.t == 7
        return
    run.server.advance()
    assert run.server.liars == {run.names[0]}
    np.testing.assert_array_equal(run.server.total, run.expected(range(8)))


def test_a_dealer_of_false_shares_cannot_falsify_the_sum(attempt: Any) -> None:
    """Its commitment is not to the seed that it shared: the attempt fails by name, the sum is not wrong."""
    run = attempt(5).until(ServerPhase.SHARES)
    honest = unseal(run.clients[2].handle(run.messages[run.names[2]])).payload
    run.server.receive(run.forge(2, Kind.SHARES, bytes(KEY_BYTES) + honest[KEY_BYTES:]))
    for index in (0, 1, 3, 4):
        run.answer(index)
    run.messages = run.server.advance()
    run.until(ServerPhase.UNMASK)
    for index in range(5):
        run.answer(index)
    with pytest.raises(ProtocolError, match="shares of silo-002 do not fit together"):
        run.server.advance()


def test_a_false_nonce_is_refused_at_once(attempt: Any) -> None:
    run = attempt(60, choose_parameters(60, 0.1, 0.1)).until(ServerPhase.REVEAL)
    with pytest.raises(ProtocolError, match="nonce opened by silo-007"):
        run.server.receive(run.forge(7, Kind.REVEAL, bytes(32), run.server.cohort.sid))


def test_a_low_order_key_makes_no_predictable_mask(attempt: Any) -> None:
    run = attempt(4)
    zero = run.client(3)
    advert = Advert(bytes(32), KeyPair().public, zero._advert().commitment)
    run.server.receive(run.forge(3, Kind.ADVERTISE, advert.to_bytes(), run.session.digest()))
    for index in range(3):
        run.answer(index)
    messages = run.server.advance()
    with pytest.raises(ProtocolError, match="key advertised by silo-003 is unusable"):
        run.clients[0].handle(messages[run.names[0]])


def test_an_abort_of_another_round_is_refused(attempt: Any) -> None:
    old = attempt(4, session=Session("job", 1, 0, 6))
    new = attempt(4, session=Session("job", 2, 0, 6), signers=old.signers)
    with pytest.raises(ProtocolError, match="another round"):
        new.server.receive(old.clients[0].abort("replayed"))


def test_after_an_abort_a_silo_does_nothing_more(attempt: Any) -> None:
    run = attempt(4).until(ServerPhase.MASKED)
    client = run.clients[0]
    client.handle(run.messages[run.names[0]])
    client.abort("enough")
    assert not client._custody.held
    with pytest.raises(ProtocolError, match="cannot do this now"):
        client.masked_chunks(ArraySource(run.vectors[0]))


def test_a_bitmap_names_nobody_beyond_the_cohort() -> None:
    assert members_from_bytes(b"\x0f", 4) == frozenset(range(4))
    with pytest.raises(ProtocolError, match="beyond the 4"):
        members_from_bytes(b"\x1f", 4)
