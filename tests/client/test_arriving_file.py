"""A file that is decoded while it arrives: nothing is read before it is there, and nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roundtable.client.arriving_file import ArrivingFile
from roundtable.core.errors import EncodingError


def test_a_reader_waits_for_its_bytes_and_for_no_more(tmp_path: Path) -> None:
    path, whole = tmp_path / "part", bytes(range(200))
    arriving = ArrivingFile(path, len(whole))
    with ThreadPoolExecutor(1) as threads, path.open("wb") as file:
        reading = threads.submit(
            lambda: [bytes(arriving.read(30)), arriving.skip(20), bytes(arriving.read(150))]
        )
        for end in (10, 29, 49, 120):
            file.write(whole[file.tell() : end])
            file.flush()
            arriving.has(end)
            assert not reading.done()
        path.rename(tmp_path / "whole")
        file.write(whole[120:])
        file.flush()
        arriving.has(200)
        first, _, last = reading.result()
    assert first + last == whole[:30] + whole[50:]
    assert arriving.left == 0
    with pytest.raises(EncodingError, match="1 bytes too early"):
        arriving.read(1)
    arriving.close()


def test_what_does_not_arrive_is_an_error(tmp_path: Path) -> None:
    arriving = ArrivingFile(tmp_path / "part", 10)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(arriving.read, 5)
        arriving.give_up()
        with pytest.raises(EncodingError, match="did not arrive"):
            reading.result()
    arriving.close()
