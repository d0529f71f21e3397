"""The tables that a site's [data] describes, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnTable, DataTableTable, differences
from roundtable.core.tables.table_reading import DataTable, column_names, left_out, read_columns
from roundtable.core.toml import TomlDocument, validate


class SiloTables(Mapping[str, DataTableTable]):
    """What is described in `options`, the site's [data], by name.

    A list in the place of a description holds one for each simulated client; `index` says which is here.
    Files count from `folder`; None: from where the process runs, which is the silo's folder in its worker.
    """

    def __init__(self, options: Mapping[str, Any], index: int = 0, folder: Path | None = None) -> None:
        self._folder = folder or Path()
        self._options = {
            name: value[index] if isinstance(value, list | tuple) and index < len(value) else value
            for name, value in options.items()
        }
        self._read: dict[str, tuple[Any, DataTable]] = {}
        self.code: Any = None
        """What asks them, where that is not built in."""

    @override
    def __getitem__(self, name: str) -> DataTableTable:
        if name not in self._options:
            raise TaskError(
                f"this silo has no table {name!r}: describe it as [data.{name}] with a file or a url in its "
                "agent.toml"
            )
        table = described_table(name, self._options[name])
        if table.file is None:
            return table
        return table.model_copy(update={"file": str(self._folder / Path(table.file).expanduser())})

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(name for name, value in self._options.items() if is_table(value))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def read(
        self,
        name: str,
        wanted: Mapping[str, ColumnTable] | None = None,
        *,
        fresh: bool = False,
        lenient: bool = False,
        discreet: bool = False,
    ) -> DataTable:
        """A table's columns: those that a study needs, or all that are described; `fresh` reads them again,
        `lenient` refuses no table for single values, `discreet` messages tell nothing of rows (see
        `read_columns`).

        Raises TaskError, that names the table, for what is missing, described otherwise or no value of its
        column.
        """
        key = None if wanted is None else sorted((name, repr(column)) for name, column in wanted.items())
        held = self._read.get(name)
        if held is not None and held[0] == (key, lenient) and not fresh:
            return held[1]
        table = self[name]
        place = Path(table.file).name if table.file is not None else "its database"
        try:
            if wanted is not None and table.columns:
                names = set(column_names(table))
                if unlike := differences(wanted, table.columns, names):
                    raise TaskError("; ".join(unlike))
            found = read_columns(table, wanted, lenient=lenient, discreet=discreet)
        except TaskError as error:
            raise TaskError(f"table {name!r} ({place}): {error}") from None
        self._read[name] = (key, lenient), found
        return found

    def left_out(self, name: str, wanted: Mapping[str, ColumnTable], read: DataTable) -> Mapping[str, int]:
        """Of columns of a table that was `read`, the rows whose values a study alone calls missing."""
        return left_out(self[name], wanted, read)


def is_table(value: Any) -> bool:
    """Whether an entry of [data] describes a table."""
    return isinstance(value, Mapping) and ("file" in value or "url" in value)


def described_table(name: str, value: Any) -> DataTableTable:
    """The description of a table in [data]. TaskError for one that is none, with what is wrong."""
    if not is_table(value):
        raise TaskError(f"[data] {name} describes no table: write it as [data.{name}] with a file or a url")
    try:
        return validate(DataTableTable, TomlDocument(dict(value), f"[data.{name}]", ""))
    except ConfigError as error:
        raise TaskError(str(error)) from None
