"""Pictures of the gallery that need nobody but this machine, each of figures that the tree holds or makes.

    .venv/bin/python tools/gallery_pictures.py [--out docs/figures] [NAME ...]

`partitions` and `epsilon` are worked out, `attacks` and `speed` drawn from the tables of docs/robustness.md
and docs/performance.md, `timeline` from three simulations, `survival` from a survey of the patients of GBSG2
that the tests have. Needs matplotlib and scikit-learn; takes a minute.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from roundtable.core.config import JobConfig
from roundtable.privacy.plan import privacy_plan
from roundtable.simulation import describe_partition, simulate
from roundtable.surveys import analyse

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


def table_of(page: str, first: str) -> list[list[str]]:
    """The cells of the first table of a page of docs/ whose line begins with `first`, head included."""
    lines = iter((ROOT / "docs" / page).read_text().splitlines())
    head = next(line for line in lines if line.startswith(first))
    rows = [head]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in row[1:].strip("|").split("|")] for row in (rows[0], *rows[2:])]


def attacks(path: Path) -> None:
    """Accuracy of each rule under each attack, as the page has it."""
    head, *rows = table_of("robustness.md", "| rule (f = 4)")
    shown = np.array([[float(cell.rstrip("*")) for cell in row[2:]] for row in rows])
    figure = Figure(figsize=(11.0, 8.2), layout="constrained")
    panel: Any = figure.subplots()
    image = panel.imshow(shown, cmap="viridis", vmin=75, vmax=95, aspect="auto")
    panel.set_xticks(range(len(head) - 2), head[2:], rotation=35, ha="right")
    panel.set_yticks(range(len(rows)), [row[0].replace("`", "") for row in rows])
    for (row, column), value in np.ndenumerate(shown):
        color = "white" if value < 87 else "black"
        panel.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7.5, color=color)
    panel.set_title("MNIST, 4 of 20 silos hostile, 40 rounds: accuracy in %, worst seed")
    figure.colorbar(image, ax=panel, extend="min", fraction=0.03)
    figure.savefig(path, dpi=90)


def speed(path: Path) -> None:
    """Seconds of a round, as the page has them."""
    head, *rows = table_of("performance.md", "| | S1 |")
    rounds = [row for row in rows if not row[0].startswith("our ")]
    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    names = [re.sub(r", (another run|a run before)$", "*", row[0]) for row in rounds]
    for panel, column in zip(panels, (1, 2), strict=True):
        found = [re.match(r"[0-9.]+", row[column]) for row in rounds]
        seconds = [float(each[0]) if each else float("nan") for each in found]
        bars = panel.barh(names, seconds, color=["C1", *["C0"] * (len(rounds) - 1)])
        panel.bar_label(bars, [f"{each[0]} s" if each else "" for each in found], padding=3)
        panel.set(title=f"{head[column]}: seconds a round", xscale="log", xlim=(0.03, 12))
    panels[0].invert_yaxis()
    figure.supxlabel("MNIST on two shared cores; * of another run than the rest", fontsize="small")
    figure.savefig(path, dpi=90)


def timeline(path: Path) -> None:
    """One job of slow and fast silos, waited for in three ways: when models come, and how good they are."""
    ways = {
        "waits for all 8": {"cohort.size": 8},
        "asks 8, goes on with 5": {"cohort.size": 5, "cohort.minimum": 5, "cohort.over_selection": 1.6},
        "buffered: a model of each 5": {"round.mode": "buffered", "round.buffer": 5, "round.concurrency": 8},
    }
    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    lanes: Any
    curves: Any
    lanes, curves = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    for lane, (name, keys) in enumerate(ways.items()):
        told = {
            "rounds": 30,
            "algorithm.epochs": 1,
            "simulation.clients": 16,
            "simulation.partition.alpha": 1.0,
        }
        slow = {"simulation.devices.speed": {"median": 20.0, "sigma": 1.0}}
        job = ROOT / "examples" / "digits" / "job.toml"
        history = simulate(job, overrides={**told, **slow, **keys}, progress=False).history
        minutes = [row["time"] / 60 for row in history]
        lanes.vlines(minutes, lane + 0.1, lane + 0.9, color=f"C{lane}")
        curves.plot(minutes, [row["accuracy"] for row in history], "o-", ms=3, color=f"C{lane}", label=name)
    lanes.set_yticks(np.arange(len(ways)) + 0.5, ways)
    lanes.set_title("30 models of one job: digits, 16 silos whose speeds differ (lognormal, sigma = 1)")
    lanes.invert_yaxis()
    curves.set(xlabel="virtual minutes", ylabel="accuracy")
    curves.legend()
    figure.savefig(path, dpi=90)


def survival(path: Path) -> None:
    """Kaplan-Meier curves of patients of four silos, out of masked sums."""
    with (ROOT / "tests" / "core" / "analyses" / "survival" / "gbsg2.csv").open() as file:
        head, *rows = list(csv.reader(file))
    with tempfile.TemporaryDirectory() as folder:
        for silo in range(4):
            with Path(folder, f"{silo}.csv").open("w") as file:
                csv.writer(file).writerows([head, *rows[silo::4]])
        survey = Path(folder, "survey.toml")
        survey.write_text(SURVEY)
        analyse(survey).plot(path)


SURVEY = """
table = "gbsg2"
columns.time = { unit = "days", least = 0, most = 4000 }
columns.event = { kind = "category", values = ["no", "yes"], recode = { 0 = "no", 1 = "yes" } }
columns.horTh = { kind = "category", values = ["no", "yes"], recode = { 0 = "no", 1 = "yes" } }

[[questions]]
name = "GBSG2: days without recurrence, by hormone therapy"
ask = "survival"
time = "time"
event = "event"
every = 30
by = "horTh"

[silos]
a = "0.csv"
b = "1.csv"
c = "2.csv"
d = "3.csv"
"""

PICTURES = {made.__name__: made for made in (partitions, epsilon, attacks, speed, timeline, survival)}


def main() -> None:
    """Makes all, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*PICTURES, []], help=", ".join(PICTURES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    said = parser.parse_args()
    for name in said.names or PICTURES:
        PICTURES[name](said.out / f"{name}.png")


if __name__ == "__main__":
    main()
