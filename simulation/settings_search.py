"""Looking for good settings: at random within ranges, and by successive halving of what was drawn.

What is tried follows from the seed and the number of the trial alone: a search that was stopped goes on with
the same trials, and one with more trials begins with those of one with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.stop_table import larger_is_better
from roundtable.core.paths import AnyPath
from roundtable.core.privacy_table import NoPrivacy
from roundtable.core.seeds import numpy_generator
from roundtable.core.task import AnyTask, ArrayTask, Task
from roundtable.simulation.reporting.comparison import Comparison, Run, open_run
from roundtable.simulation.sweep import Overrides, run_names, sweep
from roundtable.simulation.world.longer_runs import why_not_to_other_rounds


@dataclass(frozen=True)
class ValueRange:
    """Values of one key: evenly between two ends, evenly in their logarithm, or whole numbers, both ends
    among them. Raises ConfigError for ends that are none."""

    kind: Literal["uniform", "log", "int"]
    low: float
    high: float

    def __post_init__(self) -> None:
        whole = self.kind != "int" or (self.low == int(self.low) and self.high == int(self.high))
        finite = math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high
        if not (finite and whole and (self.kind != "log" or self.low > 0)):
            raise ConfigError(
                f"{self.kind}({self.low:g}, {self.high:g}): the first end lies below the second; both are "
                "above 0 for log, and whole numbers for int"
            )

    def at(self, share: float) -> float | int:
        """The value at a share of the way, from 0 to 1."""
        if self.kind == "log":
            return _rounded(math.exp(math.log(self.low) + share * math.log(self.high / self.low)))
        if self.kind == "int":
            return min(int(self.high), int(self.low) + int(share * (self.high - self.low + 1)))
        return _rounded(self.low + share * (self.high - self.low))


Axis = Sequence[Any] | ValueRange


def draw(axes: Mapping[str, Axis], trials: int, seed: int) -> list[dict[str, Any]]:
    """The settings of so many trials, each key on its own: from a range, or one of the values of a list.

    Bergstra and Bengio 2012. Raises ConfigError for a key without values.
    """
    for key, axis in axes.items():
        if not isinstance(axis, ValueRange) and (isinstance(axis, str) or not axis):
            raise ConfigError(f"search: {key} needs a list of values, or a range; got {axis!r}")

    def share(key: str, trial: int) -> float:
        return float(numpy_generator(seed, "search", key, trial).random())

    return [{key: _at(axis, share(key, trial)) for key, axis in axes.items()} for trial in range(trials)]


def rungs(rounds: int, trials: int, eta: int = 3, least: int = 1) -> list[tuple[int, int]]:
    """(trials, rounds that each has run by then) of successive halving, the last with one trial or few.

    Jamieson and Talwalkar 2016: of n trials the best ⌊n/η⌋ go on to η times the rounds, until `rounds`.
    """
    if eta < 2 or not 1 <= least <= rounds:
        raise ConfigError(
            f"halving: eta is at least 2, and the least rounds from 1 to {rounds}; got {eta}, {least}"
        )
    steps = max(0, math.floor(math.log(trials, eta) + 1e-9))
    while steps and math.ceil(rounds / eta**steps) < least:
        steps -= 1
    return [(max(1, trials // eta**k), math.ceil(rounds / eta ** (steps - k))) for k in range(steps + 1)]


def halving(
    job: AnyPath,
    settings: Sequence[Overrides],
    folder: AnyPath,
    metric: str,
    task: AnyTask | type[Task] | type[ArrayTask] | None = None,
    *,
    eta: int = 3,
    least: int = 1,
    fixed: Overrides | None = None,
    at_once: int = 1,
    done: Callable[[Run], None] | None = None,
    rung: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Runs all settings for a few rounds, the best of them for more, and so on to the job's rounds.

    Who goes on does so from its last round, to the bits of a run that was never stopped. `metric` is a column
    of the history, compared as `[stop]` states its direction, else by its name; a run that has no finite
    value comes last, and one that fails goes no further. Called again after an interruption it decides alike
    and runs what is missing. `rung` hears of (trials, rounds) before each. Gives all runs, the best first,
    those that failed last. Raises ConfigError for a job whose noise or learning rates follow from its rounds,
    and for a metric that no run has.
    """
    checked = load_job(job, dict(fixed or {}))
    _check_rounds_matter_not(checked, settings)
    steps = rungs(checked.rounds, len(settings), eta, least)
    _check_goes_on(job, settings, fixed or {})
    names, place = run_names(settings, width=4), Path(folder)
    left = dict(zip(names, settings, strict=True))
    reached: dict[str, int] = {}
    failed: dict[str, Run] = {}
    for trials, rounds in steps:
        if rung is not None:
            rung(trials, rounds)
        whole = [name for name in left if name not in failed]
        left = {name: left[name] for name in _ranked(place, whole, reached, metric, checked)[:trials]}
        missing = [name for name in left if _rounds_of(place / name) < rounds]
        if missing:
            found = sweep(
                job,
                [left[name] for name in missing],
                folder,
                task,
                fixed={**(fixed or {}), "rounds": rounds},
                at_once=at_once,
                done=done,
                names=missing,
            )
            failed |= {run.name: run for run in found.runs if run.failed}
        reached |= dict.fromkeys(left, rounds)
    order = sorted((name for name in names if name not in failed), key=lambda name: -reached[name])
    best_first = [
        name
        for rounds in sorted(set(reached.values()), reverse=True)
        for name in _ranked(place, [n for n in order if reached[n] == rounds], reached, metric, checked)
    ]
    comparison = Comparison((*(open_run(place / name) for name in best_first), *failed.values()))
    comparison.to_csv(place / "comparison.csv")
    return comparison


def _check_rounds_matter_not(job: JobConfig, settings: Sequence[Overrides]) -> None:
    if not settings:
        raise ConfigError("halving: nothing to try; give at least one set of overrides")
    varied = {key for each in settings for key in each}
    if not isinstance(job.privacy, NoPrivacy) or any(key.startswith("privacy") for key in varied):
        raise ConfigError(
            "halving and [privacy]: how much noise a round gets can follow from how many rounds there are, "
            "so that a run which goes on would be another one; draw at random without halving"
        )
    if "rounds" in varied:
        raise ConfigError("halving decides the rounds itself: leave rounds out of what varies")


def _check_goes_on(job: AnyPath, settings: Sequence[Overrides], fixed: Overrides) -> None:
    """ConfigError where a run that goes on to more rounds is another one."""
    for each in settings:
        if why := why_not_to_other_rounds(load_job(job, {**fixed, **each})):
            raise ConfigError(
                f"halving: a run that goes on would be another one than a run that was never stopped: {why}; "
                "draw at random without halving"
            )


def _ranked(
    folder: Path, names: Iterable[str], reached: Mapping[str, int], metric: str, job: JobConfig
) -> list[str]:
    """These runs, the best first, by what each had measured last up to the round that it was to reach."""
    names = list(names)
    if not all(name in reached for name in names):
        return names
    runs = {name: open_run(folder / name) for name in names}
    values = {name: _value(run, metric, reached[name]) for name, run in runs.items()}
    if runs and not any(metric in run.history.columns for run in runs.values()):
        columns = dict.fromkeys(column for run in runs.values() for column in run.history.columns)
        raise ConfigError(f"halving: no run has measured {metric!r}; there are {', '.join(columns)}")
    sign = -1.0 if larger_is_better(metric, job.stop) else 1.0
    return sorted(names, key=lambda name: sign * values[name] if math.isfinite(values[name]) else math.inf)


def _value(run: Run, metric: str, rounds: int) -> float:
    found = [row[metric] for row in run.history[:rounds] if row.get(metric) is not None]
    return float(found[-1]) if found else math.nan  # type: ignore[arg-type]


def _rounds_of(folder: Path) -> int:
    return len(open_run(folder).history) if (folder / "job.json").exists() else 0


def _at(axis: Axis, share: float) -> Any:
    return (
        axis.at(share) if isinstance(axis, ValueRange) else axis[min(len(axis) - 1, int(share * len(axis)))]
    )


def _rounded(value: float) -> float:
    """To four digits: it names a folder, and nobody tells more apart."""
    return float(f"{value:.4g}")
