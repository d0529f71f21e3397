"""What the samples of benchmarks/soak.py say: what is flat, what grows as it must, and a picture.

A slope is Theil and Sen's, the median of the slopes of all pairs of samples: a spike that other work on the
machine makes does not move it. The first half of a run is warming up and decides nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import theilslopes

FEWEST = 12


@dataclass(frozen=True)
class Quantity:
    """One measured quantity.

    `a_round` is the most by which a flat one may grow for each round, and `noise` what it may have grown by
    in the judged half all the same, since it goes up and down. `share` is the most by which one may grow
    over that half, as a share of its median, where a growth for each round makes no sense. One that has
    neither grows by design: then its growth for each round must stay what it is.
    """

    name: str
    title: str
    unit: str
    a_round: float | None = None
    noise: float = 0.0
    share: float | None = None
    rounding: int = 1


# Whole things, such as a descriptor or a thread: less than one in a hundred rounds.
WHOLE = 0.01
# By how much faster may grow at the end what grows by design.
LINEAR = 1.25
REAL = (
    Quantity("memory", "coordinator's memory", "MB", a_round=0.01, noise=2),
    # Each upload that is under way holds some.
    Quantity("files", "its descriptors", "", a_round=WHOLE, noise=8, rounding=0),
    Quantity("threads", "its threads", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("database", "database, by design", "MB", rounding=2),
    # SQLite keeps the file at the greatest length that it ever had.
    Quantity("wal", "write-ahead log", "MB", a_round=0.001, noise=1, rounding=2),
    Quantity("artifacts", "artifacts", "MB", a_round=0.001, noise=0.1, rounding=2),
    Quantity("log", "coordinator's log, by design", "MB", rounding=2),
    Quantity("series", "lines of its metrics", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("round", "a round", "s", share=0.25, rounding=2),
    Quantity("status", "asking for the status", "ms", share=0.5),
    Quantity("job", "asking for the job", "ms", share=0.5),
    Quantity("agent_memory", "memory of a whole agent", "MB", a_round=0.01, noise=2),
    Quantity("agent_files", "its descriptors", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("agent_threads", "its threads", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("agent_state", "its state on disk, by design", "MB", rounding=3),
)
VIRTUAL = (
    Quantity("memory", "simulator's memory, by design", "MB"),
    Quantity("files", "its descriptors", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("threads", "its threads", "", a_round=WHOLE, noise=1, rounding=0),
    Quantity("run", "run directory, by design", "MB", rounding=2),
    Quantity("round", "a round", "s", share=0.25, rounding=3),
)
KINDS = {"real": REAL, "virtual": VIRTUAL}


@dataclass(frozen=True)
class Verdict:
    """What became of one quantity: medians early and late, growth for each round, whether it holds."""

    quantity: Quantity
    early: float
    late: float
    slope: float
    holds: bool
    why: str


@dataclass(frozen=True)
class Run:
    """One file of samples: the line about it, and the columns."""

    about: dict[str, Any]
    columns: dict[str, np.ndarray]

    @classmethod
    def read(cls, file: Path) -> Run:
        """A file that soak.py has written."""
        about, *rows = [json.loads(line) for line in file.read_text().splitlines()]
        names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
        return cls(about, {name: np.array([row[name] for row in rows], dtype=float) for name in names})

    @property
    def kind(self) -> str:
        """real or virtual."""
        return str(self.about["kind"])

    @property
    def quantities(self) -> list[Quantity]:
        """Those that this run has measured."""
        return [quantity for quantity in KINDS[self.kind] if quantity.name in self.columns]


def judge(run: Run) -> list[Verdict]:
    """A verdict for each quantity. ValueError where there are too few samples for one."""
    rounds = run.columns.get("rounds", np.array([]))
    if len(rounds) < FEWEST or rounds[-1] <= rounds[len(rounds) // 2]:
        raise ValueError(
            f"{len(rounds)} samples over {rounds[-1] if len(rounds) else 0:.0f} rounds decide nothing: "
            f"at least {FEWEST} samples are needed, and rounds in the second half of them; let it run longer"
        )
    return [_judge(quantity, rounds, run.columns[quantity.name]) for quantity in run.quantities]


def _judge(quantity: Quantity, rounds: np.ndarray, values: np.ndarray) -> Verdict:
    count = len(rounds)
    half, quarter = slice(count // 2, None), slice(count // 4, count // 2)
    early, late = float(np.median(values[quarter])), float(np.median(values[-(count // 4) :]))
    slope, _, lowest, _ = theilslopes(values[half], rounds[half])
    over = float(rounds[-1] - rounds[count // 2])

    def verdict(holds: bool, why: str) -> Verdict:
        return Verdict(quantity, early, late, float(slope), bool(holds), why)

    if quantity.a_round is not None:
        holds = slope * over <= max(quantity.a_round * over, quantity.noise)
        return verdict(holds, f"flat: at most {quantity.a_round:g} a round")
    if quantity.share is not None:
        # The interval's lower end: where other work shakes a latency, only a certain growth is one.
        grown = lowest * over / max(float(np.median(values[half])), 1e-9)
        return verdict(grown <= quantity.share, f"flat: at most {100 * quantity.share:g} % in the half")
    before = _growth(rounds, values, count // 4, count // 2)
    now = _growth(rounds, values, count // 2, count - 1)
    # A file that grows in pages may stand still in one part: what that is, is no growth either.
    least = 0.002 * max(late, 1e-9) / max(over, 1.0)
    return verdict(now <= LINEAR * max(before, least), f"linear: at most {LINEAR:g} times what it was before")


def _growth(rounds: np.ndarray, values: np.ndarray, first: int, last: int) -> float:
    return float((values[last] - values[first]) / max(rounds[last] - rounds[first], 1.0))


def table(run: Run, verdicts: list[Verdict]) -> str:
    """What people read."""
    about = run.about
    lines = [f"{about['said']}; {run.columns['rounds'][-1]:.0f} rounds"]
    for found in verdicts:
        unit, rounding = found.quantity.unit, found.quantity.rounding
        lines.append(
            f"{'ok  ' if found.holds else 'GROWS'} {found.quantity.title:<30} "
            f"{found.early:>10.{rounding}f} → {found.late:.{rounding}f} {unit}, "
            f"{found.slope:+.2g} {unit} a round ({found.why})"
        )
    return "\n".join(lines)


def as_json(run: Run, verdicts: list[Verdict]) -> dict[str, Any]:
    """The same for a program."""
    rows = {
        found.quantity.name: {
            "unit": found.quantity.unit,
            "second_quarter": found.early,
            "last_quarter": found.late,
            "a_round": found.slope,
            "holds": found.holds,
            "rule": found.why,
        }
        for found in verdicts
    }
    return {**run.about, "rounds": int(run.columns["rounds"][-1]), "quantities": rows}


def draw(runs: list[Run], file: Path) -> None:
    """One picture of all runs, a panel for each quantity."""
    from matplotlib.figure import Figure

    panels = [(run, quantity) for run in runs for quantity in run.quantities]
    across = 5
    down = -(-len(panels) // across)
    figure = Figure(figsize=(2.6 * across, 1.9 * down), layout="constrained")
    for place, (run, quantity) in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        time, values = run.columns["time"], run.columns[quantity.name]
        colour = "#1f5fa8" if run.kind == "real" else "#a8501f"
        axes.plot(time, values, linewidth=0.8, color=colour)
        axes.axvline(time[len(time) // 2], linewidth=0.6, color="#999999", linestyle=":")
        if np.ptp(values) < 0.1 * np.max(values):
            axes.set_ylim(0, 1.25 * np.max(values))
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(f"{quantity.title}{', ' if quantity.unit else ''}{quantity.unit}", fontsize=8)
        axes.set_xlabel("minutes" if run.kind == "real" else "virtual hours", fontsize=7)
        axes.tick_params(labelsize=7)
    figure.savefig(file, dpi=80)
