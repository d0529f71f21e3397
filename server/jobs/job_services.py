"""What the drivers of all jobs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from roundtable.aggregation.rows.row_passes import ShardWorkers
from roundtable.server.jobs.sessions import Sessions
from roundtable.server.jobs.trusted_training import TrustedTraining
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.coordinator_observer import CoordinatorObserver
from roundtable.server.operations.measured_lines import MeasuredLines
from roundtable.server.operations.populations import Populations
from roundtable.server.operations.silo_setups import SiloSetups
from roundtable.server.queue.queue_rules import QueueRules
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.retention import Retention
from roundtable.server.store import Database
from roundtable.server.store.group_commit import GroupedWrites


@dataclass(frozen=True)
class JobServices:
    """One coordinator's services for its jobs.

    `compute` is the one thread in which models are made; `writer` names this process in the rows that it
    writes; `together` groups small writes of many callers; `tracking` is the folder of all jobs' trackers;
    `queue` is what operators have set for the turns of jobs; `encodings` are those of others that may decode
    updates, by name, with the hashes of their code; `shards` work on blocks of large rounds beside `compute`.
    """

    database: Database
    artifacts: ArtifactStore
    sessions: Sessions
    clock: Callable[[], float]
    compute: ThreadPoolExecutor
    writer: str
    retention: Retention
    alerts: Alerts
    together: GroupedWrites
    tracking: Path
    trusted: TrustedTraining
    observer: CoordinatorObserver
    populations: Populations
    queue: QueueRules
    links: MeasuredLines
    setups: SiloSetups
    encodings: Mapping[str, str]
    shards: ShardWorkers
