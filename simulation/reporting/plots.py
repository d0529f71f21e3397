"""Figures, if matplotlib is there: learning curves of one run or of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundtable.core.errors import ResourceError
from roundtable.core.paths import AnyPath
from roundtable.simulation.reporting.history import History

COUNTS = ("round", "attempt", "clients", "failed", "excluded", "time", "seconds")


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


def curves(runs: Mapping[str, History], path: AnyPath | None = None) -> Any:
    """One panel a metric: evaluation as a line, training dashed; a colour for each run.

    What was measured before a round stands at the round that made the model.
    """
    metrics = [name for run in runs.values() for name in run.columns if name not in COUNTS]
    plain = (name.removeprefix("train_").removeprefix("before_") for name in metrics)
    names = list(dict.fromkeys(plain)) or ["loss"]
    figure, axes = new_figure(len(names))
    for axis, name in zip(axes, names, strict=True):
        for number, (title, run) in enumerate(runs.items()):
            colour = f"C{number}"
            _draw(axis, run, f"train_{name}", "--", colour, f"{title} (train)")
            _draw(axis, run, name, "-", colour, title)
            _draw(axis, run, f"before_{name}", "-", colour, title, earlier=1)
        axis.set_xlabel("round")
        axis.set_ylabel(name)
        if axis.lines:
            axis.legend(fontsize="x-small")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _draw(
    axis: Any, run: History, column: str, style: str, colour: str, label: str, earlier: int = 0
) -> None:
    if column not in run.columns:
        return
    rounds = (record.round - earlier for record in run.records)
    points = [(at, row[column]) for at, row in zip(rounds, run, strict=True) if row.get(column) is not None]
    axis.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.2)
