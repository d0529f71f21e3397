"""What is learnt of ranks that are gone: what caused it, whether a new start may help, and in which words."""

from __future__ import annotations

import math
from typing import Any

from roundtable.client.failures import WorkFailed
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.train.orders import Report

AGAIN = {"node_failure", "gpu_error", "out_of_memory", "network_partition"}
"""Kinds of failure after which the ranks are started again."""


class RanksLost(Exception):
    """The connection to rank 0 is gone."""


class RanksUnanswered(RanksLost):
    """No rank answers, though the group may still run: it is ended, as nothing else would end it."""


def cause_of(reports: list[Report], group: RankGroup | None, lost: RanksLost) -> Report:
    """What broke the group, by the ranks' reports and what a device's library printed as it ended one."""
    found = group.device_fault() if group is not None else None
    if found is not None:
        rank, fault = found
        reports = [*reports, Report(rank, fault.kind, f"{fault.meaning} ({fault.source})", "", at=0.0)]
    if reports:
        return min(reports, key=_tells_least)
    output = group.last_failure() if group is not None else ""
    return Report(rank=-1, kind="node_failure", detail=f"{lost}; {output}".rstrip("; "), trace="", at=0.0)


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
