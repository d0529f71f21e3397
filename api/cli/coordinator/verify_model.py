"""`roundtable audit bundle` and `audit verify-model`: a job's models made again, offline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.coordinator.audit import FILE, UNPROVEN, ca_option, owner_of, read_export
from roundtable.cli.shared.options import APPROVALS, encodings_option, json_option
from roundtable.cli.shared.output import print_json, print_table, say

if TYPE_CHECKING:
    from roundtable.core import JobConfig
    from roundtable.engine.verification.findings import RoundVerdict

_SILENT_SECONDS = 2.0


@click.command("bundle")
@click.argument("config", type=FILE)
@click.argument("job")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@json_option
def bundle(config: Path, job: str, folder: Path, as_json: bool) -> None:
    """Write what an auditor needs to make a job's models again.

    Runs where the coordinator of CONFIG (coordinator.toml) keeps its state; it may run meanwhile. FOLDER has
    the silos' updates, as far as `keep_updates` has kept them: give it to nobody who may not read those.
    """
    from roundtable.server.storage.round_bundle import write_bundle
    from roundtable.settings import coordinator_settings

    written = write_bundle(coordinator_settings(config), job, folder)
    if as_json:
        print_json({**vars(written), "folder": str(folder)})
        return
    say(
        f"Wrote {written.rounds} rounds of job {written.job} and {written.artifacts} artifacts into {folder}."
    )
    if written.why_not:
        say(f"It holds no updates: {written.why_not}.")
    elif written.missing:
        say(f"{written.missing} artifacts were not kept: keep_updates in coordinator.toml says how long.")


@click.command("verify-model")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--round", "number", type=click.IntRange(1), help="This round alone; default: all.")
@click.option("--witness", "witnesses", type=FILE, multiple=True, help="A silo's own log; may be repeated.")
@encodings_option
@ca_option
@json_option
def verify_model(
    folder: Path,
    number: int | None,
    witnesses: tuple[Path, ...],
    approved: Mapping[str, str],
    authority: Path,
    as_json: bool,
) -> int:
    """Make a job's models again from a bundle, and compare.

    The bundle is in FOLDER; what comes out is compared with the committed models. Exit code 1: something
    contradicts what was signed. 3: nothing does, but something is shown by nothing.
    """
    from roundtable.core.encodings.foreign.approval import not_approved
    from roundtable.core.evidence.audit_log import check_signed
    from roundtable.core.evidence.cross_check import compare_logs, witnessed
    from roundtable.engine.verification.bundle import LOG, Bundle
    from roundtable.engine.verification.job_audit import JobAudit
    from roundtable.server.versions import versions

    found, ca = Bundle(folder), authority.read_bytes()
    log = read_export(folder / LOG, authority, False)
    check_signed(log)
    silos = {path: read_export(path, authority, True) for path in witnesses}
    contradictions = [
        line
        for path, own in silos.items()
        for line in compare_logs(log, own, owner_of(path, own), ca).contradictions
    ]
    seen = [] if contradictions else [n for own in silos.values() for n in witnessed(log, own, ca)]

    def unapproved(job: JobConfig) -> str:
        return "; ".join(not_approved(job.transfer.foreign, approved, "this auditor", APPROVALS))

    audit = JobAudit(found, log, ca, log.proven(time.time(), seen), versions(), unapproved)
    committed = [each.round for each in audit.rounds]
    if number is not None and number not in committed:
        raise click.UsageError(f"--round {number}: {len(committed)} rounds of this job are committed")
    verdicts: list[RoundVerdict] = []
    begun = time.monotonic()
    for wanted in [number] if number else committed:
        if not as_json and time.monotonic() - begun > _SILENT_SECONDS:
            say(f"round {wanted} of {committed[-1]} …", err=True)
        verdicts += audit.verdicts([wanted])
    if as_json:
        print_json(_plain(found.job.id, verdicts, contradictions))
    else:
        _show(found.job.id, verdicts, contradictions)
    worst = {verdict.findings.verdict for verdict in verdicts}
    if contradictions or "refuted" in worst:
        return 1
    return UNPROVEN if "unproven" in worst else 0


def _plain(job: str, verdicts: Sequence[RoundVerdict], contradictions: Sequence[str]) -> dict[str, object]:
    rounds = [
        {
            "round": item.round,
            "attempt": item.attempt,
            "model": item.model,
            "updates": item.updates,
            "verdict": item.findings.verdict,
            "refuted": list(item.findings.refuted),
            "unproven": list(item.findings.unproven),
        }
        for item in verdicts
    ]
    return {"job": job, "rounds": rounds, "contradictions": list(contradictions)}


def _show(job: str, verdicts: Sequence[RoundVerdict], contradictions: Sequence[str]) -> None:
    rows = [
        (item.round, item.updates, item.model[:12], item.findings.verdict.upper(), reason)
        for item in verdicts
        for reason in (*item.findings.refuted, *item.findings.unproven) or ("",)
    ]
    print_table(("round", "updates", "model", "verdict", "why"), rows, "There is no round.")
    for line in contradictions:
        say(f"REFUTED by a silo's log: {line}")
    good = sum(item.findings.verdict == "verified" for item in verdicts)
    say(f"Job {job}: {good} of {len(verdicts)} rounds verified, bit for bit.")
