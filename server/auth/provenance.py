"""Where a model comes from: a statement that the coordinator signs and anybody can check offline.

Silos appear under pseudonyms: the same one throughout a job, another in each job, and none that can be
found by trying the names of known organisations, because the coordinator's identity key goes into them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import envelope, job_digest
from roundtable.server.auth.access import Refusal
from roundtable.server.store import Database, JobRow
from roundtable.server.store.jobs import UnknownJob, find_job, history
from roundtable.server.store.trust_rows import Party

_PSEUDONYM_DIGITS = 16


class Provenance:
    """Makes signed statements about committed rounds."""

    def __init__(
        self, database: Database, identity: SiloIdentity | None, version: str, clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._identity = identity
        self._version = version
        self._clock = clock

    async def statement(self, wanted: str, who: Party, round_number: int = 0) -> str:
        """The statement of the job that `who` means, after a round (0: the newest), as signed JSON."""
        if self._identity is None:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this coordinator has no identity key to sign with: issue its credentials anew",
            )
        try:
            row = await self._database.read(lambda connection: find_job(connection, wanted, who))
        except UnknownJob as error:
            raise Refusal(grpc.StatusCode.NOT_FOUND, str(error)) from error
        lines = await self._database.read(lambda connection: history(connection, row.id))
        records = [json.loads(record) for record in lines]
        last = round_number or (records[-1]["round"] if records else 0)
        records = [record for record in records if record["round"] <= last]
        if not records or records[-1]["round"] != last:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"round {last} of job {row.id} is not committed")
        return json.dumps(envelope(self._identity, "provenance", self._values(row, records)), indent=1)

    def _values(self, row: JobRow, records: list[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "model": records[-1]["model"],
            "job": row.id,
            "name": row.name,
            "config": job_digest(row.config),
            "submitter": row.submitter,
            "initial_model": row.initial_model,
            "privacy": json.loads(row.config).get("privacy", {}),
            "coordinator": self._database.identity,
            "version": self._version,
            "time": self._clock(),
            "rounds": [self._round(row.id, record) for record in records],
        }

    def _round(self, job: str, record: Mapping[str, Any]) -> dict[str, Any]:
        shown = {
            "round": record["round"],
            "attempt": record["attempt"],
            "model": record["model"],
            "ended": record["ended"],
            "charge": record["charge"],
        }
        if "cohort" in record.get("withheld", ()):
            return {**shown, "withheld": record["withheld"]}
        participants = sorted(self._pseudonym(job, name) for name in record["contributors"])
        return {**shown, "cohort": len(record["cohort"]), "participants": participants}

    def _pseudonym(self, job: str, name: str) -> str:
        assert self._identity is not None
        secret = self._identity.key.private_bytes_raw()
        key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"roundtable pseudonyms").derive(
            secret
        )
        mac = hmac.new(key, f"{job}\0{name}".encode(), hashlib.sha256)
        return mac.hexdigest()[:_PSEUDONYM_DIGITS]
