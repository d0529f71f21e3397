"""For which silos a relay speaks: those that have signed that it may, each with its own identity."""

from __future__ import annotations

from collections.abc import Collection

from roundtable.core.errors import IdentityError
from roundtable.core.identity.credentials import verify_identity
from roundtable.core.identity.signing import PATH_MARK, check_signature, passage_values
from roundtable.server.auth.principals import CertifiedCallers, Principal
from roundtable.server.door.agent_messages import Passage

SILO_KEY = "roundtable-silo"
"""The metadata of a relay's call that names the silo for which it calls."""


class VoidIdentity(IdentityError):
    """The identity of a silo that a relay speaks for is not in force any more."""


class RelayedSilos:
    """Kept in memory: a relay that comes again shows again who has signed."""

    def __init__(self, principals: CertifiedCallers, authority: bytes, here: str = "") -> None:
        """`here` is the relay that is spoken to; "" the coordinator."""
        self._here = (here,) if here else ()
        self._principals = principals
        self._authority = authority
        self._silos: dict[str, dict[str, tuple[bytes, tuple[str, ...]]]] = {}

    def admit(
        self, relay: str, silo: str, identity: bytes, installation: bytes, passage: Passage | None
    ) -> tuple[Principal, bytes]:
        """The silo as a caller from now on, and its Ed25519 key.

        IdentityError unless the silo's identity is certified, in force and not revoked, and has signed that
        this relay may speak for this installation of it, to whom it is speaking.
        """
        if passage is None or not self._leads_here(passage.path, relay) or not identity or not installation:
            way = PATH_MARK.join((relay, *self._here))
            raise IdentityError(
                f"{silo!r} has not signed that the relay {relay!r} may speak for it: its agent.toml must say "
                f'relay = "{way}", the relays on its way to the coordinator, and its credentials must hold '
                "identity.crt and identity.key"
            )
        holder, key = verify_identity(identity, self._authority)
        shown = self._principals.of_certificate(identity)
        if holder != silo:
            raise IdentityError(f"the identity certificate that {silo!r} shows is one of {holder!r}")
        check_signature(key, "passage", _signed(silo, passage, installation), passage.signature, silo)
        self._silos.setdefault(relay, {})[silo] = identity, passage.path
        return Principal(silo, "agent", "relay", shown.expires), key

    def _leads_here(self, path: tuple[str, ...], relay: str) -> bool:
        """Whether the silo's way goes from this relay straight to where it speaks."""
        if relay not in path:
            return False
        after = path.index(relay) + 1
        return path[after : after + 1] == self._here

    def leave(self, relay: str) -> None:
        """The relay is gone: it speaks for nobody."""
        self._silos.pop(relay, None)

    def caller(self, relay: str, silo: str, way: tuple[str, ...] = ()) -> Principal:
        """The silo for which a relay calls; IdentityError unless it may, and the silo's way to it ends with
        `way`, the relays on it with that one as the last. VoidIdentity for one that was revoked since."""
        identity, path = self._silos.get(relay, {}).get(silo, (None, ()))
        if identity is None:
            raise IdentityError(f"the relay {relay!r} does not speak for a silo of this name")
        here = path.index(relay) + 1
        if path[max(0, here - len(way)) : here] != way and way:
            raise IdentityError(f"the way of {silo!r} is not by the relays {PATH_MARK.join(way)!r}")
        try:
            shown = self._principals.of_certificate(identity)
        except IdentityError as error:
            raise VoidIdentity(str(error)) from error
        return Principal(silo, "agent", "relay", shown.expires)

    def silos_of(self, who: Principal) -> Collection[str]:
        """Those for whom a caller may read: itself, or the silos of a relay."""
        return self._silos.get(who.name, {}) if who.role == "relay" else (who.name,)


def _signed(silo: str, passage: Passage, installation: bytes) -> dict[str, str]:
    return passage_values(silo, PATH_MARK.join(passage.path), installation)
