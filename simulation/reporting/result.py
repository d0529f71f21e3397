"""What a simulation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.core.config import JobConfig
from roundtable.core.foreign_text import printable
from roundtable.core.models import Model
from roundtable.core.paths import AnyPath
from roundtable.engine import Best
from roundtable.simulation.reporting.client_table import ClientTable
from roundtable.simulation.reporting.cross_table import CrossTable
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.kept_models import KeptModels
from roundtable.simulation.reporting.notebook import picture, png_of
from roundtable.simulation.reporting.plots import curves
from roundtable.simulation.world.natural_names import NaturalNames


@dataclass(frozen=True)
class Result:
    """A finished run: its rounds, its model, and how it ran.

    model: the last, or the best where the job keeps that (`[keep] best`): its round and metric are in `best`.
    models: those that are there by round, 0 the initial one: the last, the best, and every so many
    (`[keep] every`).
    cross_site: the model and each client's own on all clients' test data, where that was asked for.
    status and reason: how it ended, in the engine's words. backend: what ran the clients and why.
    names: what clients are called beside their numbers, where the task or the partition names them.
    """

    job: JobConfig
    history: History
    model: Model
    status: str
    reason: str
    backend: str
    run_dir: Path | None = None
    best: Best | None = None
    models: KeptModels = field(default_factory=KeptModels)
    cross_site: CrossTable | None = None
    names: NaturalNames = field(default_factory=NaturalNames)

    @property
    def secure_aggregation(self) -> str:
        """What was done of it, in words, so that nobody takes its sum alone for the protocol; "" for none."""
        records = self.history.records
        return str(records[-1].charge.get("secure_aggregation", "")) if records else ""

    @property
    def clients(self) -> ClientTable:
        """What each client measured of the best model where that is kept, else of the last evaluated one."""
        told = [record for record in self.history.records if record.client_metrics]
        of_best = [record for record in told if self.best is not None and record.round == self.best.round]
        shown = (of_best or told)[-1:]
        return ClientTable.of(self.job, shown[0], self.names) if shown else ClientTable(0, {})

    def plot(self, path: AnyPath | None = None) -> Any:
        """Loss and metrics over rounds, as a matplotlib Figure; also written to `path` if one is given.

        Raises ResourceError where matplotlib is not installed.
        """
        return curves({self.job.title: [self.history]}, path)

    def _repr_png_(self) -> bytes:
        return png_of(self.plot())

    def _repr_html_(self) -> str:
        said = f"{self.job.title}: {self.status}, {self.reason} ({self.backend})"
        return f"<p>{escape(printable(said))}</p>{picture(self.plot)}{self.history._repr_html_()}"

    @override
    def __repr__(self) -> str:
        secure = f"\nsecure aggregation: {self.secure_aggregation}" if self.secure_aggregation else ""
        return f"{self.job.title}: {self.status}, {self.reason} ({self.backend}){secure}\n{self.history!r}"
