"""The rows of a CSV file, one after the other, with an error that says where the file is none."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from roundtable.core.errors import TaskError


def csv_rows(path: Path, separator: str) -> Iterator[list[str]]:
    """The rows of a UTF-8 file, without empty ones; a byte order mark at its start is no text.

    Rows end with a line feed, or a carriage return and a line feed; within quotes all characters are text.
    TaskError with the line for other encodings, NUL, bare carriage returns, quotes that are not closed, and
    values longer than `csv.field_size_limit`.
    """
    # Lines end at "\n" alone, so that the reader sees other line ends and refuses them outside of quotes.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        reader = csv.reader(_lines(file, path.name), delimiter=separator, strict=True)
        try:
            yield from (row for row in reader if row)
        except UnicodeDecodeError:
            raise TaskError(
                f"{path.name} is no UTF-8 text, behind line {reader.line_num}: save it as UTF-8"
            ) from None
        except csv.Error as error:
            raise TaskError(f"{path.name}, line {reader.line_num}: {_said(str(error))}") from None


def _lines(file: Iterable[str], name: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise TaskError(
                f"{name}, line {number}: a NUL character, which no text has: the file is damaged, or no CSV"
            )
        yield line


def _said(error: str) -> str:
    if "new-line" in error:
        return (
            "a carriage return without a line feed stands outside of quotes: save the file with the line "
            "ends of Unix or Windows"
        )
    if "field limit" in error:
        limit = csv.field_size_limit()
        return f"a value is longer than {limit:,} characters: most likely a quote before it is not closed"
    if "unexpected end" in error:
        return "the file ends within quotes: a quote is not closed"
    return (
        "after a closing quote comes neither the separator nor the end of the line: write a quote in quotes "
        'twice ("")'
    )
