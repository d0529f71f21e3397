"""Blobs as they come in: past the system's cache or through it, the bytes are the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import TransferError
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.blobs import CATCH_UP

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
        seen, begun = bytearray(), place
        writer = store.receive("x", digest, len(whole), seen.extend, offset=place).open()
        for _ in range(data.draw(st.integers(1, len(left)))):
            count = left.pop(0)
            writer.write(memoryview(whole)[place : place + count])
            place += count
        writer.close() if left else writer.finish()
        # What was there before is hashed beside what comes, and all of it before the blob has its name.
        assert seen == whole[: len(seen)]
        assert len(seen) == place or (left and len(seen) >= min(place, CATCH_UP * (place - begun)))
        assert writer.offset == place
    writer.close()
    assert store.path(digest).read_bytes() == whole


def test_going_on_waits_for_nothing_that_was_there_before(tmp_path: Path) -> None:
    store, whole = store_in(tmp_path), os.urandom(64 * KIB)
    digest, half, seen = blake3(whole).hexdigest(), 32 * KIB, bytearray()
    writer = store.receive("x", digest, len(whole)).open()
    writer.write(whole[:half])
    writer.close()
    writer = store.receive("x", digest, len(whole), seen.extend).open()
    assert (writer.offset, len(seen)) == (half, 0)
    writer.write(whole[half : half + KIB])
    assert len(seen) == CATCH_UP * KIB
    writer.write(whole[half + KIB :])
    assert writer.finish() == (digest, len(whole))
    assert seen == whole


def test_another_first_half_is_found_at_the_end(tmp_path: Path) -> None:
    store, whole = store_in(tmp_path), os.urandom(64 * KIB)
    writer = store.receive("x", blake3(whole).hexdigest(), len(whole)).open()
    writer.write(bytes(32 * KIB))
    writer.close()
    writer = store.receive("x", blake3(whole).hexdigest(), len(whole)).open()
    writer.write(whole[32 * KIB :])
    with pytest.raises(TransferError, match="announced was"):
        writer.check()
    writer.close()
    assert store.received("x", blake3(whole).hexdigest()) == 0


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
