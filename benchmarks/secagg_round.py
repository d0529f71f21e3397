"""A whole round with and without secure aggregation: three real agents and a coordinator over mTLS.

    python benchmarks/secagg_round.py [--elements 1000000] [--rounds 10]     # about half a minute
    python benchmarks/secagg_round.py --quick

Coordinator and agents are processes of their own. Training is left out, an agent's update lies ready:
a round is the model's way down, the key exchange, masking, upload, unmasking, the new model stored and
committed. The two jobs take turns; the first round of each warms up and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transport import coordinator, run_agent, spawn

from roundtable.core import Layout, Model, parse_job, save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient

AGENTS = ("alder", "birch", "cedar")
SECURE = "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 2.0\n"
TARGET = 2.0


def seconds(operator: OperatorClient, model: Path, rounds: int, table: str) -> list[float]:
    """What each round of a job took, the first left out."""
    job = parse_job(
        f'task = "ready"\nrounds = {rounds}\n[cohort]\nsize = 3\nwait = 60\n[evaluation]\nevery = 0\n{table}'
    )
    submitted = operator.submit(job, model)
    for _ in operator.watch(submitted.id):
        pass
    detail = operator.job(submitted.id)
    assert detail.job.status == "finished", detail.job.reason
    records: list[dict[str, Any]] = [json.loads(record) for record in detail.history]
    return [record["ended"] - record["started"] for record in records[1:]]


def measure(folder: Path, elements: int, rounds: int) -> dict[str, float]:
    """Median seconds of a round, both ways, and their ratio."""
    create_ca(folder / "ca")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", ("localhost", "127.0.0.1"))
    issue(folder / "ca", "operator", "operator", folder / "operator")
    for name in AGENTS:
        issue(folder / "ca", name, "agent", folder / name)
    state = {"w": torch.zeros(elements)}
    layout = Layout.of(state)
    save_model(folder / "model.safetensors", Model(layout, layout.flatten(state)))
    plain: list[float] = []
    secure: list[float] = []
    with coordinator(folder) as (port, _):
        agents = [
            spawn.Process(target=run_agent, args=(folder, port, name, elements), daemon=True)
            for name in AGENTS
        ]
        for agent in agents:
            agent.start()
        with OperatorClient(f"localhost:{port}", folder / "operator") as operator:
            for _ in range(2):
                plain += seconds(operator, folder / "model.safetensors", rounds, "")
                secure += seconds(operator, folder / "model.safetensors", rounds, SECURE)
        for agent in agents:
            agent.terminate()
            agent.join()
    without, masked = statistics.median(plain), statistics.median(secure)
    return {"elements": elements, "plain_s": without, "secure_s": masked, "ratio": masked / without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1_000_000, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each of the four jobs")
    parser.add_argument("--quick", action="store_true", help="four rounds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roundtable-secagg-") as folder:
        found = measure(Path(folder), options.elements, 4 if options.quick else options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    plain, secure = 1e3 * found["plain_s"], 1e3 * found["secure_s"]
    print(f"a round of 3 agents over mTLS, {options.elements / 1e6:g} M parameters, without training")
    print(f"in the clear {plain:.0f} ms, with secure aggregation {secure:.0f} ms")
    print(f"{found['ratio']:.2f} times as long (target ≤ {TARGET:g})")


if __name__ == "__main__":
    sys.exit(main())
