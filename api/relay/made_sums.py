"""Sums on the relay's disk, each with a signed statement of what is in it, until it is decided about."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from google.protobuf.message import DecodeError

from roundtable.aggregation import ClientRow, rows_in_files
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.aggregation.rules.mean import mean
from roundtable.aggregation.weighting import row_weights
from roundtable.client.durable_files import append_synced, digest_of, replace_synced
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.errors import ProtocolError, ResourceError, RoundtableError
from roundtable.core.failpoints import failpoint
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import envelope, sign
from roundtable.privacy.secagg.masks import pack, reduce_ring, ring_dtype, unpack
from roundtable.proto import MAX_MESSAGE_BYTES, common_pb2, relay_pb2
from roundtable.proto.receipts import sum_values
from roundtable.relay.held_updates import Held, HeldSum, Part
from roundtable.relay.sum_orders import SumTerms
from roundtable.server.door.from_relays import MOST_MEMBERS, SumOffer, sum_of

log = logging.getLogger("roundtable.relay")

LOG_BYTES = 64 << 20
TAKEN, ANEW = "taken", "made anew"
_ROOM = 1 << 18
"""Of a message, for what is beside the members: rounds within the region among it."""


@dataclass(frozen=True)
class MadeSum:
    """A sum that is here, whole, and what goes before its bytes."""

    header: relay_pb2.SumHeader
    offer: SumOffer
    path: Path

    @property
    def members(self) -> Mapping[str, str]:
        """Whose updates are in it, with their digests."""
        return {silo: update.digest for silo, update in self.offer.everyone.items()}


@dataclass(frozen=True)
class FromRegion:
    """The rounds within the region before the step that is added up; and by how much its model is then
    away from the coordinator's [d], float32, for a sum that goes up."""

    within: Sequence[relay_pb2.RegionRound]
    moved: torch.Tensor | None = None


@dataclass(frozen=True)
class Summed:
    """What came of adding up: the sum, if there is one, and what is no part of any."""

    made: MadeSum | None
    odd: Sequence[Part]


class SumSpool:
    """The folder of sums. A log is beside it: a line for each sum and what became of it, in two files of
    `LOG_BYTES` at most, the older one with the name's end .1.jsonl.

    `told` counts sums by what became of them since the start, `summed` the updates in those that were taken.
    """

    def __init__(self, folder: Path, relay: str, identity: SiloIdentity) -> None:
        self._folder = folder
        self._relay = relay
        self._identity = identity
        self._log = folder.with_suffix(".jsonl")
        self.told: Counter[str] = Counter()
        self.summed = 0
        folder.mkdir(parents=True, exist_ok=True)

    def make(self, held: Sequence[Part], terms: SumTerms, region: FromRegion | None = None) -> Summed:
        """Adds updates of one step up, and sums of relays behind this one, in the order of names; the sum is
        durable. Who is in two of them is in one: the other stays for the next sum. `region` says what rounds
        within the region have led to it. Blocks.

        Odd are those that are not what the order asks for, or not finite: the coordinator is to judge them.
        DamagedRows where bytes have changed on this disk, ResourceError for a full one.
        """
        fitting, odd = _apart(held, terms)
        rows = _as_many_as_fit(fitting)
        if not rows:
            return Summed(None, odd)
        moved = region.moved if region is not None else None
        data, spoiled = _masked_sum(rows, terms.ring) if terms.ring else _plain_sum(rows, terms, moved)
        if spoiled:
            return Summed(None, [*odd, *spoiled])
        step = rows[0].offer.at.step
        header = relay_pb2.SumHeader(
            step=rows[0].header.step,
            content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
            members=[
                relay_pb2.SumMember(silo=each.silo, header=each.header)
                for each in rows
                if isinstance(each, Held)
            ],
            sums=[
                relay_pb2.SumBelow(relay=each.relay, header=each.header)
                for each in rows
                if isinstance(each, HeldSum)
            ],
            time=time.time(),
            certificate=self._identity.certificate,
            within=region.within if region is not None else (),
        )
        header.signature = sign(self._identity, "sum", sum_values(self._relay, header))
        offer = sum_of(header)
        path = self._folder / f"{_slug(offer)}.sum"
        replace_synced(path, [data])
        replace_synced(path.with_suffix(".header"), [header.SerializeToString()])
        failpoint("updates_summed", step.round, step.phase)
        return Summed(MadeSum(header, offer, path), odd)

    def remove(self, made: MadeSum, outcome: str) -> None:
        """The coordinator has decided about it. The statement and the outcome stay in the log. Blocks."""
        statement = envelope(self._identity, "sum", sum_values(self._relay, made.header))
        line = {"time": time.time(), "outcome": outcome, "sum": statement}
        if self._log.exists() and self._log.stat().st_size >= LOG_BYTES:
            self._log.replace(self._log.with_suffix(".1.jsonl"))
        append_synced(self._log, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.told[_kind(outcome)] += 1
        self.summed += len(made.members) if outcome == TAKEN else 0
        made.path.with_suffix(".header").unlink(missing_ok=True)
        made.path.unlink(missing_ok=True)

    def recover(self) -> list[MadeSum]:
        """What an earlier process has made; what is damaged or was never whole is made anew. So is one with a
        sum of another relay: that comes again, with its silos, for whom this relay speaks only then."""
        found = [made for path in sorted(self._folder.glob("*.header")) if (made := self._read(path))]
        for made in [each for each in found if each.offer.sums]:
            self.remove(made, f"{ANEW} after a restart")
            found.remove(made)
        known = {made.path.stem for made in found}
        for path in self._folder.iterdir():
            if path.stem not in known:
                path.unlink()
        return found

    def _read(self, path: Path) -> MadeSum | None:
        try:
            header = relay_pb2.SumHeader.FromString(path.read_bytes())
            made = MadeSum(header, sum_of(header), path.with_suffix(".sum"))
            if digest_of(made.path) != made.offer.digest:
                raise ResourceError("its bytes have changed on this disk")
        except (OSError, ValueError, DecodeError, RoundtableError) as error:
            log.warning("the sum %s cannot be read and is made anew: %s", path.stem, error)
            return None
        return made


def _plain_sum(
    rows: Sequence[Part], terms: SumTerms, moved: torch.Tensor | None
) -> tuple[memoryview, Sequence[Part]]:
    """The bytes of the mean, with what the region's model has `moved` before; and of which updates none can
    be made."""
    vector = _mean(rows, terms)
    if moved is not None:
        if moved.shape != vector.shape:
            return memoryview(b""), rows
        vector = moved + vector
    values: Any = vector.view(torch.uint8).numpy()
    if is_finite(vector):
        return memoryview(values), ()
    return memoryview(b""), [each for each in rows if not is_finite(_mean([each], terms))] or rows


def _masked_sum(rows: Sequence[Part], ring_bits: int) -> tuple[memoryview, Sequence[Part]]:
    """The same for masked vectors, which are added in the ring: exactly, in whatever order and tree."""
    total = np.zeros(rows[0].offer.size * 8 // ring_bits, ring_dtype(ring_bits))
    spoiled = []
    for each in rows:
        data = each.path.read_bytes()
        if blake3(data).hexdigest() != each.offer.digest:
            raise DamagedRows((each.offer.digest,))
        try:
            vector = unpack(memoryview(data), ring_bits)
        except ProtocolError:
            spoiled.append(each)
        else:
            np.add(total, vector, out=total)
    reduce_ring(total, ring_bits)
    return pack(total, ring_bits), spoiled


def _mean(rows: Sequence[Part], terms: SumTerms) -> torch.Tensor:
    own, whole = get_encoding(terms.encoding), get_encoding("float32")
    encodings = [whole if isinstance(each, HeldSum) else own for each in rows]
    step = rows[0].offer.at.step
    matrix = rows_in_files(
        [each.path for each in rows],
        _values(rows[0]),
        encodings,
        [StreamKey(0, each.name, step.round, step.attempt) for each in rows],
        [each.offer.digest for each in rows],
    )
    clients = [[ClientRow(*about) for about in _examples(each)] for each in rows]
    return mean(matrix, np.array([row_weights(each, terms.weighting, {}).sum() for each in clients])).vector


def _examples(part: Part) -> list[tuple[str, int, None]]:
    return [(silo, offer.examples, None) for silo, offer in part.members.items()]


def _values(part: Part) -> int:
    """How many values, or bytes of masked ones, there are; 0 where it is no whole number."""
    dense = None if part.terms is None or part.terms.ring else get_encoding(part.terms.encoding).dense_dtype
    width = 1 if dense is None else 4 if isinstance(part, HeldSum) else dense.itemsize
    return part.offer.size // width if part.offer.size % width == 0 else 0


def _apart(held: Sequence[Part], terms: SumTerms) -> tuple[list[Part], list[Part]]:
    """Those that can be added up, by name, and the others."""
    asked = (terms.encoding, terms.layout, terms.model)
    # Of masked updates nobody says how many examples they are of.
    least = 0 if terms.ring else 1

    def sound(each: Part) -> bool:
        return _values(each) > 0 and all(
            (offer.encoding, offer.layout, offer.model) == asked
            and not offer.flaw
            and offer.examples >= least
            for offer in each.members.values()
        )

    usual = Counter(_values(each) for each in held if sound(each)).most_common(1)
    fitting = [each for each in held if sound(each) and _values(each) == usual[0][0]]
    odd = [each for each in held if each not in fitting]
    return sorted(fitting, key=lambda each: each.name), odd


def _as_many_as_fit(rows: Sequence[Part]) -> list[Part]:
    """As many as one message can name, each silo once."""
    chosen: list[Part] = []
    taken: set[str] = set()
    room = MAX_MESSAGE_BYTES - _ROOM
    for each in rows:
        if not taken.isdisjoint(each.members):
            continue
        room -= each.header.ByteSize() + len(each.name) + 16
        if chosen and (room < 0 or len(taken) + len(each.members) > MOST_MEMBERS):
            break
        chosen.append(each)
        taken |= each.members.keys()
    return chosen


def _kind(outcome: str) -> str:
    """Of an outcome in words, for figures."""
    return "taken" if outcome == TAKEN else "anew" if outcome.startswith(ANEW) else "refused"


def _slug(offer: SumOffer) -> str:
    """Part of a file's name: all of it was checked to be words and numbers."""
    step = offer.at.step
    return f"{offer.at.job}.{step.round}.{step.attempt}.{step.phase}.{next(iter(offer.everyone))}"
