"""Blobs as they come in: past the system's cache or through it, the bytes are the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.server.storage.artifact_store import ArtifactStore

KIB = 1 << 10
SIZES = [1, 4 * KIB - 1, 4 * KIB, 8 * KIB, 12 * KIB + 1, 1100 * KIB]
sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=6)


def store_in(folder: Path) -> ArtifactStore:
    return ArtifactStore(folder / "artifacts", "database")


@settings(max_examples=30, deadline=None)
@given(sizes, st.data())
def test_any_cut_and_any_resumption_gives_the_same_blob(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], data: st.DataObject
) -> None:
    store, whole = store_in(tmp_path_factory.mktemp("blobs")), os.urandom(sum(cuts))
    digest, place, left = blake3(whole).hexdigest(), 0, list(cuts)
    while left:
        seen = bytearray()
        writer = store.receive("x", digest, len(whole), seen.extend, offset=place).open()
        for _ in range(data.draw(st.integers(1, len(left)))):
            count = left.pop(0)
            writer.write(memoryview(whole)[place : place + count])
            place += count
        writer.close() if left else writer.finish()
        assert seen == whole[:place]
        assert writer.offset == place
    writer.close()
    assert store.path(digest).read_bytes() == whole


def test_where_the_disk_wants_larger_blocks_the_cached_way_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def refuse_direct(file: int, data: memoryview) -> int:
        if not refused:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, data)

    store, whole = store_in(tmp_path), os.urandom(300 * KIB)
    monkeypatch.setattr(os, "write", refuse_direct)
    writer = store.receive("x", blake3(whole).hexdigest(), len(whole)).open()
    writer.write(whole)
    digest, size = writer.finish()
    writer.close()
    assert (size, refused) == (len(whole), [300 * KIB])
    assert store.path(digest).read_bytes() == whole
