"""How much a round adds to what is kept: the coordinator's database and log, the silo's logs."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from processes import Federation
from small_task import SMALL

FEW, MANY = 4, 24
SILOS = ("elm", "birch")
MOST = {"database": 7_000, "coordinator's log": 500, "silo's audit log": 3_500, "silo's log": 500}
"""Bytes a round, with two silos and an evaluation each round: docs/operator.md states them."""


def test_a_round_adds_no_more_than_the_page_says(tmp_path: Path) -> None:
    """A job of many rounds adds so much more than one of few rounds, once there was one before both."""
    federation = Federation(tmp_path, silos=SILOS, task=SMALL)
    sizes = []
    try:
        federation.coordinator()
        for name in SILOS:
            federation.agent(name)
        for number, rounds in enumerate((FEW, FEW, MANY)):
            job = federation.submit(federation.job(rounds=rounds), f"job {number}")
            assert federation.finish(job).job.rounds_done == rounds
            sizes.append(_sizes(federation))
    finally:
        federation.close()
    grown = {
        name: (few + many - 2 * middle) / (MANY - FEW)
        for name in MOST
        for few, middle, many in [[size[name] for size in sizes]]
    }
    assert all(0 < grown[name] <= most for name, most in MOST.items()), grown


def _sizes(federation: Federation) -> dict[str, int]:
    with sqlite3.connect(federation.folder / "server" / "coordinator.db") as database:
        (pages,), (page,), (free,) = (
            database.execute(f"PRAGMA {name}").fetchone()
            for name in ("page_count", "page_size", "freelist_count")
        )
    return {
        "database": (pages - free) * page,
        "coordinator's log": len(federation.log("hub")),
        "silo's audit log": (federation.folder / "silos" / "elm" / "audit.jsonl").stat().st_size,
        "silo's log": len(federation.log("elm")),
    }
