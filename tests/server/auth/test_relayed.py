"""For whom a relay may speak: what a relay could show in the place of the silo's signature."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import create_ca, issue, load_credentials, load_silo_identity
from roundtable.core.identity.signing import passage_values, sign
from roundtable.server.auth.principals import CertifiedCallers
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.door.agent_messages import Passage

INSTALLATION = bytes(range(32))


def test_a_relay_is_believed_with_the_silos_own_signature_alone(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    for name in ("elm", "birch"):
        issue(tmp_path / "ca", name, "agent", tmp_path / name)
    ca = load_credentials(tmp_path / "elm").ca
    relayed = RelayedSilos(CertifiedCallers(tmp_path, ca, time.time), ca)
    elm, birch = (load_silo_identity(tmp_path / name) for name in ("elm", "birch"))
    good = sign(elm, "passage", passage_values("elm", "east", INSTALLATION))
    word = Passage(("east",), good)

    def shown(
        relay: str = "east",
        silo: str = "elm",
        identity: bytes = elm.certificate,
        installation: bytes = INSTALLATION,
        passage: Passage | None = word,
    ) -> str:
        return relayed.admit(relay, silo, identity, installation, passage)[0].label

    with pytest.raises(IdentityError, match="does not speak for"):
        relayed.caller("east", "elm")
    other = sign(birch, "passage", passage_values("elm", "east", INSTALLATION))
    purpose = sign(elm, "installation", passage_values("elm", "east", INSTALLATION))
    for attack in (
        {"passage": None},
        {"relay": "west"},
        {"relay": "west", "passage": Passage(("west",), good)},
        {"silo": "birch"},
        {"silo": "birch", "identity": birch.certificate},
        {"identity": birch.certificate},
        {"identity": b""},
        {"installation": INSTALLATION[::-1]},
        {"installation": b""},
        {"passage": Passage(("east",), other)},
        {"passage": Passage(("east",), purpose)},
    ):
        with pytest.raises(IdentityError):
            shown(**attack)  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match="does not speak for"):
        relayed.caller("east", "elm")
    far = sign(elm, "passage", passage_values("elm", "west/east", INSTALLATION))
    for relay, path, signature in (
        ("west", ("west", "east"), far),  # To a relay alone, not past it.
        ("east", ("east", "west"), far),
        ("east", ("west", "east"), good),
    ):
        with pytest.raises(IdentityError):
            shown(relay=relay, passage=Passage(path, signature))
    at_east = RelayedSilos(CertifiedCallers(tmp_path, ca, time.time), ca, "east")
    with pytest.raises(IdentityError, match='relay = "west/east"'):
        at_east.admit("west", "elm", elm.certificate, INSTALLATION, word)
    with pytest.raises(IdentityError):
        at_east.admit("east", "elm", elm.certificate, INSTALLATION, Passage(("west", "east"), far))
    at_east.admit("west", "elm", elm.certificate, INSTALLATION, Passage(("west", "east"), far))
    assert shown(passage=Passage(("west", "east"), far)) == "agent/elm"
    relayed.leave("east")
    assert shown() == "agent/elm"
    assert relayed.caller("east", "elm").label == "agent/elm"
    with pytest.raises(IdentityError, match="does not speak for"):
        relayed.caller("west", "elm")
    relayed.leave("east")
    with pytest.raises(IdentityError, match="does not speak for"):
        relayed.caller("east", "elm")
