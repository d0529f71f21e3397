"""What a round has received and the old model on disk become the new model on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from roundtable.aggregation.foreign_optimizer import ForeignOptimizer
from roundtable.aggregation.fragment_optimizer import FragmentOptimizer
from roundtable.aggregation.rows.row_passes import ShardWorkers, sharded_over
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Encoding
from roundtable.core.model_delta import delta_blocks, published
from roundtable.core.models import Model, model_blocks, open_model
from roundtable.engine import Plan, Received, ServerState, combine, initial_server_state
from roundtable.engine import messages as m
from roundtable.engine.combining.new_model import new_model
from roundtable.privacy import SecureNoise
from roundtable.server.jobs.privacy_budget import Guarantee
from roundtable.server.jobs.sliced_optimizer import SlicedOptimizer, drop_pages, give_back_free_memory
from roundtable.server.jobs.trusted_training import TrustedTraining
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.store import ArtifactRow


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
        # A rule that starts from the last aggregate needs it afterwards; others let the model take its place.
        whole = isinstance(plan.optimizer, ForeignOptimizer) and not plan.optimizer.elementwise
        # One that moves a fragment knows where each value lies in the whole vector.
        whole = whole or isinstance(plan.optimizer, FragmentOptimizer)
        keeps_aggregate = whole or plan.aggregation.takes("previous")
        self._plan = plan if keeps_aggregate else replace(plan, optimizer=SlicedOptimizer(plan.optimizer))

    def combine(self, action: m.Aggregate, received: Received, guarantee: Guarantee, now: float) -> NewModel:
        """The new model, which carries the guarantee. `received` is used up, whatever happens.

        Raises AggregationError or InvalidUpdate where there is no sound answer; DamagedRows, DamagedArtifact
        where what was read of an update, the old model or the optimizer's state is not what it should be.
        """
        # The transfers before have left buffers behind, and this is where the most memory is needed.
        give_back_free_memory()
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

        def publish(
            encoding: Encoding, held: Tensor, exact: Tensor, state: ServerState
        ) -> tuple[Tensor, bytes]:
            # Once the exact model is stored, what silos get takes its place in memory.
            self._store({"optimizer": state.blocks()}, now, made)
            return published(encoding, held, exact, out=exact, passed=drop_pages)

        combined = combine(
            self._plan,
            received,
            old.vector,
            self._state(action.optimizer, old.layout.size, reading),
            round=action.step.round,
            seed=self._job.seed,
            noise=SecureNoise(),
            diagnose=self._job.aggregation.diagnosis,
            root_update=self._root_update(action, old),
            population=action.population,
            publish=publish,
            attempt=action.step.attempt,
        )
        model = new_model(self._job, old, combined.vector, action.step.round, guarantee.statement)
        parts = {"model": model_blocks(model)}
        if combined.state.worth_keeping and not made:
            parts["optimizer"] = combined.state.blocks()
        if combined.delta is not None:
            parts["delta"] = delta_blocks(model, combined.delta)
        self._store(parts, now, made)
        digests = {row.kind: row.digest for row in made}
        optimizer, delta = digests.get("optimizer", ""), digests.get("delta", "")
        return combined.event(action.step, digests["model"], optimizer, guarantee.figures, delta)

    def _root_update(self, action: m.Aggregate, old: Model) -> Tensor | None:
        """The coordinator's own training from the same model, for rules that compare with it."""
        if not self._plan.aggregation.takes("root_update"):
            return None
        return self._trusted.update(self._job, old.layout, old.vector, action.step.round)

    def _state(self, optimizer: str, columns: int, reading: ExitStack) -> ServerState:
        if not optimizer:
            return initial_server_state(self._plan, columns)
        return ServerState.from_model(open_model(reading.enter_context(self._artifacts.using(optimizer))))

    def _store(
        self, parts: Mapping[str, Iterable[bytes | memoryview]], now: float, made: list[ArtifactRow]
    ) -> None:
        """Stores artifacts by their kinds, side by side: the silos wait for the last of them."""
        with ThreadPoolExecutor(len(parts), thread_name_prefix="storing") as threads:
            stored = {kind: threads.submit(self._artifacts.create, blocks) for kind, blocks in parts.items()}
        made.extend(
            ArtifactRow(*storing.result(), kind, now)
            for kind, storing in stored.items()
            if storing.exception() is None
        )
        for storing in stored.values():
            storing.result()
