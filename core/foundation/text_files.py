"""Texts out of files: paragraphs, lines of JSON, rows of a Parquet table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundtable.core import extras
from roundtable.core.errors import TaskError

Text = str | dict[str, Any]
"""A plain text, or an object: of "text", of "prompt" and "completion", of "messages", or, for preferences, of
"prompt", "chosen" and "rejected"."""
_OF_OBJECTS = (".jsonl", ".parquet")


def read_texts(path: Path) -> list[Text]:
    """The texts of a file: paragraphs of a .txt or .md, objects of a .jsonl, rows of a .parquet.

    TaskError, with file and line or row, for an object that is no `Text`, and for other kinds of files.
    """
    if path.suffix not in (".txt", ".md", *_OF_OBJECTS):
        raise TaskError(
            f"{path.name}: texts are read from .txt, .md, .jsonl and .parquet, and this is none of them"
        )
    if path.suffix in _OF_OBJECTS:
        return list(_checked(path, objects_of(path)))
    try:
        return [part.strip() for part in _whole(path).split("\n\n") if part.strip()]
    except OSError as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from error


def objects_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a .jsonl or .parquet file, none of which is null inside, with the words for their places.

    TaskError for other kinds of files, for one that cannot be read, and for a line that is no JSON.
    """
    if path.suffix not in _OF_OBJECTS:
        raise TaskError(
            f"{path.name}: rows are read from .jsonl and .parquet, and this is neither; pandas.read_csv(FILE)"
            '.to_json("rows.jsonl", orient="records", lines=True) makes one of a CSV file'
        )
    try:
        if path.suffix == ".parquet":
            yield from ((f"row {number}", value) for number, value in _rows(path))
        else:
            yield from ((f"line {number}", value) for number, value in _lines(path))
    except OSError as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from error


def _whole(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path.name} cannot be read as UTF-8 text: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_whole(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path.name}, line {number}: no JSON: {error}") from error
        if "\\u" in line:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise TaskError(
                    f"{path.name}, line {number}: it holds half of a surrogate pair (\\ud800 to \\udfff), "
                    "which is no text"
                ) from error
        yield number, _present(value)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Part of the table after part; a column that is empty in a row is not there."""
    parquet = extras.load("pyarrow.parquet", "texts in a Parquet file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, _present(row)
    except (OSError, ValueError) as error:  # All of pyarrow's own are one of these.
        raise TaskError(f"{path.name} cannot be read as Parquet: {error}") from error


def _present(value: Any) -> Any:
    """A table has all columns in each row, and all fields in each message: empty ones are not meant. So it is
    with null in JSON."""
    if isinstance(value, dict):
        return {name: _present(part) for name, part in value.items() if part is not None}
    return [_present(part) for part in value] if isinstance(value, list) else value


def _checked(path: Path, found: Iterator[tuple[str, Any]]) -> Iterator[Text]:
    for place, value in found:
        if why := _wrong(value):
            raise TaskError(f"{path.name}, {place}: {why}")
        yield value


def is_answered(value: dict[str, Any]) -> bool:
    """Whether an object is of a prompt and its answer, whatever else it has."""
    return "prompt" in value and "completion" in value


def _wrong(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "an object is wanted"
    if "chosen" in value or "rejected" in value:
        return _wrong_pair(value)
    if "messages" in value:
        if not isinstance(value["messages"], list) or not value["messages"]:
            return '"messages" is a list of messages, and not empty'
        return _wrong_messages("messages", value["messages"])
    if is_answered(value):
        known = isinstance(value["prompt"], str) and isinstance(value["completion"], str)
        return None if known else '"prompt" and "completion" are both texts'
    if isinstance(value.get("text"), str):
        return None
    return (
        'it has neither "text", nor "prompt" and "completion", nor "messages", nor "prompt", "chosen" and '
        '"rejected"'
    )


def _wrong_pair(value: dict[str, Any]) -> str | None:
    parts = {name: value.get(name) for name in ("prompt", "chosen", "rejected")}
    if all(isinstance(part, str) for part in parts.values()):
        return None
    for name, part in parts.items():
        if not isinstance(part, list) or not part:
            return 'a preference has "prompt", "chosen" and "rejected", all texts or all lists of messages'
        if why := _wrong_messages(name, part):
            return why
    return None


def _wrong_messages(name: str, messages: list[Any]) -> str | None:
    known = all(
        isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))
        for each in messages
    )
    return None if known else f'each of "{name}" needs "role" and "content", both texts'
