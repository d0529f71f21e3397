"""`roundtable job diagnose`: what a round's updates looked like, and what the rule made of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import print_json, print_table, say

if TYPE_CHECKING:
    from roundtable.aggregation import Diagnosis


@click.command("diagnose")
@click.argument("target", metavar="JOB|RUN_DIR")
@click.option("--round", "number", type=click.IntRange(min=1), help="Which round; default: the last.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw cosines and distances of all pairs as heat maps into a PNG, SVG or PDF file.",
)
@connection_options
@json_option
def diagnose(
    target: str,
    number: int | None,
    plot: Path | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Show whose updates a round rejected or weighed down.

    By which rule, and by how much. JOB is a submitted job, or the run directory of a simulation. Cosines and
    distances are there where the rule compares updates, or where the job says `[aggregation] diagnosis =
    true`.
    """
    from roundtable.core.errors import ConfigError

    if (Path(target) / "history.jsonl").is_file():
        records = _simulated(Path(target))
    else:
        with connect(coordinator, credentials) as operator:
            records = [json.loads(record) for record in operator.job(target).history]
    if not records:
        raise ConfigError(f"{target} has no committed round yet: there is nothing to diagnose")
    record = _chosen(records, number, target)
    if not record["diagnosis"]:
        raise ConfigError(
            f"round {record['round']} of {target} has no diagnosis: secure aggregation or central "
            "noise keeps single updates from being inspected"
        )
    diagnosis = _diagnosis(record)
    if plot is not None:
        _draw(diagnosis, plot)
    if as_json:
        verdicts = dict(diagnosis.verdicts())
        print_json({"round": record["round"], **record["diagnosis"], "verdicts": verdicts})
        return
    _show(diagnosis, record, records)
    if plot is not None:
        say(f"The heat maps are in {plot}.")


def _simulated(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["record"] for line in lines]


def _chosen(records: Sequence[dict[str, Any]], number: int | None, target: str) -> dict[str, Any]:
    from roundtable.core.errors import ConfigError

    if number is None:
        return records[-1]
    for record in records:
        if record["round"] == number:
            return record
    raise ConfigError(f"--round {number}: {target} has committed {len(records)} rounds")


def _diagnosis(record: dict[str, Any]) -> Diagnosis:
    from roundtable.aggregation import Diagnosis

    return Diagnosis.from_dict(record["diagnosis"])


def _draw(diagnosis: Diagnosis, path: Path) -> None:
    from roundtable.core.errors import ConfigError, ResourceError

    try:
        diagnosis.plot(path)
    except ImportError as error:
        raise ResourceError(
            f"--plot needs matplotlib: pip install 'roundtable-fl[plot]' ({error})"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}; set [aggregation] diagnosis = true") from error


def _show(diagnosis: Diagnosis, record: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    say(f"round {record['round']} of {len(records)}: {diagnosis.rule} over {len(diagnosis.clients)} updates")
    header, rows = diagnosis.table()
    print_table(header, rows, "no update was used")
    if diagnosis.cosine is None:
        say("Pairs were not compared; set [aggregation] diagnosis = true to have it done.")
    times: Counter[str] = Counter()
    rounds = [_diagnosis(each) for each in records if each["diagnosis"]]
    for each in rounds:
        times.update(silo for silo, verdict in each.verdicts() if not verdict.startswith("used"))
    if times:
        often = ", ".join(f"{silo} in {count}" for silo, count in sorted(times.items()))
        say(f"Left out, rejected or weighed down, of {len(rounds)} rounds: {often}.")
