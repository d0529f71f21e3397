"""Every named place: killed there with SIGKILL and started again, a job ends with the very same model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from processes import SILOS, Federation

from roundtable.core.errors import ConfigError, UnavailableError
from roundtable.core.failpoints import AGENT_POINTS, COORDINATOR_POINTS, Failpoint

VICTIM = SILOS[0]
# Where in the job each point is reached; rounds 2 and 3 of three, so that there is a past to keep.
PLACES = {
    "job_stored": ("*/*",),
    "transition_due": ("1/select", "2/train", "2/aggregate", "2/evaluate", "2/commit"),
    "transition_open": ("2/train", "2/commit"),
    "transition_stored": ("1/train", "2/train", "2/aggregate", "2/evaluate", "2/commit", "3/commit"),
    "transition_done": ("2/train", "2/aggregate", "2/commit"),
    "model_part_sent": ("*/*",),
    "update_part": ("2/train",),
    "blob_synced": ("*/*",),
    "blob_named": ("*/*",),
    "receipt_due": ("2/train",),
    "aggregated": ("2/aggregate",),
    "retired": ("*/*",),
    "accepted": ("2/train", "2/evaluate"),
    "model_part": ("*/*",),
    "model_here": ("2/train", "2/evaluate"),
    "update_encoded": ("2/train",),
    "memory_kept": ("2/train",),
    "update_written": ("2/train",),
    "update_described": ("2/train",),
    "upload_part": ("2/train",),
    "receipt_here": ("2/train",),
    "evaluated": ("2/evaluate",),
}
# Of secure aggregation: the attempt in which round 1 is then committed.
SECURE = {"masked": 2, "keys_kept": 2, "update_described": 1, "update_kept": 1}
FAST = ("2/commit/transition_stored", "2/train/update_described")


def cases(points: dict[str, str]) -> list[Any]:
    places = [f"{place}/{point}" for point in points for place in PLACES.get(point, ())]
    return [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in places]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"))
    made.coordinator()
    for name in SILOS:
        made.agent(name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> Any:
    """The job's detail where nothing happens."""
    detail = federation.finish(federation.submit(federation.job(), "undisturbed"))
    assert detail.job.status == "finished", detail.job.reason
    return detail


def test_every_point_is_walked() -> None:
    assert set(PLACES) | set(SECURE) == set(COORDINATOR_POINTS) | set(AGENT_POINTS)


@pytest.mark.parametrize("place", cases(COORDINATOR_POINTS))
def test_the_coordinator_is_killed(federation: Federation, undisturbed: Any, place: str) -> None:
    if "hub" in federation.processes:
        federation.kill("hub")
    federation.coordinator(place)
    if place.endswith("job_stored"):
        with pytest.raises(UnavailableError), federation.operator() as operator:
            operator.submit(federation.job(), federation.folder / "initial.safetensors", request_id=place)
    else:
        federation.submit(federation.job(), place)
    assert federation.died("hub") == -signal.SIGKILL
    federation.coordinator()
    check(federation, federation.submit(federation.job(), place), undisturbed)


@pytest.mark.parametrize("place", cases(AGENT_POINTS))
def test_an_agent_is_killed(federation: Federation, undisturbed: Any, place: str) -> None:
    if "hub" not in federation.processes:
        federation.coordinator()
    federation.kill(VICTIM)
    federation.agent(VICTIM, place)
    job = federation.submit(federation.job(), place)
    assert federation.died(VICTIM) == -signal.SIGKILL
    federation.agent(VICTIM)
    check(federation, job, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("point", SECURE)
def test_an_agent_is_killed_while_it_masks(federation: Federation, undisturbed: Any, point: str) -> None:
    """Until its update is in the spool the attempt is begun afresh with new keys; then it goes on. An update
    that is kept for a group is masked after the restart."""
    if "hub" not in federation.processes:
        federation.coordinator()
    if VICTIM in federation.processes:
        federation.kill(VICTIM)
    kept = point == "update_kept"
    federation.agent(VICTIM, f"1/{'prepare' if kept else 'train'}/{point}")
    buffered = {"round": {"mode": "buffered", "buffer": len(SILOS)}, "cohort": {"grace": "10m"}}
    rounds = buffered if kept else {}
    privacy = {"level": "none", "secure_aggregation": True, "clip_norm": 10.0}
    wanted = federation.job(rounds=2, evaluation={"every": 0}, privacy=privacy, **rounds)
    job = federation.submit(wanted, f"secure {point}")
    assert federation.died(VICTIM) == -signal.SIGKILL
    federation.agent(VICTIM)
    detail = federation.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    records = [json.loads(record) for record in detail.history]
    assert [record["attempt"] for record in records] == [SECURE[point], 1]
    assert all(record["contributors"] == sorted(SILOS) for record in records)


def check(federation: Federation, job: str, undisturbed: Any) -> None:
    """The same model in each round, from the same silos, in the first attempt; nothing is said twice."""
    detail = federation.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    assert detail.job.model.digest == undisturbed.job.model.digest
    histories = (map(json.loads, found.history) for found in (detail, undisturbed))
    for mine, theirs in zip(*histories, strict=True):
        for key in ("round", "attempt", "model", "contributors", "training", "evaluation", "failures"):
            assert mine[key] == theirs[key], key
    with federation.operator() as operator:
        events = [event for update in operator.watch(job) for event in update.events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    delivered = [(event.round, event.client) for event in events if event.kind == "update_received"]
    assert sorted(delivered) == sorted((number, name) for number in (1, 2, 3) for name in SILOS)


@pytest.mark.parametrize("text", ["2/train", "2/train/nowhere", "2/train/accepted:burn", "/"])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write round/phase/point:action"):
        Failpoint(text)
