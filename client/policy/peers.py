"""Keeps the silos met in secure aggregation, each with the key that it showed first.

Whoever holds the issuing key can certify a false silo under a true one's name. It comes too late for names
that are known here: another key than the first is refused, until the root itself has certified it
(offline), or a person here forgets the old one. Renewed certificates are for the same key.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.identity.credentials import verify_identity

_log = logging.getLogger("roundtable.agent")


class KnownPeers:
    """`peers.json` in the state folder: read anew for each attempt, as people change it meanwhile."""

    def __init__(self, state: Path) -> None:
        self._path = state / "peers.json"

    def meet(self, shown: Mapping[str, tuple[bytes, bytes]], ca: bytes) -> None:
        """Remembers who is new of these: name → (Ed25519 key, the certificate that vouches for it).

        IdentityError for a known silo with another key than before.
        """
        known, fresh = self._read(), {}
        for name, (key, certificate) in shown.items():
            first = known.get(name)
            if first is not None and first["key"] == key.hex():
                continue
            if first is not None:
                _check_changed(name, key, certificate, ca, first)
            fresh[name] = {"key": key.hex(), "since": time.time()}
        if fresh:
            replace_synced(self._path, [json.dumps({**known, **fresh}).encode()])
            _log.info("met in secure aggregation, and known from now on: %s", ", ".join(sorted(fresh)))

    def forget(self, name: str) -> None:
        """Forgets this silo, so that its next key counts as its first; ConfigError for an unknown one."""
        known = self._read()
        if name not in known:
            met = ", ".join(sorted(known)) or "nobody yet"
            raise ConfigError(f"{name!r} is not known here; this silo has met {met}")
        del known[name]
        replace_synced(self._path, [json.dumps(known).encode()])

    def _read(self) -> dict[str, dict[str, str | float]]:
        try:
            entries = json.loads(self._path.read_bytes()).items()
            return {name: {"key": str(one["key"]), "since": float(one["since"])} for name, one in entries}
        except FileNotFoundError:
            return {}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise IdentityError(
                f"{self._path.name} is damaged, and with it who the other silos are: restore a backup, or "
                f"delete it to take each one's next key as its first ({type(error).__name__})"
            ) from error


def _check_changed(
    name: str, key: bytes, certificate: bytes, ca: bytes, first: Mapping[str, str | float]
) -> None:
    """Refuses another key of a known silo, unless the root certified it."""
    try:
        verify_identity(certificate, ca, from_root=True)
    except IdentityError:
        since = datetime.fromtimestamp(float(first["since"]), UTC)
        raise IdentityError(
            f"silo {name!r} presents a new key ({key.hex()[:16]}; until now {str(first['key'])[:16]}, "
            f"known since {since:%Y-%m-%d}). Call the silo. If it replaced the key, run "
            f"`roundtable client forget {name}`; if not, somebody may be impersonating it"
        ) from None
    _log.warning("the silo %r has another key, which the root has certified", name)
