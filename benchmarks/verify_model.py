"""What an auditor's second execution of a round costs, beside the coordinator's own combining.

    python benchmarks/verify_model.py [--silos 20] [--elements 1000000]     # about ten seconds
    python benchmarks/verify_model.py --quick

Combining reads the updates' files as a coordinator does. Verifying reads the bundle, checks the log and every
silo's signature, hashes every file, combines, and hashes the model that comes out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from roundtable.aggregation import FileMatrix
from roundtable.core import JobConfig, Layout, Model
from roundtable.core.evidence.audit_log import entry, read_log
from roundtable.core.identity.credentials import SiloIdentity, create_ca, issue, load_silo_identity
from roundtable.core.identity.signing import envelope, job_digest
from roundtable.core.models import model_blocks, model_digest
from roundtable.engine import Plan, Rows, combine, initial_server_state, make_plan
from roundtable.engine.combining.new_model import new_model
from roundtable.engine.messages import BlobReference, Update
from roundtable.engine.verification.bundle import JOB, LOG, ROUNDS, Bundle, object_path, round_path
from roundtable.engine.verification.job_audit import JobAudit
from roundtable.server.versions import versions

RULES: dict[str, dict[str, Any]] = {"mean": {}, "trimmed_mean": {"f": 4}, "krum": {"f": 4}}
JOB_ID, TIMES = "a" * 12, 5


class Round:
    """One committed round of a job, as a bundle in a folder."""

    def __init__(self, folder: Path, ca: Path, rule: str, silos: int, elements: int) -> None:
        self.folder, self.ca = folder, (ca / "ca" / "ca.crt").read_bytes()
        table = {"rule": rule, "parameters": RULES[rule]}
        values = {"task": "t", "rounds": 1, "cohort": {"size": silos}, "aggregation": table}
        self.job = JobConfig.model_validate(values)
        self.plan: Plan = make_plan(self.job, silos)
        self.old = Model(Layout.of({"w": torch.zeros(elements)}), torch.zeros(elements))
        base = self._store(b"".join(bytes(block) for block in model_blocks(self.old)))
        self.rows = [self._update(ca / f"silo-{n:02d}", n, base, elements) for n in range(silos)]
        combined = self.combine()
        made = new_model(self.job, self.old, combined.vector, 1)
        self._store(b"".join(bytes(block) for block in model_blocks(made)))
        config = self.job.to_json()
        digests = {row["client"]: row["digest"] for row in self.rows}
        detail = {
            "config": job_digest(config),
            "round": 1,
            "attempt": 1,
            "cohort": sorted(digests),
            "updates": digests,
            "model": model_digest(made),
            "optimizer": "",
            "versions": versions(),
        }
        weights = dict(combined.account.weights)
        (folder / ROUNDS).mkdir()
        round_path(folder, 1).write_text(json.dumps({"round": 1, "updates": self.rows, "weights": weights}))
        self._write_log(load_silo_identity(ca / "hub"), detail)
        submitted = {"submitter": "olga", "request_id": "r", "signature": "", "certificate": "", "time": 0.0}
        job = {"id": JOB_ID, "config": config, "initial_model": base, "coordinator": "", "population": silos}
        (folder / JOB).write_text(json.dumps({**job, **submitted}))

    def combine(self) -> Any:
        """What the coordinator does."""
        paths = [object_path(self.folder, row["digest"]) for row in self.rows]
        updates = [Update(row["client"], BlobReference(row["digest"]), row["examples"]) for row in self.rows]
        columns = self.old.layout.size
        state = initial_server_state(self.plan, columns)
        rows = Rows(FileMatrix(paths, columns, "float32"), updates)
        return combine(self.plan, rows, self.old.vector, state, round=1, seed=self.job.seed)

    def verify(self) -> None:
        """What the auditor does, but for starting Python."""
        with (self.folder / LOG).open() as lines:
            log = read_log(lines, self.ca)
        audit = JobAudit(Bundle(self.folder), log, self.ca, log.proven(time.time()), versions())
        (verdict,) = audit.verdicts([1])
        assert not verdict.findings.refuted, verdict.findings
        # Nobody has signed the job here; everything else must hold.
        assert len(verdict.findings.unproven) == 1, verdict.findings

    def _update(self, credentials: Path, number: int, base: str, elements: int) -> dict[str, Any]:
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(number))
        digest, name = self._store(vector.numpy().tobytes()), credentials.name
        identity = load_silo_identity(credentials)
        step = {"client": name, "job": JOB_ID, "round": 1, "attempt": 1}
        sent = {"model": base, "update": digest, "examples": 100, "metrics": {}, "time": time.time()}
        return {
            "client": name,
            "round": 1,
            "attempt": 1,
            "digest": digest,
            "examples": 100,
            "loss": None,
            "statement": envelope(identity, "update", {**step, **sent}),
        }

    def _store(self, data: bytes) -> str:
        digest = blake3(data).hexdigest()
        path = object_path(self.folder, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return digest

    def _write_log(self, hub: SiloIdentity, detail: dict[str, Any]) -> None:
        made = entry(time.time(), "coordinator", "round_committed", JOB_ID, detail).after(None)
        seal = {"sequence": 1, "hash": made.hash, "time": made.time}
        sealed = json.dumps({"seal": envelope(hub, "seal", seal)})
        (self.folder / LOG).write_text(f"{made.to_line()}\n{sealed}\n")


def median_seconds(work: Callable[[], object]) -> float:
    """Of a few runs; one before them warms up."""
    work()
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the elements")
    given = parser.parse_args()
    elements = given.elements // 10 if given.quick else given.elements
    with tempfile.TemporaryDirectory() as place:
        ca = Path(place) / "certificates"
        create_ca(ca / "ca")
        issue(ca / "ca", "hub", "coordinator", ca / "hub", hosts=("127.0.0.1",))
        for number in range(given.silos):
            issue(ca / "ca", f"silo-{number:02d}", "agent", ca / f"silo-{number:02d}")
        print(f"{given.silos} silos, {elements} parameters; seconds, median of {TIMES}")
        for rule in RULES:
            folder = Path(place) / rule
            folder.mkdir()
            round = Round(folder, ca, rule, given.silos, elements)
            own, audit = median_seconds(round.combine), median_seconds(round.verify)
            print(f"{rule:<14} combine {own:.3f}   verify {audit:.3f}   ratio {audit / own:.2f}", flush=True)


if __name__ == "__main__":
    main()
