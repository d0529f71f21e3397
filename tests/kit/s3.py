"""A bucket on this machine: a server of the S3 protocol, found as in production, by the environment alone."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_bucket(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a place in an empty bucket; skips where moto and s3fs are absent."""
    reason = "a bucket on this machine needs s3fs and moto's server: pip install 'roundtable-fl[s3,test]'"
    s3fs = pytest.importorskip("s3fs", reason=reason)
    moto_server = pytest.importorskip("moto.server", reason=reason)
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.setenv(name, "test")
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    # All servers of moto's in one process have the same buckets.
    name = f"models-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/roundtable"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
