"""What a silo keeps until a group masks it: whole or absent, one of a job; each phase has its own work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundtable.client.door.incoming import ExchangeWork, ModelWork
from roundtable.client.door.model_names import ArtifactName
from roundtable.client.prepared_updates import (
    PreparedUpdate,
    PreparedUpdates,
    objection_to_phase,
    prepares,
)
from roundtable.client.step_key import StepKey
from roundtable.core import parse_job

STEP = StepKey("job-1", 1, 1, "prepare")
KEPT = PreparedUpdate(STEP, "a" * 64, "b" * 64, "c" * 64, 2, "d" * 64, 8, 5, (2.5, 5))
MASKS = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n[evaluation]\nevery = 0\n'
BUFFERED = '[round]\nmode = "buffered"\nbuffer = 3\n'


def keep(folder: Path, update: PreparedUpdate = KEPT) -> PreparedUpdates:
    kept = PreparedUpdates(folder / "prepared")
    plain = folder / "plain"
    plain.write_bytes(bytes(range(8)))
    kept.keep(plain, update)
    return kept


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "prepared").iterdir())


def test_what_is_kept_is_found_after_a_restart_with_the_rounds_that_masked_it(tmp_path: Path) -> None:
    kept = keep(tmp_path)
    assert kept.find(STEP) == KEPT
    kept.masks(KEPT, 3)
    kept.masks(kept.find(STEP) or KEPT, 3)
    kept.masks(kept.find(STEP) or KEPT, 4)
    again = PreparedUpdates(tmp_path / "prepared")
    assert again.recover() == [STEP]
    assert again.find(STEP) == replace(KEPT, masked_in=(3, 4))
    assert again.plain_of(STEP).read_bytes() == bytes(range(8))
    assert again.find(STEP._replace(attempt=2)) is None


def test_one_update_of_a_job_is_kept(tmp_path: Path) -> None:
    kept = keep(tmp_path)
    other, later = STEP._replace(job="job-1.5"), STEP._replace(round=2)
    keep(tmp_path, replace(KEPT, step=other))
    keep(tmp_path, replace(KEPT, step=later, loss=None))
    assert kept.recover() == [later, other]
    kept.remove(later)
    assert kept.find(later) is None
    kept.forget_job("job-1.5")
    assert names(tmp_path) == []


@pytest.mark.parametrize("left", ["plain", "json", "cut", "nonsense", "list"])
def test_what_a_crash_or_a_disk_has_left_of_one_is_none(tmp_path: Path, left: str) -> None:
    kept = keep(tmp_path)
    plain, description = (tmp_path / "prepared" / f"job-1.1.1.prepare.{end}" for end in ("plain", "json"))
    (tmp_path / "prepared" / ".job-1.1.1.prepare.json.partial").write_text("{")
    (tmp_path / "prepared" / "stray.json").write_text("{}")
    match left:
        case "plain":
            description.unlink()
        case "json":
            plain.unlink()
        case "cut":
            plain.write_bytes(b"1234")
        case "nonsense":
            description.write_text('{"step": 7}')
        case "list":
            description.write_text("[1, 2]")
    assert kept.find(STEP) is None
    assert kept.recover() == []
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "phase", "kind", "prepared", "words"),
    [
        (BUFFERED + MASKS, "prepare", "train", None, ""),
        (BUFFERED + MASKS, "train", "train", STEP, ""),
        (BUFFERED + MASKS, "evaluate", "evaluate", None, ""),
        (BUFFERED + MASKS, "train", "train", None, "asks to train: in this job that has the phase 'prepare'"),
        (BUFFERED + MASKS, "prepare", "train", STEP, "in this job that has the phase 'train'"),
        (BUFFERED + MASKS, "prepare", "evaluate", None, "its work 'evaluate'"),
        (MASKS, "train", "train", None, ""),
        (MASKS, "train", "train", STEP, "the job keeps none"),
        (MASKS, "prepare", "train", None, "its work 'train'"),
        (BUFFERED, "prepare", "train", None, "its work 'train'"),
        (BUFFERED, "train", "train", None, ""),
    ],
)
def test_a_step_asks_for_the_work_of_its_phase(
    text: str, phase: str, kind: str, prepared: StepKey | None, words: str
) -> None:
    job = parse_job(f'task = "t"\n{text}')
    work = ModelWork(kind, ArtifactName("a" * 64, 8), "c" * 64, prepared=prepared)  # type: ignore[arg-type]
    found = objection_to_phase(phase, work, job)
    assert (words in found) if words else found == ""
    assert objection_to_phase("exchange", ExchangeWork(b""), job) == ""
    assert prepares(job) == (text == BUFFERED + MASKS)
