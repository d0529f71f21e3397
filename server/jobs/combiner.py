"""What a round has received and the old model on disk become the new model on disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from roundtable.aggregation.foreign_optimizer import ForeignOptimizer
from roundtable.core.config import JobConfig
from roundtable.core.model_delta import delta_blocks
from roundtable.core.models import Model, model_blocks, open_model
from roundtable.engine import Plan, Received, ServerState, combine, initial_server_state
from roundtable.engine import messages as m
from roundtable.engine.combining.new_model import new_model
from roundtable.privacy import SecureNoise
from roundtable.server.jobs.privacy_budget import Guarantee
from roundtable.server.jobs.sliced_optimizer import SlicedOptimizer, give_back_free_memory
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
        self, job: JobConfig, plan: Plan, artifacts: ArtifactStore, trusted: TrustedTraining
    ) -> None:
        self._job = job
        self._artifacts = artifacts
        self._trusted = trusted
        # A rule that starts from the last aggregate needs it afterwards; others let the model take its place.
        whole = isinstance(plan.optimizer, ForeignOptimizer) and not plan.optimizer.elementwise
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
            with ExitStack() as reading:
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
        )
        model = new_model(self._job, old, combined.vector, action.step.round, guarantee.statement)
        made.append(self._store(model, "model", now))
        optimizer = ""
        if combined.state.worth_keeping:
            made.append(self._store(combined.state.to_model(), "optimizer", now))
            optimizer = made[-1].digest
        delta = ""
        if combined.delta is not None:
            made.append(self._stored(delta_blocks(model, combined.delta), "delta", now))
            delta = made[-1].digest
        return combined.event(action.step, made[0].digest, optimizer, guarantee.figures, delta)

    def _root_update(self, action: m.Aggregate, old: Model) -> Tensor | None:
        """The coordinator's own training from the same model, for rules that compare with it."""
        if not self._plan.aggregation.takes("root_update"):
            return None
        return self._trusted.update(self._job, old.layout, old.vector, action.step.round)

    def _state(self, optimizer: str, columns: int, reading: ExitStack) -> ServerState:
        if not optimizer:
            return initial_server_state(self._plan, columns)
        return ServerState.from_model(open_model(reading.enter_context(self._artifacts.using(optimizer))))

    def _store(self, model: Model, kind: str, now: float) -> ArtifactRow:
        return self._stored(model_blocks(model), kind, now)

    def _stored(self, blocks: Iterable[bytes | memoryview], kind: str, now: float) -> ArtifactRow:
        digest, size = self._artifacts.create(blocks)
        return ArtifactRow(digest, size, kind, now)
