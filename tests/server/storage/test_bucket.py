"""Buckets: a server of the S3 protocol on this machine, spoken to by s3fs as any other would be.

Skipped where moto and s3fs are absent: `pip install 'roundtable-fl[s3,test]'` where the tests run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from fsspec.registry import _registry as registry
from s3 import s3_bucket
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.core.errors import ConfigError, StorageError
from roundtable.server import ServerConfig
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.location import Location, Unreachable, blob_name

s3fs = pytest.importorskip("s3fs", reason="pip install 'roundtable-fl[s3,test]'")
ONE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as address:
        yield address


def files(bucket: str) -> list[str]:
    """What lies there, as another client sees it; names from `roundtable/` on."""
    found = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    return sorted(name.partition("/")[2] for name in found.find(bucket.removeprefix("s3://")))


def test_what_breaks_off_beside_a_request_is_a_line_in_the_log(
    bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    location = Location(bucket, "copies")

    async def left_behind(error: Exception) -> None:
        async def fail() -> None:
            raise error

        task = asyncio.ensure_future(fail())
        await asyncio.wait([task])

    caplog.set_level("INFO")
    for error in (ConnectionResetError("Cannot write to closing transport"), ValueError("a mistake of ours")):
        asyncio.run_coroutine_threadsafe(left_behind(error), location._files.loop).result()
        assert location.has("x") is False
    told = [(record.getMessage().split("\n")[0], record.exc_info is None) for record in caplog.records]
    assert ("a request to a bucket broke off: Cannot write to closing transport", True) in told
    assert [traced for words, traced in told if "never retrieved" in words] == [False]


def test_a_copy_is_put_found_fetched_and_forgotten(bucket: str, tmp_path: Path) -> None:
    data = torch.arange(3_000_000.0).numpy().tobytes()
    digest = blake3(data).hexdigest()
    source, target = tmp_path / "model", tmp_path / "back"
    source.write_bytes(data)
    location = Location(bucket, "copies")
    assert not location.has(blob_name(digest))
    assert not location.get(digest, target)
    location.put(source, digest)
    assert files(bucket) == [f"roundtable/{digest[:2]}/{digest}"]
    assert Location(bucket, "copies").get(digest, target)
    assert target.read_bytes() == data
    location.forget(blob_name(digest))
    assert files(bucket) == []
    location.forget(blob_name(digest))


def test_a_copy_that_is_damaged_in_the_bucket_is_not_used(bucket: str, tmp_path: Path) -> None:
    source, digest = tmp_path / "model", blake3(b"model").hexdigest()
    source.write_bytes(b"model")
    location = Location(bucket, "copies")
    location.put(source, digest)
    s3fs.S3FileSystem().pipe(f"{bucket}/{digest[:2]}/{digest}", b"mouse")
    s3fs.S3FileSystem.clear_instance_cache()
    assert not Location(bucket, "copies").get(digest, tmp_path / "back")
    assert not (tmp_path / "back").exists()


async def test_a_damaged_model_comes_back_from_the_bucket(
    bucket: str, settings: Callable[..., ServerConfig], certificates: Path, tmp_path: Path
) -> None:
    async with (
        running(settings(copies=[bucket], keep_models=1)) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as agent,
    ):
        job = await operator.submit(ONE, rounds=2)
        await agent.answer(await agent.expect("instruction"), torch.ones(4))
        second = await agent.expect("instruction")
        digest = second.train.model.digest
        async with asyncio.timeout(60):
            while not any(name.endswith(digest) for name in await asyncio.to_thread(files, bucket)):
                continue
        place = tmp_path / "state" / "artifacts" / "objects" / digest[:2] / digest
        data = await asyncio.to_thread(place.read_bytes)
        await asyncio.to_thread(place.write_bytes, bytes(len(data)))
        assert await agent.download(digest) == data
        await agent.answer(second, torch.ones(4))
        await operator.watch_until(job.id, "finished")


def test_a_bucket_is_the_home_of_artifacts_and_another_folder_a_cache(bucket: str, tmp_path: Path) -> None:
    first = ArtifactStore(tmp_path / "first", "me", Bucket(bucket))
    data = torch.arange(6_000_000.0).numpy().tobytes()
    digest, size = first.create([data[:5_000_000], data[5_000_000:]])
    assert files(bucket) == [f"roundtable/{digest[:2]}/{digest}", "roundtable/coordinator"]
    second = ArtifactStore(tmp_path / "second", "me", Bucket(bucket))
    assert (second.size(digest), second.digests()) == (size, [digest])
    assert second.path(digest).read_bytes() == data
    with pytest.raises(StorageError, match="belongs to coordinator me, the database to you"):
        Bucket(bucket).check_owner("you")
    home = Bucket(bucket)
    Location(bucket, "bucket").probe()
    second = ArtifactStore(tmp_path / "second", "me", home)
    assert second.delete([digest]) == 1
    home._purge()
    assert files(bucket) == ["roundtable/coordinator"]


def test_a_bucket_that_is_not_there_or_not_ours_is_named(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unreachable, match="s3://nobody-has-this/x does not do what it is asked to"):
        ArtifactStore(tmp_path / "first", "me", Bucket("s3://nobody-has-this/x"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Unreachable, match="Could not connect to the endpoint"):
        Bucket(bucket).check_owner("me")


@pytest.mark.parametrize(
    ("address", "library", "extra"),
    [("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gcs"), ("abfs://b/x", "adlfs", "azure")],
)
def test_a_kind_of_bucket_whose_library_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, address: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for protocol in (address.partition(":")[0], "s3a"):
        monkeypatch.delitem(registry, protocol, raising=False)
    said = rf"bucket = '{address}' needs the library '{library}', .* install 'roundtable-fl\[{extra}\]'$"
    with pytest.raises(ConfigError, match=said):
        Location(address, "bucket")
