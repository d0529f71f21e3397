"""Theory beside the real rounds: convergence on quadratics, run by `roundtable.simulate`, with its bounds.

    python examples/convergence/measure.py                       the table of docs/convergence.md
    python examples/convergence/measure.py --plot curves.png     and its figure
    python examples/convergence/measure.py --json

Each study gives points (what was varied, what was measured, the bound). Errors are squared distances to the
minimum. Every bound is worked out for these quadratics; no point lies above its own
by more than CHANCE, which measurements of noise are off by.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from quadratics import DEFAULTS, DIMENSION, Quadratics, curvature

from roundtable.core.config import JobConfig
from roundtable.simulation import simulate

MU, LARGEST = DEFAULTS["mu"], DEFAULTS["L"]
CHANCE = 1.05
DISCOUNTS: Mapping[str, Mapping[str, Any]] = {
    "constant": {"staleness": "constant"},
    "1/(1 + 0.1 s)": {"staleness": "hinge"},
    "polynomial, 1/2": {"staleness": "polynomial"},
    "hinge, 0.5 after 2": {"staleness": "hinge", "staleness_slope": 0.5, "staleness_free": 2},
}


@dataclass(frozen=True)
class Dot:
    """One measurement: of what, at which value of what is varied, and what it may be at most."""

    study: str
    series: str
    at: float
    measured: float
    bound: float


def trajectory(
    distance: float, rounds: int, clients: int, rate: float, **tables: Any
) -> tuple[np.ndarray, Any]:
    """The model after 0, 1, ... rounds [rounds + 1, d], and the result of the run."""
    values: dict[str, Any] = {"task": "quadratics", "rounds": rounds, **tables}
    values["algorithm"] = {"steps": 1, "batch_size": 1, "learning_rate": rate, **tables.get("algorithm", {})}
    values["evaluation"] = {"every": 0}
    values["simulation"] = {"clients": clients, "workers": 1, **tables.get("simulation", {})}
    points = [np.asarray(Quadratics(distance).model().x.detach())]

    def seen(progress: Any) -> None:
        if progress.kind == "round":
            points.append(progress.model.vector[:DIMENSION].numpy().copy())

    result = simulate(JobConfig.model_validate(values), Quadratics(distance), progress=seen)
    if result.status != "finished":
        raise RuntimeError(f"a run of {rounds} rounds ended as {result.status}: {result.reason}")
    return np.stack(points).astype(np.float64), result


def squared(points: np.ndarray) -> np.ndarray:
    """The error of each model."""
    return (points**2).sum(-1)


def slope(dots: Sequence[Dot]) -> float:
    """Of the line through the measured points, both axes logarithmic."""
    return float(np.polyfit(np.log([dot.at for dot in dots]), np.log([dot.measured for dot in dots]), 1)[0])


def synchronous_rate(rates: Iterable[float] = (0.05, 0.1, 0.2, 0.4)) -> list[Dot]:
    """‖x_t‖ ≤ (1 − μη)ᵗ ‖x_0‖ without noise: the factor of the last rounds."""
    dots = []
    for rate in rates:
        rounds = math.ceil(4.0 / (rate * MU))
        errors = np.sqrt(squared(trajectory(1.0, rounds, 4, rate)[0]))
        assert (errors <= (1 - MU * rate) ** np.arange(rounds + 1) * (1 + 1e-5)).all()
        half = rounds // 2
        factor = (errors[-1] / errors[half]) ** (1 / (rounds - half))
        dots.append(Dot("rate of a round", "one step", rate, float(factor), 1 - MU * rate))
    return dots


def noise_floor(rates: Iterable[float] = (0.05, 0.1, 0.2, 0.4), sigma: float = 1.0) -> list[Dot]:
    """Stationary error ≤ η σ²/(μ (2 − ηL)), η σ²/2μ for small η; σ² is that of the mean of 4 clients."""
    dots = []
    for rate in rates:
        settled = math.ceil(2.0 / (rate * MU))
        data = {"data": {"sigma": 2.0 * sigma}}
        points, _ = trajectory(0.0, settled + 60, 4, rate, simulation=data)
        bound = rate * sigma**2 / (MU * (2 - rate * LARGEST))
        dots.append(Dot("noise floor", "one step", rate, float(squared(points[settled:]).mean()), bound))
    return dots


def drift(steps: Iterable[int] = (1, 2, 4, 8, 16), rate: float = 0.02) -> list[Dot]:
    """Mean ‖y_i − x‖² of one round from the minimum ≤ H²η²ζ² + Hη²σ²."""
    dots = []
    for series, spread, sigma in (("spread", 1.0, 0.0), ("spread and noise", 1.0, 1.0)):
        for count in steps:
            data = {"data": {"spread": spread, "sigma": sigma}}
            tables = {"algorithm": {"steps": count}, "simulation": data, "aggregation": {"diagnosis": True}}
            _, result = trajectory(0.0, 1, 10, rate, **tables)
            norms = result.history.records[0].diagnosis["norms"]
            lengths = [norms[name] for name in norms] if isinstance(norms, dict) else norms
            bound = (count * rate * spread) ** 2 + count * (rate * sigma) ** 2
            measured = float(np.mean(np.square(lengths)))
            dots.append(Dot("drift of a round", series, count, measured, bound))
    return dots


def fixed_point(steps: Iterable[int] = (2, 4, 8, 16), rate: float = 0.05) -> list[Dot]:
    """Where FedAvg ends: error ≤ ((H − 1) η L ζ/2)² / μ_H², with H η μ_H = 1 − (1 − ημ)^H."""
    dots = []
    for count in steps:
        data = {"data": {"spread": 1.0}}
        rounds = math.ceil(7.0 / (rate * MU * count))
        points, _ = trajectory(0.0, rounds, 4, rate, algorithm={"steps": count}, simulation=data)
        weak = (1 - (1 - rate * MU) ** count) / (count * rate)
        bound = ((count - 1) * rate * LARGEST / 2 / weak) ** 2
        dots.append(Dot("where FedAvg ends", "H − 1", count - 1, float(squared(points[-1:])[0]), bound))
    return dots


def heterogeneity(
    spreads: Iterable[float] = (0.1, 1.0, 10.0), steps: int = 8, rate: float = 0.05
) -> list[Dot]:
    """Where FedAvg and SCAFFOLD end as clients differ more: as ζ², and at rounding."""
    dots = []
    weak = (1 - (1 - rate * MU) ** steps) / (steps * rate)
    for name in ("fedavg", "scaffold"):
        for spread in spreads:
            tables: dict[str, Any] = {"simulation": {"data": {"spread": spread}}}
            if name == "scaffold":
                tables["aggregation"] = {"weighting": "uniform"}
            algorithm = {"name": name, "steps": steps}
            points, _ = trajectory(1.0, 100, 4, rate, algorithm=algorithm, **tables)
            # Single precision: so many roundings of steps as long as η ζ.
            bound = ((steps - 1) * rate * LARGEST * spread / 2 / weak) ** 2
            bound = bound if name == "fedavg" else (1e-5 * max(spread, 1.0)) ** 2
            dots.append(Dot("spread of clients", name, spread, float(squared(points[-1:])[0]), bound))
    return dots


def delayed(distance: float, rounds: int, delay: int, rate: float, discount: str, sigma: float) -> np.ndarray:
    """Buffered rounds of one update each, by clients of one speed that join one after the other within the
    time that an update takes: from round `delay` on each update is as stale."""
    table = {
        "mode": "buffered",
        "buffer": 1,
        "concurrency": delay + 1,
        "max_staleness": max(1, delay),
        **DISCOUNTS[discount],
    }
    with TemporaryDirectory() as folder:
        trace = Path(folder, "fleet.csv")
        joined = [f"{client},{client / (delay + 1)},1e9" for client in range(delay + 1)]
        trace.write_text("\n".join(["client,start,end", *joined, ""]))
        devices = {"speed": 1.0, "trace": str(trace)}
        simulation = {"devices": devices, "data": {"sigma": sigma}}
        points, result = trajectory(distance, rounds, delay + 1, rate, round=table, simulation=simulation)
    ages = {age for record in result.history.records[delay:] for age in record.staleness.values()}
    assert ages <= {delay}, f"staleness {ages} where it should be {delay}"
    return points


def factor_of(discount: str, delay: int) -> float:
    """What the discount leaves at a staleness."""
    values = {
        "task": "quadratics",
        "round": {"mode": "buffered", "buffer": 1, **DISCOUNTS[discount]},
    }
    return JobConfig.model_validate(values).round.discount(delay)


def stale_gradients(
    delays: Iterable[int] = (1, 2, 4, 8), rate: float = 0.1, names: Iterable[str] = tuple(DISCOUNTS)
) -> list[Dot]:
    """‖∇f(x_t) − ∇f(x_{t−τ})‖² ≤ τ²η²L² max ‖∇f‖² of the steps between: the penalty (1 + τ²η²L²)."""
    curve = curvature(0, MU, LARGEST)
    dots = []
    for name in names:
        for delay in delays:
            points = delayed(1.0, 4 * delay + 20, delay, rate, name, 0.0)
            slopes = curve * points
            worst = max(
                squared(slopes[t] - slopes[t - delay]) / squared(slopes[t - 2 * delay : t - delay]).max()
                for t in range(3 * delay, len(points))
            )
            bound = (delay * rate * factor_of(name, delay) * LARGEST) ** 2
            dots.append(Dot("error of a stale gradient", name, delay, float(worst), bound))
    return dots


def stale_floor(
    delays: Iterable[int] = (0, 1, 2, 4), rate: float = 0.2, names: Iterable[str] = tuple(DISCOUNTS)
) -> list[Dot]:
    """Stationary error with delay ≤ η σ² (1 + τ)²/(μ (2 − ηL)), η discounted."""
    dots = []
    for name in names:
        for delay in delays:
            eta = rate * factor_of(name, delay)
            settled = math.ceil(2.0 / (eta * MU))
            points = delayed(0.0, settled + 100, delay, rate, name, 1.0)
            bound = eta * (1 + delay) ** 2 / (MU * (2 - eta * LARGEST))
            dots.append(
                Dot("noise floor with delay", name, delay + 1, float(squared(points[settled:]).mean()), bound)
            )
    return dots


STUDIES: tuple[Callable[[], list[Dot]], ...] = (
    synchronous_rate,
    noise_floor,
    drift,
    fixed_point,
    heterogeneity,
    stale_gradients,
    stale_floor,
)
AXES = {
    "rate of a round": "η",
    "noise floor": "η",
    "drift of a round": "H",
    "where FedAvg ends": "H − 1",
    "spread of clients": "ζ",
    "error of a stale gradient": "τ",
    "noise floor with delay": "1 + τ",
}


def plot(dots: Sequence[Dot], path: Path) -> None:
    """A panel a study: measured as dots, bounds as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    for axis, study in zip(figure.subplots(2, 4).flat, AXES, strict=False):
        mine = [dot for dot in dots if dot.study == study]
        for number, series in enumerate(dict.fromkeys(dot.series for dot in mine)):
            some = [dot for dot in mine if dot.series == series]
            at = [dot.at for dot in some]
            axis.plot(at, [dot.bound for dot in some], "-", color=f"C{number}", linewidth=1)
            axis.plot(at, [dot.measured for dot in some], "o", color=f"C{number}", markersize=4, label=series)
        axis.set_title(study, fontsize="small")
        axis.set_xlabel(AXES[study])
        if study != "rate of a round":
            axis.set_xscale("log")
            axis.set_yscale("log")
            at = sorted({dot.at for dot in mine})
            axis.set_xticks(at, [f"{value:g}" for value in at])
            axis.set_xticks([], minor=True)
        axis.legend(fontsize="x-small")
    figure.axes[-1].set_axis_off()
    figure.savefig(path, dpi=80)


def table(dots: Sequence[Dot]) -> str:
    """As Markdown."""
    lines = ["| study | series | at | measured | bound |", "| --- | --- | --- | --- | --- |"]
    for dot in dots:
        lines.append(f"| {dot.study} | {dot.series} | {dot.at:g} | {dot.measured:.4g} | {dot.bound:.4g} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, help="write the figure")
    parser.add_argument("--json", action="store_true", help="the points for programs")
    asked = parser.parse_args()
    dots = []
    for number, study in enumerate(STUDIES, 1):
        print(f"{number} of {len(STUDIES)}: {study.__name__}", file=sys.stderr, flush=True)
        dots += study()
    print(json.dumps([asdict(dot) for dot in dots], indent=1) if asked.json else table(dots))
    if asked.plot is not None:
        plot(dots, asked.plot)
    return int(any(dot.measured > dot.bound * CHANCE for dot in dots))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
