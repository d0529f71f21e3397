"""What a cell of a silo's table counts as: a value, a missing one, or a mistake that is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roundtable.core.errors import TaskError
from roundtable.core.tables.table_description import ColumnTable, DataTableTable
from roundtable.core.tables.table_reading import left_out, read_columns

NAN = float("nan")


def column(folder: Path, cells: list[str], study: ColumnTable, *, discreet: bool = False) -> list[float]:
    """The places, or numbers, of these cells."""
    file = folder / "table.csv"
    file.write_text("c,other\n" + "".join(f"{cell},1\n" for cell in cells))
    return read_columns(DataTableTable(file=str(file)), {"c": study}, discreet=discreet).column("c").tolist()


@pytest.mark.parametrize(
    ("values", "cells", "places"),
    [
        # Words that stand for nothing elsewhere are values where the study says so, and as it writes them.
        (["none", "mild"], ["none", "mild", "None", "", "nan"], [0, 1, NAN, NAN, NAN]),
        (["EU", "NA"], ["NA", "EU", "na", "null"], [1, 0, NAN, NAN]),
        # Identifiers that are the same double.
        (["9007199254740992", "9007199254740993"], ["9007199254740993", "9007199254740992.0"], [1, 0]),
        ([9007199254740993, -9007199254740993], ["-9007199254740993", "9007199254740993"], [1, 0]),
        # Bands are not numbers, though Python reads them so.
        (["1_5", "15"], ["15", "1_5", " 15.0 "], [1, 0, 1]),
    ],
)
def test_a_category_has_the_values_that_its_description_lists(
    tmp_path: Path, values: list[str | int], cells: list[str], places: list[float]
) -> None:
    found = column(tmp_path, cells, ColumnTable(kind="category", values=tuple(values)))
    assert np.array_equal(found, places, equal_nan=True)


def test_what_is_missing_by_a_code_is_so_whatever_else_it_means(tmp_path: Path) -> None:
    study = ColumnTable(kind="category", values=("none", "mild"), missing=("none",))
    assert np.array_equal(column(tmp_path, ["none", "mild"], study), [NAN, 1], equal_nan=True)
    # The silo takes the word for a value: rows that a study's code leaves out are counted.
    own = ColumnTable(kind="category", values=("none", "mild"))
    table = DataTableTable(file=str(tmp_path / "table.csv"), columns={"c": own})
    assert left_out(table, {"c": study}, read_columns(table, {"c": study})) == {"c": 1}


def test_a_number_is_the_nearest_double_or_a_mistake(tmp_path: Path) -> None:
    number = ColumnTable()
    assert column(tmp_path, ["9007199254740993", "-0", "1e3", "NA"], number)[:3] == [2.0**53, 0, 1000]
    for cell in ("1_000", "9" * 400, "1e999", "inf", "True"):
        with pytest.raises(TaskError, match="row 1: not a finite number"):
            column(tmp_path, [cell], number)


def test_what_leaves_the_silo_names_no_other_column_and_no_row(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("age,hiv\n1,0\n2\n")
    for discreet in (False, True):
        told = []
        for name in ("years", "age"):
            with pytest.raises(TaskError) as raised:
                read_columns(DataTableTable(file=str(file)), {name: ColumnTable()}, discreet=discreet)
            told.append(str(raised.value))
        assert ("hiv" in told[0], "row 2" in told[1]) == (not discreet, not discreet)
        assert "no column 'years'" in told[0]
        assert "1 values where there are 2 columns" in told[1]


def test_a_name_that_two_columns_of_a_query_have_is_none(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    query = "SELECT 1 AS age, 2 AS ill, 3 AS age"
    table = DataTableTable(url=f"sqlite:///{tmp_path / 'silo.db'}", query=query)
    assert read_columns(table, {"ill": ColumnTable()}).column("ill").tolist() == [2]
    with pytest.raises(TaskError, match="several columns 'age'"):
        read_columns(table, {"age": ColumnTable()})
