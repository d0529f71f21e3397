"""`roundtable privacy audit`: whether what a job would publish bears out the epsilon that it states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, set_option
from roundtable.cli.shared.output import console, interruptible, print_json, print_table, say

if TYPE_CHECKING:
    from roundtable.core import JobConfig
    from roundtable.privacy.audit.report import AuditReport
    from roundtable.simulation.canary_rounds import Watch

REFUTED = 1
"""Exit code: what was published contradicts what is stated."""


@click.command("audit")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1.0 - 1e-9),
    default=0.999,
    show_default=True,
    help="Of all bounds together.",
)
@click.option(
    "--coordinates",
    type=click.IntRange(64, 1 << 24),
    default=1 << 15,
    show_default=True,
    help="Weights at which the noise is measured: four times as many halve the error.",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Rounds under the job's own noise; default: 3, dp_ftrl: all."
)
@json_option
def audit(
    file: Path,
    overrides: dict[str, Any],
    confidence: float,
    coordinates: int,
    rounds: int | None,
    as_json: bool,
) -> int:
    """Bound a job's epsilon from below, by canaries.

    FILE describes the job; what its mechanism publishes of canaries is judged. The job's privacy, sampling
    and rounds are simulated with a task of which every update is known. Exit code 1 where the bound exceeds
    what is stated, or something that epsilon rests on does not hold.
    """
    from roundtable.core.config import load_job
    from roundtable.preparation import likely_population

    job = load_job(file, overrides)
    how = {"coordinates": coordinates, "confidence": confidence, "rounds": rounds, "folder": file.parent}
    found = audited(job, likely_population(job), as_json, **how)
    if as_json:
        print_json(report_values(found))
    else:
        show_report(found)
    return REFUTED if found.refuted else 0


def audited(job: JobConfig, clients: int, silent: bool, **how: Any) -> AuditReport:
    """The audit of a job over so many clients; unless `silent` with a word on how far it is."""
    from roundtable.simulation.canary_rounds import audit_job

    with interruptible("Nothing is kept of an audit."), _progress(silent) as watch:
        return audit_job(job, clients, watch=watch, **how)


@contextmanager
def _progress(silent: bool) -> Iterator[Watch]:
    if silent or not console().is_terminal:
        yield lambda done, total: None if silent else say(f"round {done} of {total} with canaries", err=True)
        return
    from rich.progress import Progress

    with Progress(console=console(), transient=True) as bars:
        task = bars.add_task("rounds with canaries", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def report_values(found: AuditReport) -> dict[str, Any]:
    """An audit as JSON can hold it."""
    bound = found.bound if math.isfinite(found.bound) else None
    return {**asdict(found), "bound": bound, "refuted": found.refuted}


def show_report(found: AuditReport) -> None:
    """Prints an audit for people."""
    rows = [
        [
            finding.name,
            *((f"{finding.claimed:.4g}", f"{finding.seen:.4g}") if finding.caught else ("", "")),
            "REFUTED" if finding.refuted else "holds",
            f"{finding.caught:.4g}" if finding.caught else "",
            finding.words,
        ]
        for finding in found.findings
    ]
    print_table(["", "claimed", "seen", "", "caught from", "how"], rows, "")
    say()
    say(f"stated epsilon      {found.stated:.4f}  at delta = {found.delta:g}, level {found.level}")
    bound = f"{found.bound:.4f}" if math.isfinite(found.bound) else "no epsilon holds"
    say(f"audited from below  {bound}  with confidence {found.confidence:g}")
    if found.guessed:
        say(f"by guesses alone    {found.guessed:.4f}  of the audited rounds, whatever the noise is")
    say("REFUTED: less privacy than stated." if found.refuted else "Nothing contradicts the statement.")
