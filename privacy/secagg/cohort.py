"""Checking the cohort that a coordinator announces, before a silo has anything to do with it."""

from __future__ import annotations

from collections.abc import Mapping

from roundtable.core.errors import ProtocolError
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.keys import Session, session_id, verifier
from roundtable.privacy.secagg.messages import Advert, Peers, check_name
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.wire import Envelope, Kind


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
    if len(names) != parameters.n or len(names) < minimum_cohort:
        raise ProtocolError(
            f"a cohort of {len(names)} silos was announced for n = {parameters.n}; "
            f"this site demands at least {minimum_cohort}"
        )
    if list(names) != sorted(set(names)):
        raise ProtocolError("the announced cohort is not sorted, or names a silo twice")
    strangers = [name for name in names if name not in directory]
    if strangers:
        raise ProtocolError(f"{strangers[0]} is not a silo that this site has pinned an identity for")
    digest = session.digest()
    for peer in offered.peers:
        advertised = Envelope(Kind.ADVERTISE, digest, peer.name, peer.advert, peer.signature)
        advertised.check(verifier(directory[peer.name], peer.name))
    adverts = tuple(Advert.from_bytes(peer.advert) for peer in offered.peers)
    public = [key for advert in adverts for key in (advert.box_key, advert.mask_key)]
    if len(set(public)) != len(public):
        raise ProtocolError("a public key is advertised twice in the announced cohort")
    identities = tuple(directory[name] for name in names)
    if len(set(identities)) != len(identities):
        raise ProtocolError("two silos of the announced cohort have one identity key")
    triples = [(peer.name, directory[peer.name], peer.advert) for peer in offered.peers]
    sid = session_id(session, offered.parameters, triples)
    return Cohort(session, parameters, names, identities, sid, b""), adverts
