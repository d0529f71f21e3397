"""Figures, if matplotlib is there: learning curves of one run or of several."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from roundtable.core.errors import ResourceError
from roundtable.core.measures.columns import CENTRAL
from roundtable.core.paths import AnyPath
from roundtable.simulation.reporting.history import History

COUNTS = ("round", "attempt", "clients", "failed", "excluded", "time", "seconds")
TRAVELLED = ("up_bytes", "down_bytes", "encoding_error", "tokens", "tokens_per_second", "bytes_per_token")


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    """A figure that no window or notebook state holds, and its axes side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ResourceError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def curves(runs: Mapping[str, Sequence[History]], path: AnyPath | None = None) -> Any:
    """One panel a metric: evaluation as a line, training dashed, the server's dotted; a colour for each name.

    Of several runs under one name their mean is drawn, in a band of one deviation of a sample. What was
    measured before a round stands at the round that made the model.
    """
    columns = [name for group in runs.values() for run in group for name in run.columns]
    metrics = [name for name in columns if name not in COUNTS and not _still(name, runs)]
    plain = (name.removeprefix("train_").removeprefix("before_").removeprefix(CENTRAL) for name in metrics)
    names = list(dict.fromkeys(plain)) or ["loss"]
    figure, axes = new_figure(len(names))
    for axis, name in zip(axes, names, strict=True):
        for number, (title, group) in enumerate(runs.items()):
            colour = f"C{number}"
            _draw(axis, group, f"train_{name}", "--", colour, f"{title} (train)")
            _draw(axis, group, name, "-", colour, title)
            _draw(axis, group, f"before_{name}", "-", colour, title, earlier=1)
            _draw(axis, group, f"{CENTRAL}{name}", ":", colour, f"{title} (server)")
        axis.set_xlabel("round")
        axis.set_ylabel(name)
        axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _still(name: str, runs: Mapping[str, Sequence[History]]) -> bool:
    """Whether what travelled was the same in every round of every run: no panel for a level line."""
    if name not in (*TRAVELLED, "communication"):
        return False
    return len({row.get(name) for group in runs.values() for run in group for row in run}) == 1


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Beside the curves, each label once: within a panel it would hide some of them."""
    found: dict[str, Any] = {}
    for axis in axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, line)
    if found:
        figure.legend(found.values(), found.keys(), fontsize="x-small", loc="outside right upper")


def _draw(
    axis: Any,
    group: Sequence[History],
    column: str,
    style: str,
    colour: str,
    label: str,
    earlier: int = 0,
) -> None:
    values: dict[int, list[float]] = {}
    for run in group:
        for record, row in zip(run.records, run, strict=True):
            if (value := row.get(column)) is not None:
                values.setdefault(record.round - earlier, []).append(value)
    if not values:
        return
    rounds = sorted(values)
    means = [statistics.fmean(values[at]) for at in rounds]
    axis.plot(rounds, means, style, color=colour, label=label, linewidth=1.2)
    if len(group) > 1:
        spread = [statistics.stdev(values[at]) if len(values[at]) > 1 else 0.0 for at in rounds]
        lower, upper = ([m + sign * s for m, s in zip(means, spread, strict=True)] for sign in (-1, 1))
        axis.fill_between(rounds, lower, upper, color=colour, alpha=0.15, linewidth=0)
