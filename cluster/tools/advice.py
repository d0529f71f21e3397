"""What the figures of a silo's rounds advise: a table of rules with thresholds, over what was measured.

The thresholds are rules of thumb, not measurements of this project: beyond them one thing takes so much of a
step that changing it is worth a try, and the next round's report says whether it helped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundtable.cluster.train.round_reports import FIGURES

# Of one device's memory.
FULL, HALF_EMPTY = 0.92, 0.5
# Of a step's time.
COMMUNICATING, WAITING = 0.3, 0.1
# Of the devices' peak.
IDLE = 0.25
# A step's deviation over its mean; a rank's waiting over the mean of the others.
UNEVEN, BEHIND = 0.5, 2.0


@dataclass(frozen=True)
class Hint:
    """One thing to try, and the figure that says so."""

    about: str
    found: str
    advice: str


@dataclass(frozen=True)
class StepShares:
    """The figures that the rules look at; NaN for what was not measured."""

    memory: float
    communicating: float
    waiting: float
    utilisation: float
    uneven: float
    behind: float
    slowest: int
    strategy: Mapping[str, Any]


@dataclass(frozen=True)
class AdviceRule:
    """`holds` where `found` is worth saying; comparisons with NaN do not hold."""

    about: str
    holds: Callable[[StepShares], bool]
    found: Callable[[StepShares], str]
    advice: str


RULES = (
    AdviceRule(
        "memory",
        lambda s: s.memory > FULL,
        lambda s: f"the fullest device holds {s.memory:.0%} of its memory",
        'share the model out further: [cluster.strategy] data_parallel = "zero2" or "zero3", or recompute '
        'activations: checkpointing = "every"; the next longer batch runs out of it',
    ),
    AdviceRule(
        "memory",
        lambda s: s.memory < HALF_EMPTY and s.strategy.get("checkpointing", "none") != "none",
        lambda s: (
            f"the fullest device holds {s.memory:.0%} of its memory, and activations are computed twice"
        ),
        'keep them: [cluster.strategy] checkpointing = "none", or a larger micro_batch',
    ),
    AdviceRule(
        "communication",
        lambda s: s.communicating > COMMUNICATING,
        lambda s: f"{s.communicating:.0%} of a step has a collective under way",
        'send less: [cluster.strategy] reduction = "bfloat16" or "powersgd" under ddp, or meet less often: '
        "local_steps (DiLoCo); over nodes, fewer of them may be faster",
    ),
    AdviceRule(
        "data",
        lambda s: s.waiting > WAITING,
        lambda s: f"{s.waiting:.0%} of a step is waiting for data",
        "read ahead: a DataLoader with num_workers and prefetch_factor from the task's data; or decode less "
        "for each example, or store examples decoded",
    ),
    AdviceRule(
        "data",
        lambda s: s.behind > BEHIND and s.waiting > WAITING / 2,
        lambda s: f"rank {s.slowest} waits for data {s.behind:.1f} times as long as the others in the mean",
        "make shards of about one size, and as many lanes as a multiple of the data-parallel ranks",
    ),
    AdviceRule(
        "device",
        lambda s: s.utilisation < IDLE and not s.communicating > COMMUNICATING and not s.waiting > WAITING,
        lambda s: f"the model's own operations come to {s.utilisation:.0%} of the devices' peak",
        'give a device more at once: a larger micro_batch or batch_size; precision = "bfloat16"; less tp',
    ),
    AdviceRule(
        "steps",
        lambda s: s.uneven > UNEVEN,
        lambda s: f"steps differ by {s.uneven:.0%} of their mean from each other",
        "look for other work on the devices, examples of very different lengths, and slow checkpoints",
    ),
)


def advise(report: Mapping[str, Any]) -> list[Hint]:
    """What a round's report, or a job's, advises; nothing where nothing stands out."""
    shares = _shares(report)
    return [Hint(rule.about, rule.found(shares), rule.advice) for rule in RULES if rule.holds(shares)]


def whole_job(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report over all of a job's: each figure's steps put together (Chan et al. 1979, equation 2.1).

    Ranks and plan are those of the last round.
    """
    last = reports[-1]
    found: dict[str, Any] = {
        "rounds": len({report["round"] for report in reports}),
        **{name: sum(report[name] for report in reports) for name in ("steps", "examples", "tokens")},
        "memory": max(report["memory"] for report in reports),
        **{name: last[name] for name in ("memory_limit", "ranks", "plan", "strategy")},
    }
    for name in FIGURES:
        # Reports that an earlier version kept lack later figures, and how many steps had one.
        parts = [{"steps": report["steps"], **report[name]} for report in reports if report.get(name)]
        found[name] = _together(parts) if parts else None
    return found


def _together(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    steps = max(sum(part["steps"] for part in parts), 1)
    mean = sum(part["steps"] * part["mean"] for part in parts) / steps
    squares = sum(part["steps"] * (part["deviation"] ** 2 + (part["mean"] - mean) ** 2) for part in parts)
    return {
        "mean": mean,
        "least": min(part["least"] for part in parts),
        "most": max(part["most"] for part in parts),
        "deviation": math.sqrt(squares / steps),
        "steps": steps,
    }


def _shares(report: Mapping[str, Any]) -> StepShares:
    seconds = _mean(report, "seconds")
    waits = [rank["waiting"] for rank in report["ranks"]]
    slowest = max(range(len(waits)), key=waits.__getitem__, default=0)
    others = len(waits) - 1
    # Of the others: with two ranks none waits more than twice the mean of both.
    mean_wait = (sum(waits) - waits[slowest]) / others if others > 0 else 0.0
    return StepShares(
        memory=report["memory"] / report["memory_limit"] if report["memory_limit"] else math.nan,
        communicating=_mean(report, "communicating") / seconds if seconds > 0 else math.nan,
        waiting=_mean(report, "waiting") / seconds if seconds > 0 else math.nan,
        utilisation=_mean(report, "utilisation"),
        uneven=report["seconds"]["deviation"] / seconds if seconds > 0 else math.nan,
        behind=waits[slowest] / mean_wait if mean_wait else math.nan,
        slowest=slowest,
        strategy=report["strategy"],
    )


def _mean(report: Mapping[str, Any], name: str) -> float:
    spread = report[name]
    return math.nan if spread is None else float(spread["mean"])
