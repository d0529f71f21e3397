"""What training ahead hides: rounds over a wide line where silos wait for each other's model, and do not.

    sudo python benchmarks/overlap.py                    # six minutes
    sudo python benchmarks/overlap.py --megabits 1000 --millions 32

The line is `wide_link.py`'s, between a coordinator and one silo with its training process, which trains a
network of so many million weights on rows of its own. Of each job the rounds behind the first two count, from
start to commit, and what the silo says of its training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from wide_link import COORDINATOR, PORT, namespaces, within

from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient

LAYERS, FRAGMENTS = 8, 4
TASK = """
import torch
from torch import nn
from roundtable.core import Task

class Wide(Task):
    def model(self):
        return nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range({layers})))
    def data(self, site):
        rows = torch.randn(64, {width}, generator=torch.Generator().manual_seed(1))
        return rows, None
    def loss(self, model, batch):
        return (model(batch) - batch).square().mean()
"""
WAYS: dict[str, dict[str, Any]] = {
    "fragments": {"name": "streaming", "fragments": FRAGMENTS},
    "fragments, overlap": {"name": "streaming", "fragments": FRAGMENTS, "overlap": True},
    "whole": {"name": "fedavg"},
    "whole, eager": {"name": "eager"},
}


def job_of(algorithm: dict[str, Any], steps: int, rounds: int) -> JobConfig:
    """A job of one silo."""
    return JobConfig.model_validate(
        {
            "task": "wide",
            "rounds": rounds,
            "algorithm": {**algorithm, "steps": steps, "batch_size": 64, "learning_rate": 1e-3},
            "aggregation": {"weighting": "uniform", "server_optimizer": {"name": "diloco"}},
            "cohort": {"size": 1, "wait": 60, "deadline": 600},
            "evaluation": {"every": 0},
        }
    )


def run_jobs(folder: Path, steps: int, rounds: int) -> None:
    """In the silo's namespace: runs each job, and prints the seconds of its rounds."""
    found = {}
    with OperatorClient(f"{COORDINATOR}:{PORT}", folder / "operator") as operator:
        for name, algorithm in WAYS.items():
            job = job_of(algorithm, steps, rounds)
            save_model(folder / "model", initial_model(job, load_task("wide.py", folder)))
            submitted = operator.submit(job, folder / "model")
            for _ in operator.watch(submitted.id):
                pass
            detail = operator.job(submitted.id)
            assert detail.job.status == "finished", detail.job.reason
            records = [json.loads(record) for record in detail.history]
            ends = [record["ended"] for record in records]
            found[name] = [after - before for before, after in pairwise(ends[1:])]
    print(json.dumps(found), flush=True)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of each way the median seconds of a round, from commit to commit."""
    width = round((options.millions * 1e6 / LAYERS) ** 0.5)
    (folder / "wide.py").write_text(TASK.format(width=width, layers=LAYERS), encoding="utf-8")
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", (COORDINATOR,))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    issue(folder / "ca", "alder", "agent", folder / "alder")
    (folder / "agent.toml").write_text(
        f'coordinator = "{COORDINATOR}:{PORT}"\ncredentials = "alder"\nstate = "silo"\n'
        '[tasks]\nwide = "wide.py:Wide"\n[limits]\ndevice = "cpu"\nthreads = 1\n',
        encoding="utf-8",
    )
    server = [sys.executable, "-m", "roundtable", "server", "--listen", f"{COORDINATOR}:{PORT}"]
    server += ["--state", str(folder / "state"), "--credentials", str(folder / "coordinator")]
    agent = [sys.executable, "-m", "roundtable", "client", "--config", str(folder / "agent.toml")]
    task = load_task("wide.py", folder)
    model, rows = task.model(), task.data(None)[0]
    torch.set_num_threads(1)
    began = time.perf_counter()
    for _ in range(3):
        task.loss(model, rows).backward()
    step = (time.perf_counter() - began) / 3
    steps = max(1, round(options.seconds / step))
    with namespaces(options.megabits * 1e6, options.milliseconds / 1e3, 64 << 20) as (hub, silo):
        jobs = [sys.executable, __file__, "--part", str(folder), str(steps), str(options.rounds)]
        with (
            within(hub, *server, said="is listening"),
            within(silo, *agent),
            within(silo, *jobs) as child,
        ):
            assert child.stdout is not None
            found = json.loads(child.stdout.read())
    return {name: statistics.median(seconds) for name, seconds in found.items()} | {"steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=8.0, help="of weights")
    parser.add_argument("--seconds", type=float, default=4.0, help="that training takes, about")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--megabits", type=float, default=100.0, help="a second that the line carries")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a round trip")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        folder, steps, rounds = options.part
        run_jobs(Path(folder), int(steps), int(rounds))
        return
    with tempfile.TemporaryDirectory(prefix="roundtable-overlap-") as folder:
        found = measure(Path(folder), options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for late, plain in (("fragments, overlap", "fragments"), ("whole, eager", "whole")):
        ratio = found[late] / found[plain]
        print(f"{plain:<10} {found[plain]:.2f} s a round; {late}: {found[late]:.2f} s, {ratio:.2f} of it")


if __name__ == "__main__":
    sys.exit(main())
