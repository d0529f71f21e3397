"""`roundtable sweep` and `roundtable compare`: one job with different settings, and what came of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, parse_value, set_option
from roundtable.cli.shared.output import interruptible, print_json, print_table, say
from roundtable.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from roundtable.simulation import Comparison


def _axes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    axes: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{value!r} is not key=[values], for example cohort.size=[5, 10]")
        parsed = parse_value(text.strip())
        axes[key.strip()] = parsed if isinstance(parsed, list) else [parse_value(v) for v in text.split(",")]
    return axes


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--vary",
    "axes",
    metavar="KEY=[VALUES]",
    multiple=True,
    callback=_axes,
    help="Values of one key of the job, for example cohort.size=[5,10]; repeated: every combination runs.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="TOML file with a [[run]] table of dotted keys for each run, instead of --vary.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for the runs and their comparison; called again, the sweep goes on there.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=2),
    help="Repeat each setting with so many seeds, from the job's on; shows mean ± deviation.",
)
@click.option(
    "--jobs", "at_once", type=click.IntRange(min=1), default=1, help="Runs at a time, each in a process."
)
@set_option
@json_option
def sweep(
    file: Path,
    axes: dict[str, Any],
    runs: Path | None,
    out: Path,
    seeds: int | None,
    at_once: int,
    overrides: dict[str, Any],
    as_json: bool,
) -> int:
    """Simulate a job with different settings, and compare.

    Ctrl-C stops it; the same command goes on with the rounds that are missing.
    """
    if axes and runs is not None:
        raise click.UsageError("say what to vary by --vary KEY=[VALUES] or by --runs FILE, not by both")
    if not axes and runs is None and seeds is None:
        raise click.UsageError("say what to vary: --vary KEY=[VALUES], --runs FILE or --seeds N")
    if seeds is not None and "seed" in axes:
        raise click.UsageError("--seeds varies the seed already: leave seed out elsewhere")
    from roundtable.core.config import load_job
    from roundtable.simulation import grid
    from roundtable.simulation import sweep as run

    settings = _listed(runs) if runs is not None else grid(axes)
    if seeds is not None:
        first = load_job(file, overrides).seed
        settings = [{**each, "seed": first + number} for each in settings for number in range(seeds)]
    ended = 0

    def done(name: str, rounds: int) -> None:
        nonlocal ended
        ended += 1
        if not as_json:
            say(f"{ended} of {len(settings)}  {name}: {rounds} rounds")

    with interruptible("The same command goes on where it stopped."):
        comparison = run(file, settings, out, fixed=overrides, at_once=at_once, done=done)
    _show(comparison, out / "comparison.png", as_json, "seed" if seeds is not None else None)
    return 0


@click.command()
@click.argument(
    "paths", metavar="RUNS...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the learning curves here (PNG)."
)
@click.option(
    "--over", metavar="KEY", help="Take runs that differ in this key alone together: mean ± deviation."
)
@json_option
def compare(paths: tuple[Path, ...], plot: Path | None, over: str | None, as_json: bool) -> int:
    """Put the runs in these run directories side by side.

    Files are passed over, so that SWEEP/* may name all that a sweep has left in its folder.
    """
    from roundtable.simulation import compare as side_by_side

    folders = [path for path in paths if path.is_dir()]
    if not folders:
        raise click.UsageError(f"{paths[0]} is not a run directory: name the folders of runs")
    _show(side_by_side(folders), plot, as_json, over)
    return 0


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("run")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: no [[run]] table; write one for each run, with dotted keys in quotes")
    return tables


def _show(comparison: Comparison, plot: Path | None, as_json: bool, over: str | None) -> None:
    if over is not None:
        found = comparison.over(over)
        if as_json:
            print_json(found)
        else:
            columns = list(dict.fromkeys(name for row in found for name in row))
            print_table(
                columns, [[_text(row.get(column)) for column in columns] for row in found], "No runs."
            )
    elif as_json:
        print_json(comparison.rows)
    else:
        columns = comparison.columns
        rows = [[_text(row.get(column)) for column in columns] for row in comparison.rows]
        print_table(columns, rows, "No runs.")
    if plot is None:
        return
    try:
        comparison.plot(plot, over)
    except ResourceError as error:
        say(f"No plot: {error}", err=True)


def _text(value: Any) -> Any:
    if isinstance(value, tuple):
        mean, spread = value
        return f"{mean:.4g}" if not spread else f"{mean:.4g} ± {spread:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else value
