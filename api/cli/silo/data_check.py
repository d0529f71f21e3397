"""`roundtable client data check`: a silo's tables against their descriptions, and against a study's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, print_table, say, working
from roundtable.cli.silo.silo import silo_of
from roundtable.core.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from roundtable.core.tables.silo_tables import SiloTables
    from roundtable.core.tables.table_description import ColumnTable
    from roundtable.core.tables.table_reading import DataTable


@click.group("data")
def data() -> None:
    """Look at the tables that [data] describes."""


@data.command("check")
@click.argument("study", required=False, type=click.Path(path_type=Path, dir_okay=False))
@json_option
@click.pass_context
def check(context: click.Context, study: Path | None, as_json: bool) -> int:
    """Check the tables of [data], and say what differs from a study's.

    STUDY is a survey: its table is compared with this silo's, column by column. Without it every described
    table is read and checked against its own description. Nothing leaves this machine. Exit code 1: something
    differs.
    """
    from roundtable.core.tables.silo_tables import SiloTables
    from roundtable.surveys import load_survey

    assert context.parent is not None
    config, _ = silo_of(context.parent)
    task = config.task_tables.get("analysis")
    options = config.data if task is None or task.data is None else task.data
    tables = SiloTables(options, folder=config.folder)
    wanted: dict[str, Any]
    if study is not None:
        survey = load_survey(study)
        wanted = {survey.table: survey.columns}
    else:
        wanted = dict.fromkeys(tables)
    if not wanted:
        raise ConfigError("[data] describes no table: write one as [data.NAME] with a file or a url")
    found = []
    for name, columns in wanted.items():
        with working(f"reading {name}"):
            found.append(_checked(tables, name, columns))
    if as_json:
        print_json(found)
    else:
        for each in found:
            _show(each)
    return 1 if any(each["differences"] for each in found) else 0


def _checked(tables: SiloTables, name: str, columns: dict[str, ColumnTable] | None) -> dict[str, Any]:
    """Every difference, and what is in the columns that could be read."""
    from roundtable.core.tables.table_description import differences
    from roundtable.core.tables.table_reading import column_names, read_columns

    try:
        table = tables[name]
        present = set(column_names(table))
    except TaskError as error:
        return {"table": name, "differences": [str(error)], "columns": []}
    needed = table.columns if columns is None else columns
    unlike = differences(needed, table.columns, present)
    rows = []
    for column, described in needed.items():
        if column not in present:
            continue
        try:
            rows.append(_summary(column, described, read_columns(table, {column: described})))
        except TaskError as error:
            unlike.append(str(error))
    return {"table": name, "differences": unlike, "columns": rows}


def _summary(name: str, described: ColumnTable, read: DataTable) -> dict[str, Any]:
    import numpy as np

    values = read.column(name)
    there = values[~np.isnan(values)]
    number = described.kind == "number" and len(there) > 0
    return {
        "column": name,
        "kind": described.kind,
        "unit": described.unit or "",
        "rows": len(values),
        "missing": len(values) - len(there),
        "least": float(there.min()) if number else None,
        "most": float(there.max()) if number else None,
    }


def _show(found: dict[str, Any]) -> None:
    say(f"table {found['table']}")
    columns = found["columns"]
    if columns:
        keys = list(columns[0])
        print_table(
            keys, [["–" if row[key] is None else row[key] for key in keys] for row in columns], "nothing"
        )
    for line in found["differences"]:
        say(f"  differs: {line}")
    if not found["differences"]:
        say("  as described")
    say()
