"""Peak memory of rules over files, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import sys
from pathlib import Path
from roundtable.aggregation import AggregationConfig, ClientRow, FileMatrix, aggregate

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

folder, columns = Path(sys.argv[1]), int(sys.argv[2])
paths = sorted(folder.iterdir())
clients = [ClientRow(path.name) for path in paths]
before, f = memory("VmRSS"), len(paths) // 5
for rule, parameters, pre in (
    ("median", {}, ()),
    ("trimmed_mean", {"f": f}, ()),
    ("multi_krum", {"f": f}, ()),
    ("geometric_median", {}, ()),
    ("trimmed_mean", {"f": f}, (("arc", {}), ("nnm", {}))),
):
    aggregate(FileMatrix(paths, columns), clients, AggregationConfig(rule, parameters, pre))
print(memory("VmHWM") - before, memory("VmHWM"))
"""


def peak(folder: Path, rows: int, columns: int) -> tuple[float, float]:
    """MB above the start, and in all, that five rules take over `rows` files of `columns` values."""
    for index in range(rows):
        values = np.random.default_rng(index).standard_normal(columns, dtype=np.float32)
        values.tofile(folder / f"{index:03}")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(columns)], capture_output=True, text=True, check=True
    )
    grown, whole = run.stdout.split()
    return float(grown), float(whole)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure memory")
def test_rules_over_files_take_a_few_blocks_of_memory(tmp_path: Path) -> None:
    rows, columns = 60, 2_000_000
    grown, _ = peak(tmp_path, rows, columns)
    assert grown < 0.5 * rows * columns * 4 / 2**20


@pytest.mark.bigmem
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure memory")
def test_ten_gigabytes_of_updates_need_less_than_one_and_a_half(tmp_path: Path) -> None:
    _, whole = peak(tmp_path, 100, 25_000_000)
    assert whole < 1500
