"""The small parts: the check for finite values, artifacts on disk, slices of an optimizer."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import ResourceError, StorageError, TransferError
from roundtable.core.machine import resident_memory as memory
from roundtable.server.services.transfer import in_thread
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.finite_check import FiniteCheck

DATA = bytes(range(256)) * 8
DIGEST = blake3(DATA).hexdigest()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=40),
    st.lists(st.integers(1, 30), min_size=1),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_first_bad_element_is_found_however_the_bytes_are_cut(
    values: list[float], cuts: list[int], dtype: torch.dtype
) -> None:
    vector = torch.tensor(values, dtype=torch.float32).to(dtype)
    data = vector.view(torch.uint8).numpy().tobytes() if values else b""
    check, place = FiniteCheck(dtype), 0
    for width in itertools.cycle(cuts):
        if place >= len(data):
            break
        check(data[place : place + width])
        place += width
    bad = torch.nonzero(~torch.isfinite(vector))
    assert check.first_bad == (int(bad[0]) if len(bad) else None)
    norm = None if len(bad) else float(vector.double().norm())
    assert check.norm == (norm if norm is None else pytest.approx(norm, rel=1e-3))


@pytest.mark.parametrize("size", [3e38, 1.0, 1e-16, 1e-20, 1e-40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_large_and_tiny_values_is_what_it_is(size: float, dtype: torch.dtype) -> None:
    vector = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).clamp(-1, 1).mul(size).to(dtype)
    check = FiniteCheck(dtype)
    check(vector.view(torch.uint8).numpy().tobytes())
    assert check.first_bad is None
    assert check.norm == pytest.approx(float(vector.double().norm()), rel=1e-3)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts", "me")


def test_a_blob_has_its_name_when_it_is_whole(store: ArtifactStore) -> None:
    writer = store.receive("x.1", DIGEST, len(DATA)).open()
    writer.write(DATA[:1000])
    writer.close()
    assert store.size(DIGEST) is None
    assert store.received("x.1", DIGEST) == 1000
    assert store.received("y.1", DIGEST) == 0
    seen = bytearray()
    writer = store.receive("x.1", DIGEST, len(DATA), seen.extend).open()
    writer.write(DATA[1000:])
    assert writer.finish() == (DIGEST, len(DATA))
    writer.close()
    assert bytes(seen) == DATA
    assert store.path(DIGEST).read_bytes() == DATA
    assert store.received("x.1", DIGEST) == 0


def test_going_on_from_before_the_end_drops_what_follows(store: ArtifactStore) -> None:
    writer = store.receive("x", DIGEST, len(DATA)).open()
    writer.write(b"?" * 500)
    writer.close()
    writer = store.receive("x", DIGEST, len(DATA), offset=0).open()
    assert writer.offset == 0
    writer.write(DATA)
    writer.finish()
    writer.close()
    assert store.path(DIGEST).read_bytes() == DATA


async def test_cancelled_work_lets_go_of_its_file_first() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(20)
        ended.set()

    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(in_thread(threads, work))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


def test_wrong_bytes_are_forgotten(store: ArtifactStore) -> None:
    writer = store.receive("x", DIGEST, len(DATA)).open()
    writer.write(b"?" * len(DATA))
    with pytest.raises(TransferError, match="announced was"):
        writer.finish()
    writer.close()
    assert store.received("x", DIGEST) == 0
    assert store.size(DIGEST) is None


@pytest.mark.parametrize("damage", [b"?" * len(DATA), DATA[:-1], None])
def test_damage_is_found_when_a_later_process_reads(tmp_path: Path, damage: bytes | None) -> None:
    digest, _ = ArtifactStore(tmp_path / "a", "me").create([DATA[:5], memoryview(DATA)[5:]])
    assert digest == DIGEST
    path = tmp_path / "a" / "objects" / DIGEST[:2] / DIGEST
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(StorageError, match="missing" if damage is None else "damaged"):
        ArtifactStore(tmp_path / "a", "me").path(DIGEST)


def test_what_is_not_mentioned_yet_is_not_deleted(store: ArtifactStore) -> None:
    digest, _ = store.create([DATA])
    store.delete([digest])
    assert store.path(digest).is_file()
    store.unpin([digest])
    store.delete([digest])
    assert store.size(digest) is None


def test_unfinished_uploads_are_discarded_by_prefix(store: ArtifactStore) -> None:
    for owner in ("job.1.1.alder", "job.12.1.alder", "put.olga"):
        store.receive(owner, DIGEST, len(DATA)).open().close()
    store.discard("job.1.")
    left = sorted(path.name.removesuffix(f".{DIGEST}") for path in (store.folder / "partial").iterdir())
    assert left == ["job.12.1.alder", "put.olga"]


@pytest.mark.parametrize("name", ["../" + "a" * 61, "a" * 63, "A" * 64, "", "a" * 63 + "/"])
def test_names_that_are_no_digests(store: ArtifactStore, name: str) -> None:
    with pytest.raises(StorageError):
        store.path(name)
    with pytest.raises(StorageError):
        store.receive("x", name, 1)


def test_a_full_device(store: ArtifactStore, tmp_path: Path) -> None:
    writer = store.receive("x", DIGEST, len(DATA)).open()
    writer.close()
    with open("/dev/full", "wb", buffering=0) as full:
        writer._file = full.fileno()
        with pytest.raises(ResourceError, match="is full: free some space"):
            writer.write(DATA)


def test_dropping_the_pages_of_a_mapped_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "v"
    path.write_bytes(np.arange(100_000, dtype=np.float32).tobytes())
    mapped = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", offset=8, shape=(90_000,)))
    before = mapped.clone()
    memory.drop_pages(mapped[10:80_000])
    assert torch.equal(mapped, before)


def test_a_blob_waits_for_two_syncs_its_file_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path, "one")
    synced: list[int] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    for data in (b"one", b"another", b"a third one"):
        synced.clear()
        digest, _ = store.create([data])
        place = tmp_path / "objects" / digest[:2]
        assert synced == [(place / digest).stat().st_ino, place.stat().st_ino]


def test_a_blobs_folder_that_was_tidied_away_is_made_again(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, "one")
    for folder in (tmp_path / "objects").iterdir():
        folder.rmdir()
    digest, _ = store.create([b"one"])
    assert (tmp_path / "objects" / digest[:2] / digest).read_bytes() == b"one"
