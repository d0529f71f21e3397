"""What encodings cost in accuracy: simulated rounds, paired over seeds, each with its bytes.

A figure is the mean accuracy of the last five rounds in points; a cost is that of float32 with the same seed
less that of the encoding, as mean and standard error over the seeds. Clients' own test data measure the model
that silos hold. Finished runs are kept in a file of JSON lines, and a later call does what is missing.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import roundtable as rt
from roundtable.core import parse_job
from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.simulation import simulate

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAST = 5
TRAINED = 1500
SIMPLE, FEEDBACK = "off", "on"
MASKED = """
[privacy]
level = "none"
secure_aggregation = true
clip_norm = 20.0
[evaluation]
bounds = { accuracy = 1.0 }
"""


@dataclass(frozen=True)
class Contestant:
    """A `[transfer]` table: what is sent up, with or without error feedback, and down; `masked` in a sum."""

    up: str
    feedback: str = SIMPLE
    down: str = "float32"
    masked: bool = False

    @property
    def name(self) -> str:
        down = f", down {self.down}" if self.down != "float32" else ""
        feedback = " + feedback" if self.feedback == FEEDBACK else ""
        return self.up + feedback + down + (", masked" if self.masked else "")

    @property
    def table(self) -> str:
        written = f'up = "{self.up}"\nfeedback = "{self.feedback}"\ndown = "{self.down}"'
        return written + (MASKED if self.masked else "")


TOP5, TOP1 = "topk(ratio=0.05) | int8", "topk(ratio=0.01) | int8"
NO_CODING = Contestant("float32")
CHOSEN = (
    NO_CODING,
    Contestant("int4"),
    Contestant("int2(rounding=stochastic)"),
    Contestant("sign(block=4096)", FEEDBACK),
    Contestant(TOP5, FEEDBACK),
    Contestant(TOP1, FEEDBACK),
)
"""Runs on every task."""

OTHERS = (
    Contestant("bfloat16"),
    Contestant("float16"),
    Contestant("int8"),
    Contestant("int8(rounding=stochastic)"),
    Contestant("int4(rounding=stochastic)"),
    Contestant("nf4"),
    Contestant("fp4"),
    Contestant("int2", FEEDBACK),
    Contestant("qsgd(levels=7)"),
    Contestant("natural"),
    Contestant("minmax(bits=4)"),
    Contestant("minmax(bits=8)"),
    Contestant("sign(block=4096)"),
    Contestant(TOP5),
    Contestant(TOP1),
    Contestant("topk(ratio=0.1)", FEEDBACK),
    Contestant("randomk(ratio=0.1)"),
    Contestant("randomk(ratio=0.1, scaled=false)", FEEDBACK),
    Contestant("lowrank(rank=4)", FEEDBACK),
    Contestant("multilevel(small=64, large=1024)", FEEDBACK),
    Contestant("int4", SIMPLE, "int4"),
    Contestant(TOP5, FEEDBACK, "int4"),
)
"""Runs on the smallest task too, so that there is a curve for every encoding."""

IN_SUMS = (
    Contestant("float32", masked=True),
    Contestant("randomk(ratio=0.2, indices=cohort)", masked=True),
    Contestant("randomk(ratio=0.1, indices=cohort)", masked=True),
    Contestant("lowrank(rank=8, basis=cohort)", FEEDBACK, masked=True),
    Contestant("lowrank(rank=4, basis=cohort)", FEEDBACK, masked=True),
    Contestant("lowrank(rank=2, basis=cohort)", FEEDBACK, masked=True),
    Contestant("lowrank(rank=4, basis=cohort)", masked=True),
)
"""Run under secure aggregation, where clients' sums alone are seen."""

LIMITS = (
    (0.2, 7.5, Contestant("int4")),
    (0.5, 14.0, Contestant("int2(rounding=stochastic)")),
    (1.5, 32.0, Contestant("sign(block=4096)", FEEDBACK)),
    (2.0, 46.0, Contestant(TOP5, FEEDBACK)),
)
"""(points that may be lost, how much smaller than float32, by what)."""


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy over all positions."""
    guessed = model(batch[0])
    return cross_entropy(guessed.flatten(0, -2), batch[1].flatten())


def share_right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, tuple[Tensor, int]]:
    """Accuracy over all positions."""
    right = model(batch[0]).argmax(-1) == batch[1]
    return {"accuracy": (right.sum(), right.numel())}


class Pictures(rt.Task):
    """MNIST's digits at half their size, 14 × 14, and a network of two convolutions, 19,858 parameters."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(144, 120), nn.ReLU(), nn.Linear(120, 10)),
        )

    def data(self, site: rt.Site) -> Any:
        images, labels = pictures(self._file)
        train = torch.from_numpy(site.shard(labels[:TRAINED]))
        test = TRAINED + 200 * site.index + torch.arange(200)
        return (images[train], labels[train]), (images[test], labels[test])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return mean_loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return share_right(model, batch)


@cache
def pictures(file: Path) -> tuple[Tensor, Tensor]:
    """Images to train with and 2,000 others to test with [n, 1, 14, 14], and their labels."""
    with np.load(file, allow_pickle=False) as found:
        names = ("{}_images", "{}_labels") if "train_images" in found else ("x_{}", "y_{}")
        images, labels = (
            np.concatenate([found[name.format("train")][:TRAINED], found[name.format("test")][:2000]])
            for name in names
        )
    pixels = avg_pool2d(torch.from_numpy(images).float().div_(255).unsqueeze(1), 2)
    return pixels, torch.from_numpy(labels.astype(np.int64))


class Letters(rt.Task):
    """The next character of Python's own reference, which its standard library holds: an embedding of 16, an
    LSTM of 64 units. Each site has a stretch of the text, whose last tenth is its test."""

    LENGTH, SYMBOLS = 40, 64

    def model(self) -> nn.Module:
        return LetterModel(self.SYMBOLS)

    def data(self, site: rt.Site) -> Any:
        text = reference(self.SYMBOLS)
        rows = len(text) // 10 // (self.LENGTH + 1)
        mine = text[site.index * rows * (self.LENGTH + 1) :][: rows * (self.LENGTH + 1)].view(rows, -1)
        x, y, train = mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), int(0.9 * rows)
        return (x[:train], y[:train]), (x[train:], y[train:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return mean_loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return share_right(model, batch)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)


class LetterModel(nn.Module):
    """[n, length] of symbols to [n, length, symbols]."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(symbols, 16), nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """The next symbol's logits."""
        out: Tensor = self.head(self.cells(self.embed(x))[0])
        return out


@cache
def reference(symbols: int) -> Tensor:
    """The text as symbols: its most frequent characters, and the last symbol for all others."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:60_000]
    frequent = sorted(set(text), key=lambda letter: (-text.count(letter), letter))[: symbols - 1]
    number = {letter: place for place, letter in enumerate(frequent)}
    return torch.tensor([number.get(letter, symbols - 1) for letter in text])


JOB = """
task = "{task}"
seed = {seed}
rounds = {rounds}
[algorithm]
epochs = {epochs}
batch_size = {batch}
{rate}
[cohort]
size = {clients}
[simulation]
clients = {clients}
backend = "{backend}"
partition = {{ {partition} }}
[transfer]
{transfer}
"""


@dataclass(frozen=True)
class Course:
    """A task with its job."""

    name: str
    task: Callable[[], rt.Task] | None
    folder: Path | None
    options: Mapping[str, Any]

    def run(self, contestant: Contestant, seed: int) -> dict[str, Any]:
        """Accuracy in points and how many times smaller than float32 an update is."""
        job = parse_job(JOB.format(seed=seed, transfer=contestant.table, **self.options))
        result = simulate(job, self.task() if self.task else None, folder=self.folder)
        column = "before_accuracy" if contestant.masked else "accuracy"
        accuracy = [float(value) for value in result.history[column] if value is not None]
        update = result.model.vector[: result.model.layout.sent.size]
        encoding = get_encoding(contestant.up).over(result.model.layout.sent)
        if isinstance(encoding, CommonRank):
            travelled = 2.0 * (encoding.values(1) + encoding.values(2))
        else:
            travelled = encoding.encoded_size(len(update)) or sum(
                len(block) for block in encoding.encode(torch.randn(len(update)))
            )
        return {
            "points": 100 * statistics.fmean(accuracy[-LAST:]),
            "curve": [round(100 * value, 2) for value in accuracy],
            "smaller": 4 * len(update) / travelled,
        }


def courses(mnist: Path | None) -> Iterator[Course]:
    """The tasks of this machine: MNIST is only where its file is named."""
    usual = {
        "clients": 10,
        "partition": 'name = "dirichlet", alpha = 0.5',
        "epochs": 2,
        "batch": 16,
        "rate": "learning_rate = 0.1",
        "backend": "vectorised",
    }
    own = {"partition": 'name = "iid"', "rate": "", "backend": "sequential", "epochs": 1, "batch": 32}
    yield Course("digits", None, EXAMPLES / "digits", {**usual, "task": "digits", "rounds": 25})
    if mnist is not None:
        task = partial(Pictures, mnist)
        yield Course("MNIST CNN", task, None, {**usual, "task": "pictures", "rounds": 60})
    yield Course("letters", Letters, None, {**usual, **own, "task": "letters", "rounds": 120})
    yield Course(
        "LoRA", None, EXAMPLES / "lora", {**usual, **own, "task": "lora", "rounds": 40, "clients": 4}
    )


def measure(
    file: Path, seeds: int, mnist: Path | None, only: Sequence[str], masked: bool
) -> list[dict[str, Any]]:
    """Runs what is missing in `file`, and gives all that is there of these courses and seeds.

    `masked`: what is sent under secure aggregation, beside float32 without it.
    """
    done = read(file)
    plan = [
        (course, contestant, seed)
        for seed in range(1, seeds + 1)
        for course in courses(mnist)
        if not only or course.name in only
        for contestant in _contestants(course, masked)
    ]
    began, made = time.monotonic(), 0
    for number, (course, contestant, seed) in enumerate(plan, 1):
        key = (course.name, contestant.name, seed)
        if key in done:
            continue
        found = course.run(contestant, seed)
        done[key] = {"course": course.name, "contestant": contestant.name, "seed": seed, **found}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(done[key]) + "\n")
        made += 1
        left = (time.monotonic() - began) / made * (len(plan) - number) / 60
        said = f"[{number}/{len(plan)}] {course.name}, seed {seed}: {contestant.name}: {found['points']:.2f}"
        print(f"{said} (at most {left:.0f} min left)", file=sys.stderr, flush=True)
    wanted = {(course.name, contestant.name, seed) for course, contestant, seed in plan}
    return [row for key, row in done.items() if key in wanted]


def _contestants(course: Course, masked: bool) -> tuple[Contestant, ...]:
    if masked:
        return (NO_CODING, *IN_SUMS)
    return (*CHOSEN, *(OTHERS if course.name == "digits" else ()))


def read(file: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Finished runs by (course, contestant, seed); a last line that was cut short counts as none."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["course"], row["contestant"], row["seed"]] = row
    return found


def costs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each contestant's cost on each course: mean and standard error of paired differences, in points."""
    base = {(r["course"], r["seed"]): r["points"] for r in rows if r["contestant"] == NO_CODING.name}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["course"], row["contestant"]), []).append(row)
    table = []
    for (course, contestant), group in groups.items():
        lost = [base[course, r["seed"]] - r["points"] for r in group if (course, r["seed"]) in base]
        if not lost:
            continue
        error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else math.nan
        table.append(
            {
                "course": course,
                "contestant": contestant,
                "smaller": statistics.fmean(r["smaller"] for r in group),
                "points": statistics.fmean(r["points"] for r in group),
                "lost": statistics.fmean(lost),
                "error": error,
                "seeds": len(lost),
            }
        )
    return table


def verdicts(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether each limit holds, with the figures."""
    said = []
    for most, smaller, contestant in LIMITS:
        for row in table:
            if row["contestant"] != contestant.name:
                continue
            word = "holds" if row["lost"] <= most else "MISSED"
            said.append(
                f"{word}: {row['course']}, {contestant.name}: {row['lost']:+.2f} ± {row['error']:.2f} points "
                f"lost at {row['smaller']:.1f} × (at most {most:g} at {smaller:g} ×)"
            )
    return said


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Accuracy against bytes on each course, and the course of training of each contestant on the first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    table = costs(rows)
    names = list(dict.fromkeys(row["course"] for row in table))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(4.4 * len(names), 7.0), squeeze=False, height_ratios=(1.2, 1.0)
    )
    for axis, key, name in zip(*axes, names, strict=True):
        points = sorted((r for r in table if r["course"] == name), key=lambda r: r["smaller"])
        points = [row for row in points if ", down" not in row["contestant"]]
        for number, row in enumerate(points, 1):
            feedback = "feedback" in row["contestant"]
            axis.errorbar(
                row["smaller"],
                -row["lost"],
                yerr=row["error"],
                fmt="s" if feedback else "o",
                color="tab:orange" if feedback else "tab:blue",
                markersize=4,
                capsize=2,
                label=f"{number}  {row['contestant']}",
            )
            axis.annotate(
                str(number), (row["smaller"], -row["lost"]), (3, 3), textcoords="offset points", size=7
            )
        axis.set(xscale="log", title=name, xlabel="times smaller than float32")
        axis.set_yscale("symlog", linthresh=1.0)
        axis.axhline(0, color="grey", linewidth=0.5)
        key.axis("off")
        key.legend(*axis.get_legend_handles_labels(), fontsize=6.5, loc="upper left", frameon=False)
    axes[0][0].set_ylabel("points against float32")
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "compression-accuracy.png"]
    figure.savefig(files[0], dpi=130)
    pyplot.close(figure)
    files.append(_draw_rounds(rows, names, folder))
    return files


def _draw_rounds(rows: Sequence[Mapping[str, Any]], names: Sequence[str], folder: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(names), figsize=(4.4 * len(names), 3.8), squeeze=False)
    shown = [contestant.name for contestant in CHOSEN if contestant.down == "float32"]
    for axis, name in zip(axes[0], names, strict=True):
        for contestant in shown:
            curves = [r["curve"] for r in rows if (r["course"], r["contestant"]) == (name, contestant)]
            if curves:
                axis.plot(np.arange(1, len(curves[0]) + 1), np.mean(curves, 0), linewidth=1, label=contestant)
        axis.set(title=name, xlabel="round")
    axes[0][0].set_ylabel("accuracy, mean over seeds")
    axes[0][0].legend(fontsize=6, loc="lower right")
    figure.tight_layout()
    file = folder / "compression-rounds.png"
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file
