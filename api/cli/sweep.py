"""`roundtable sweep` and `roundtable compare`: one job with different settings, and what came of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, parse_value, set_option
from roundtable.cli.shared.output import brief, interruptible, print_json, print_table, say
from roundtable.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from roundtable.simulation import Comparison, Run


_RANGE = re.compile(r"(uniform|log|int)\(\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)")


def _range(kind: Any, low: str, high: str) -> Any:
    from roundtable.simulation import ValueRange

    try:
        return ValueRange(kind, float(low), float(high))
    except ValueError as error:
        raise click.BadParameter(f"{kind}({low}, {high}): two numbers") from error


def _axes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    axes: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{value!r} is not key=[values], for example cohort.size=[5, 10]")
        if found := _RANGE.fullmatch(text.strip()):
            axes[key.strip()] = _range(*found.groups())
            continue
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
    help="Values of one key of the job, for example cohort.size=[5,10]; repeated: every combination runs. "
    "With --trials also a range to draw from: log(1e-3,1), uniform(0,0.9), int(1,10).",
)
@click.option(
    "--trials", type=click.IntRange(min=1), help="Search: so many settings, drawn from what --vary names."
)
@click.option(
    "--halving",
    metavar="METRIC",
    help="Search: run all trials for a few rounds, the best of them by this metric for more, and so on.",
)
@click.option(
    "--eta", type=click.IntRange(min=2), default=3, show_default=True, help="Halving: one of so many goes on."
)
@click.option(
    "--least-rounds",
    "least",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Halving: no trial is judged by fewer.",
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
    trials: int | None,
    halving: str | None,
    eta: int,
    least: int,
    runs: Path | None,
    out: Path,
    seeds: int | None,
    at_once: int,
    overrides: dict[str, Any],
    as_json: bool,
) -> int:
    """Simulate a job with different settings, and compare.

    Every combination, or with --trials a search. A run that fails is told with its reason, keeps none of the
    others from running, and makes the exit code 1. Ctrl-C stops it; the same command goes on with the rounds
    that are missing, and with more --trials beside those that are done.
    """
    from roundtable.simulation import halving as halve
    from roundtable.simulation import sweep as run
    from roundtable.simulation.sweep import run_names

    _check_asked(axes, runs, seeds, trials, halving)
    settings = _settings(file, overrides, axes, runs, seeds, trials)
    ended = 0

    def done(run: Run) -> None:
        nonlocal ended
        ended += 1
        if not as_json:
            count = "" if halving else f"{ended} of {len(settings)}  "
            rounds = f"{len(run.history)} rounds"
            say(f"{count}{run.name}: " + (f"failed after {rounds}: {run.failed}" if run.failed else rounds))

    def rung(left: int, rounds: int) -> None:
        say(f"{left} of {len(settings)} trials up to round {rounds}", err=as_json)

    with interruptible("The same command goes on where it stopped."):
        if halving:
            comparison = halve(
                file,
                settings,
                out,
                halving,
                eta=eta,
                least=least,
                fixed=overrides,
                at_once=at_once,
                done=done,
                rung=rung,
            )
        else:
            names = run_names(settings, width=4) if trials is not None else None
            comparison = run(file, settings, out, fixed=overrides, at_once=at_once, done=done, names=names)
    _show(comparison, out / "comparison.png", as_json, "seed" if seeds is not None else None)
    return 1 if comparison.failed else 0


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
@click.option(
    "--by",
    metavar="KEY",
    multiple=True,
    help="Take runs together that have this key alike, whatever else varies; may be repeated.",
)
@json_option
def compare(
    paths: tuple[Path, ...], plot: Path | None, over: str | None, by: tuple[str, ...], as_json: bool
) -> int:
    """Put the runs in these run directories side by side.

    Files are passed over, so that SWEEP/* may name all that a sweep has left in its folder.
    """
    from roundtable.simulation import compare as side_by_side

    folders = [path for path in paths if path.is_dir()]
    if not folders:
        raise click.UsageError(f"{paths[0]} is not a run directory: name the folders of runs")
    if over is not None and by:
        raise click.UsageError(
            "--over takes runs together that differ in one key, --by those alike in some: choose one"
        )
    _show(side_by_side(folders), plot, as_json, over, by)
    return 0


def _check_asked(
    axes: dict[str, Any], runs: Path | None, seeds: int | None, trials: int | None, halving: str | None
) -> None:
    """UsageError for options that do not go together."""
    from roundtable.simulation import ValueRange

    if axes and runs is not None:
        raise click.UsageError("say what to vary by --vary KEY=[VALUES] or by --runs FILE, not by both")
    if not axes and runs is None and seeds is None:
        raise click.UsageError("say what to vary: --vary KEY=[VALUES], --runs FILE or --seeds N")
    if seeds is not None and "seed" in axes:
        raise click.UsageError("--seeds varies the seed already: leave seed out elsewhere")
    if trials is not None and (not axes or seeds is not None or "seed" in axes):
        raise click.UsageError(
            "--trials draws from what --vary names, by the job's seed: no --runs or --seeds"
        )
    if trials is None and (halving or any(isinstance(axis, ValueRange) for axis in axes.values())):
        raise click.UsageError("ranges and --halving are for a search: say how many --trials")


def _settings(
    file: Path,
    overrides: dict[str, Any],
    axes: dict[str, Any],
    runs: Path | None,
    seeds: int | None,
    trials: int | None,
) -> list[dict[str, Any]]:
    """The settings of each run."""
    from roundtable.core.config import load_job
    from roundtable.simulation import draw, grid

    if trials is not None:
        return draw(axes, trials, load_job(file, overrides).seed)
    settings = _listed(runs) if runs is not None else grid(axes)
    if seeds is not None:
        first = load_job(file, overrides).seed
        settings = [{**each, "seed": first + number} for each in settings for number in range(seeds)]
    return settings


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("run")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: no [[run]] table; write one for each run, with dotted keys in quotes")
    return tables


def _show(
    comparison: Comparison, plot: Path | None, as_json: bool, over: str | None, by: tuple[str, ...] = ()
) -> None:
    for run in comparison.runs:
        if run.left_out:
            say(f"{run.name}: {run.left_out}", err=True)
    if over is not None or by:
        found = comparison.by(*by) if over is None else comparison.over(over)
        if as_json:
            print_json(found)
        else:
            shown = [row | ({"failed": len(row["failed"])} if "failed" in row else {}) for row in found]
            _print(list(dict.fromkeys(name for row in found for name in row)), shown)
    elif as_json:
        print_json(comparison.rows)
    else:
        _print(comparison.columns, comparison.rows)
    if plot is None:
        return
    try:
        comparison.plot(plot, over, by)
    except ResourceError as error:
        say(f"No plot: {error}", err=True)


def _print(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """For people: what travelled is in --json and in comparison.csv."""
    from roundtable.simulation.reporting.plots import TRAVELLED

    columns = [name for name in columns if name not in (*TRAVELLED, "communication")]
    print_table(columns, [[_text(row.get(column)) for column in columns] for row in rows], "No runs.")


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return brief(value)
    if isinstance(value, tuple):
        mean, spread = value
        return f"{mean:.4g}" if not spread else f"{mean:.4g} ± {spread:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else value
