"""A cluster trains on the samples of a stream that one process would take, round after round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster_cases import Case, adam
from cluster_models import Mixture, Normed
from cluster_plans import case, plan
from cluster_silo import TASK, Silo, watched
from ranks import run_ranks
from streamed_cases import after_streams
from tar_files import write_shards

from roundtable.cluster.parallel.strategy import Strategy

CODE = (
    TASK.split("    def data(self, site):", maxsplit=1)[0]
    + """
    def data(self, site):
        from roundtable.client.streams.tar_shards import TarShards
        self.options, self.calls = site.options, 0
        def decode(sample):
            number = int(sample["id"])
            g = torch.Generator().manual_seed(number)
            return torch.randn(8, generator=g) + 0.1 * torch.rand(8), number % 3
        folder = pathlib.Path(__file__).parent / "shards"
        return TarShards(sorted(folder.glob("*.tar")), decode, shuffle=10, lanes=LANES), None
"""
    + "    def loss(self, model, batch):"
    + TASK.split("    def loss(self, model, batch):", maxsplit=1)[1]
)
JOB = {"algorithm": {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 6, "steps": 7}}


def silo_of(folder: Path, lanes: int, **options: object) -> Silo:
    write_shards(folder / "shards", [9, 14, 5, 12])
    return Silo(folder, JOB, CODE.replace("LANES", str(lanes)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
async def test_rounds_over_a_stream_equal_one_process(lanes: int, tmp_path: Path) -> None:
    """With one lane both ranks share its records, with three one rank has two."""
    silo = silo_of(tmp_path, lanes)
    local: dict[str, torch.Tensor] = {}
    async with silo.trainer() as trainer:
        for round in (1, 2, 3):
            output = f"update-{round}"
            trained = await trainer.train(
                silo.work(round, output=output, counted=round - 1 or None), watched([])
            )
            assert trained.examples == trained.metrics["loss"][1] == 42
            if round == 2:  # The same attempt again goes on where round 1 stopped.
                again = await trainer.train(silo.work(round, output="again", counted=1), watched([]))
                assert again.digest == trained.digest
            assert torch.allclose(silo.update(output), silo.alone(round=round, local=local), atol=1e-6)
            silo.go_on(output)


SHAPES = [
    ("zero1", plan("zero1", dp=2)),
    ("zero3", plan("zero3", fsdp=2, checkpointing="every")),
    ("tp sequence", plan(tp=2, sequence_parallel=True)),
]
# One rank has two of three lanes, and runs their four examples of six at once.
NORMED = case("batch norm", plan("zero2", micro=4, fsdp=2), {"batch_size": 6, "steps": 3}, kind=Normed)
OTHERS = [("ddp", plan("ddp", dp=2)), ("zero2", plan("zero2", micro=1, fsdp=2)), ("tp", plan(tp=2))]
PRODUCTS = [
    ("hsdp", plan("zero3", dp=2, fsdp=2)),
    ("zero3 tp", plan("zero3", fsdp=2, tp=2)),
    ("dp tp", plan("zero2", dp=2, tp=2, sequence_parallel=True)),
]


@pytest.mark.parametrize(
    "shapes",
    [SHAPES, *(pytest.param(some, marks=pytest.mark.slow) for some in (OTHERS, PRODUCTS))],
    ids=["two ranks", "others of two", "four ranks"],
)
def test_every_strategy_takes_the_samples_of_one_process(
    shapes: list[tuple[str, Strategy]], tmp_path: Path
) -> None:
    """Ranks that split layers read the same lanes, others have lanes of their own."""
    urls = [str(path) for path in write_shards(tmp_path, [9, 14, 5, 12])]
    cases = [case(name, strategy, {"batch_size": 6, "steps": 3}) for name, strategy in shapes]
    if shapes is SHAPES:
        cases.append(NORMED)
    if shapes is PRODUCTS:
        experts = Case("ep", plan("zero3", fsdp=4, ep=2), adam(block=Mixture), {"batch_size": 6, "steps": 3})
        cases.append(experts)
    for gaps in run_ranks(after_streams, cases[0].strategy.mesh.world, cases, urls):
        assert {name: gap for name, gap in gaps.items() if not gap < 1e-6} == {}


@pytest.mark.slow
async def test_a_round_that_is_killed_goes_on_within_the_stream(tmp_path: Path) -> None:
    """A rank is killed in round 1, after a checkpoint; round 2 follows."""
    silo = silo_of(tmp_path, 3, trouble="kill", table={"timeout": 6.0, "checkpoint_steps": 2})
    local: dict[str, torch.Tensor] = {}
    async with silo.trainer() as trainer:
        for round in (1, 2):
            output = f"update-{round}"
            trained = await trainer.train(
                silo.work(round, output=output, counted=round - 1 or None), watched([])
            )
            assert trained.metrics["loss"][1] == 42
            assert torch.allclose(silo.update(output), silo.alone(round=round, local=local), atol=1e-6)
            silo.go_on(output)
        assert (tmp_path / "mark").exists()
