"""A matrix of models by clients: what each model's metric is on each client's test data."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.core.errors import ConfigError
from roundtable.core.foreign_text import printable
from roundtable.core.job_tables.stop_table import StopTable, larger_is_better
from roundtable.core.paths import AnyPath
from roundtable.simulation.reporting.notebook import html_table, png_of
from roundtable.simulation.reporting.plots import new_figure
from roundtable.simulation.world.natural_names import NaturalNames

GLOBAL = "global"
_SHOWN = 12


@dataclass(frozen=True)
class CrossTable:
    """`rows[model][client][metric]`: the model `global` of a round, and each client's own after training from
    it. A client that has no test data, or could not measure, has no metrics. Where clients have `names`,
    people see those, and rows and CSV have both."""

    round: int
    rows: Mapping[str, Mapping[str, Mapping[str, float]]]
    stop: StopTable = field(default_factory=StopTable)
    names: NaturalNames = field(default_factory=NaturalNames)

    @property
    def clients(self) -> list[str]:
        """Those whose test data served, in order."""
        return list(self.rows[GLOBAL])

    @property
    def metrics(self) -> list[str]:
        """The metrics that any cell has: that of `[stop]` first, the loss last."""
        found = dict.fromkeys(name for row in self.rows.values() for cell in row.values() for name in cell)
        return sorted(found, key=lambda name: (name != self.stop.metric, name == "loss"))

    def matrix(self, metric: str | None = None) -> dict[str, dict[str, float | None]]:
        """Model → client → value; of the first metric unless one is named. Raises ConfigError for none."""
        metric = self._known(metric)
        rows = self.rows.items()
        return {model: {client: cell.get(metric) for client, cell in row.items()} for model, row in rows}

    def __iter__(self) -> Iterator[dict[str, str | int | float]]:
        for model, row in self.rows.items():
            for client, cell in row.items():
                yield {
                    "round": self.round,
                    **self._who("model", model),
                    **self._who("client", client),
                    **cell,
                }

    def _who(self, column: str, client: str) -> dict[str, str]:
        return {column: client, **({f"{column}_name": self.names.of(client)} if self.names else {})}

    def to_csv(self, path: AnyPath | None = None) -> str:
        """One line for each model and client as CSV text; also written to `path` if one is given."""
        text = io.StringIO()
        who = (*self._who("model", ""), *self._who("client", ""))
        writer = csv.DictWriter(text, ["round", *who, *self.metrics], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def plot(self, path: AnyPath | None = None, metric: str | None = None) -> Any:
        """The matrix as a heat map, better is darker; a matplotlib Figure, also written to `path`.

        Raises ResourceError where matplotlib is not installed.
        """
        metric, matrix = self._known(metric), self.matrix(metric)
        values = [[float("nan") if v is None else v for v in row.values()] for row in matrix.values()]
        figure, (axis,) = new_figure(1)
        map_ = "viridis_r" if larger_is_better(metric, self.stop) else "viridis"
        image = axis.imshow(values, aspect="auto", cmap=map_)
        axis.set_xlabel("test data of")
        axis.set_ylabel("model of")
        columns, rows = map(self._named, self.clients), map(self._named, matrix)
        axis.set_xticks(range(len(self.clients)), columns, rotation=90, fontsize="xx-small")
        axis.set_yticks(range(len(matrix)), rows, fontsize="xx-small")
        figure.colorbar(image, label=printable(metric))
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def lines(self, metric: str | None = None) -> list[str]:
        """The matrix of a metric for a terminal: the first models and clients."""
        metric, matrix = self._known(metric), self.matrix(metric)
        shown = self.clients[:_SHOWN]
        cells = [[printable(metric), *map(self._named, shown)]]
        for model, row in [*matrix.items()][: _SHOWN + 1]:
            values = (row[client] for client in shown)
            cells.append([self._named(model), *("" if v is None else f"{v:.4g}" for v in values)])
        widths = [max(len(line[place]) for line in cells) for place in range(len(shown) + 1)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        if (more := len(self.clients) - _SHOWN) > 0:
            lines.append(f"… {more} clients more")
        return lines

    def _named(self, client: str) -> str:
        return printable(self.names.of(client))

    def _known(self, metric: str | None) -> str:
        known = self.metrics
        if not known or (metric is not None and metric not in known):
            what = repr(metric) if metric else "no metric"
            raise ConfigError(f"cross-site evaluation has {what}; measured are {', '.join(known) or 'none'}")
        return known[0] if metric is None else metric

    def _repr_html_(self) -> str:
        if not self.metrics:
            return "<p>nothing was measured</p>"
        matrix = self.matrix()
        rows = [[self._named(model), *row.values()] for model, row in matrix.items()]
        return html_table([self.metrics[0], *map(self._named, self.clients)], rows)

    def _repr_png_(self) -> bytes:
        return png_of(self.plot())

    @override
    def __repr__(self) -> str:
        return "\n".join(self.lines()) if self.metrics else "nothing was measured"
