"""Rounds within a region on the relay's disk: which have been, and the models that they have made.

A span is what the coordinator's order of one round stands for: that round and the rounds within the region
before it. Its folder holds the coordinator's model, the region's newest one and a description, which is
replaced at the end of each round: a kill at any moment leaves a round wholly behind the region or before it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from roundtable.aggregation.rows.reductions import is_finite
from roundtable.client.door.model_names import ArtifactName
from roundtable.client.durable_files import digest_of, explained, replace_synced
from roundtable.core.errors import AggregationError, ResourceError, RoundtableError
from roundtable.core.failpoints import failpoint
from roundtable.core.identity.signing import canonical
from roundtable.core.models import Model, model_digest, open_model, save_model
from roundtable.proto import relay_pb2
from roundtable.proto.receipts import region_round
from roundtable.relay.made_sums import MadeSum

log = logging.getLogger("roundtable.relay")


@dataclass(frozen=True)
class RoundMade:
    """A round within the region: the model that it began with and the one that it made, by digest and size of
    the file, and its `members` by name: digest and examples of each update."""

    round: int
    model: str
    made: str
    size: int
    members: Mapping[str, Sequence[str | int]]

    def message(self) -> relay_pb2.RegionRound:
        """As the coordinator gets it; names stay here."""
        return relay_pb2.RegionRound(
            round=self.round,
            model=self.model,
            made=self.made,
            silos=len(self.members),
            examples=sum(int(examples) for _, examples in self.members.values()),
            members=blake3(canonical(self.members)).hexdigest(),
        )


@dataclass
class RegionSpan:
    """Rounds `first` to `last` of a job in one attempt: before `last` each is one within the region.

    `start` is the coordinator's model, `rounds` those that have been, `ends` the Unix time after which the
    coordinator waits no more. `problem` says why the region has given up.
    """

    job: str
    first: int
    last: int
    attempt: int
    start: ArtifactName
    ends: float
    rounds: list[RoundMade] = field(default_factory=list)
    problem: str = ""

    @property
    def round(self) -> int:
        """The one that runs."""
        return self.first + len(self.rounds)

    @property
    def model(self) -> ArtifactName:
        """The model that it began with."""
        return ArtifactName(self.rounds[-1].made, self.rounds[-1].size) if self.rounds else self.start

    @property
    def models(self) -> tuple[str, str]:
        """The digests of the models that it needs."""
        return self.start.digest, self.model.digest

    def called(self, relay: str) -> str:
        """The round that runs, in words."""
        return f"round {self.round} within the region of the relay {relay}"

    @property
    def within(self) -> list[relay_pb2.RegionRound]:
        """The rounds that have been, as the coordinator gets them."""
        return [made.message() for made in self.rounds]

    @property
    def records(self) -> str:
        """The digest of them."""
        return blake3(canonical({"rounds": [region_round(each) for each in self.within]})).hexdigest()

    def seconds(self, now: float) -> float:
        """For the round that runs, at the Unix time `now`: as much for each that is to come."""
        return max(0.0, self.ends - now) / (self.last - self.round + 1)


class SpanFolder:
    """The folders of spans, and one of models, below the relay's state folder."""

    def __init__(self, folder: Path, relay: str) -> None:
        self._folder = folder
        self._relay = relay
        self.models = folder / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        self._spans: dict[str, RegionSpan] = {}

    def keep(self, span: RegionSpan) -> None:
        """Writes the span down, synced. ResourceError for a full disk. Blocks."""
        self._spans[span.job] = span
        replace_synced(self._description(span), [json.dumps(asdict(span)).encode()])

    def adopt(self, span: RegionSpan, start: Path) -> None:
        """Keeps the coordinator's model as long as the span. ResourceError for a full disk. Blocks."""
        path = self.path(span.start.digest)
        if not path.exists():
            partial = path.with_suffix(".part")
            partial.unlink(missing_ok=True)
            try:
                _linked(start, partial)
                partial.replace(path)
            except OSError as error:
                raise explained(error, path) from error

    def path(self, digest: str) -> Path:
        """The file of a model."""
        return self.models / f"{digest}.safetensors"

    def make(self, span: RegionSpan, made: MadeSum) -> RoundMade:
        """What the sum makes of the region's model, on the disk; the span is as it was. Blocks.

        The region's model and the mean of its updates are added in float32, as in a simulation. Raises
        AggregationError for a sum that is not one of this model's updates, or a model that is not finite.
        """
        before = open_model(self.path(span.model.digest))
        if made.path.stat().st_size != 4 * before.vector.numel():
            values = made.path.stat().st_size // 4
            raise AggregationError(f"updates have {values} values, and the model {before.vector.numel()}")
        vector = before.vector + _vector(made.path)
        if not is_finite(vector):
            raise AggregationError("the region's new model is not finite: lower the learning rate")
        notes = {**before.metadata, "round": str(span.round), "region": self._relay}
        model = Model(before.layout, vector, before.local, notes)
        digest = model_digest(model)
        try:
            save_model(self.path(digest), model)
        except OSError as error:
            raise explained(error, self.path(digest)) from error
        failpoint("region_made", span.round, "train")
        members: dict[str, list[str | int]] = {
            silo: [each.digest, each.examples] for silo, each in made.offer.everyone.items()
        }
        return RoundMade(span.round, span.model.digest, digest, self.path(digest).stat().st_size, members)

    def leave(self, span: RegionSpan, model: str) -> None:
        """Forgets the model before the newest one. Blocks."""
        self._remove(model)

    def moved(self, span: RegionSpan) -> torch.Tensor:
        """By how much the region's model is away from the coordinator's [d], float32. Blocks."""
        start = open_model(self.path(span.start.digest))
        return open_model(self.path(span.model.digest)).vector - start.vector

    def forget(self, span: RegionSpan) -> None:
        """The span is over. Blocks."""
        self._description(span).unlink(missing_ok=True)
        self._spans.pop(span.job, None)
        for digest in (span.start.digest, *(each.made for each in span.rounds)):
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        """Forgets a model that no span needs: jobs may begin with the same one."""
        if not any(digest in span.models for span in list(self._spans.values())):
            self.path(digest).unlink(missing_ok=True)

    def recover(self) -> list[RegionSpan]:
        """What an earlier process has kept, of each job; models that no span needs are removed. Blocks."""
        found = [span for path in sorted(self._folder.glob("*.json")) if (span := self._read(path))]
        self._spans = {span.job: span for span in found}
        needed = {self.path(digest) for span in found for digest in span.models}
        for path in self.models.iterdir():
            if path not in needed:
                path.unlink()
        return found

    def _read(self, path: Path) -> RegionSpan | None:
        try:
            plain = json.loads(path.read_bytes())
            rounds = [RoundMade(**each) for each in plain.pop("rounds")]
            start = ArtifactName(**plain.pop("start"))
            span = RegionSpan(**plain, start=start, rounds=rounds)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("rounds within the region cannot be read and are dropped: %s: %s", path.name, error)
            path.unlink(missing_ok=True)
            return None
        try:
            if span.rounds and digest_of(self.path(span.model.digest)) != span.model.digest:
                raise ResourceError("its bytes have changed on this disk")
        except (OSError, RoundtableError) as error:
            span.problem = span.problem or f"the region's model of round {span.round - 1} is lost: {error}"
        return span

    def _description(self, span: RegionSpan) -> Path:
        # All of it was checked to be words and numbers.
        return self._folder / f"{span.job}.json"


def _linked(start: Path, to: Path) -> None:
    try:
        os.link(start, to)
    except OSError:
        shutil.copyfile(start, to)


def _vector(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.float32))
