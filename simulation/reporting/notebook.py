"""What a notebook shows: a run's progress while it goes on, and results as tables and pictures."""

from __future__ import annotations

import base64
import io
import sys
import time
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

from roundtable.core.errors import ResourceError
from roundtable.core.foreign_text import printable
from roundtable.core.observability.metric_sums import means
from roundtable.simulation.reporting.progress import Progress, Report

_LEAST_SECONDS = 0.2


def notebook_report() -> Report | None:
    """A progress bar below the cell that runs; None where this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    shown = import_module("IPython.display")
    return Bar(shown.HTML, shown.display)


class Bar:
    """One line and a bar, shown again at most five times a second, and at each round's end."""

    def __init__(self, made: Any, display: Any) -> None:
        self._made = made
        self._handle = display(made("…"), display_id=True)
        self._shown = 0.0
        self._rounds = "waiting for the first round"

    def __call__(self, progress: Progress) -> None:
        if progress.kind == "note":
            return
        now = time.monotonic()
        if progress.kind == "round":
            self._rounds = self._of_round(progress)
        elif now - self._shown < _LEAST_SECONDS:
            return
        self._shown = now
        done = progress.round - (progress.kind != "round")
        part = float(done)
        if progress.kind == "clients":
            share = progress.done / max(1, progress.total)
            part += 0.8 * share if progress.phase != "evaluate" else 0.8 + 0.2 * share
        bar = f'<progress max="{progress.rounds}" value="{part:.2f}"></progress>'
        where = f"{progress.phase} {progress.done}/{progress.total}" if progress.kind == "clients" else ""
        text = f"{bar} round {done}/{progress.rounds} {where} {self._rounds}"
        self._handle.update(self._made(text))

    @staticmethod
    def _of_round(progress: Progress) -> str:
        assert progress.record is not None
        figures = {**means(progress.record.training), **means(progress.record.evaluation)}
        told = "  ".join(f"{escape(printable(name))} {value:.4f}" for name, value in figures.items())
        left = progress.seconds_left
        return told + (f"  {left:.0f} s left" if left else "")


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose texts are shown as they are, whoever wrote them."""
    head = "".join(f"<th>{escape(printable(name))}</th>" for name in columns)
    cells = ("".join(f"<td>{escape(printable(_text(value)))}</td>" for value in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def png_of(figure: Any) -> bytes:
    """A matplotlib figure as a picture."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    return data.getvalue()


def picture(plot: Any, told: str = "curves over rounds") -> str:
    """What `plot()` draws as an element of a page; nothing where matplotlib is not installed."""
    try:
        data = base64.b64encode(png_of(plot())).decode()
    except ResourceError:
        return ""
    return f'<img alt="{told}" src="data:image/png;base64,{data}"/>'


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
