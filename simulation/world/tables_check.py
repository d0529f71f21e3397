"""All that a job file says below `[simulation]`, checked without running anything."""

from __future__ import annotations

from pathlib import Path

from roundtable.core.config import JobConfig
from roundtable.simulation.world.config import (
    attack_table,
    capacity_table,
    devices_table,
    dropouts_table,
    metadata_table,
)
from roundtable.simulation.world.partition import parse_partitioner


def check_tables(job: JobConfig, folder: Path | None = None) -> None:
    """Raises ConfigError, naming the key, for a partition, devices, dropouts or an attack without sense.

    `folder` is the job's, for a partition in a file.
    """
    parse_partitioner(job.simulation.partition, folder)
    devices_table(job)
    dropouts_table(job)
    metadata_table(job)
    capacity_table(job)
    attack_table(job)
