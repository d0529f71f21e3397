"""Which installation of the agent this is: a key in its state folder, apart from the credentials.

Who copies the credentials alone cannot pose as this installation: the coordinator binds the first one that
shows a certificate's key, and asks for a signature at each hello. Who was refused for that the coordinator
tells this installation, which keeps it: people must hear of it once, and find it until the keys are new.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519

from roundtable.client.door.incoming import CloneNews
from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import IdentityError, ResourceError
from roundtable.core.foreign_text import printable
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import (
    NODE_CERTIFICATE,
    SiloIdentity,
    identity_of,
    load_silo_identity,
)
from roundtable.core.identity.signing import passage_values, sign

_log = logging.getLogger("roundtable.agent")
KEY_FILE = "installation.key"
CLONE_FILE = "clone.json"
CLONE_REMEDY = (
    "If you have not moved or copied this agent yourself, its keys are stolen: have the operator run "
    "`roundtable client revoke` and send a new invitation, move the credentials folder away, and "
    "`roundtable client enroll` makes new keys"
)


class Installation:
    """Made at the first start, and the same ever after."""

    def __init__(self, state: Path, name: str) -> None:
        path = state / KEY_FILE
        if not path.exists():
            x.write_new(state, {KEY_FILE: x.pem_of_key(ed25519.Ed25519PrivateKey.generate(), x.passphrase())})
        key = x.load_key(path)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise IdentityError(f"{path} is no Ed25519 key; enrol this silo anew in a new state folder")
        self._key = key
        self._name = name

    @property
    def public_key(self) -> bytes:
        """32 bytes, Ed25519."""
        return self._key.public_key().public_bytes_raw()

    def prove(self, nonce: bytes) -> bytes:
        """The signature that the coordinator asks for."""
        values = {"nonce": nonce.hex(), "name": self._name}
        return sign(SiloIdentity(b"", self._key), "installation", values)


def passage(credentials: Path, relay: str, installation: Installation) -> tuple[str, bytes] | None:
    """The silo's word that this relay, or all on its way to the coordinator, may speak for it; None where
    none is named.

    IdentityError for credentials without a signing identity.
    """
    if not relay:
        return None
    identity = load_silo_identity(credentials)
    name = identity_of(identity.certificate)[0]
    return relay, sign(identity, "passage", passage_values(name, relay, installation.public_key))


class CloneMemory:
    """The newest clone of the silo's credentials, in a file that survives restarts.

    What it holds is of one pair of keys: with new ones in the credentials folder nothing is known.
    """

    def __init__(self, state: Path, credentials: Path) -> None:
        self._path = state / CLONE_FILE
        self._credentials = credentials

    def newest(self) -> CloneNews | None:
        """Who came last with the keys that the silo has now; None where nobody is known to have."""
        try:
            kept = json.loads(self._path.read_bytes())
            news = CloneNews(float(kept["time"]), printable(kept["address"]))
            return news if kept["key"] == self._key() else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, IdentityError) as error:
            _log.warning("what is known of clones cannot be read from %s: %s", self._path, error)
            return None

    def hear(self, news: CloneNews | None) -> None:
        """Warns of a clone that is newer than the one that is known."""
        known = self.newest()
        if news is None or (known is not None and news.time <= known.time):
            return
        _log.warning("%s. %s", said_of(news), CLONE_REMEDY)
        kept = {"key": self._key(), "time": news.time, "address": news.address}
        try:
            replace_synced(self._path, [json.dumps(kept).encode()])
        except (ResourceError, OSError) as error:
            _log.warning("that cannot be kept, and will be told again: %s", error)

    def _key(self) -> str:
        certificate = x.certificates_in(x.read(self._credentials / NODE_CERTIFICATE), NODE_CERTIFICATE)[0]
        return x.public_bytes(certificate.public_key()).hex()


def said_of(news: CloneNews) -> str:
    """What has happened, in a sentence without its end."""
    when = datetime.fromtimestamp(news.time, UTC)
    return (
        f"somebody else came with this silo's certificate at {when:%Y-%m-%d %H:%M:%S} UTC, "
        f"from {news.address} as the coordinator saw it, and was refused; this agent goes on"
    )
