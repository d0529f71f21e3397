"""What a round has received and the old model on disk become the new model on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from roundtable.aggregation.rows.row_passes import ShardWorkers, sharded_over
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Encoding
from roundtable.core.machine.resident_memory import drop_pages, give_back_free_memory
from roundtable.core.model_delta import delta_blocks, published
from roundtable.core.models import Model, open_model
from roundtable.engine import Plan, Received, ServerState, combine, initial_server_state
from roundtable.engine import messages as m
from roundtable.engine.combining.new_model import new_model
from roundtable.privacy import SecureNoise
from roundtable.server.jobs.privacy_budget import Guarantee
from roundtable.server.jobs.round_files import RoundFiles
from roundtable.server.jobs.trusted_training import TrustedTraining
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.store import ArtifactRow

LARGE_BYTES = 1 << 20
"""A model of so many bytes takes longer to combine than free memory to be given back."""
Storing: TypeAlias = Callable[[], tuple[str, int]]
"""Stores an artifact durably, pinned: its digest and size."""


@dataclass(frozen=True)
class NewModel:
    """The engine's event, and the new artifacts: durable, not yet mentioned, pinned until they are."""

    event: m.Aggregated
    artifacts: tuple[ArtifactRow, ...]


class Combiner:
    """Makes one job's models. Blocks for as long as that takes: call it in a thread."""

    def __init__(
        self,
        job: JobConfig,
        plan: Plan,
        artifacts: ArtifactStore,
        trusted: TrustedTraining,
        shards: ShardWorkers,
    ) -> None:
        self._job = job
        self._artifacts = artifacts
        self._trusted = trusted
        self._shards = shards
        self._plan = plan

    def combine(self, action: m.Aggregate, received: Received, guarantee: Guarantee, now: float) -> NewModel:
        """The new model, which carries the guarantee. `received` is used up, whatever happens.

        Raises AggregationError or InvalidUpdate where there is no sound answer; DamagedRows, DamagedArtifact
        where what was read of an update, the old model or the optimizer's state is not what it should be.
        """
        made: list[ArtifactRow] = []
        try:
            with ExitStack() as reading, sharded_over(self._shards):
                event = self._combine(action, received, guarantee, now, reading, made)
        except BaseException:
            # Nobody will mention what was made, of damaged files or in part.
            self._artifacts.unpin(row.digest for row in made)
            raise
        return NewModel(event, tuple(made))

    def _combine(
        self,
        action: m.Aggregate,
        received: Received,
        guarantee: Guarantee,
        now: float,
        reading: ExitStack,
        made: list[ArtifactRow],
    ) -> m.Aggregated:
        """Stores what `made` then lists; it counts only if `reading` ends without an error."""
        old = open_model(reading.enter_context(self._artifacts.using(action.model)))
        if old.vector.nbytes >= LARGE_BYTES:
            # The transfers before have left buffers behind, and this is where the most memory is needed.
            give_back_free_memory()
        model = new_model(self._job, old, torch.empty(0), action.step.round, guarantee.statement)
        files = reading.enter_context(RoundFiles(self._artifacts, model))
        state, kept = self._state(action.optimizer, old.layout.size, reading)
        files.maps([old.vector, *kept])

        def publish(
            encoding: Encoding, held: Tensor, exact: Tensor, state: ServerState
        ) -> tuple[Tensor, bytes]:
            # Once the exact model is stored, what silos get takes its place in memory.
            self._store({"optimizer": partial(self._create, files, state.blocks())}, now, made)
            return published(encoding, held, exact, out=exact, passed=drop_pages)

        combined = combine(
            self._plan,
            received,
            old.vector,
            state,
            round=action.step.round,
            seed=self._job.seed,
            noise=SecureNoise(),
            diagnose=self._job.aggregation.diagnosis,
            root_update=self._root_update(action, old),
            population=action.population,
            publish=publish,
            attempt=action.step.attempt,
            places=files,
        )
        parts: dict[str, Storing] = {"model": files.finish}
        if combined.state.worth_keeping and not made:
            parts["optimizer"] = partial(self._create, files, combined.state.blocks())
        if combined.delta is not None:
            parts["delta"] = partial(self._artifacts.create, delta_blocks(model, combined.delta))
        self._store(parts, now, made)
        digests = {row.kind: row.digest for row in made}
        optimizer, delta = digests.get("optimizer", ""), digests.get("delta", "")
        return combined.event(action.step, digests["model"], optimizer, guarantee.figures, delta)

    def _root_update(self, action: m.Aggregate, old: Model) -> Tensor | None:
        """The coordinator's own training from the same model, for rules that compare with it."""
        if not self._plan.aggregation.takes("root_update"):
            return None
        return self._trusted.update(self._job, old.layout, old.vector, action.step.round)

    def _state(
        self, optimizer: str, columns: int, reading: ExitStack
    ) -> tuple[ServerState, tuple[Tensor, ...]]:
        """The state that the round begins with, and the vectors that its parts are mapped from."""
        if not optimizer:
            return initial_server_state(self._plan, columns), ()
        stored = open_model(reading.enter_context(self._artifacts.using(optimizer)))
        return ServerState.from_model(stored), (stored.vector,)

    def _create(self, files: RoundFiles, blocks: Iterable[bytes | memoryview]) -> tuple[str, int]:
        return self._artifacts.create(files.released(blocks))

    def _store(self, parts: Mapping[str, Storing], now: float, made: list[ArtifactRow]) -> None:
        """Stores artifacts by their kinds, side by side: the silos wait for the last of them."""
        if len(parts) == 1:
            made.extend(ArtifactRow(*storing(), kind, now) for kind, storing in parts.items())
            return
        with ThreadPoolExecutor(len(parts), thread_name_prefix="storing") as threads:
            stored = {kind: threads.submit(storing) for kind, storing in parts.items()}
        made.extend(
            ArtifactRow(*storing.result(), kind, now)
            for kind, storing in stored.items()
            if storing.exception() is None
        )
        for storing in stored.values():
            storing.result()
