"""The silo's own log, on a disk that is full for a while."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from file_limit import files_of_at_most

from roundtable.client.agent.silo_log import SiloLog
from roundtable.core.errors import ResourceError


def test_a_line_that_a_full_disk_cut_off_spoils_none_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = SiloLog(path, tmp_path)
    log.note("coordinator", "asked", "j", round=1)
    with (
        files_of_at_most(path.stat().st_size + 20),
        pytest.raises(ResourceError, match="nothing is done without it: the silo's disk is full"),
    ):
        log.note("coordinator", "asked", "j", round=2)
    log.note("coordinator", "asked", "j", round=3)
    # Another process takes it up as it is.
    SiloLog(path, tmp_path).note("coordinator", "asked", "j", round=4)
    entries = [json.loads(line)["entry"] for line in path.read_text().splitlines()]
    assert [(entry["sequence"], entry["detail"]["round"]) for entry in entries] == [(1, 1), (2, 3), (3, 4)]
    assert path.stat().st_mode & 0o777 == 0o600
