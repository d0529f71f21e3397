"""Files that take another's place whole: evidence that is there is not lost for what does not come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roundtable.cli.main import run
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.paths import written_whole


def test_what_is_not_whole_takes_nothings_place(tmp_path: Path) -> None:
    file, link = tmp_path / "audit.jsonl", tmp_path / "newest.jsonl"
    file.write_text("before")
    file.chmod(0o600)
    link.symlink_to(file)
    with pytest.raises(UnicodeEncodeError), written_whole(link) as text:
        text.writelines(["half\n" * 10_000, "\ud800"])
    assert file.read_text() == "before"
    with written_whole(link) as text:
        text.write("Größe")
    assert (file.read_text(encoding="utf-8"), file.stat().st_mode & 0o777) == ("Größe", 0o600)
    assert sorted(os.listdir(tmp_path)) == ["audit.jsonl", "newest.jsonl"]
    with written_whole(os.devnull) as text:
        text.write("what is no file is written to")
    with (
        pytest.raises(OSError, match=r"nowhere/audit\.jsonl'"),
        written_whole(tmp_path / "nowhere/audit.jsonl"),
    ):
        pass


def test_an_export_that_fails_leaves_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "olga", "admin", tmp_path / "olga")
    nobody = ["--coordinator", "127.0.0.1:9", "--credentials", str(tmp_path / "olga")]
    file = tmp_path / "kept"
    for words in (["audit", "export"], ["model", "provenance", "job"], ["privacy", "export"]):
        file.write_text("before")
        assert run([*words, "-o", str(file), *nobody]) == 1
        assert "nothing listens at 127.0.0.1:9" in capsys.readouterr().err
        assert file.read_text() == "before"
