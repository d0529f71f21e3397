"""What is told of ranks that are gone: which one, at which phase, and why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from roundtable.client.failures import WorkFailed
from roundtable.cluster.agent.failed_ranks import Course, RanksLost, advise, cause_of
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.train.orders import Advice, Report

CUT_OFF = "a rank lost contact with the others: Connection reset by peer"


def report(rank: int, kind: str = "node_failure", detail: str = CUT_OFF) -> Report:
    return Report(rank, kind, detail, "", at=float(rank))


async def found(
    reports: list[Report], first: tuple[int, int] | None, printed: str = "", ranks: range = range(4)
) -> Report:
    """The cause by these reports, of a group of which (place, status) ended first, or that was ended here."""
    output, prints = os.pipe()
    os.write(prints, printed.encode())
    os.close(prints)
    group = RankGroup(1, output, lambda: group.over(0, -signal.SIGKILL, ""), lambda: "", ranks)
    if first is not None:
        group.over(*first, "")
    await group.end()
    return cause_of(reports, group, RanksLost("no rank sent anything for 17 s"), 6.0)


@pytest.mark.parametrize(
    ("reports", "first", "rank", "said"),
    [
        # Those that have lost contact are not why.
        (
            [report(0), report(3)],
            (1, -9),
            1,
            "rank 1 was ended by SIGKILL, by somebody or by the kernel for want",
        ),
        ([], (2, -9), 2, "rank 2 was ended by SIGKILL"),
        ([report(0)], (1, 7), 1, "rank 1 ended with status 7; an error that names itself"),
        ([report(0), report(1, "out_of_memory", "too little")], (1, 1), 1, "too little"),
        ([report(0), report(2, "task_error", "a mistake")], (1, -9), 2, "a mistake"),
        # All that ended have said that they waited in vain.
        (
            [report(0), report(2)],
            (0, 1),
            -1,
            f"{CUT_OFF}; nothing was heard of ranks 1, 3: a hang, or a step",
        ),
        ([report(rank) for rank in range(4)], (0, 1), -1, CUT_OFF),
        # What the agent has ended itself was not ended by somebody.
        ([], None, -1, "no rank sent anything for 17 s; an error that names itself"),
        ([report(1)], None, -1, f"{CUT_OFF}; nothing was heard of ranks 0, 2, 3: a hang"),
    ],
)
async def test_the_cause_is_who_left_no_word(
    reports: list[Report], first: tuple[int, int] | None, rank: int, said: str
) -> None:
    cause = await found(reports, first, "an error that names itself\n")
    assert (cause.rank, cause.detail[: len(said)]) == (rank, said)


async def test_a_rank_of_a_replica_is_told_by_its_number_among_all() -> None:
    cause = await found([report(4)], (1, -9), ranks=range(4, 6))
    assert cause.detail.startswith("rank 5 was ended by SIGKILL")


@pytest.mark.parametrize("in_parts", [True, False])
async def test_a_rank_that_the_kernel_ended_for_want_of_memory_gets_less_to_hold(
    in_parts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the kernel's own count; on GPUs smaller parts of a batch leave main memory as full as it was."""
    counts = iter([3, 4])
    monkeypatch.setattr("roundtable.cluster.agent.rank_group.memory_kills", lambda: next(counts))
    output, prints = os.pipe()
    os.close(prints)
    group = RankGroup(1, output, lambda: None, lambda: "", range(2), in_parts=in_parts)
    group.over(1, -signal.SIGKILL, "")
    await group.end()
    cause = cause_of([report(0)], group, RanksLost("gone"), 6.0)
    assert (cause.kind, cause.rank, cause.whole) == ("out_of_memory", 1, not in_parts)
    assert "rose from 3 to 4" in cause.detail
    advise(tmp_path, cause, [0, 1])
    assert Advice.read(tmp_path).halvings == int(in_parts)


def test_a_failure_is_told_with_its_rank_and_phase() -> None:
    course = Course("train")
    phases = [str(course)]
    course.connected = True
    phases.append(str(course))
    for step in (3, 8):
        course.hears(step, 8)
        phases.append(str(course))
    assert phases == [
        "while the ranks started",
        "before the first step",
        "after step 3 of 8",
        "after the last of 8 steps, while the update was handed over",
    ]
    course.hears(3, 8)
    assert course.placed(report(1, "gpu_error", "it broke")).detail == "it broke (rank 1, after step 3 of 8)"
    assert course.placed(report(1, detail="rank 1 ended")).detail == "rank 1 ended (after step 3 of 8)"
    assert course.placed(report(0, "refused", "no plan")).detail == "no plan"
    assert str(Course("evaluate", connected=True)) == "in an evaluation"


def test_only_what_a_new_start_may_mend_is_advised_on(tmp_path: Path) -> None:
    advise(tmp_path, report(3, "gpu_error"), [4, 6])
    advise(tmp_path, report(0, "out_of_memory"), [4, 6])
    advise(tmp_path, report(1, "gpu_error"), [])
    assert Advice.read(tmp_path) == Advice(1, (6,))
    with pytest.raises(WorkFailed, match="a mistake"):
        advise(tmp_path, report(0, "task_error", "a mistake"), [4])
