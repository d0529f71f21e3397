"""Reads a silo's table: from a CSV or Parquet file, or from a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roundtable.core import extras
from roundtable.core.errors import TaskError
from roundtable.core.tables.csv_rows import csv_rows
from roundtable.core.tables.table_description import ColumnTable, DataTableTable, code_key, number_of

Values = npt.NDArray[np.float64]
_READS = "a table of [data]"
_ALWAYS_MISSING = frozenset(("", "nan", "na", "null", "none"))


@dataclass(frozen=True)
class DataTable:
    """Columns of equal length, float64 [rows], NaN where a value is missing.

    A category's value is its place among the `values` of its description. `derived` is what somebody has
    worked out of these rows and may use again; whoever looks must be able to do without.
    """

    columns: Mapping[str, Values]
    descriptions: Mapping[str, ColumnTable]
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def column(self, name: str) -> Values:
        """One column, float64 [rows]. TaskError for one that is not there."""
        if name not in self.columns:
            raise TaskError(f"the table has no column {name!r}; it has {', '.join(sorted(self.columns))}")
        return self.columns[name]

    def matrix(self, names: Sequence[str]) -> Values:
        """Columns side by side, float64 [rows, columns]."""
        return np.column_stack([self.column(name) for name in names])


def read_columns(
    table: DataTableTable,
    wanted: Mapping[str, ColumnTable] | None = None,
    *,
    lenient: bool = False,
    discreet: bool = False,
) -> DataTable:
    """The columns of a table, checked by their descriptions: `wanted` those that a study needs; None for all
    that the table describes. Where it is `lenient`, what is no value of its column is missing, and the range
    is left to who uses it: under differential privacy a refusal would tell of the row that it is about.

    What the silo says of a column (missing codes, range, values) holds beside what the study says. Raises
    TaskError that names column and row for a value that is none, or not in its range; of a value itself it
    tells nothing. `discreet` messages, for those that leave the silo, name the column alone: with ranges that
    a study chooses, rows and their number would tell of people.
    """
    needed = dict(table.columns if wanted is None else wanted)
    raw = raw_columns(table, list(needed), lenient=lenient, discreet=discreet or lenient)
    found = {}
    for name, description in needed.items():
        own = table.columns.get(name, description)
        try:
            found[name] = _checked(name, raw[name], description, own, lenient)
        except TaskError:
            if not discreet:
                raise
            raise TaskError(
                f"column {name!r} has values that are none of the study's, or not in its range: "
                "`roundtable client data check SURVEY`, at the silo, names the first of them"
            ) from None
    return DataTable(found, needed)


def left_out(table: DataTableTable, wanted: Mapping[str, ColumnTable], read: DataTable) -> Mapping[str, int]:
    """In how many rows of a column that was `read` a study's codes and recoding make a value missing which
    the silo's own description takes for one; of columns in which they may."""
    found = {}
    told = {name: study for name, study in wanted.items() if study.missing or study.recode}
    for name, values in raw_columns(table, list(told)).items() if told else ():
        own, study = table.columns.get(name, ColumnTable()), told[name]
        missing, meant = {code_key(code) for code in own.missing}, _meant(own)
        stated = {code_key(value) for value in own.values}
        keys = [_key(values[row], meant) for row in np.flatnonzero(np.isnan(read.column(name)))]
        number = study.kind == "number"
        found[name] = sum(
            not (
                key in missing
                or (_is_blank(key) and key not in stated)
                or (number and number_of(key) is None)
            )
            for key in keys
        )
    return found


def column_names(table: DataTableTable) -> list[str]:
    """The names of all columns that the table has."""
    return list(_source(table).names)


def raw_columns(
    table: DataTableTable, names: Sequence[str], *, lenient: bool = False, discreet: bool = False
) -> dict[str, list[Any]]:
    """These columns as they stand there; where it is `lenient`, a row of another length is missing in all.
    TaskError where the table or a column is missing, or there twice; a `discreet` one names no other column,
    and no row."""
    source = _source(table)
    if lost := [name for name in names if name not in source.names]:
        others = "" if discreet else f"; it has {', '.join(source.names)}"
        raise TaskError(f"the table has no column {', '.join(map(repr, lost))}{others}")
    if twice := [name for name in names if list(source.names).count(name) > 1]:
        raise TaskError(
            f"the table has several columns {twice[0]!r}: give each a name of its own, in a query with AS"
        )
    places = [source.names.index(name) for name in names]
    columns: list[list[Any]] = [[] for _ in names]
    for number, row in enumerate(source.rows, 1):
        if len(row) != len(source.names) and lenient:
            row = [None] * len(source.names)
        elif len(row) != len(source.names):
            where = "a row" if discreet else f"row {number}"
            raise TaskError(
                f"{where} of the table has {len(row)} values where there are {len(source.names)} columns"
            )
        for column, place in zip(columns, places, strict=True):
            column.append(row[place])
    return dict(zip(names, columns, strict=True))


@dataclass(frozen=True)
class _Source:
    names: Sequence[str]
    rows: Iterable[Sequence[Any]]


def _source(table: DataTableTable) -> _Source:
    if table.url is not None:
        return _of_database(table.url, str(table.query))
    path = Path(str(table.file)).expanduser()
    if not path.is_file():
        raise TaskError(f"there is no table at {path.name}: [data] names its file")
    if path.suffix == ".parquet":
        return _of_parquet(path)
    separator = "\t" if path.suffix == ".tsv" and table.separator == "," else table.separator
    rows = csv_rows(path, separator)
    if table.header:
        return _Source(table.header, rows)
    first = next(rows, None)
    if first is None:
        raise TaskError(f"{path.name} is empty: its first line names the columns, or [data] has a header")
    names = [name.strip() for name in first]
    if len(set(names)) != len(names):
        raise TaskError(
            f"the first line of {path.name} repeats a name; give a header in [data] if it is no header"
        )
    return _Source(names, rows)


def _of_parquet(path: Path) -> _Source:
    parquet = extras.load("pyarrow.parquet", f"{_READS} in a Parquet file")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise TaskError(f"{path.name} cannot be read as Parquet: {error}") from None
    columns = [column.to_pylist() for column in table.columns]
    return _Source(table.column_names, list(zip(*columns, strict=True)))


def _of_database(url: str, query: str) -> _Source:
    sql = extras.load("sqlalchemy", f"{_READS} in a database")
    try:
        engine = sql.create_engine(url)
    except (sql.exc.ArgumentError, sql.exc.NoSuchModuleError):
        raise TaskError("[data] url is no address that SQLAlchemy understands") from None
    try:
        with engine.connect() as connection:
            answer = connection.execute(sql.text(query))
            return _Source(list(answer.keys()), [tuple(row) for row in answer])
    except sql.exc.SQLAlchemyError as error:
        # The message may hold the query's own values, and the address a password.
        kind = type(getattr(error, "orig", None) or error).__name__
        raise TaskError(f"the silo's database did not answer the query of [data] ({kind})") from None
    finally:
        engine.dispose()


def _checked(
    name: str, values: Sequence[Any], study: ColumnTable, silo: ColumnTable, lenient: bool
) -> Values:
    missing = {code_key(code) for table in (study, silo) for code in table.missing}
    meant = {**_meant(study), **_meant(silo)}
    places = {code_key(value): place for place, value in enumerate(study.values)}
    found = np.empty(len(values))
    for number, value in enumerate(values):
        key = _key(value, meant)
        try:
            found[number] = _number(name, number + 1, key, missing, places, study.kind)
        except TaskError:
            if not lenient:
                raise
            found[number] = np.nan
    for table in (study, silo):
        if table.kind != "number" or lenient:
            continue
        below = found < table.least if table.least is not None else np.zeros(len(found), bool)
        above = found > table.most if table.most is not None else np.zeros(len(found), bool)
        if (outside := np.flatnonzero(below | above)).size:
            raise TaskError(
                f"column {name!r} is not between {_end(table.least)} and {_end(table.most)} in "
                f"{outside.size} rows, the first of them row {outside[0] + 1}: correct the data, or name "
                "what stands for a missing value (missing)"
            )
    return found


def _meant(table: ColumnTable) -> dict[float | str, Any]:
    return {code_key(code): value for code, value in table.recode.items()}


def _key(value: Any, meant: Mapping[float | str, Any]) -> float | str:
    """What stands in a cell as it is compared, recoded."""
    key = "" if value is None else code_key(int(value) if isinstance(value, bool) else value)
    return code_key(meant[key]) if key in meant else key


def _is_blank(key: float | str) -> bool:
    return isinstance(key, str) and key.lower() in _ALWAYS_MISSING


def _number(
    name: str,
    row: int,
    key: float | str,
    missing: set[float | str],
    places: Mapping[float | str, int],
    kind: str,
) -> float:
    if key in missing or (_is_blank(key) and key not in places):
        return np.nan
    if kind == "category":
        if key not in places:
            raise TaskError(
                f"column {name!r}, row {row}: a value that is none of the column's values: correct the data, "
                "or name what stands for a missing value (missing)"
            )
        return places[key]
    number = number_of(key)
    if number is None:
        raise TaskError(
            f"column {name!r}, row {row}: not a finite number: correct the data, or name what stands for a "
            "missing value (missing)"
        )
    return number


def _end(value: float | None) -> str:
    return "anything" if value is None else f"{value:g}"
