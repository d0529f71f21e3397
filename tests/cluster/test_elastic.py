"""Ranks that somebody else starts, and a node that joins them between two rounds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cluster_silo import Silo, watched
from processes import free_port


@contextmanager
def node(name: str, silo: Silo, port: int) -> Iterator[Path]:
    """torchrun with one rank, as deploy/cluster/torchrun.sh starts it; gives the file with what it says."""
    log = silo.folder / f"{name}.log"
    options = [
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=silo",
        "--rdzv-conf=last_call_timeout=1",
        "--monitor-interval=0.2",
    ]
    rank = ["-m", "roundtable.cluster.train.rank", str(silo.config.state / "cluster")]
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *rank],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            yield log
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_node_that_joins_trains_from_the_next_round_on(tmp_path: Path) -> None:
    silo, port = Silo(tmp_path, table={"launch": "external", "nodes": 2, "devices": 1}), free_port()
    async with silo.trainer() as trainer:
        with node("first", silo, port) as log:
            await trainer.train(silo.work(), watched([]))
            assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
            assert "plan: one device" in log.read_text()
            with node("second", silo, port):
                # torchrun ends the group of one, and rank 0's connection with it.
                assert trainer._line is not None
                async with asyncio.timeout(200):
                    assert await trainer._line[0].read() == b""
                await trainer.train(silo.work(round=2, output="second"), watched([]))
                assert torch.allclose(silo.update("second"), silo.alone(round=2), atol=1e-6)
                assert "plan: dp2" in log.read_text()
