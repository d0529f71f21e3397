"""A cluster trains on the samples of a stream that one process would take, round after round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster_silo import TASK, Silo, watched
from tar_files import write_shards

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
