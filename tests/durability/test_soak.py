"""The soak of `benchmarks/soak.py`: its verdict finds what grows, and a short one of real processes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SAMPLES = 120
ROUNDS = np.arange(1, SAMPLES + 1) * 5.0
NOISE = np.random.default_rng(5).normal(size=SAMPLES)


@pytest.fixture(scope="module")
def verdict(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "benchmarks"))
    return importlib.import_module("soak_verdict")


def healthy() -> dict[str, Any]:
    """A coordinator that warms up, then stays, on a machine with other work."""
    spikes = np.where(np.arange(SAMPLES) % 17 == 0, 20.0, 1.0)
    return {
        "memory": 330 + 15 * (1 - np.exp(-ROUNDS / 40)) + 0.4 * NOISE,
        "files": 226 + (np.arange(SAMPLES) % 3),
        "threads": np.full(SAMPLES, 19),
        "database": 1 + 0.18 * ROUNDS,
        "log": np.full(SAMPLES, 0.01),
        "round": (1.5 + 0.1 * NOISE) * spikes,
        "job": (30 + 4 * NOISE) * spikes,
    }


LEAKS: dict[str, Callable[[np.ndarray], Any]] = {
    "memory": lambda values: values + 0.02 * ROUNDS,
    "files": lambda values: values + ROUNDS // 20,
    "threads": lambda values: values + ROUNDS // 50,
    "database": lambda values: values + 0.0004 * ROUNDS**2,
    "log": lambda values: values + np.where(ROUNDS > 300, (ROUNDS - 300) * 0.001, 0),
    "round": lambda values: values * (1 + ROUNDS / 300),
    "job": lambda values: values + 0.3 * ROUNDS,
}


@pytest.mark.parametrize("leak", [None, *LEAKS])
def test_the_verdict_names_what_grows_and_nothing_else(
    verdict: ModuleType, tmp_path: Path, leak: str | None
) -> None:
    columns = healthy()
    if leak is not None:
        columns[leak] = LEAKS[leak](columns[leak])
    rows = [
        {
            "time": place / 4,
            "rounds": ROUNDS[place],
            **{name: float(of[place]) for name, of in columns.items()},
        }
        for place in range(SAMPLES)
    ]
    file = tmp_path / "real.jsonl"
    lines = [{"kind": "real", "said": "made up"}, *rows]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = verdict.Run.read(file)
    found = verdict.judge(run)
    assert [each.quantity.name for each in found if not each.holds] == ([leak] if leak else [])
    assert verdict.table(run, found).count("GROWS") == (leak is not None)
    document = json.loads(json.dumps(verdict.as_json(run, found)))
    assert set(document["quantities"]) == set(healthy())
    verdict.draw([run], tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_samples_decide_nothing(verdict: ModuleType) -> None:
    for rounds in ([1.0] * 40, [1.0, 2.0, 3.0]):
        column = {name: np.array(rounds) for name in ("time", "rounds", "memory")}
        with pytest.raises(ValueError, match="let it run longer"):
            verdict.judge(verdict.Run({"kind": "real", "said": "short"}, column))


@pytest.mark.slow
def test_a_minute_of_rounds_leaves_no_descriptor_thread_or_artifact_behind(
    root: Path, tmp_path: Path
) -> None:
    words = [root / "benchmarks" / "soak.py", "--minutes", "1", "--agents", "8", "--out", tmp_path, "--json"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    (run,) = json.loads(done.stdout[done.stdout.index("[") :])
    assert run["rounds"] > 20
    # A minute says nothing of memory and latency, which a whole run judges.
    whole = ("files", "threads", "artifacts", "series", "agent_files", "agent_threads")
    assert [name for name in whole if not run["quantities"][name]["holds"]] == []
