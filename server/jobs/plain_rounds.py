"""Rounds whose updates the coordinator sees: each upload is checked and becomes a row of a matrix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from roundtable.aggregation import rows_in_files
from roundtable.aggregation.rows.row_passes import sharded_over
from roundtable.core.algorithms.analysis import SUMS
from roundtable.core.analyses.exact_sums import largest_digit
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Encoding, StreamKey, get_encoding
from roundtable.core.errors import AggregationError, SiteFailure, StorageError
from roundtable.core.layout import Layout
from roundtable.engine import Mean, Received, Rows
from roundtable.engine import messages as m
from roundtable.engine.combining.region_sums import mean_of_parts, parts_of
from roundtable.engine.validation.round_plan import aggregation_config
from roundtable.engine.validation.transfer_composition import as_counted
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.round_collection import Pay
from roundtable.server.storage.artifact_store import DamagedArtifact
from roundtable.server.storage.finite_check import ContentCheck, EncodedCheck, FiniteCheck


class DamagedUpdates(StorageError):
    """Updates that were accepted and whose bytes have changed since: client → what is wrong."""

    def __init__(self, damaged: dict[str, str]) -> None:
        super().__init__("; ".join(f"the update of {name}: {reason}" for name, reason in damaged.items()))
        self.damaged = damaged


class PlainRounds:
    """The collection without a protocol: it needs no messages and no state beside the uploads."""

    def __init__(self, job: JobConfig, sent: Layout, services: JobServices) -> None:
        self._job = job
        self._sent = sent
        self._seed = job.seed
        self._columns = sent.size
        self._services = services
        self._norms: dict[str, tuple[str, float]] = {}

    def admit(self, action: m.Instruct) -> Sequence[bytes]:
        return ()

    def problem(self, client: str, offer: UploadOffer, encoding: str) -> str:
        if offer.encoding != encoding:
            who = "the silo was told" if self._job.transfer.automatic else "the job says"
            return f"the update is encoded as {offer.encoding!r}, {who} {encoding!r}"
        return self._problem(offer, get_encoding(encoding).over(self._sent))

    def _problem(self, offer: UploadOffer, encoding: Encoding) -> str:
        expected, most = encoding.encoded_size(self._columns), encoding.size_bound(self._columns)
        if offer.size != expected and (expected is not None or offer.size > most):
            size = f"at most {most}" if expected is None else expected
            return f"the update has {offer.size} bytes; {self._columns} values of {encoding.chain} are {size}"
        if offer.examples < 1:
            return (
                f"the update claims {offer.examples} examples; between 1 and 2^53 can be: a silo without "
                "data for this round reports a failure instead"
            )
        return ""

    def content_check(self, client: str, offer: UploadOffer) -> ContentCheck:
        encoding, step = get_encoding(offer.encoding).over(self._sent), offer.at.step
        if encoding.dense_dtype is not None:
            added = self._job.algorithm.most_added()
            largest = largest_digit(added) if added else None
            return FiniteCheck(encoding.dense_dtype, largest, self._others_digits(client))
        key = StreamKey(self._seed, client, step.round, step.attempt)
        return EncodedCheck(encoding, self._columns, key)

    def _others_digits(self, client: str) -> np.ndarray | None:
        digits = self._job.algorithm.others_digits(client)
        if digits is None:
            return None
        given = np.full(self._columns, np.nan, dtype=np.float32)
        given[self._sent.places[SUMS]] = digits
        return given

    def sum_content(self, step: m.Step) -> tuple[int, ContentCheck]:
        return 4 * self._columns, FiniteCheck(torch.float32)

    def arrived(self, client: str, offer: UploadOffer, norm: float | None) -> None:
        if norm is not None:
            self._norms[client] = (offer.digest, norm)

    def exchanged(self, client: str, step: m.Step, message: bytes) -> None:
        return

    def failed(self, failure: SiteFailure) -> None:
        return

    def rejoined(self, client: str) -> None:
        return

    def progress(self) -> str:
        return ""

    def permit(self, step: m.Step) -> None:
        return

    async def collect(self, action: m.Aggregate, pay: Pay) -> Received:
        """The updates as files, in the order of the action, hashed as they will be read; or their mean, where
        relays add updates up."""
        compute = self._services.compute
        if self._job.regions.sum:
            return await asyncio.get_running_loop().run_in_executor(compute, self._mean, action)
        paths = await asyncio.get_running_loop().run_in_executor(compute, self._paths, action.updates)
        digests = [update.digest for update in action.updates]
        keys = [StreamKey(self._seed, each.client, *asked_in(each, action.step)) for each in action.updates]
        encodings = [self._encoding_of(each) for each in action.updates]
        rows = rows_in_files(paths, self._columns, encodings, keys, digests)
        measured = ((each, self._norms.get(each.client)) for each in action.updates)
        norms = {each.client: norm[1] for each, norm in measured if norm and norm[0] == each.digest}
        return Rows(rows, action.updates, norms)

    def _mean(self, action: m.Aggregate) -> Mean:
        """The mean of relays' sums and of updates that came by themselves. Blocks. AggregationError for a sum
        that is damaged here: its relay has nothing any more to send it again from."""
        parts = parts_of(action.updates)
        vectors = [part[0] for part in parts]
        try:
            paths = self._paths(vectors)
        except DamagedUpdates as error:
            lost = {part[0].client for part in parts if part[0].relay}
            if lost.isdisjoint(error.damaged):
                raise
            raise AggregationError(f"a relay's sum is damaged here: {error}") from error
        sums = get_encoding("float32").over(self._sent)
        encodings = [sums if each.relay else self._encoding_of(each) for each in vectors]
        keys = [StreamKey(self._seed, each.client, *asked_in(each, action.step)) for each in vectors]
        digests = [each.digest for each in vectors]
        rows = rows_in_files(paths, self._columns, encodings, keys, digests)
        with sharded_over(self._services.shards):
            return mean_of_parts(aggregation_config(self._job.aggregation), rows, parts)

    def _encoding_of(self, update: m.Update) -> Encoding:
        chosen = update.transfer.encoding if update.transfer else ""
        return as_counted(self._job, chosen or self._job.transfer.up).over(self._sent)

    def take_up(self, step: m.Step) -> None:
        return

    def retire(self, round: int) -> None:
        return

    def close(self, *, forget: bool) -> None:
        return

    def _paths(self, updates: Sequence[m.Update]) -> list[Path]:
        """The files of the updates. Blocks: with a bucket, those that are not here are fetched."""
        paths, damaged = [], {}
        for update in updates:
            try:
                paths.append(self._services.artifacts.path(update.digest))
            except DamagedArtifact as error:
                damaged[update.client] = str(error)
        if damaged:
            raise DamagedUpdates(damaged)
        return paths


def asked_in(update: m.Update, step: m.Step) -> tuple[int, int]:
    """The (round, attempt) in which the update was asked for."""
    return update.asked or (step.round, step.attempt)
