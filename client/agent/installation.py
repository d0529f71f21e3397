"""Which installation of the agent this is: a key in its state folder, apart from the credentials.

Who copies the credentials alone cannot pose as this installation: the coordinator binds the first one that
shows a certificate's key, and asks for a signature at each hello.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519

from roundtable.core.errors import IdentityError
from roundtable.core.identity import certificates as x
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import sign

KEY_FILE = "installation.key"


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
