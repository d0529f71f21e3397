"""`roundtable privacy`: what a job's differential privacy costs before it runs, and what has been spent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from roundtable.cli.jobs.privacy_audit import audit
from roundtable.cli.jobs.privacy_ledger import budget, export, show
from roundtable.cli.shared.options import json_option, set_option
from roundtable.cli.shared.output import interruptible, print_json, say_lines, working


@click.group()
def privacy() -> None:
    """Plan differential privacy, and see what has been spent."""


for _command in (audit, show, budget, export):
    privacy.add_command(_command)


@privacy.command("plan")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option(
    "--plot",
    "image",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it into this image file.",
)
@click.option(
    "--group",
    type=click.IntRange(min=1),
    help="Also show epsilon for one person with so many records in a silo, or data at so many silos.",
)
@json_option
def plan(file: Path, overrides: dict[str, Any], image: Path | None, group: int | None, as_json: bool) -> None:
    """Show a job's noise, and its epsilon over the rounds.

    And what other mechanisms would give. FILE describes the job.
    """
    from roundtable.preparation import likely_population, prepare
    from roundtable.privacy import plot, privacy_plan, render
    from roundtable.privacy.levels import group_spending

    with interruptible("Nothing was changed."), working("solving for the noise, and comparing mechanisms"):
        prepared = prepare(file, overrides)
        job = prepared.job
        plan_of_job = privacy_plan(job, likely_population(job), prepared.model.layout.sent.size)
        if image is not None:
            plot(plan_of_job, image)
        of_group = None
        if group is not None:
            population, noise = likely_population(job), plan_of_job.noise_multiplier
            of_group = group_spending(job, noise, population, prepared.model.layout.sent.size, group)
    if as_json:
        print_json({**asdict(plan_of_job), **({"group": group, "group_epsilon": of_group} if group else {})})
        return
    say_lines(render(plan_of_job))
    if of_group is not None:
        what = "records in one silo" if job.privacy.level == "example" else "silos"
        say_lines(
            f"\nFor one person with data in {group} {what}: epsilon = {of_group:.4f} at the same delta, "
            "after all rounds."
        )
