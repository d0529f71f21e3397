"""`roundtable migrate`: a project of another framework, as files that run here."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, print_table, say
from roundtable.migration.outcome import Migration


@click.group()
def migrate() -> None:
    """Write what a project of another framework needs."""


@migrate.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def flower(path: Path, as_json: bool) -> None:
    """Read a Flower app; write its task and job.

    PATH is the project's folder or the file of its ClientApp. Nothing of it is run or changed: federated.py
    and job.toml (survey.toml for an app that only asks) are written beside it, and MIGRATION.md says what was
    not carried, with file and line.
    """
    from roundtable.migration.from_flower import migrate_flower

    _finish(migrate_flower(path), as_json)


@migrate.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def nvflare(path: Path, as_json: bool) -> None:
    """Read an NVFLARE script; write what joins rounds.

    PATH is a script of the client API or its folder. Nothing of it is run or changed: silo.py, a task for the
    coordinator and job.toml are written beside it, and MIGRATION.md says what was not carried, with file and
    line.
    """
    from roundtable.migration.from_nvflare import migrate_nvflare

    _finish(migrate_nvflare(path), as_json)


def _finish(outcome: Migration, as_json: bool) -> None:
    written = outcome.write()
    if as_json:
        print_json(outcome.as_json())
        return
    say(f"Wrote {', '.join(file.name for file in written)} in {outcome.home}")
    if outcome.lost:
        rows = [(each.what, f"{each.file}:{each.line}", each.instead) for each in outcome.lost]
        print_table(("not carried", "where", "here"), rows, "nothing")
    if "federated.py" in outcome.files:
        say("Try it: roundtable simulate job.toml")
