"""Where a job's checkpoints lie: in the agent's state folder, and copies where `[cluster]` says."""

from __future__ import annotations

from pathlib import Path

from roundtable.client.policy.cluster_table import ClusterTable


def checkpoint_places(folder: Path, table: ClusterTable, job: str) -> tuple[Path, ...]:
    """A job's own folders, below the cluster's state folder and the table's: the first is written."""
    return tuple(place / job for place in (folder / "checkpoints", *map(Path, table.checkpoints)))
