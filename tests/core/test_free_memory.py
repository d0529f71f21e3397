"""What memory a process may still take: the machine's, and that of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.core.machine import process_facts
from roundtable.core.machine.process_facts import free_memory, group_limit

MEMORY = "MemTotal:  8000 kB\nMemAvailable:  4000 kB\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch) -> Path:
    """The folder of control groups; the process is in unit.service of the second version."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMORY)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n0::/system.slice/unit.service\n")
    monkeypatch.setattr(process_facts, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(process_facts, "_GROUP", tmp_path / "groups")
    return tmp_path / "groups"


def limited(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_without_a_limit_it_is_the_machines(groups: Path) -> None:
    limited(groups / "system.slice/unit.service", max="max", current=1)
    limited(groups / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=1)
    assert (free_memory(), group_limit()) == (4000 << 10, None)


def test_the_narrowest_group_counts_without_cached_files(groups: Path) -> None:
    pages = "anon 1000\nactive_file 300\ninactive_file 500"
    limited(groups / "system.slice/unit.service", max=9000, current=1800, stat=pages)
    limited(groups / "system.slice", max=20_000, current=1800, stat=pages)
    assert (free_memory(), group_limit()) == (8000, 9000)


def test_groups_of_the_first_version_count_too_where_their_tree_begins(groups: Path) -> None:
    pages = "cache 0\ntotal_active_file 10\ntotal_inactive_file 20"
    limited(groups / "memory", limit_in_bytes=5000, usage_in_bytes=6030, stat=pages)
    assert (free_memory(), group_limit()) == (0, 5000)
