"""docs/reproduction.md and its figure, written from the results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from roundtable.simulation.reporting.plots import new_figure

from .cells import HERE, GroupFile
from .results import Results
from .verdicts import OrderRow, PartRow, Row, Verdict, orders, rows

DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "reproduction.md"
FIGURE = DOCS / "figures" / "reproduction.png"
_HEAD = """# Published results, run again

For researchers who compare frameworks. At the end you know which published figures come out again
here, and which do not.

Tables of publications, run again with their authors' settings through `roundtable.simulate`. What was
published is data, with its sources, in `benchmarks/reproduction/cells/`; ours is in
`benchmarks/reproduction/results/`, a line for each run; and this page is written from both.

```sh
python -m benchmarks.reproduction --only heart --out mine     # runs, or goes on with, a table; prints it
python -m benchmarks.reproduction --only heart/fedavg --seeds 3 --out mine
python -m benchmarks.reproduction --page                      # writes this page from the stored results
```

A cell **agrees** if the mean of our seeds is within one published deviation of the published mean, or
within half a point where that deviation is smaller. Five seeds against five say little: two means of equal
methods differ by more than 0.63 deviations in a third of the cases. So ours are 20 where theirs are five. Δ
is ours − theirs in their deviations; the time is that of one run, in one process on a core that had other
work to do as well. "Seen" figures were read at their source, "recalled" ones are from memory of the paper.

![Theirs as bars, ours as dots](figures/reproduction.png)
"""


def page(known: dict[str, GroupFile], results: Results) -> str:
    """The whole page."""
    every = list(rows(known, results))
    between = [order for name, group in known.items() for order in orders(name, group, results)]
    tables = (_group(name, group, every, results) for name, group in known.items())
    return "\n".join([_HEAD, *tables, _foot(known, every, between)])


def fingerprint(known: dict[str, GroupFile], results: Results) -> str:
    """Of the figures on the page: the picture carries it, so that a test can tell whether it is theirs."""
    return blake3(page(known, results).encode()).hexdigest(16)


def _group(name: str, group: GroupFile, every: list[Row], results: Results) -> str:
    mine = [row for row in every if row.group == name]
    table = group.group
    lines = [
        f"## {table.title}\n",
        f"{table.about}.\n",
        f"Source ({table.evidence}): {table.source}. Their deviation is over {table.deviation_over}.\n",
    ]
    if cells := [row for row in mine if row.cell.value is not None or row.verdict == "shown"]:
        lines += [
            "| method | theirs | ours | seeds | Δ | time | |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_line(row, table.unit) for row in cells]
        lines.append("")
    if table.parts and any(row.ours for row in mine):
        lines += _by_part(table.parts, mine)
    between = list(orders(name, group, results))
    if between:
        lines += ["| order | smaller | larger | seeds | |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {one.claim} | {_figure(one.smaller, None, table.unit)} | "
            f"{_figure(one.larger, None, table.unit)} | {one.seeds} | {one.verdict} |"
            for one in between
        ]
        lines.append("")
    notes = _notes(cells)
    return "\n".join([*lines, *notes, ""] if notes else lines)


def _line(row: Row, unit: str) -> str:
    cell, ours = row.cell, row.ours
    theirs = "–" if cell.value is None else _figure(cell.value, cell.deviation, unit)
    measured = "–" if ours is None else _figure(ours.mean, ours.deviation if ours.seeds > 1 else None, unit)
    difference = "–" if row.difference is None else f"{row.difference:+.2f}"
    seconds = "–" if ours is None else _time(ours.seconds)
    seeds = ours.seeds if ours else 0
    return f"| {cell.method} | {theirs} | {measured} | {seeds} | {difference} | {seconds} | {row.verdict} |"


def _figure(mean: float, deviation: float | None, unit: str) -> str:
    if math.isnan(mean):
        return "–"
    digits = 0 if unit in ("rounds", "points²") else 4
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _by_part(parts: tuple[str, ...], mine: list[Row]) -> list[str]:
    """Theirs / ours of each part: means may agree by accident."""
    lines = [
        "Each part is a cell of its own, judged by the same rule with its own deviation; what **differs** is "
        "bold and told of below.\n",
        f"| theirs / ours | {' | '.join(parts)} |",
        f"| --- |{' --- |' * len(parts)}",
    ]
    lines += [
        f"| {row.cell.method} | {' | '.join(_pair(part) for part in row.parts)} |"
        for row in mine
        if row.ours is not None
    ]
    return [*lines, ""]


def _pair(part: PartRow) -> str:
    assert part.ours is not None
    theirs = "–" if part.theirs is None else f"{part.theirs:.3f}"
    if part.their_deviation is not None:
        theirs += f" ± {part.their_deviation:.3f}"
    text = f"{theirs} / {part.ours:.3f}"
    return f"**{text}**" if part.verdict == "differs" else text


def _notes(mine: list[Row]) -> list[str]:
    """A line for each note, with the methods that it is of; what was found out about parts that differ."""
    said = [row.cell for row in mine if row.cell.note]
    notes = [
        f"- {'; '.join(cell.method for cell in said if cell.note == note)}: {note}"
        for note in dict.fromkeys(cell.note for cell in said)
    ]
    return notes + [
        f"- {row.cell.method}, {part.part}, differs: {row.cell.found[part.part]}"
        for row in mine
        for part in row.parts
        if part.verdict == "differs" and part.part in row.cell.found
    ]


def _foot(known: dict[str, GroupFile], every: list[Row], between: list[OrderRow]) -> str:
    lines = ["| table | cells | agree | differ | too few seeds | not run |", "| --- |" + " --- |" * 5]
    total: Counter[Verdict] = Counter()
    for name, group in known.items():
        if counts := _judged(row for row in every if row.group == name):
            total += counts
            lines.append(_counted(group.group.title, counts))
    lines.append(_counted("all", total))
    orders_held = sum(order.verdict == "agrees" for order in between)
    orders_run = sum(order.verdict != "not run" for order in between)
    return "\n".join(
        [
            "## In sum\n",
            "Cells that are judged: means, and parts with a deviation of their own.\n",
            *lines,
            f"\nOf {len(between)} orders of curves {orders_run} were run, and {orders_held} hold.",
            "\n`make test` runs a cell with a few seeds and holds this page to the results;",
            "`pytest -m nightly` runs whole tables (`tests/simulation/test_reproduction.py`).\n",
        ]
    )


def _judged(some: Iterable[Row]) -> Counter[Verdict]:
    """How many cells, and parts that are cells, got which verdict."""
    counts: Counter[Verdict] = Counter()
    for row in some:
        if row.cell.judged:
            counts[row.verdict] += 1
            counts.update(part.verdict for part in row.parts if part.their_deviation is not None)
    return counts


def _counted(title: str, counts: Counter[Verdict]) -> str:
    kinds: tuple[Verdict, ...] = ("agrees", "differs", "too few seeds", "not run")
    return f"| {title} | {counts.total()} | {' | '.join(str(counts[kind]) for kind in kinds)} |"


def draw(known: dict[str, GroupFile], results: Results, path: Path) -> None:
    """A panel a group: what is allowed around a published figure as a bar, ours as a dot with its error."""
    every = [row for row in rows(known, results) if row.ours is not None]
    shown = [name for name in known if any(row.group == name and row.cell.value is not None for row in every)]
    figure, axes = new_figure(max(1, len(shown)))
    for axis, name in zip(axes, shown, strict=False):
        _panel(axis, known[name], [row for row in every if row.group == name])
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Description": fingerprint(known, results), "Software": None})


def _panel(axis: Any, group: GroupFile, mine: list[Row]) -> None:
    labels = []
    axis.use_sticky_edges = False  # Bars would be cut off at the picture's edge.
    for place, row in enumerate(reversed(mine)):
        assert row.ours is not None
        labels.append(row.cell.method)
        if row.cell.value is not None:
            wide = max(row.cell.deviation or 0.0, 0.005)
            axis.barh(place, 2 * wide, 0.6, row.cell.value - wide, color="0.8")
            axis.plot([row.cell.value] * 2, [place - 0.3, place + 0.3], color="0.4")
        spread = row.ours.deviation / math.sqrt(row.ours.seeds)
        axis.errorbar(row.ours.mean, place, xerr=spread, fmt="o", color="C0", markersize=4, capsize=2)
    # One cell alone is a line, and not all of the panel.
    spare = 0.75 + max(0, 6 - len(labels)) / 2
    axis.set_ylim(-spare, len(labels) - 1 + spare)
    axis.set_yticks(range(len(labels)), labels, fontsize="x-small")
    axis.set_title(group.group.title, fontsize="small")
    axis.set_xlabel(group.group.unit)
