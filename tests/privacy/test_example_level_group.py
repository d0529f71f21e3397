"""Several processes of one silo: one noise, one model, rates over all of the data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_two_processes_add_the_noise_once_and_end_with_the_same_model(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_processes.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running]
    assert outputs[0] == outputs[1]
    assert outputs[0]["rate"] == 10 / 40
    weights = torch.tensor(outputs[0]["weights"], dtype=torch.float64)
    assert float(weights[2:].std()) == pytest.approx(0.5 / 10, rel=0.06)
    assert float(weights[0]) == pytest.approx(-7 / 10, abs=0.3)
    assert float(weights[1]) == pytest.approx(0.0, abs=0.3)
