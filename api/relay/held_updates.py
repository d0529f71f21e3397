"""Silos' updates on the relay's disk: kept durably until the coordinator has decided about them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from roundtable.client.durable_files import digest_of, replace_synced
from roundtable.core.errors import ResourceError, RoundtableError
from roundtable.core.failpoints import failpoint
from roundtable.core.machine.file_access import sync_folder
from roundtable.proto import agent_pb2, relay_pb2
from roundtable.relay.sum_orders import SumTerms
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.door.from_agents import offer_of
from roundtable.server.door.from_relays import SumOffer
from roundtable.server.storage.blobs import BlobWriter

log = logging.getLogger("roundtable.relay")

MOST_HELD = 16
"""Updates of one silo: each is of another step, and more steps than jobs are rare."""
Key = tuple[str, str, int, int, str]
"""Silo, job, round, attempt, phase."""


@dataclass(frozen=True)
class HeldSum:
    """A sum of the relay `relay`, behind this one, that is here, whole, to be added up by these terms."""

    relay: str
    header: relay_pb2.SumHeader
    offer: SumOffer
    path: Path
    terms: SumTerms

    @property
    def name(self) -> str:
        """That no silo can have."""
        return f"{self.relay}/{self.offer.digest}"

    @property
    def members(self) -> Mapping[str, UploadOffer]:
        """Whose updates are in it."""
        return self.offer.everyone

    def answer(self, told: Mapping[str, agent_pb2.UploadReceipt], problem: str = "") -> relay_pb2.SumReceipt:
        """What its relay is told, once the coordinator has decided about these of its members."""
        members = [relay_pb2.MemberReceipt(silo=silo, receipt=receipt) for silo, receipt in told.items()]
        taken = len(members) == len(self.members)
        return relay_pb2.SumReceipt(taken=taken, members=members, problem="" if members else problem)


@dataclass(frozen=True)
class Held:
    """An update that is here, whole: what the silo said of it, its file, who may be shown for it. With
    `terms` it is to be added up with others."""

    silo: str
    header: agent_pb2.UploadHeader
    offer: UploadOffer
    bearer: relay_pb2.Bearer
    path: Path
    terms: SumTerms | None = None

    @property
    def key(self) -> Key:
        return key_of(self.silo, self.offer)

    @property
    def name(self) -> str:
        """Among what is added up."""
        return self.silo

    @property
    def members(self) -> Mapping[str, UploadOffer]:
        """Whose updates it is of: one."""
        return {self.silo: self.offer}

    def answer(
        self, told: Mapping[str, agent_pb2.UploadReceipt], problem: str = ""
    ) -> agent_pb2.UploadReceipt | None:
        """The coordinator's receipt; None where the update is to be handed on."""
        return told.get(self.silo)


Part = Held | HeldSum


def key_of(silo: str, offer: UploadOffer) -> Key:
    """What names an update: a silo has one for a step."""
    step = offer.at.step
    return silo, offer.at.job, step.round, step.attempt, step.phase


class RelaySpool:
    """The folder of updates; a kill at any moment leaves it sound."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def received(self, silo: str, offer: UploadOffer) -> int:
        """Bytes of an update that have arrived, while it is not whole."""
        path = self._partial(silo, offer)
        return min(path.stat().st_size, offer.size) if path.exists() else 0

    def writer(self, silo: str, offer: UploadOffer) -> BlobWriter:
        """Takes an update from the offer's offset onwards; `finish` gives it its name, synced."""

        def adopt(partial: Path, _: str) -> None:
            partial.replace(self._bytes(silo, offer))
            sync_folder(self._folder)

        return BlobWriter(self._partial(silo, offer), offer.size, offer.digest, adopt, offset=offer.offset)

    def keep(
        self,
        silo: str,
        header: agent_pb2.UploadHeader,
        bearer: relay_pb2.Bearer,
        terms: SumTerms | None = None,
    ) -> Held:
        """Describes an update whose bytes are here: from now on it survives a kill."""
        header.offset = 0
        offer = offer_of(header)
        described = {
            "header": header.SerializeToString().hex(),
            "bearer": bearer.SerializeToString().hex(),
            "terms": terms.plain() if terms is not None else None,
        }
        replace_synced(self._description(silo, offer), [json.dumps(described).encode()])
        failpoint("update_held", offer.at.step.round, offer.at.step.phase)
        return Held(silo, header, offer, bearer, self._bytes(silo, offer), terms)

    def remove(self, held: Held) -> None:
        """The coordinator has decided about it."""
        self._description(held.silo, held.offer).unlink(missing_ok=True)
        held.path.unlink(missing_ok=True)

    def recover(self) -> list[Held]:
        """What an earlier process was told to keep; what is damaged or was never whole is removed."""
        found = [held for path in sorted(self._folder.glob("*.json")) if (held := self._read(path))]
        known = {path for held in found for path in (held.path, self._description(held.silo, held.offer))}
        for path in self._folder.iterdir():
            if path not in known and path.suffix != ".part":
                path.unlink()
        return found

    def _read(self, path: Path) -> Held | None:
        try:
            described = json.loads(path.read_bytes())
            header = agent_pb2.UploadHeader.FromString(bytes.fromhex(described["header"]))
            bearer = relay_pb2.Bearer.FromString(bytes.fromhex(described["bearer"]))
            offer = offer_of(header)
            terms = SumTerms.of(described["terms"]) if described["terms"] else None
            held = Held(bearer.silo, header, offer, bearer, self._bytes(bearer.silo, offer), terms)
            if digest_of(held.path) != offer.digest:
                raise ResourceError("its bytes have changed on this disk")
        except (OSError, ValueError, KeyError, TypeError, DecodeError, RoundtableError) as error:
            log.warning(
                "the update %s cannot be read and is dropped; its silo still has it: %s", path.stem, error
            )
            return None
        return held

    def _partial(self, silo: str, offer: UploadOffer) -> Path:
        return self._folder / f"{_slug(silo, offer)}.{offer.digest[:16]}.part"

    def _bytes(self, silo: str, offer: UploadOffer) -> Path:
        return self._folder / f"{_slug(silo, offer)}.update"

    def _description(self, silo: str, offer: UploadOffer) -> Path:
        return self._folder / f"{_slug(silo, offer)}.json"


def _slug(silo: str, offer: UploadOffer) -> str:
    """Part of a file's name: all of it was checked to be words and numbers."""
    _, job, round, attempt, phase = key_of(silo, offer)
    return f"{silo}.{job}.{round}.{attempt}.{phase}"
