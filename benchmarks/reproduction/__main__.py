"""Runs published tables again: `python -m benchmarks.reproduction --only heart`, in the project's folder.

    --only GROUP or CELL   what to run; again for more; everything without it
    --seeds N              so many seeds of each cell instead of those that it needs
    --out DIR              where results are kept, and taken up; default: those of docs/reproduction.md
    --mnist FILE           MNIST as an .npz file; its cells are left out without it
    --report               only print what the results say; --json for programs
    --page                 write docs/reproduction.md and its figure from the results

A run that is interrupted is gone on with by the same command; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roundtable.core.errors import RoundtableError

from . import heart_cells, mcmahan_cells, mnist_cells, synthetic_cells
from .cells import HERE, CellTable, GroupFile, chosen, groups
from .page import FIGURE, PAGE, draw, page
from .results import Outcome, Results
from .verdicts import orders, rows

STORED = HERE / "results"
RUNNERS = {
    "heart": heart_cells.run,
    "mcmahan": mcmahan_cells.run,
    "niid_mnist": mnist_cells.run_niid,
    "pfedme_mnist": mnist_cells.run_pfedme,
    "pfedme_synthetic": synthetic_cells.run_pfedme_synthetic,
    "fedprox": synthetic_cells.run_fedprox,
    "qffl": synthetic_cells.run_qffl,
}


def main(arguments: list[str] | None = None) -> int:
    """0 where nothing that was asked for differs from what was published."""
    asked = _parser().parse_args(arguments)
    known, results = groups(), Results(asked.out)
    picked = list(chosen(known, asked.only))
    if asked.page:
        PAGE.write_text(page(known, results), encoding="utf-8")
        draw(known, results, FIGURE)
        print(f"wrote {PAGE} and {FIGURE}")
        return 0
    if not asked.report:
        _run(picked, results, asked)
    return _tell({cell.id for _, _, cell in picked}, known, results, asked.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.reproduction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options]",
    )
    parser.add_argument("--only", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=_positive, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=STORED, help=argparse.SUPPRESS)
    parser.add_argument("--mnist", type=Path, help=argparse.SUPPRESS)
    for flag in ("--report", "--json", "--page"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _run(picked: list[tuple[str, GroupFile, CellTable]], results: Results, asked: Any) -> None:
    """What is not there yet, cell by cell; a line for each run as it ends."""
    for name in dict.fromkeys(name for name, _, _ in picked):
        group = next(group for title, group, _ in picked if title == name)
        data = getattr(asked, group.group.data) if group.group.data else None
        if group.group.data and data is None:
            print(f"{name}: left out, as it needs --{group.group.data} FILE", file=sys.stderr)
            continue
        with results.alone(name):
            _run_group(
                name, group, [cell for title, _, cell in picked if title == name], results, asked.seeds, data
            )


def _run_group(
    name: str,
    group: GroupFile,
    cells: list[CellTable],
    results: Results,
    seeds: int | None,
    data: Path | None,
) -> None:
    first = group.group.first_seed
    missing = [
        (cell, seed)
        for cell in cells
        for seed in range(first, first + min(seeds or group.seeds(cell), cell.seeds or sys.maxsize))
        if seed not in results.of(name, group, cell)
    ]
    begun = time.monotonic()
    for done, (cell, seed) in enumerate(missing, 1):
        start = time.monotonic()
        value, parts = RUNNERS[name](group.job(cell, seed), cell.options, data)
        seconds = time.monotonic() - start
        results.add(name, Outcome(cell.id, group.digest(cell), seed, value, parts, round(seconds, 2)))
        left = (time.monotonic() - begun) / done * (len(missing) - done)
        print(
            f"{cell.id}, seed {seed}: {value:.4f} in {seconds:.1f} s; {done} of {len(missing)}, "
            f"about {left / 60:.0f} min left",
            file=sys.stderr,
        )


def _tell(ids: set[str], known: dict[str, GroupFile], results: Results, as_json: bool) -> int:
    """The table of the cells that were asked for, and of the orders between them."""
    found = [row for row in rows(known, results) if row.cell.id in ids]
    between = [
        line
        for name, group in known.items()
        if any(cell.id in ids for cell in group.cell)
        for line in orders(name, group, results)
    ]
    if as_json:
        table = [
            {
                "cell": row.cell.id,
                "theirs": row.cell.value,
                "their_deviation": row.cell.deviation,
                "ours": asdict(row.ours) if row.ours else None,
                "in_their_deviations": row.difference,
                "verdict": row.verdict,
                "parts": [asdict(part) for part in row.parts],
            }
            for row in found
        ]
        print(json.dumps({"cells": table, "orders": [asdict(line) for line in between]}, indent=1))
    else:
        print(f"{'cell':32} {'theirs':>16} {'ours':>16} {'seeds':>5} {'sd':>6} {'s':>7}  verdict")
        for row in found:
            print(_line(row))
            for part in row.parts:
                if part.verdict == "differs":
                    theirs = f"{part.theirs:.4f} ± {part.their_deviation:.4f}"
                    print(f"    {part.part}: {theirs}, ours {part.ours:.4f}: differs")
        for line in between:
            print(f"{line.claim}: {line.smaller:.4f} < {line.larger:.4f}, {line.seeds} seeds: {line.verdict}")
    parts = (part for row in found for part in row.parts)
    return int(any(line.verdict == "differs" for line in (*found, *between, *parts)))


def _line(row: Any) -> str:
    theirs = "–" if row.cell.value is None else f"{row.cell.value:.4f}"
    if row.cell.deviation is not None:
        theirs += f" ± {row.cell.deviation:.4f}"
    ours = "–" if row.ours is None else f"{row.ours.mean:.4f} ± {row.ours.deviation:.4f}"
    sd = "–" if row.difference is None else f"{row.difference:+.2f}"
    seconds = "–" if row.ours is None else f"{row.ours.seconds:.1f}"
    seeds = row.ours.seeds if row.ours else 0
    return f"{row.cell.id:32} {theirs:>16} {ours:>16} {seeds:>5} {sd:>6} {seconds:>7}  {row.verdict}"


def command(arguments: list[str] | None = None) -> int:
    """`main`, with a user's mistake and Ctrl-C in words."""
    try:
        return main(arguments)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except RoundtableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(command())
