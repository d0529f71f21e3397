"""Rounds that a silo makes private itself, over its ranks: one noise, one charge, what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_plans import plan
from cluster_privacy import PrivateCase, one_process, private_round, withdrawn_work, written
from cluster_silo import Silo, watched
from ranks import run_ranks

from roundtable.client.failures import WorkFailed
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.privacy import Charge
from roundtable.privacy.example_level import SiloAccount

CLIP = 0.05
EXAMPLE = {"level": "example", "clip_norm": CLIP, "delta": 1e-3, "local_steps": 3}
LOCAL = {"level": "client_local", "clip_norm": CLIP, "delta": 1e-3}


def test_two_ranks_clip_and_sum_as_one_process_and_add_its_noise_once(tmp_path: Path) -> None:
    # With all 64 examples in every batch nothing is left to chance but the noise, which is seeded.
    case = PrivateCase(plan("ddp", dp=2, micro=5), {**EXAMPLE, "noise_multiplier": 2.0, "batch_size": 64})
    found = run_ranks(private_round, 2, case, tmp_path, True)
    expected = one_process(case)
    # Sums in another order may fall on the other side of a step of the grid that noise is rounded to.
    assert torch.allclose(written(tmp_path), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert [len(each["paid"]) for each in found] == [len(each["asked"]) for each in found] == [1, 0]
    charge = Charge.from_json(found[0]["paid"][0])
    assert (charge.unit, charge.rate, charge.steps) == ("example", 1.0, 3)


def test_all_ranks_stop_where_the_first_one_is_told_in_training_and_in_evaluation() -> None:
    case = PrivateCase(plan("ddp", dp=2, micro=5), {**EXAMPLE, "noise_multiplier": 2.0, "batch_size": 8})
    assert run_ranks(withdrawn_work, 2, case, 2) == [([1, 2], 1, 1), ([1, 2], 1, 0)]


@pytest.mark.parametrize(
    "strategy",
    [
        plan("zero3", fsdp=2),
        pytest.param(plan(pp=2), marks=pytest.mark.slow),
        pytest.param(plan("ddp", dp=2), marks=pytest.mark.slow),
    ],
    ids=["zero3", "pipeline", "ddp"],
)
def test_the_whole_update_is_clipped_and_every_entry_gets_its_noise_once(
    strategy: Strategy, tmp_path: Path
) -> None:
    unclipped = one_process(PrivateCase(strategy, {**LOCAL, "noise_multiplier": 1.0}), plain=True)
    assert float(unclipped.norm()) > 2 * CLIP
    clipped = unclipped * (CLIP / unclipped.norm())
    faint = PrivateCase(strategy, {**LOCAL, "noise_multiplier": 1e-9})
    found = run_ranks(private_round, 2, faint, tmp_path, False)
    assert torch.allclose(written(tmp_path), clipped, atol=1e-6 * CLIP)
    assert [len(each["paid"]) for each in found] == [1, 0]
    loud = PrivateCase(strategy, {**LOCAL, "noise_multiplier": 2.0})
    run_ranks(private_round, 2, loud, tmp_path, False)
    noise = written(tmp_path) - clipped
    assert float(noise.std()) == pytest.approx(2 * CLIP, rel=0.02)
    halves = noise[: len(noise) // 2 * 2].view(2, -1)
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 0.03
    assert len(noise.unique()) > 0.9 * len(noise)


def account(silo: Silo, unit: str) -> SiloAccount:
    return SiloAccount.from_json((silo.config.state / "privacy" / f"{unit}.json").read_text())


def privately(folder: Path, level: str = "example", steps: int = 4, **options: Any) -> Silo:
    table = {"level": level, "clip_norm": 1e-3, "delta": 1e-3, "noise_multiplier": 3.0}
    algorithm = {"learning_rate": 1.0, "batch_size": 8, "steps": steps}
    return Silo(folder, {"rounds": 2, "algorithm": algorithm, "privacy": table}, **options)


async def test_the_agents_cluster_pays_once_a_round_and_tells_nothing_exact(tmp_path: Path) -> None:
    silo = privately(tmp_path)
    async with silo.trainer() as trainer:
        seen: list[int] = []
        trained = await trainer.train(silo.work(), watched(seen))
        assert (trained.examples, trained.metrics) == (1, {})
        assert len(seen) == 4
        await trainer.train(silo.work(round=2, output="second"), watched([]))
    entries = account(silo, "example").entries
    assert [(entry.job, entry.round) for entry in entries] == [("job-1", 1), ("job-1", 2)]
    assert {entry.charge.rate for entry in entries} == {8 / 64}
    assert {entry.charge.steps for entry in entries} == {4}
    # Gradients are clipped to a third of the noise's deviation: what is seen is four steps of noise.
    both = torch.cat([silo.update(), silo.update("second")])
    assert float(both.std()) == pytest.approx(3e-3 / 8 * 4**0.5, rel=0.1)
    assert not torch.equal(silo.update(), silo.update("second"))


@pytest.mark.slow
async def test_what_the_silos_own_limit_does_not_hold_is_refused_before_training(tmp_path: Path) -> None:
    silo = privately(tmp_path, policy={"epsilon": 0.001})
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match="budget holds no further round") as failed:
            await trainer.train(silo.work(), watched([]))
    assert failed.value.kind == "refused"
    assert not (silo.config.state / "privacy").exists()


@pytest.mark.slow
async def test_a_round_that_broke_is_paid_for_once(tmp_path: Path) -> None:
    # The first few losses are for the choice of how gradients are clipped.
    silo = privately(tmp_path, steps=16, trouble="kill", call=14, table={"checkpoint_steps": 1})
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
        assert (tmp_path / "mark").exists()
        assert torch.isfinite(silo.update()).all()
        assert not list((silo.config.state / "cluster" / "checkpoints").rglob("*.safetensors"))
    assert len(account(silo, "example").entries) == 1


@pytest.mark.slow
async def test_the_whole_update_leaves_with_its_noise_alone(tmp_path: Path) -> None:
    silo = privately(tmp_path, "client_local", table={"strategy": {"data_parallel": "zero3"}})
    async with silo.trainer() as trainer:
        trained = await trainer.train(silo.work(), watched([]))
    assert (trained.examples, trained.metrics) == (1, {})
    assert float(silo.update().std()) == pytest.approx(3e-3, rel=0.15)
    (entry,) = account(silo, "client").entries
    assert entry.charge.steps == 1
