"""What analyses have read of the silo's tables: the next one may not differ by a few rows.

    KEY                          what readings are scrambled with
    TABLE/COLUMN/READING.npy     the values of one reading as 64-bit words, sorted

A study says which codes are missing and what is recoded, and a table changes from day to day: two readings of
a column that differ in one row tell of that row by subtraction. A reading is of the whole column, whatever
is asked of it; rows are told apart by their values alone, so that their order is nothing. The words keep the
values from who looks at a file; who has the key and the folder can try all values.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from roundtable.client.durable_files import replace_synced
from roundtable.client.training.silo_account import in_turn
from roundtable.core.errors import PrivacyError
from roundtable.core.tables.table_description import ColumnTable, code_key
from roundtable.core.tables.table_reading import DataTable, Values

_Words = npt.NDArray[np.uint64]
READINGS = "readings"
"""The folder in the agent's state."""
_KEY = "KEY"


class EarlierReadings:
    """The readings below one folder of the silo's state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compare(self, name: str, table: DataTable, least: int) -> None:
        """Keeps what an analysis is about to use of the table `name`; durable when this returns.

        PrivacyError, and nothing is kept, where a column differs from an earlier reading in fewer than
        `least` rows, but in some. Once such a reading is kept, the same one may be used again.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with in_turn(self._folder):
            key = self._key()
            found = {
                column: _words(values, table.descriptions[column], key)
                for column, values in table.columns.items()
            }
            for column, words in found.items():
                if not self._file(name, column, words).exists():
                    self._check(name, column, words, least)
            for column, words in found.items():
                file = self._file(name, column, words)
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    content = io.BytesIO()
                    np.save(content, words)
                    replace_synced(file, [content.getvalue()])

    def _check(self, name: str, column: str, words: _Words, least: int) -> None:
        for file in sorted(self._file(name, column, words).parent.glob("*.npy")):
            rows = rows_apart(words, np.load(file, allow_pickle=False))
            if rows < least:
                raise PrivacyError(
                    f"column {column!r} of table {name!r} differs in fewer than {least} rows from what an "
                    "earlier analysis read: the difference of the two would tell of those rows; ask with the "
                    "same missing codes and recoding as before, or once more rows have changed"
                )

    def _file(self, name: str, column: str, words: _Words) -> Path:
        parts = (blake3(part).hexdigest(32) for part in (name.encode(), column.encode(), words.tobytes()))
        table, of, reading = parts
        return self._folder / table / of / f"{reading}.npy"

    def _key(self) -> int:
        file = self._folder / _KEY
        if not file.exists():
            replace_synced(file, [os.urandom(8)])
        return int.from_bytes(file.read_bytes(), "little")


def rows_apart(one: _Words, other: _Words) -> int:
    """In how many rows two readings differ at least, whatever their order."""
    _, place = np.unique(np.concatenate([one, other]), return_inverse=True)
    more = np.bincount(place[: len(one)], minlength=int(place.max(initial=-1)) + 1)
    fewer = np.bincount(place[len(one) :], minlength=len(more))
    apart = more - fewer
    return int(max(apart[apart > 0].sum(), -apart[apart < 0].sum()))


def _words(values: Values, description: ColumnTable, key: int) -> _Words:
    """The values of a column, scrambled and sorted; of a category what its values are, not their places."""
    if description.kind == "category":
        kinds = np.array([_bits(code_key(value)) for value in description.values], dtype=np.uint64)
        whole = ~np.isnan(values)
        bits = np.full(len(values), _bits(np.nan), dtype=np.uint64)
        bits[whole] = kinds[values[whole].astype(np.int64)]
    else:
        bits = np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64)
    # SplitMix64's mixing (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    words = bits ^ np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    mixed: _Words = np.sort(words ^ (words >> np.uint64(31)))
    return mixed


def _bits(value: float | str) -> int:
    if isinstance(value, str):
        return int.from_bytes(blake3(value.encode()).digest(8), "little")
    return int(np.array(value + 0.0).view(np.uint64))
