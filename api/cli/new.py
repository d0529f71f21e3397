"""`roundtable new`: a folder to begin with, made from a template or an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, print_table, say
from roundtable.starters import BUILT_EXAMPLES, STARTERS, StartingPoint, find_start, write_start

_DEFAULT = "tabular"


@click.command()
@click.argument("name", required=False)
@click.option(
    "--template", type=click.Choice(sorted(STARTERS)), help=f"What to begin with.  [default: {_DEFAULT}]"
)
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), help="Folder to make; default: ./NAME."
)
@click.option("--list", "listing", is_flag=True, help="List the templates and the examples.")
@json_option
def new(name: str | None, template: str | None, into: Path | None, listing: bool, as_json: bool) -> None:
    """Make a folder that runs at once: task, job, test.

    NAME becomes the task's name. The name of an example (see --list) copies that example.
    """
    if listing:
        _list(as_json)
        return
    if name is None:
        raise click.UsageError("say a NAME for the task, or --list to see what there is")
    # An example or a template under its own name; any other name is the task's.
    known = name in STARTERS or name in BUILT_EXAMPLES
    start = find_start(template or (name if known else _DEFAULT))
    folder = into or Path(name)
    files = write_start(start, name, folder)
    if as_json:
        print_json({"folder": str(folder), "from": start.name, "files": [str(file) for file in files]})
        return
    say(f"Made {folder} from the {_kind(start)} {start.name}: {', '.join(str(file) for file in files)}")
    if start.needs:
        say(f"It needs {start.needs}.")
    say("Try it:")
    say(f"  cd {folder}")
    say(f"  {start.run}")


def _kind(start: StartingPoint) -> str:
    return "example" if start.is_example else "template"


def _list(as_json: bool) -> None:
    starts = (*STARTERS.values(), *BUILT_EXAMPLES.values())
    if as_json:
        print_json([_values(start) for start in starts])
        return
    rows = [(start.name, _kind(start), start.says, start.needs) for start in starts]
    print_table(("name", "kind", "what it is", "needs"), rows, "nothing")
    say("roundtable new NAME --template TEMPLATE, or roundtable new EXAMPLE")


def _values(start: StartingPoint) -> dict[str, Any]:
    return {
        "name": start.name,
        "kind": _kind(start),
        "says": start.says,
        "run": start.run,
        "needs": start.needs or None,
    }
