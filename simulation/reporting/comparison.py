"""Several runs side by side: what was different between them, and what came of it."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError, StorageError
from roundtable.core.paths import AnyPath
from roundtable.engine import record_from_plain
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.notebook import html_table, picture, png_of
from roundtable.simulation.reporting.plots import COUNTS, curves
from roundtable.simulation.reporting.run_directory import whole_rounds, why_stopped

_FAILED = "failed"
"""The column of reasons."""


@dataclass(frozen=True)
class Run:
    """What a run directory holds. `job` is the whole configuration as plain values.

    failed: why the run stopped before its end; "" where it did not. left_out: what of its history is not
    told of, as a kill tore it or it was never committed; "" for nothing.
    """

    name: str
    job: Mapping[str, Any]
    history: History
    failed: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class Comparison:
    """Runs as rows: the settings in which they differ, then rounds, seconds, the last of each metric, and why
    one failed, where some have."""

    runs: tuple[Run, ...]

    @property
    def settings(self) -> list[str]:
        """Dotted keys of the job in which at least two runs differ."""
        all_flat = [flat(run.job) for run in self.runs]
        keys = dict.fromkeys(key for values in all_flat for key in values)
        return [key for key in keys if any(values.get(key) != all_flat[0].get(key) for values in all_flat)]

    @property
    def columns(self) -> list[str]:
        """Names of the table's columns."""
        metrics = dict.fromkeys(
            name for run in self.runs for name in run.history.columns if name not in COUNTS
        )
        why = [_FAILED] if self.failed else []
        return list(dict.fromkeys(("run", *self.settings, "rounds", "seconds", *metrics, *why)))

    @property
    def failed(self) -> dict[str, str]:
        """Why runs stopped before their end, by the name of each that did."""
        return {run.name: run.failed for run in self.runs if run.failed}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a run, by column; None where a run has no such value."""
        return [self._row(run) for run in self.runs]

    def to_csv(self, path: AnyPath | None = None) -> str:
        """The table as CSV text; also written to `path` if one is given."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def over(self, key: str = "seed") -> list[dict[str, Any]]:
        """One row for each setting but `key`: how many runs have it, and (mean, deviation) of each metric.

        The deviation is that of a sample, over n − 1; None for a single run. Runs that failed are counted and
        named under `failed`, and in no mean. Raises ConfigError where no two runs differ in `key`.
        """
        return [self._summary(settings, runs) for settings, runs in self._over(key)]

    def by(self, *keys: str) -> list[dict[str, Any]]:
        """One row for each of the values that these keys have together, whatever else varies: how many runs
        have them, and (mean, deviation) of each metric, of those that have not failed.

        Raises ConfigError where no two runs differ in one of the keys.
        """
        return [self._summary(settings, runs) for settings, runs in self._groups(keys)]

    def plot(self, path: AnyPath | None = None, over: str | None = None, by: Sequence[str] = ()) -> Any:
        """All learning curves in one matplotlib Figure; also written to `path` if one is given.

        With `over`, a line for each group of runs that differ in this key alone: their mean, in a band of one
        deviation; with `by` for each group of runs that have these keys alike.
        """
        if over is None and not by:
            return curves({run.name: [run.history] for run in self.runs}, path)
        groups = self._groups(by) if over is None else self._over(over)
        return curves({_title(settings): [r.history for r in runs] for settings, runs in groups}, path)

    def _repr_png_(self) -> bytes:
        return png_of(self.plot())

    def _repr_html_(self) -> str:
        columns = self.columns
        table = html_table(columns, [[row.get(column) for column in columns] for row in self.rows])
        return picture(self.plot) + table

    def _over(self, key: str) -> list[tuple[dict[str, Any], list[Run]]]:
        self._check_differ(key)
        return self._groups([name for name in self.settings if name != key])

    def _check_differ(self, key: str) -> None:
        if key not in self.settings:
            raise ConfigError(
                f"no two of these runs differ in {key!r}; they do in {', '.join(self.settings) or 'nothing'}"
            )

    def _groups(self, keys: Sequence[str]) -> list[tuple[dict[str, Any], list[Run]]]:
        for key in keys:
            self._check_differ(key)
        groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
        for run in self.runs:
            values = flat(run.job)
            settings = {name: values.get(name) for name in keys}
            groups.setdefault(json.dumps(settings, default=str), (settings, []))[1].append(run)
        return list(groups.values())

    def _summary(self, settings: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
        row: dict[str, Any] = {**settings, "runs": len(runs)}
        for name in self.columns:
            if name in (*self.settings, "run", "seconds", _FAILED):
                continue
            told = (self._row(run).get(name) for run in runs if not run.failed)
            found = [value for value in told if isinstance(value, int | float)]
            if found:
                spread = statistics.stdev(found) if len(found) > 1 else None
                row[name] = (statistics.fmean(found), spread)
        failed = {run.name: run.failed for run in runs if run.failed}
        return row | ({_FAILED: failed} if failed else {})

    def _row(self, run: Run) -> dict[str, Any]:
        settings, history = flat(run.job), run.history
        seconds = [value for value in history.seconds if value is not None]
        row: dict[str, Any] = {"run": run.name, **{key: settings.get(key) for key in self.settings}}
        row |= {"rounds": len(history), "seconds": sum(seconds), _FAILED: run.failed or None}
        return {name: row[name] if name in row else _last(history, name) for name in self.columns}


def open_run(path: AnyPath) -> Run:
    """The run in a run directory, finished or not: the rounds from which it would be resumed.

    Raises StorageError where there is none.
    """
    path = Path(path)
    if not (path / "job.json").exists():
        raise StorageError(f"{path} holds no run: no job.json is in it; name a folder that --run-dir named")
    try:
        job = json.loads((path / "job.json").read_text(encoding="utf-8"))
        lines, left_out = whole_rounds(path)
        rows = [json.loads(line) for line in lines]
        records = tuple(record_from_plain(row["record"]) for row in rows)
        history = History(records, tuple(row["seconds"] for row in rows))
        return Run(path.name, job, history, why_stopped(path), left_out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} holds no run that can be read: {error}") from error


def compare(paths: Sequence[AnyPath]) -> Comparison:
    """The runs in these run directories side by side."""
    return Comparison(tuple(open_run(path) for path in paths))


def _title(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items()) or "all runs"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    dotted: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            dotted |= flat(value, f"{prefix}{key}.")
        else:
            dotted[f"{prefix}{key}"] = value
    return dotted


def _last(history: History, name: str) -> Any:
    """The last value of a column that is one."""
    if name not in history.columns:
        return None
    return next((value for value in reversed(history[name]) if value is not None), None)
