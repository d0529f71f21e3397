"""Pictures of a survey's answers: histograms, survival curves, coefficients with intervals, losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from roundtable.core import extras
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import ConfigError
from roundtable.core.foreign_text import printable

_ENDINGS = (".png", ".svg", ".pdf")
_LONGEST = 60


def draw(answers: Sequence[Answer], path: Path) -> None:
    """One panel for each answer that has a picture. ConfigError for another ending, or where none has one."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"{path}: a picture ends in {', '.join(_ENDINGS)}")
    drawn = [(answer, _PANELS[answer.ask]) for answer in answers if not answer.why and answer.ask in _PANELS]
    if not drawn:
        raise ConfigError(f"no answer of this survey has a picture; those of {', '.join(_PANELS)} have")
    figures = extras.load("matplotlib.figure", "a picture")
    # Words of a study are no formulas: "$0 to $50" is no mathematics.
    with extras.load("matplotlib", "a picture").rc_context({"text.parse_math": False}):
        heights = [_height(answer) for answer, _ in drawn]
        figure = figures.Figure(figsize=(6.4, sum(heights)), layout="constrained")
        rows = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
        for (answer, panel), (axes,) in zip(drawn, rows, strict=True):
            try:
                panel(axes, answer)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{answer.title}: its values make no picture ({error!r})") from error
            axes.set_title(_word(answer.title))
        figure.savefig(path)


def _word(text: str) -> str:
    """A word of the study in a picture: printable, as SVG has it to be, and short. A legend leaves out what
    begins with an underscore."""
    shown = printable(text, _LONGEST)
    return f" {shown}" if shown.startswith("_") else shown


def _height(answer: Answer) -> float:
    """Inches: a line for each term, where the panel is made of terms."""
    terms = answer.values.get("terms")
    return 1.1 + 0.3 * len(terms) if isinstance(terms, list | tuple) else 3.6


def _histogram(axes: Any, answer: Answer) -> None:
    edges, counts = answer.values["edges"], answer.values["counts"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    for label, counted in counts.items():
        line = axes.stairs([_or_nan(each) for each in counted], edges, label=_word(label))
        for middle, ends in zip(middles, answer.values.get("intervals", {}).get(label, ()), strict=False):
            axes.plot([middle, middle], ends, color=line.get_edgecolor(), linewidth=0.8)
    # A step to 0 would say that nobody is there.
    hidden = [place for place, each in enumerate(zip(*counts.values(), strict=True)) if None in each]
    for number, place in enumerate(hidden):
        label = None if number else "few rows: hidden"
        axes.axvspan(edges[place], edges[place + 1], color="0.88", zorder=0, label=label)
    axes.set_xlabel(_word(answer.header[0].removesuffix(" from")))
    axes.set_ylabel("rows")
    if len(counts) > 1 or hidden:
        axes.legend()


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _survival(axes: Any, answer: Answer) -> None:
    for label, curve in answer.values["curves"].items():
        times = [0.0, *curve["times"]]
        line = axes.step(times, [1.0, *curve["survival"]], where="post", label=_word(label))[0]
        low, high = ([1.0, *map(_or_nan, curve[key])] for key in ("lower", "upper"))
        axes.fill_between(times, low, high, step="post", alpha=0.2, color=line.get_color())
    axes.set_ylim(0, 1)
    axes.set_xlabel("time")
    axes.set_ylabel("share without the event")
    if len(answer.values["curves"]) > 1:
        axes.legend()


def _coefficients(axes: Any, answer: Answer) -> None:
    terms, values, spans = (answer.values[key][1:] for key in ("terms", "coefficients", "intervals"))
    places = list(range(len(terms)))
    axes.errorbar(
        values,
        places,
        xerr=[
            [value - low for value, (low, _) in zip(values, spans, strict=True)],
            [high - value for value, (_, high) in zip(values, spans, strict=True)],
        ],
        fmt="o",
    )
    axes.axvline(0.0, linewidth=0.8, color="grey")
    axes.set_yticks(places, [_word(term) for term in terms])
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.set_xlabel("coefficient, 95 % interval")


def _hazard_ratios(axes: Any, answer: Answer) -> None:
    """A forest plot: ratios with their intervals on a logarithmic axis."""
    terms, values = answer.values["terms"], answer.values["hazard_ratios"]
    ends = [[math.exp(end) for end in interval] for interval in answer.values["intervals"]]
    places = list(range(len(terms)))
    reach = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    axes.errorbar(values, places, xerr=reach, fmt="s")
    axes.set_xscale("log")
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    if high < 20 * low:
        axes.set_xticks(ticks := _round_numbers(low, high), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.axvline(1.0, linewidth=0.8, color="grey")
    axes.set_yticks(places, [_word(term) for term in terms])
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.set_xlabel("hazard ratio, 95 % interval")


def _round_numbers(low: float, high: float) -> list[float]:
    """A few round numbers between two ratios, 1 among them."""
    ladder = [mantissa * 10.0**power for power in range(-9, 9) for mantissa in (1, 1.5, 2, 3, 5, 7)]
    found = [each for each in ladder if low / 1.1 <= each <= high * 1.1]
    if len(found) > 2:
        return found
    ticks = extras.load("matplotlib.ticker", "a picture").MaxNLocator(5).tick_values(low, high)
    return [float(tick) for tick in ticks if tick > 0]


def _trees(axes: Any, answer: Answer) -> None:
    """Losses by round; of trees under noise, which tell none, what features are worth."""
    if "metric" not in answer.values:
        worth = {name: each["total_gain"] for name, each in answer.values["importance"].items()}
        names = sorted(worth, key=lambda name: worth[name])
        axes.barh(range(len(names)), [worth[name] for name in names])
        axes.set_yticks(range(len(names)), [_word(name) for name in names])
        axes.set_xlabel("total gain")
        return
    for label, key in (("grown on", "training_loss"), ("held out", "held_out_loss")):
        if key in answer.values:
            axes.plot(answer.values[key], label=label)
    axes.axvline(answer.values["rounds"], linewidth=0.8, color="grey")
    axes.set_xlabel("rounds of boosting")
    axes.set_ylabel(answer.values["metric"])
    axes.legend()


def _evaluation(axes: Any, answer: Answer) -> None:
    curve = answer.values.get("calibration")
    silos = {name: own for name, own in answer.values.get("silos", {}).items() if own is not None}
    if curve:
        axes.plot([0, 1], [0, 1], linewidth=0.8, color="grey")
        axes.plot([each["predicted"] for each in curve], [each["observed"] for each in curve], marker="o")
        for name, own in silos.items():
            points = [[each[key] for each in own["calibration"]] for key in ("predicted", "observed")]
            axes.plot(*points, linewidth=0.8, label=_word(name))
        if silos:
            axes.legend()
        axes.set_xlabel("predicted")
        axes.set_ylabel("observed")
        return
    groups = {"all": answer.values, **answer.values.get("groups", {}), **silos}
    told = {name: each for name, each in groups.items() if each["auroc"] is not None}
    for place, each in enumerate(told.values()):
        axes.plot(each["auroc_interval"], [place, place], color="C0")
        axes.plot([each["auroc"]], [place], marker="o", color="C0")
    axes.set_yticks(range(len(told)), [_word(name) for name in told])
    axes.set_xlabel("AUROC, 95 % interval")


_PANELS: dict[str, Callable[[Any, Answer], None]] = {
    "histogram": _histogram,
    "survival": _survival,
    **dict.fromkeys(("linear", "logistic", "poisson", "negative_binomial", "mixed_intercept"), _coefficients),
    "evaluate": _evaluation,
    "cox": _hazard_ratios,
    "weighted_cox": _hazard_ratios,
    "boosted_trees": _trees,
}
