"""`Aggregate` performed: updates on disk and the old model become the new model on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from roundtable.aggregation import FileMatrix
from roundtable.core.config import JobConfig
from roundtable.core.errors import StorageError
from roundtable.core.layout import Layout
from roundtable.core.models import Model, model_blocks, open_model
from roundtable.engine import Plan, Received, Rows, ServerState, combine, initial_server_state
from roundtable.engine import messages as m
from roundtable.privacy import SecureNoise
from roundtable.server.jobs.privacy_budget import Guarantee
from roundtable.server.jobs.sliced_optimizer import SlicedOptimizer, give_back_free_memory
from roundtable.server.storage.artifact_store import DamagedArtifact, LocalArtifacts
from roundtable.server.store import ArtifactRow


@dataclass(frozen=True)
class Outcome:
    """The engine's event, and the new artifacts: durable, not yet mentioned, pinned until they are."""

    event: m.Aggregated
    artifacts: tuple[ArtifactRow, ...]


class DamagedUpdates(StorageError):
    """Updates that were accepted and are not what they were: client → what is wrong."""

    def __init__(self, damaged: dict[str, str]) -> None:
        super().__init__("; ".join(f"the update of {name}: {said}" for name, said in damaged.items()))
        self.damaged = damaged


class Trusted(Protocol):
    """Training on data of the coordinator's own: whoever starts the service brings it."""

    def offers(self, task: str) -> bool:
        """Whether there are trusted data for a job's task."""

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        """local − global after a round of training from `vector`: float32 [layout.size].

        Raises AggregationError where the task fails.
        """


class Combiner:
    """Combines one job's updates. Blocks for as long as that takes: call it in a thread."""

    def __init__(
        self, job: JobConfig, plan: Plan, artifacts: LocalArtifacts, trusted: Trusted | None = None
    ) -> None:
        self._job, self._artifacts, self._trusted = job, artifacts, trusted
        # A rule that starts from the last aggregate needs it afterwards; others let the model take its place.
        keeps_aggregate = plan.aggregation.takes("previous")
        self._plan = plan if keeps_aggregate else replace(plan, optimizer=SlicedOptimizer(plan.optimizer))

    def __call__(
        self, action: m.Aggregate, received: Received, now: float, privacy: Guarantee | None = None
    ) -> Outcome:
        """`privacy` is the guarantee that the new model carries. `received` is used up, whatever happens.

        Raises AggregationError or InvalidUpdate where there is no sound answer.
        """
        # The transfers before have left buffers behind, and this is where the most memory is needed.
        give_back_free_memory()
        old = open_model(self._artifacts.path(action.model))
        combined = combine(
            self._plan,
            received,
            old.vector,
            self._state(action.optimizer, old.layout.size),
            round=action.step.round,
            seed=self._job.seed,
            noise=SecureNoise(),
            diagnose=self._job.aggregation.diagnosis,
            root_update=self._root_update(action, old),
        )
        metadata = {"job": self._job.title, "round": str(action.step.round)}
        if privacy:
            metadata["privacy"] = privacy.statement
        model = self._store(Model(old.layout, combined.vector, old.local, metadata), "model", now)
        artifacts = [model]
        if combined.state.worth_keeping:
            artifacts.append(self._store(combined.state.to_model(), "optimizer", now))
        optimizer = artifacts[1].digest if len(artifacts) > 1 else ""
        event = combined.event(action.step, model.digest, optimizer, privacy.figures if privacy else {})
        return Outcome(event, tuple(artifacts))

    def rows(self, action: m.Aggregate) -> Rows:
        """The named updates as mapped files. DamagedUpdates where some must be sent again first."""
        columns = open_model(self._artifacts.path(action.model)).layout.size
        matrix = FileMatrix(self._paths(action), columns, self._job.transfer.encoding)
        return Rows(matrix, action.updates)

    def _paths(self, action: m.Aggregate) -> list[Path]:
        paths, damaged = [], {}
        for update in action.updates:
            try:
                paths.append(self._artifacts.path(update.digest))
            except DamagedArtifact as error:
                damaged[update.client] = str(error)
        if damaged:
            raise DamagedUpdates(damaged)
        return paths

    def _root_update(self, action: m.Aggregate, old: Model) -> Tensor | None:
        if self._trusted is None or not self._plan.aggregation.takes("root_update"):
            return None
        return self._trusted.update(self._job, old.layout, old.vector, action.step.round)

    def _state(self, optimizer: str, columns: int) -> ServerState:
        if not optimizer:
            return initial_server_state(self._plan, columns)
        return ServerState.from_model(open_model(self._artifacts.path(optimizer)))

    def _store(self, model: Model, kind: str, now: float) -> ArtifactRow:
        digest, size = self._artifacts.create(model_blocks(model))
        return ArtifactRow(digest, size, kind, now)
