"""What kills, ends and privacy do to an update that is shaped beside its ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cluster_silo import Silo
from torch import Tensor
from training_processes import workers

from roundtable.client.durable_files import digest_of
from roundtable.client.failures import WorkFailed
from roundtable.cluster.agent.shaped_updates import is_shaped
from roundtable.core import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.feedback import MEMORY
from roundtable.core.failpoints import VARIABLE
from roundtable.privacy.example_level import SiloAccount

FEEDBACK: dict[str, Any] = {"transfer": {"up": "topk(ratio=0.2) | int8(block=64)"}}
ZERO3 = {"strategy": {"data_parallel": "zero3", "fsdp": 2}}
EXAMPLE = {"level": "example", "clip_norm": 1e-3, "delta": 1e-3, "noise_multiplier": 3.0}


def left(silo: Silo) -> list[str]:
    """What lies in the silo's folders of the job."""
    places = (silo.folder, silo.config.state / "jobs" / "job-1")
    return sorted(
        path.name for place in places for path in place.glob("*update*") if place.exists()
    ) + sorted(path.name for path in places[1].rglob("*"))


def whole(silo: Silo, round: int = 1) -> Tensor:
    """What a round's update sends and has the silo remember, together."""
    encoding = get_encoding(silo.job.transfer.up).over(silo.model.layout.sent)
    sent = torch.zeros(silo.model.layout.size)
    encoding.decode((silo.folder / "update").read_bytes(), sent, StreamKey(3, "alder", round, 1))
    return sent + remembered(silo, round)


def remembered(silo: Silo, round: int) -> Tensor:
    path = silo.config.state / f"jobs/job-1/round-{round}.1.safetensors"
    return safetensors.torch.load_file(path)[MEMORY]


@pytest.mark.slow
async def test_a_process_that_is_killed_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for the ranks, and before what is remembered is durable; the ranks train once."""
    silo, troubles = Silo(tmp_path, FEEDBACK, table=ZERO3), list[tuple[str, str, str]]()

    def trouble(*said: str) -> None:
        troubles.append(said)  # type: ignore[arg-type]
        if len(troubles) == 2:
            monkeypatch.delenv(VARIABLE)

    def seen(done: int, *rest: Any) -> None:
        steps.append(done)
        if not troubles and done > 40:
            for process in workers(os.getpid()):
                os.kill(process, signal.SIGKILL)

    async with silo.trainer() as trainer:
        steps: list[int] = []
        await trainer.train(silo.work(), lambda *seen: None)
        wanted = whole(silo)
        monkeypatch.setenv(VARIABLE, "1/train/update_encoded:kill")
        told = await trainer.train(replace(silo.work(), trouble=trouble), seen)
        assert len(steps) == 16
        assert told.digest == digest_of(tmp_path / "update")
        # What is sent and what is remembered; ranks round their sums as memory lies.
        torch.testing.assert_close(whole(silo), wanted, rtol=1e-4, atol=1e-6)
        assert [kind for kind, _, _ in troubles] == ["node_failure"] * 2
        assert all("what is sent was killed" in detail for _, detail, _ in troubles)
        monkeypatch.setenv(VARIABLE, "1/train/memory_kept:kill")
        with pytest.raises(WorkFailed, match="what is sent was killed"):
            await trainer.train(silo.work(), lambda *seen: None)
    assert left(silo) == ["update", "round-1.1.safetensors"]


@pytest.mark.slow
async def test_nothing_stays_of_a_job_that_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still with its update half remembered, and would write on once the job is over."""
    silo = Silo(tmp_path, FEEDBACK, table=ZERO3)
    monkeypatch.setenv(VARIABLE, "1/train/update_encoded:stop")
    async with silo.trainer() as trainer:
        step = asyncio.create_task(trainer.train(silo.work(), lambda *seen: None))
        async for _ in looks():
            if stopped():
                break
        (tmp_path / "state/jobs/job-1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "state/jobs/job-1/.round-1.1.safetensors.partial").write_bytes(b"half")
        step.cancel()
        trainer.release("job-1", met=True)
        await asyncio.gather(*trainer._releasing)
        assert workers(os.getpid()) == []
        assert left(silo) == ["update"]  # The agent's own to remove.


async def looks() -> AsyncIterator[None]:
    """Again and again, for a minute at most."""
    async with asyncio.timeout(60):
        while True:
            yield
            await asyncio.sleep(0.05)


def stopped() -> bool:
    """Whether the process stands still."""
    found = [Path(f"/proc/{each}/stat").read_text() for each in workers(os.getpid())]
    return any(each.rsplit(")", 1)[1].split()[0] == "T" for each in found)


@pytest.mark.slow
async def test_noise_is_in_what_is_remembered_and_paid_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"learning_rate": 1.0, "batch_size": 8, "steps": 4}
    job = {"rounds": 2, "algorithm": algorithm, "privacy": EXAMPLE, **FEEDBACK}
    silo = Silo(tmp_path, job)
    before, changes = torch.zeros(silo.model.layout.size), []
    monkeypatch.setenv(VARIABLE, "1/train/update_encoded:kill")

    def trouble(*said: str) -> None:
        monkeypatch.delenv(VARIABLE)

    async with silo.trainer() as trainer:
        for round in (1, 2):
            work = replace(silo.work(round, counted=round - 1 or None), trouble=trouble)
            told = await trainer.train(work, lambda *seen: None)
            assert (told.examples, told.metrics) == (1, {})
            changes.append(whole(silo, round) - before)
            before = remembered(silo, round)
    account = SiloAccount.from_json((silo.config.state / "privacy/example.json").read_text())
    assert [entry.round for entry in account.entries] == [1, 2]
    # What is sent and what is remembered are together the update with all its noise, as in plain rounds.
    assert float(torch.cat(changes).std()) == pytest.approx(3e-3 / 8 * 4**0.5, rel=0.1)


@pytest.mark.parametrize(
    "privacy",
    [{"level": "none", "secure_aggregation": True, "clip_norm": 1.0}, {**EXAMPLE, "level": "distributed"}],
)
def test_ranks_write_what_is_masked_themselves(privacy: dict[str, Any]) -> None:
    """Of all that masks take; what is asked for beside is refused before round 1, or no agent's affair."""
    for up in ("float32", "randomk(ratio=0.5, indices=cohort)"):
        job = JobConfig.model_validate({"task": "toy", "privacy": privacy, "transfer": {"up": up}})
        assert not is_shaped(job)
