"""What a simulation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.core.config import JobConfig
from roundtable.core.models import Model
from roundtable.core.paths import AnyPath
from roundtable.simulation.reporting.client_table import ClientTable
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.plots import curves


@dataclass(frozen=True)
class Result:
    """A finished run: its rounds, the last model, and how it ran.

    status and reason: how it ended, in the engine's words. backend: what ran the clients and why.
    """

    job: JobConfig
    history: History
    model: Model
    status: str
    reason: str
    backend: str
    run_dir: Path | None = None

    @property
    def secure_aggregation(self) -> str:
        """What was done of it, in words, so that nobody takes its sum alone for the protocol; "" for none."""
        records = self.history.records
        return str(records[-1].charge.get("secure_aggregation", "")) if records else ""

    @property
    def clients(self) -> ClientTable:
        """What each client measured of the last model that was evaluated."""
        told = [record for record in self.history.records if record.client_metrics]
        return ClientTable.of(self.job, told[-1]) if told else ClientTable(0, {})

    def plot(self, path: AnyPath | None = None) -> Any:
        """Loss and metrics over rounds, as a matplotlib Figure; also written to `path` if one is given.

        Raises ResourceError where matplotlib is not installed.
        """
        return curves({self.job.title: [self.history]}, path)

    @override
    def __repr__(self) -> str:
        secure = f"\nsecure aggregation: {self.secure_aggregation}" if self.secure_aggregation else ""
        return f"{self.job.title}: {self.status}, {self.reason} ({self.backend}){secure}\n{self.history!r}"
