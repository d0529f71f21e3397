"""Copies of checkpoints elsewhere: a folder of another disk, a bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from full_checkpoints import deliver_while_full, save_while_full
from ranks import run_ranks
from s3 import s3_bucket

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.train.checkpoint_places import (
    Mirror,
    Position,
    checkpoint_folder,
    mirrors,
    remove_checkpoints,
)
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.core.errors import ConfigError, ResourceError


def checkpoint(folder: Path, step: int) -> Path:
    place = folder / f"round-000001-step-{step:08d}"
    place.mkdir(parents=True)
    (place / "shard-1.safetensors").write_bytes(bytes([step]) * 1000)
    (place / "state.json").write_text(
        json.dumps({"position": {}, "files": {"shard-1.safetensors": "d" * 64}})
    )
    return place


def go_through(mirror: Mirror, other: Mirror, folder: Path) -> None:
    """Puts, finds, fetches and removes, as a round and a job's end do."""
    assert mirror.names() == []
    first, second = checkpoint(folder, 1), checkpoint(folder, 2)
    mirror.put(first)
    mirror.put(second)
    other.put(first)
    # The second time it replaces what is there.
    mirror.put(second)
    assert sorted(mirror.names()) == [first.name, second.name]
    assert mirror.describe(second.name)["files"] == {"shard-1.safetensors": "d" * 64}
    mirror.fetch(second.name, "shard-1.safetensors", folder / "back")
    assert (folder / "back").read_bytes() == bytes([2]) * 1000
    mirror.remove(first.name)
    assert mirror.names() == [second.name]
    mirror.remove()
    mirror.remove()
    assert (mirror.names(), other.names()) == ([], [first.name]), "those of no other job"


def test_a_folder_and_a_bucket_hold_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_through(*(Mirror(str(tmp_path / "disk"), job) for job in ("job-1", "job-2")), tmp_path / "a")
    with s3_bucket(monkeypatch) as address:
        go_through(*(Mirror(address, job) for job in ("job-1", "job-2")), tmp_path / "b")
        lost = Mirror("s3://no-such-bucket/checkpoints", "job-1")
        with pytest.raises(ResourceError, match="s3://no-such-bucket/checkpoints, the place for copies of"):
            lost.put(checkpoint(tmp_path, 3))


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_copy_under_way_when_the_job_is_released_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """The agent removes what there is, and does not wait for ranks that a scheduler has started."""
    table = ClusterTable(checkpoints=[str(tmp_path / "disk")])
    (mirror,) = mirrors(table, "job-1")
    made = checkpoint(checkpoint_folder(tmp_path, "job-1"), 1)
    said: list[str] = []
    checkpoints = Checkpoints(made.parent, [mirror], 1, cast("Any", None), said.append)
    put_file, put = type(mirror._files).put_file, []

    def then_released(self: Any, *names: str) -> None:
        if len(put) == copied:
            remove_checkpoints(tmp_path, table, "job-1")
            Path(names[1]).parent.mkdir(parents=True, exist_ok=True)
        put.append(names)
        put_file(self, *names)

    monkeypatch.setattr(type(mirror._files), "put_file", then_released)
    checkpoints._copy(made, mirror)
    if copied == 2:
        assert mirror.names() == [made.name]
        remove_checkpoints(tmp_path, table, "job-1")
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert said == []


@pytest.mark.parametrize(
    "state",
    [
        {"files": {"../../../x": "0" * 64}},
        {"files": {"..": "0" * 64}},
        {"files": {"a.safetensors": "short"}},
        {"files": ["a"]},
        {},
        [],
    ],
)
def test_what_others_write_into_a_place_names_no_path_here(tmp_path: Path, state: object) -> None:
    name = "round-000001-step-00000002"
    for strange in ("..", "x", name, "round-000001-step-00000002-and-more"):
        (tmp_path / "disk" / "job-1" / strange).mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / "job-1" / strange / "state.json").write_text(json.dumps(state))
    mirror = Mirror(str(tmp_path / "disk"), "job-1")
    assert mirror.names() == [name]
    with pytest.raises(ValueError, match=name):
        mirror.describe(name)


def test_a_description_that_would_fill_the_memory_or_the_stack_is_none(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "disk" / "job-1", 2) / "state.json"
    mirror = Mirror(str(tmp_path / "disk"), "job-1")
    for text in ("[" * 100_000, " " * (17 << 20)):
        place.write_text(text)
        with pytest.raises(ValueError, match=place.parent.name):
            mirror.describe(place.parent.name)


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    own, elsewhere = tmp_path / "own", Mirror(str(tmp_path / "disk"), "job-1")
    position = vars(Position.end_of(1, "", 2))
    for place, step in ((own, 1), (own, 2), (tmp_path / "disk" / "job-1", 3), (own, 4)):
        folder, lost = checkpoint(place, step), step == 1
        files = {"lost" if lost else "shard-1.safetensors": "d" * 64}
        text = json.dumps({"position": position if step < 4 else {}, "files": files})
        (folder / "state.json").write_text(text)
    said: list[str] = []
    group: Any = None  # Nobody is asked.
    assert not list(Checkpoints(own, [elsewhere], 1, group, said.append)._whole(lambda _: True))
    assert [line.removeprefix("checkpoint round-000001-step-") for line in said] == [
        "00000004 in the agent's state folder is not used: its description is none",
        f"00000003 comes from its copy at {elsewhere.address}",
        f"00000003 at {elsewhere.address} is not used: its file shard-1.safetensors is damaged",
        "00000002 in the agent's state folder is damaged, and is not used",
        "00000001 in the agent's state folder is not used: a file of it is missing",
    ]


def test_an_address_that_nothing_reads_is_refused_when_the_agent_starts() -> None:
    with pytest.raises(ConfigError, match="'nowhere://place' cannot be used"):
        mirrors(ClusterTable(checkpoints=("nowhere://place",)), "job-1")


def test_a_full_disk_costs_its_checkpoint_and_the_newest_stays_whatever_its_name(tmp_path: Path) -> None:
    (said, there, ended, newest), (_, _, others, _) = run_ranks(save_while_full, 2, tmp_path)
    (line,) = said
    assert line.startswith("checkpoint round-000001-step-00000004 could not be written: File too large; the")
    # One that was broken off is gone, and the full disk has nothing of its own left on it.
    assert there == ["2 of 1", "2 of 1", "1 of 1"]
    assert newest == 1
    assert ended == others
    assert "end of round 1" in ended[0]
    assert "File too large" in ended[0]


def test_a_full_disk_is_the_silos_and_not_a_mistake_in_the_task(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(deliver_while_full, 2, tmp_path)):
        assert [line.split(";")[0] for line in told] == [
            f"node_failure: the silo's disk is full (File too large): {name} could not be written"
            for name in ("update", "round-1.1.safetensors")[: 2 - rank]
        ]
