"""What a silo trains a job on, as it tells the job's record: ranks, devices, the plan of its cluster.

It follows from the silo's machines, its settings and the job's model, and from no value of its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingSetup:
    """`machines` with `ranks` processes in all, each on a `device` with `memory` bytes (0: not told).

    `degrees` are the ways of parallelism by name, each with its degree; `plan` is how they train, for people.
    `factor_rank`: of its low-rank factors, where its memory has chosen that; 0 where not.
    """

    machines: int = 1
    ranks: int = 1
    device: str = ""
    memory: int = 0
    plan: str = ""
    degrees: Mapping[str, int] = field(default_factory=dict)
    factor_rank: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)
