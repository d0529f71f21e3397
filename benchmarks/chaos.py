"""A federation under faults at random, from a seed, and the verdict on what came of it.

    python benchmarks/chaos.py --seed 1                        # 200 faults
    python benchmarks/chaos.py --seed 1 --faults 1000 --minutes 60

Two coordinators on a PostgreSQL server of our own (Debian's postgresql), artifacts in a bucket of our own
(moto, s3fs), silos behind wires, small disks where the user may mount some. Each fault is a line of JSON on
standard output with its time in seconds; a table follows. Exits with 1 if anything is not as it must be, with
2 where what it needs is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import pytest
from chaos import Chaos


def main() -> int:
    """Runs it and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--silos", type=int, default=4)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no fault after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the report as one more line of JSON, no table")
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roundtable-chaos-") as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            chaos = Chaos(folder, chosen.silos, chosen.seed, lambda line: print(line, flush=True))
        except pytest.skip.Exception as error:
            print(error, file=sys.stderr)
            return 2
        report = chaos.run(chosen.faults, 60 * chosen.minutes)
    for line in [json.dumps(asdict(report))] if chosen.json else report.lines():
        print(line)
    return 0 if report.well else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
