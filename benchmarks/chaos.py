"""A federation under faults at random: rounds, faults by kind, updates acknowledged, counted, lost, doubled.

    python benchmarks/chaos.py                      # 8 silos, 200 faults
    python benchmarks/chaos.py --quick              # 3 silos, 12 faults

Two coordinators on a PostgreSQL server of our own (Debian's postgresql), silos as processes behind a proxy,
artifacts on a small tmpfs where the user may mount one. Exits with 1 if anything was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

from chaos import Chaos


def main() -> int:
    """Runs it and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--silos", type=int, default=8)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin no fault after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    chosen = parser.parse_args()
    silos, faults = (3, 12) if chosen.quick else (chosen.silos, chosen.faults)
    with tempfile.TemporaryDirectory(prefix="roundtable-chaos-") as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = Chaos(folder, silos, chosen.seed).run(faults, chosen.seconds)
    for line in report.lines():
        print(line)
    for found in (*report.lost, *report.doubled):
        print("!", found)
    return 1 if report.lost or report.doubled or report.wrong_models else 0


if __name__ == "__main__":
    sys.exit(main())
