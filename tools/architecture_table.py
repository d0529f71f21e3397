"""Trains every architecture of the tests under every strategy: the table of docs/cluster-evidence.md.

    python tools/architecture_table.py run      # minutes to an hour; goes on where it was stopped
    python tools/architecture_table.py write    # the page's table, from what was run

`run` adds a line of JSON for each cell to build/architectures.jsonl: what one process gives against what the
ranks give, or why the planner refuses. `--again NAME` runs its cells anew; the last line counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/cluster-evidence.md"
RESULTS = ROOT / "build/architectures.jsonl"
BEGIN, END = "<!-- table: tools/architecture_table.py -->", "<!-- end of table -->"
_LIBRARIES = ("torch", "transformers")
Result = dict[str, Any]


def results() -> dict[tuple[str, str], Result]:
    """The last result of each (architecture, strategy)."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["architecture"], row["strategy"]): row for row in rows}


def _note(architecture: str, strategy: str, **found: Any) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"architecture": architecture, "strategy": strategy, **found}) + "\n")
    print(
        architecture, strategy, {key: value for key, value in found.items() if key != "versions"}, flush=True
    )


def run(again: Sequence[str]) -> None:
    """Runs the cells that have no result yet, and those of the architectures named in `again`."""
    from architecture_matrix import STRATEGIES
    from architectures import ARCHITECTURES

    known = results()
    for architecture, (_, library) in ARCHITECTURES.items():
        if library and find_spec(library) is None:
            print(f"{architecture}: {library} is not installed")
            continue
        names = [name for name in STRATEGIES if architecture in again or (architecture, name) not in known]
        if names:
            _run_architecture(architecture, names)


def _run_architecture(architecture: str, names: Sequence[str]) -> None:
    from architecture_matrix import PlannedCell, planned, probe_of

    versions = {name: _version(name) for name in _LIBRARIES}
    probe = probe_of(architecture)
    allowed: list[PlannedCell] = []
    for name in names:
        cell = planned(architecture, probe, name)
        if isinstance(cell, str):
            _note(architecture, name, verdict="refused", reason=cell, versions=versions)
        else:
            allowed.append(cell)
    for world in sorted({cell.strategy.mesh.world for cell in allowed}):
        for cell, found in _measured([cell for cell in allowed if cell.strategy.mesh.world == world]):
            _note(architecture, cell.name, **found, versions=versions)


def _measured(cells: Sequence[Any]) -> Iterator[tuple[Any, Result]]:
    """Each cell's result: all in one group of ranks, or, where one of them fails, each in its own."""
    from architecture_matrix import run_cells, tolerance
    from ranks import run_ranks

    began = time.monotonic()
    try:
        found = run_ranks(run_cells, cells[0].strategy.mesh.world, list(cells), timeout=900.0)[0]
    except AssertionError as error:
        if len(cells) > 1:
            for cell in cells:
                yield from _measured([cell])
        else:
            yield cells[0], {"verdict": "failed", "reason": str(error).strip()[-2000:]}
        return
    seconds = round((time.monotonic() - began) / len(cells), 1)
    for cell, one in zip(cells, found, strict=True):
        verdict = "equal" if one["weights"] < tolerance(cell) else "differs"
        yield cell, {"verdict": verdict, **one, "tolerance": tolerance(cell), "seconds": seconds}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def markdown(found: Mapping[tuple[str, str], Result]) -> str:
    """A row for each strategy and a column for each architecture, and the reasons that its cells name."""
    from architecture_matrix import STRATEGIES
    from architectures import ARCHITECTURES

    architectures = [name for name in ARCHITECTURES if any(name == one for one, _ in found)]
    reasons: dict[str, int] = {}
    lines = [f"| strategy | {' | '.join(architectures)} |", "| --- " * (len(architectures) + 1) + "|"]
    for strategy in STRATEGIES:
        cells = [_cell(found.get((architecture, strategy)), reasons) for architecture in architectures]
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    versions = next(iter(found.values()))["versions"]
    ran = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    lines += ["", *(f"{number}. {why}" for why, number in reasons.items())]
    return "\n".join([f"With {ran}:", "", *lines])


def _cell(result: Result | None, reasons: dict[str, int]) -> str:
    if result is None:
        return "not run"
    if result["verdict"] == "refused":
        return f"no ({reasons.setdefault(_short(result['reason']), len(reasons) + 1)})"
    if result["verdict"] != "equal":
        return f"**{result['verdict']}**"
    return f"{result['weights']:.0e}" if result["tolerance"] < 1 else "trains"


def _short(reason: str) -> str:
    """The reason that a person reads first: a plan adds those of what else it tried."""
    return reason.removeprefix("no plan is possible with what [cluster.strategy] sets: ").split("; ")[0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("--again", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    if options.what == "run":
        run(options.again)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown(results())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests/kit"))
    main()
