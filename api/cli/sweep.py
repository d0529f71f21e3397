"""`roundtable sweep` and `roundtable compare`: one job with different settings, and what came of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, parse_value
from roundtable.cli.shared.output import interruptible, print_json, print_table, say
from roundtable.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from roundtable.simulation import Comparison, Progress


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
@json_option
def sweep(file: Path, axes: dict[str, Any], runs: Path | None, out: Path, as_json: bool) -> int:
    """Simulate the job that FILE describes with different settings, and compare."""
    if bool(axes) == (runs is not None):
        raise click.UsageError("say what to vary: --vary KEY=[VALUES], or --runs FILE")
    from roundtable.simulation import grid
    from roundtable.simulation import sweep as run

    settings = _listed(runs) if runs is not None else grid(axes)

    def report(name: str, progress: Progress) -> None:
        if progress.kind == "round" and progress.round == progress.rounds and not as_json:
            say(f"{name}: {progress.round} rounds")

    with interruptible("The same command goes on where it stopped."):
        comparison = run(file, settings, out, progress=report)
    _show(comparison, out / "comparison.png", as_json)
    return 0


@click.command()
@click.argument(
    "paths", metavar="RUNS...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the learning curves here (PNG)."
)
@json_option
def compare(paths: tuple[Path, ...], plot: Path | None, as_json: bool) -> int:
    """Put the runs in these run directories side by side.

    Files are passed over, so that SWEEP/* may name all that a sweep has left in its folder.
    """
    from roundtable.simulation import compare as side_by_side

    folders = [path for path in paths if path.is_dir()]
    if not folders:
        raise click.UsageError(f"{paths[0]} is not a run directory: name the folders of runs")
    _show(side_by_side(folders), plot, as_json)
    return 0


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("run")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: no [[run]] table; write one for each run, with dotted keys in quotes")
    return tables


def _show(comparison: Comparison, plot: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(comparison.rows)
    else:
        columns = comparison.columns
        rows = [[_text(row.get(column)) for column in columns] for row in comparison.rows]
        print_table(columns, rows, "No runs.")
    if plot is None:
        return
    try:
        comparison.plot(plot)
    except ResourceError as error:
        say(f"No plot: {error}", err=True)


def _text(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
