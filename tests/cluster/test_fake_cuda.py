"""What strategies ask of CUDA, rank by rank, on fake tensors: places, types, waits, order of exchanges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

KIT = Path(__file__).parents[1] / "kit"
STEPS = 2
# FSDP2 and DDP copy so themselves: gradients that are offloaded, and once the order of DDP's buckets.
OWN_COPIES = ("zero3 offload", "ddp", "zero1")
# Exchanges and products in other types than float32; figures of a step travel in float64.
HALVES: dict[str, tuple[set[str], set[tuple[str, str]]]] = {
    "none bfloat16": ({"torch.bfloat16"}, set()),
    "zero3 bfloat16": ({"torch.bfloat16"}, {("allgather_base", "torch.bfloat16")}),
    "ddp float16": ({"torch.float16"}, set()),
    "ddp bfloat16 reduction": ({"torch.float32"}, {("allreduce", "torch.bfloat16")}),
}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What autograd asks of CUDA, compiled against the torch that is installed."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler: what autograd asks of CUDA cannot be compiled")
    there = Path(torch.__file__).parent
    made = tmp_path_factory.mktemp("guard") / "fake_cuda.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{there / 'include'}", f"-L{there / 'lib'}"]
    libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{there / 'lib'}"]
    command = [compiler, *flags, "-o", str(made), str(KIT / "fake_cuda.cpp"), *libraries]
    subprocess.run(command, check=True, capture_output=True)
    return made


def run(guard: Path, *names: str) -> dict[str, list[dict[str, Any]]]:
    """What each rank of these strategies asked for in a round of two steps; all strategies without names."""
    done = subprocess.run(
        [sys.executable, "fake_cuda_ranks.py", *names],
        cwd=KIT,
        env={**os.environ, "LD_PRELOAD": str(guard), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(line.removeprefix("FOUND "))
    return found


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        where = f"{name}, rank {number}"
        assert "error" not in rank, f"{where}: {rank['error']}"
        assert 0 < rank["seconds"] <= 1, f"{where}: steps that overlap are counted twice"
        assert rank["weights"] == [f"{'cpu' if name == 'zero3 offload' else 'cuda:0'} torch.float32"], where
        # Neither a product nor an exchange is left on the host, and it reads no number of the device's.
        assert not rank["on_cpu"], where
        assert not rank["reads"], where
        if not name.startswith(OWN_COPIES):
            assert not rank["copies"], f"{where}: copies for which the host waits"
        elif name != "zero3 offload":
            assert len(rank["copies"]) == 2, where
        if name != "zero3 offload":
            # It waits for one event a step: the figures.
            assert rank["waits"].count("event") == STEPS, where
            assert "device" not in rank["waits"], where
        products, exchanges = HALVES.get(name, ({"torch.float32"}, set()))
        assert set(rank["products"]) == products, where
        kinds = {(what, kind) for what, _, kind, _ in rank["exchanges"]}
        # Ranks tell each other in whole numbers how many tokens of each expert they send.
        usual = {"torch.float32", "torch.float64", "torch.int32", "torch.int64"}
        assert {each for each in kinds if each[1] not in usual} == exchanges, where
    for one, other in combinations(range(len(ranks)), 2):
        # NCCL hangs where two ranks begin what they share in another order, or with other sizes.
        first, second = (between(one, other, ranks[rank]["exchanges"], rank) for rank in (one, other))
        assert first == second, f"{name}: ranks {one} and {other}"
        assert first["together"]


def between(one: int, other: int, exchanges: list[Any], rank: int) -> dict[str, list[Any]]:
    """What two ranks share as `rank` saw it: together, and what stages send each way, each in its order."""
    shared: dict[str, list[Any]] = {"together": [], "there": [], "back": []}
    for what, members, kind, entries in exchanges:
        if {one, other} <= set(members):
            way = "there" if (what == "send") == (rank == one) else "back"
            alone = what in ("send", "recv")
            shared[way if alone else "together"].append((kind, entries, *([] if alone else [what, members])))
    return shared


def test_a_step_asks_the_device_alone_and_all_ranks_in_one_order(guard: Path) -> None:
    found = run(guard, "zero3 bfloat16", "ddp reads a number", "ddp out of order")
    check("zero3 bfloat16", found["zero3 bfloat16"])
    assert found["zero3 bfloat16"][0]["lags"], "the host waits for a step before it begins the next"
    # Two mistakes that it has to see.
    with pytest.raises(AssertionError, match="ddp reads a number, rank 0"):
        check("ddp reads a number", found["ddp reads a number"])
    with pytest.raises(AssertionError, match="ddp out of order: ranks 0 and 1"):
        check("ddp out of order", found["ddp out of order"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_so_does_every_strategy(guard: Path) -> None:
    found = run(guard)
    assert len(found) > 15
    for name, ranks in found.items():
        check(name, ranks)
