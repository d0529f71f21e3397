"""Wheel and source distribution: the same bytes under another umask, at another time, by another user."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import distributions
import pytest


def archive(mtime: int, mode: int, owner: str, names: tuple[str, ...]) -> bytes:
    holder = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=holder, mode="wb", mtime=mtime) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as new,
    ):
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uname = len(name), mtime, mode, owner
            new.addfile(member, io.BytesIO(name.encode()))
    return holder.getvalue()


def test_what_differs_between_two_builds_is_taken_away_and_nothing_else() -> None:
    one = distributions.repacked(archive(1, 0o600, "ada", ("a/b", "a/c")), 1_000_000)
    other = distributions.repacked(archive(2, 0o644, "bob", ("a/c", "a/b")), 1_000_000)
    assert one == other
    assert one != distributions.repacked(archive(1, 0o755, "ada", ("a/b", "a/c")), 1_000_000)
    with tarfile.open(fileobj=io.BytesIO(one)) as read:
        assert [(each.name, each.mode, each.uname, each.mtime) for each in read] == [
            ("a/b", 0o644, "", 1_000_000),
            ("a/c", 0o644, "", 1_000_000),
        ]
        held = read.extractfile("a/b")
        assert held is not None
        assert held.read() == b"a/b"


@pytest.mark.slow
def test_two_builds_give_the_same_bytes_and_a_whole_package(tmp_path: Path) -> None:
    """Fetches setuptools, twine and cyclonedx-bom; needs a tree with a history."""
    if not (distributions.ROOT / ".git").exists():
        pytest.skip("distributions are built of a commit")
    built = []
    for number, mask in enumerate((0o022, 0o077)):
        before = os.umask(mask)
        try:
            built.append(distributions.build(tmp_path / str(number)))
        finally:
            os.umask(before)
    assert [file.read_bytes() for file in built[0]] == [file.read_bytes() for file in built[1]]
    wheel, source, bill = built[0]
    with zipfile.ZipFile(wheel) as packed, tarfile.open(source) as sources:
        inside = set(packed.namelist())
        assert {"roundtable/examples/digits/job.toml", "roundtable/privacy/mechanisms/gaussian.cpp"} <= inside
        assert any(name.endswith("/README.md") for name in sources.getnames())
    listed = {each["name"].lower(): each for each in json.loads(bill.read_bytes())["components"]}
    assert {"torch", "grpcio", "cryptography"} <= listed.keys()
    assert "pytest" not in listed
    assert all(each["version"] for each in listed.values())
