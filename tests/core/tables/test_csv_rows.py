"""A CSV file is read as it was written, or the error says at which line it is none."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundtable.core.errors import TaskError
from roundtable.core.tables.csv_rows import csv_rows
from roundtable.core.tables.table_description import ColumnTable, DataTableTable
from roundtable.core.tables.table_reading import read_columns

FIELDS = st.text(st.sampled_from('ab,;"\n\r\t \x0b\x0c\x1c\x85\u2028\u2029\ufeff'), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.lists(FIELDS, min_size=2, max_size=2), max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_whatever_stands_in_quotes_comes_back(
    tmp_path: Path, rows: list[list[str]], end: str, mark: bool
) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(rows)
    file = tmp_path / "any.csv"
    file.write_bytes(text.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    assert list(csv_rows(file, ",")) == rows


def test_a_note_of_several_lines_moves_no_other_column(tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    file.write_bytes('\ufeff"age",note\r\n51,"one\nline"\r\n\r\n52,a\u2028b\x85c\r\n'.encode())
    found = read_columns(DataTableTable(file=str(file)), {"age": ColumnTable()})
    assert found.column("age").tolist() == [51, 52]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n1,2\0\n", "line 3: a NUL character"),
        ("a,b\n1,2\n".encode("utf-16"), "no UTF-8 text, behind line 0: save it as UTF-8"),
        (b"a,b\r1,2\r", "line 1: a carriage return without a line feed"),
        (b"a,b\n1,2\r3\n", "line 2: a carriage return without a line feed"),
        (b'a,b\n1,"2\n3,4\n', "line 3: the file ends within quotes"),
        (b'a,b\n1,"2" inches\n', "line 2: after a closing quote"),
        (b"a,b\n1," + b"2" * 200_000 + b"\n", "line 2: a value is longer than 131,072 characters"),
    ],
    ids=["nul", "utf-16", "mac", "carriage return", "open quote", "text behind a quote", "long"],
)
def test_what_is_no_csv_is_refused_with_its_line(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_bytes(content)
    with pytest.raises(TaskError, match=rf"bad\.csv.*{said}"):
        read_columns(DataTableTable(file=str(file)), {"a": ColumnTable()})
