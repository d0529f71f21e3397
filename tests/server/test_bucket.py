"""Copies in a bucket: a server of the S3 protocol on this machine, spoken to by s3fs as any other would be.

Skipped where moto and s3fs are absent: `pip install s3fs 'moto[server]'` in the environment of the tests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.server import ServerConfig
from roundtable.server.copies import Location

REASON = "a bucket on this machine needs s3fs and moto: pip install s3fs 'moto[server]'"
s3fs = pytest.importorskip("s3fs", reason=REASON)
moto_server = pytest.importorskip("moto.server", reason=REASON)
ONE = "[cohort]\nsize = 1\n[evaluation]\nevery = 0"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket, found as in production: by the environment alone."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    # All servers of moto's in one process have the same buckets.
    name = f"models-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/roundtable"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def files(bucket: str) -> list[str]:
    """What lies there, as another client sees it; names from `roundtable/` on."""
    found = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    return sorted(name.partition("/")[2] for name in found.find(bucket.removeprefix("s3://")))


def test_a_copy_is_put_found_fetched_and_forgotten(bucket: str, tmp_path: Path) -> None:
    data = torch.arange(3_000_000.0).numpy().tobytes()
    digest = blake3(data).hexdigest()
    source, target = tmp_path / "model", tmp_path / "back"
    source.write_bytes(data)
    location = Location(bucket)
    assert not location.has(digest)
    assert not location.get(digest, target)
    location.put(source, digest)
    assert files(bucket) == [f"roundtable/{digest[:2]}/{digest}"]
    assert Location(bucket).get(digest, target)
    assert target.read_bytes() == data
    location.forget(digest)
    assert files(bucket) == []
    location.forget(digest)


def test_a_copy_that_is_damaged_in_the_bucket_is_not_used(bucket: str, tmp_path: Path) -> None:
    source, digest = tmp_path / "model", blake3(b"model").hexdigest()
    source.write_bytes(b"model")
    location = Location(bucket)
    location.put(source, digest)
    s3fs.S3FileSystem().pipe(f"{bucket}/{digest[:2]}/{digest}", b"mouse")
    s3fs.S3FileSystem.clear_instance_cache()
    assert not Location(bucket).get(digest, tmp_path / "back")
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
