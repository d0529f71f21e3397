"""What is learnt of ranks that are gone: what caused it, whether a new start may help, and in which words."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.client.failures import WorkFailed
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.train.orders import Advice, Report, take_reports

_log = logging.getLogger("roundtable.agent")
AGAIN = {"node_failure", "gpu_error", "out_of_memory", "network_partition"}
"""Kinds of failure after which the ranks are started again."""


_LOOK_SECONDS = 1.0
_TOLD_WITH_PLACE = AGAIN | {"task_error", "data_corruption"}
"""Kinds that one rank may meet with at one place; what is refused is refused for all, before any step."""


class RanksLost(Exception):
    """The connection to rank 0 is gone."""


class RanksUnanswered(RanksLost):
    """No rank answers, though the group may still run: it is ended, as nothing else would end it."""


@dataclass
class Course:
    """How far ranks have come with an order, as rank 0 has told: the phase that a failure is told with."""

    verb: str
    connected: bool = False
    step: int = 0
    steps: int = 0

    def hears(self, step: int, steps: int) -> None:
        """Rank 0 has told of a step that was taken, of so many."""
        self.step, self.steps = step, steps

    @override
    def __str__(self) -> str:
        if not self.connected:
            return "while the ranks started"
        if self.verb != "train":
            return (
                "in an evaluation" if self.verb == "evaluate" else "before round 1, while models are compared"
            )
        if not self.step:
            return "before the first step"
        if self.step == self.steps:
            return f"after the last of {self.steps} steps, while the update was handed over"
        return f"after step {self.step} of {self.steps}"

    def placed(self, report: Report) -> Report:
        """The report, its words followed by the rank, where it is known and not said, and the phase."""
        if report.kind not in _TOLD_WITH_PLACE:
            return report
        known = report.rank >= 0 and f"rank {report.rank} " not in report.detail
        place = f"rank {report.rank}, {self}" if known else str(self)
        return replace(report, detail=f"{report.detail} ({place})")


def cause_of(reports: list[Report], group: RankGroup | None, lost: RanksLost, timeout: float) -> Report:
    """What broke the group, by the ranks' reports and what a device's library printed as it ended one.

    A rank that ended before the others and left no word is the cause of those that have lost contact; where
    each that ended has left one, those are named that have not: they may hang. `timeout` is the silo's, in
    seconds.
    """
    found = group.device_fault() if group is not None else None
    if found is not None:
        rank, fault = found
        reports = [*reports, Report(rank, fault.kind, f"{fault.meaning} ({fault.source})", "", at=0.0)]
    first = min(reports, key=_tells_least, default=None)
    if group is None or (first is not None and first.kind != "node_failure"):
        return first or _unreported(f"{lost}")
    told = {report.rank for report in reports}
    if group.first is not None and group.first not in told:
        ended = replace(_unreported(group.how_it_ended()), rank=group.first)
        if not group.starved:
            return ended
        starved = f"{ended.detail}; {group.starved}"
        return replace(ended, kind="out_of_memory", detail=starved, whole=not group.in_parts)
    if first is None:
        return _unreported(f"{lost}; {group.last_failure()}")
    return replace(first, rank=-1, detail=f"{first.detail}{_silent(group.ranks, told, timeout)}")


def advise(folder: Path, cause: Report, devices: Sequence[int]) -> None:
    """Writes down what the next start of the ranks has to avoid; WorkFailed where none would help.

    `devices` are those of the ranks, in order; none where a scheduler gives them, and takes them out.
    """
    if cause.kind not in AGAIN:
        raise WorkFailed(cause.kind, cause.detail, cause.trace)
    advice = Advice.read(folder)
    if cause.kind == "out_of_memory" and not cause.whole:
        advice.halvings += 1
        _log.warning("cluster: the micro-batch is halved, or at one example another plan made")
    elif cause.kind == "gpu_error" and devices:
        advice.lost = (*advice.lost, devices[cause.rank % len(devices)])
        _log.warning("cluster: going on without device %d", advice.lost[-1])
    advice.write(folder)


def done_after(report: Report, *, external: bool) -> str:
    """What was done about a failure after which the ranks start again."""
    if report.kind == "gpu_error" and external:
        return "wait for the scheduler to start the ranks again; its node is to be taken out there"
    if report.kind == "gpu_error":
        return "left the device out and started the ranks again"
    if report.kind == "out_of_memory" and not report.whole:
        return (
            "reduced the batch size: halved the micro-batch (or, where it was 1, took the next plan) and "
            "started the ranks again"
        )
    return "started the ranks again"


async def refused(folder: Path) -> None:
    """Returns once a rank that somebody else has started says what no other start of it would mend."""
    told = set[str]()
    while True:
        for report in await asyncio.to_thread(take_reports, folder, leave=True):
            if report.kind not in AGAIN:
                return
            if report.detail not in told:
                told.add(report.detail)
                _log.warning("cluster: while ranks are waited for: %s", report.detail)
        await asyncio.sleep(_LOOK_SECONDS)


def _unreported(words: str) -> Report:
    return Report(rank=-1, kind="node_failure", detail=words.rstrip("; "), trace="", at=0.0)


def _silent(ranks: range, told: Collection[int], timeout: float) -> str:
    silent = [str(rank) for rank in ranks if rank not in told]
    if not silent or not told:
        return ""
    who = "rank " + silent[0] if len(silent) == 1 else f"ranks {', '.join(silent[:8])}"
    return (
        f"; nothing was heard of {who}: a hang, or a step that takes longer than [cluster] timeout = "
        f"{timeout:g} seconds"
    )


def _tells_least(report: Report) -> int:
    """Sorts what caused a failure before what only followed: a mistake, then a device, then a lost peer."""
    if report.kind not in AGAIN:
        return 0
    return 2 if report.kind == "node_failure" else 1


def given_up(failures: list[Report]) -> WorkFailed:
    """The error after the last start that was allowed."""
    last = failures[-1]
    return WorkFailed(
        last.kind, f"the silo's cluster failed {len(failures)} times, last: {last.detail}", last.trace
    )


def figures_of(step: dict[str, Any]) -> dict[str, float]:
    """A StepReport's values under the names of the wire's StepFigures; unknown ones are left out."""
    seconds = max(step["seconds"], 1e-9)
    figures = {
        "step": step["step"],
        "steps": step["steps"],
        "learning_rate": step["learning_rate"],
        "gradient_norm": step["norm"],
        "examples_per_second": step["examples"] / seconds,
        "tokens_per_second": step["tokens"] / seconds if step["tokens"] else None,
        "flops_utilisation": step["utilisation"],
        "memory_bytes": step["memory"],
        "seconds": step["seconds"],
        "communication_seconds": step["communicating"],
        "waiting_seconds": step["waiting"],
    }
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
