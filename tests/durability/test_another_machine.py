"""The active coordinator's machine is lost in mid-round: another goes on with what was acknowledged."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from postgresql import PostgreSQL
from processes import SILOS, Federation, free_port
from s3 import s3_bucket

SECONDS = 2.0
LATE = SILOS[-1]


@pytest.fixture(params=["file system", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file system":
        yield f"file://{tmp_path}/bucket"
    else:
        with s3_bucket(monkeypatch) as address:
            yield address


@pytest.mark.slow
def test_acknowledged_updates_outlive_the_machine_that_took_them(
    postgresql: PostgreSQL, tmp_path: Path, bucket: str
) -> None:
    settings = {"database": postgresql.fresh(), "lease": SECONDS, "bucket": bucket}
    federation = Federation(tmp_path, settings=settings)
    try:
        lose_the_first_machine(federation)
    finally:
        federation.close()


def lose_the_first_machine(federation: Federation) -> None:
    first, second = federation.folder / "first", federation.folder / "second"
    standby = free_port()
    federation.coordinator(state=str(first))
    federation.coordinator(name="standby", listen=f"127.0.0.1:{standby}", state=str(second))
    for name in SILOS:
        federation.agent(name, standbys=[f"127.0.0.1:{standby}"])
    undisturbed = federation.finish(federation.submit(federation.job(), "undisturbed"))
    federation.kill(LATE)
    late = federation.agent(LATE, "2/train/accepted:stop", standbys=[f"127.0.0.1:{standby}"])
    job = federation.submit(federation.job(), "disturbed")
    with federation.operator() as operator:
        federation.until(lambda: delivered(operator.job(job)) == 2)
    federation.kill("hub")
    shutil.rmtree(first)
    assert not list(second.glob("artifacts/objects/*/*"))
    federation.port = standby
    federation.until(lambda: "is listening" in federation.said("standby"))
    late.send_signal(signal.SIGCONT)
    detail = federation.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    histories = (map(json.loads, found.history) for found in (detail, undisturbed))
    for mine, theirs in zip(*histories, strict=True):
        for key in ("round", "attempt", "model", "contributors", "training", "evaluation", "failures"):
            assert mine[key] == theirs[key], key
    with federation.operator() as operator:
        events = [event for update in operator.watch(job) for event in update.events]
    once = [(event.round, event.client) for event in events if event.kind == "update_received"]
    assert sorted(once) == sorted((number, name) for number in (1, 2, 3) for name in SILOS)


def delivered(detail: Any) -> int:
    """Acknowledged updates of round 2."""
    return int(detail.waiting_for.split(" of ")[0]) if (detail.round, detail.phase) == (2, "train") else 0
