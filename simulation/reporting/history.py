"""A run's rounds as a table: columns by name, rows by number, and no library needed to read it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from typing_extensions import override

from roundtable.core.errors import ResourceError
from roundtable.core.foreign_text import printable
from roundtable.core.paths import AnyPath
from roundtable.engine import figures
from roundtable.engine.messages import RoundRecord
from roundtable.simulation.reporting.notebook import html_table

Value = int | float | None
Row = Mapping[str, Value]
_SHOWN = 10


@dataclass(frozen=True)
class History(Sequence[Row]):
    """One row a committed round. `history["accuracy"]` is a column, `history[-1]` the last row.

    Columns: round, attempt, clients (whose updates count), failed, excluded, time (virtual seconds
    at the round's end), seconds (of real time that the round took; None where it was not measured),
    staleness (mean number of models made since those that the updates started from; buffered rounds),
    tokens (trained on in the round), tokens_per_second (of virtual time), bytes_per_token (both ways)
    and communication (the mean share of the round's virtual time in transfers), each where it is known,
    train_NAME for training means, NAME for evaluation means, before_NAME for those of the model that the
    round began with; None where a round has no value.
    """

    records: tuple[RoundRecord, ...]
    seconds: tuple[float | None, ...]

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        names: dict[str, None] = {}
        for index in range(len(self)):
            names.update(dict.fromkeys(self._row(index)))
        return list(names)

    @override
    def __len__(self) -> int:
        return len(self.records)

    @override
    def __iter__(self) -> Iterator[Row]:
        return (self._row(index) for index in range(len(self)))

    @overload
    def __getitem__(self, key: str) -> list[Value]: ...
    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    @override
    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            return History(self.records[key], self.seconds[key])
        if isinstance(key, str):
            if key not in self.columns:
                raise KeyError(f"no column {key!r}; there are {', '.join(self.columns)}")
            return [row.get(key) for row in self]
        return self._row(range(len(self))[key])

    def to_csv(self, path: AnyPath | None = None) -> str:
        """The table as CSV text; also written to `path` if one is given."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame. Raises ResourceError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ResourceError("to_pandas() needs pandas: pip install 'roundtable-fl[pandas]'") from error
        return pandas.DataFrame(list(self), columns=self.columns)

    @override
    def __repr__(self) -> str:
        columns, rows = self.columns, self[-_SHOWN:]
        cells = [
            [printable(name) for name in columns],
            *([_text(row.get(name)) for name in columns] for row in rows),
        ]
        widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        if len(self) > _SHOWN:
            lines.insert(1, f"… {len(self) - _SHOWN} rounds before")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = self.columns
        return html_table(columns, [[row.get(name) for name in columns] for row in self])

    def _row(self, index: int) -> dict[str, Value]:
        record = self.records[index]
        values = figures(record)
        counted = {name: values[name] for name in ("clients", "failed", "excluded", "time")}
        first = {"round": record.round, "attempt": record.attempt, **counted, "seconds": self.seconds[index]}
        return {**first, **values}


def _text(value: Value) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.5g}"
