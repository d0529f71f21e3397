"""What each client of a simulation measured: a table, and how evenly the model serves them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.core.config import JobConfig
from roundtable.core.foreign_text import printable
from roundtable.core.job_tables.stop_table import StopTable
from roundtable.core.observability.fairness import Fairness, fairness_of
from roundtable.core.observability.metric_sums import Sums, means, worked_out
from roundtable.core.paths import AnyPath
from roundtable.engine.messages import RoundRecord
from roundtable.simulation.reporting.notebook import html_table
from roundtable.simulation.world.natural_names import NaturalNames

_SHOWN = 20


@dataclass(frozen=True)
class ClientTable:
    """Clients' figures in one round, by number; what a client has not measured or defined is missing.

    `stop` is the job's: the direction that it states of its metric holds here too. Where clients have
    `names`, people see those, and rows and CSV have both.
    """

    round: int
    rows: Mapping[str, Mapping[str, float]]
    stop: StopTable = field(default_factory=StopTable)
    names: NaturalNames = field(default_factory=NaturalNames)

    @classmethod
    def of(cls, job: JobConfig, record: RoundRecord, names: NaturalNames) -> ClientTable:
        """Of a committed round; without rows where no client told what it measured."""
        return cls.of_sums(job, record.round, record.client_metrics, names)

    @classmethod
    def of_sums(
        cls, job: JobConfig, round: int, told: Mapping[str, Sums], names: NaturalNames | None = None
    ) -> ClientTable:
        """Of what each client told of the model of a round."""
        rows = {name: means(worked_out(sums, job.metrics)[0]) for name, sums in told.items()}
        return cls(round, rows, job.stop, names or NaturalNames())

    @property
    def columns(self) -> list[str]:
        """The metrics that any client has, in their first order."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    @property
    def fairness(self) -> dict[str, Fairness]:
        """Of each metric that at least two clients have."""
        return fairness_of(self.rows, self.stop)

    @property
    def plain_fairness(self) -> dict[str, dict[str, Any]]:
        """The same as plain values."""
        return {metric: asdict(found) for metric, found in self.fairness.items()}

    def __iter__(self) -> Iterator[dict[str, str | int | float]]:
        return ({"round": self.round, **self._who(client), **row} for client, row in self.rows.items())

    def _who(self, client: str) -> dict[str, str]:
        return {"client": client, **({"client_name": self.names.of(client)} if self.names else {})}

    def to_csv(self, path: AnyPath | None = None) -> str:
        """The table as CSV text; also written to `path` if one is given."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["round", *self._who(""), *self.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def cells(self, most: int | None = None) -> list[list[str]]:
        """The table in words, below its head: the first clients, then what is even and what is not."""
        columns, fairness = self.columns, self.fairness
        first = [*self.rows.items()][:most]
        cells = [[printable(self.names.of(client)), *_texts(row, columns)] for client, row in first]
        for label in ("mean", "spread", "worst_tenth") if fairness else ():
            figures = {metric: getattr(found, label) for metric, found in fairness.items()}
            cells.append([label.replace("_", " "), *_texts(figures, columns)])
        return cells

    def lines(self) -> list[str]:
        """The table for a terminal."""
        columns = self.columns
        cells = [["client", *map(printable, columns)], *self.cells(_SHOWN)]
        widths = [max(len(line[place]) for line in cells) for place in range(len(columns) + 1)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        if (more := len(self.rows) - _SHOWN) > 0:
            lines.insert(_SHOWN + 1, f"… {more} clients more")
        return lines

    def _repr_html_(self) -> str:
        columns = self.columns
        rows = [[self.names.of(c), *(row.get(metric) for metric in columns)] for c, row in self.rows.items()]
        return html_table(["client", *columns], rows)

    @override
    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _texts(row: Mapping[str, float], columns: list[str]) -> list[str]:
    return [f"{row[name]:.5g}" if name in row else "" for name in columns]
