"""A day of jobs in the queue, in virtual time: how busy silos are, and how long jobs wait, with a picture.

    python benchmarks/queue_day.py --jobs 200 --silos 100 --picture docs/figures/queue.png

The same day is played three times: with what each job is expected to take, without, and with coordinators
that die in three of ten. Every decision is held against the naive check of tests/kit/queue_world.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

from queue_world import PlayedJob, QueueWorld, a_day, copied

from roundtable.server.queue.queue_rules import QueueRules

HOUR = 3600.0
DAY = 24 * HOUR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--shorter", type=float, default=0.4, help="rounds are so much shorter than drawn")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    jobs, capacities = a_day(options.jobs, options.silos, options.seed)
    jobs = [replace(job, seconds=max(1.0, round(job.seconds * options.shorter))) for job in jobs]
    unknown = [replace(job, known=False) for job in jobs]
    runs = {
        "durations known": _played(QueueWorld(copied(jobs), capacities, QueueRules(HOUR))),
        "durations unknown": _played(QueueWorld(copied(unknown), capacities, QueueRules(HOUR))),
        "known, with failovers": _played(
            QueueWorld(copied(jobs), capacities, QueueRules(HOUR), 3, options.seed)
        ),
    }
    for name, world in runs.items():
        print(json.dumps({"run": name, **_figures(world, len(capacities))}))
    if options.picture:
        _draw(runs, len(capacities), options.picture)


def _played(world: QueueWorld) -> QueueWorld:
    began = time.perf_counter()
    world.play()
    print(
        f"{world.checks} decisions in {time.perf_counter() - began:.1f} s, checks included", file=sys.stderr
    )
    assert all(job.ended is not None for job in world.jobs.values())
    return world


def _figures(world: QueueWorld, silos: int) -> dict[str, Any]:
    jobs = list(world.jobs.values())
    large = sorted(jobs, key=lambda job: -len(job.silos))[: len(jobs) // 4]
    end = max(job.ended or 0.0 for job in jobs)
    return {
        "busy share of silos, first 24 h": round(_busy(world, DAY) / silos, 3),
        "hours until the last has ended": round(end / HOUR, 1),
        "median wait, minutes": round(median(map(_wait, jobs)) / 60, 1),
        "95 % wait at most, minutes": round(sorted(map(_wait, jobs))[int(0.95 * len(jobs))] / 60, 1),
        "median wait of the largest quarter, minutes": round(median(map(_wait, large)) / 60, 1),
        "turns taken back": world.preempted,
        "failovers": world.failovers,
    }


def _wait(job: PlayedJob) -> float:
    assert job.began is not None
    return job.began - job.at


def _busy(world: QueueWorld, until: float) -> float:
    """Silos at work, on average over the time until then."""
    total, steps = 0.0, [step for step in world.used if step[0] < until]
    for (begin, _, silos), (end, _, _) in zip(steps, [*steps[1:], (until, 0, 0)], strict=True):
        total += silos * (end - begin)
    return total / until


def _draw(runs: dict[str, QueueWorld], silos: int, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    use, wait = figure.subplots(1, 2)
    for (name, world), colour in zip(runs.items(), ("#1f5fa8", "#a8501f", "#6b6b6b"), strict=True):
        hours = [moment / HOUR for moment, _, _ in world.used]
        use.step(
            hours,
            _smooth([100 * at_work / silos for _, _, at_work in world.used]),
            color=colour,
            lw=1,
            label=name,
        )
        waits = sorted(_wait(job) / 60 for job in world.jobs.values())
        wait.plot(
            waits, [100 * (n + 1) / len(waits) for n in range(len(waits))], color=colour, lw=1, label=name
        )
    use.set(xlabel="hours", ylabel="% of silos at work", ylim=(0, 100))
    wait.set(xlabel="minutes until the first turn", ylabel="% of jobs", ylim=(0, 100))
    wait.set_xscale("symlog", linthresh=1)
    wait.set_xlim(left=0)
    wait.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=90)


def _smooth(values: Sequence[float], window: int = 25) -> list[float]:
    """The mean of the last so many decisions: single ones jump."""
    return [
        sum(values[max(0, n - window + 1) : n + 1]) / len(values[max(0, n - window + 1) : n + 1])
        for n in range(len(values))
    ]


if __name__ == "__main__":
    main()
