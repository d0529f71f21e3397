"""Checking the cohort that a coordinator announces, before a silo has anything to do with it."""

from __future__ import annotations

from collections.abc import Mapping

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.framing import Envelope, Kind
from roundtable.privacy.secagg.keys import Session, session_id, verifier
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.payloads import Advert, Peers, check_name


def assemble(
    session: Session,
    offered: Peers,
    directory: Mapping[str, bytes],
    plan: SecAggParameters,
    minimum_cohort: int,
) -> tuple[Cohort, tuple[Advert, ...]]:
    """The cohort of an announcement, by index, with everybody's keys.

    ProtocolError where the parameters are weaker than `plan`, the cohort is smaller than the site
    demands, a name or key appears twice, a silo is not in the pinned `directory`, or an
    advertisement is not signed for this very attempt by the silo that it names.
    """
    parameters = SecAggParameters.from_bytes(offered.parameters)
    parameters.check_against(plan)
    names = tuple(check_name(peer.name) for peer in offered.peers)
    right = len(names) >= parameters.n if parameters.group_size else len(names) == parameters.n
    if not right or parameters.n < minimum_cohort:
        kind = "groups of" if parameters.group_size else "n ="
        raise ProtocolError(
            f"a cohort of {len(names)} silos was announced for {kind} {parameters.n}; "
            f"this site demands at least {minimum_cohort}"
        )
    if list(names) != sorted(set(names)):
        raise ProtocolError("the announced cohort is not sorted, or names a silo twice")
    _check_identities(session, offered, directory)
    adverts = tuple(Advert.from_bytes(peer.advert) for peer in offered.peers)
    public = [key for advert in adverts for key in (advert.box_key, advert.mask_key)]
    if len(set(public)) != len(public):
        raise ProtocolError("a public key is advertised twice in the announced cohort")
    identities = tuple(directory[name] for name in names)
    triples = [(peer.name, directory[peer.name], peer.advert) for peer in offered.peers]
    sid = session_id(session, offered.parameters, triples)
    return Cohort(session, parameters, names, identities, sid, b""), adverts


def _check_identities(session: Session, offered: Peers, directory: Mapping[str, bytes]) -> None:
    """Every silo is pinned, is nobody else as well, and has signed its advertisement for this attempt."""
    digest = session.digest()
    identities = set()
    for peer in offered.peers:
        identity = directory.get(peer.name)
        if identity is None:
            raise ProtocolError(f"{peer.name} is not a silo that this site has pinned an identity for")
        advertised = Envelope(Kind.ADVERTISE, digest, peer.name, peer.advert, peer.signature)
        advertised.check(verifier(identity, peer.name))
        identities.add(identity)
    if len(identities) != len(offered.peers):
        raise ProtocolError("two silos of the announced cohort have one identity key")
