"""Pictures of the gallery that need nobody but this machine: how partitions split, how ε grows over rounds.

    .venv/bin/python tools/gallery_pictures.py [--out docs/figures]

Needs matplotlib and scikit-learn; takes seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from roundtable.core.config import JobConfig
from roundtable.privacy.plan import privacy_plan
from roundtable.simulation import describe_partition

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = 10
SPLITS = {
    "iid": {"name": "iid"},
    "dirichlet, alpha = 1": {"name": "dirichlet", "alpha": 1.0},
    "dirichlet, alpha = 0.1": {"name": "dirichlet", "alpha": 0.1},
}
ROUNDS, POPULATION = 200, 1000
DRAWN = {"all of 1,000 silos a round": 1000, "100 of 1,000": 100, "20 of 1,000": 20}
NOISE = 4.0


def partitions(path: Path) -> None:
    """A bar for each silo, a colour for each digit."""
    labels = load_digits(return_X_y=True)[1]
    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    panels: Any = figure.subplots(1, len(SPLITS), sharey=True)
    for panel, (title, spec) in zip(panels, SPLITS.items(), strict=True):
        report = describe_partition({**spec, "min_size": 0}, labels, CLIENTS, seed=7)
        base = np.zeros(CLIENTS)
        for place, label in enumerate(report.labels):
            panel.bar(range(CLIENTS), report.counts[:, place], bottom=base, label=label, color=f"C{place}")
            base += report.counts[:, place]
        panel.set(title=title, xlabel="silo", xticks=range(CLIENTS))
    panels[0].set_ylabel("examples")
    figure.legend(
        *panels[0].get_legend_handles_labels(), title="digit", loc="outside right", fontsize="small"
    )
    figure.savefig(path, dpi=90)


def epsilon(path: Path) -> None:
    """What each round adds, for the same noise and three sizes of a secret cohort."""
    figure = Figure(figsize=(8.5, 4.0), layout="constrained")
    panel: Any = figure.subplots()
    for title, size in DRAWN.items():
        job = JobConfig(
            task="any",
            rounds=ROUNDS,
            aggregation={"weighting": "uniform"},
            cohort={} if size == POPULATION else {"strategy": "poisson", "probability": size / POPULATION},
            privacy={"level": "client", "noise_multiplier": NOISE, "delta": 1e-5, "clip_norm": 1.0},
        )
        rows = privacy_plan(job, POPULATION, 1000).rows
        panel.plot([row.round for row in rows], [row.epsilon for row in rows], "o-", label=title)
    panel.set(xlabel="round", ylabel="ε at δ = 1e-5, per silo", yscale="log")
    panel.set_title(f"noise multiplier {NOISE:g}")
    figure.legend(title="drawn in a round", loc="outside right upper")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Makes both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    out: Path = parser.parse_args().out
    partitions(out / "partitions.png")
    epsilon(out / "epsilon.png")


if __name__ == "__main__":
    main()
