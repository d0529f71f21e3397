"""What a masked survey of many columns costs: processor time of all silos and the coordinator together.

    python -m benchmarks.survey_time [--silos 10] [--columns 50] [--rows 2000]

Everything runs in this process, with the protocol of secure aggregation as it is: keys, shares, masks,
digits, engine, and the reading of the files. Imports are counted apart.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from roundtable.surveys import SurveyAnswers, SurveyFile, analyse, load_survey


def asked(columns: int) -> dict[str, list[dict[str, Any]]]:
    """The surveys by name."""
    names = [f"c{number}" for number in range(columns)]
    describe = [{"ask": "describe", "columns": names}]
    shown = [{"ask": "histogram", "column": name, "bins": 20} for name in names]
    quantiles = [{"ask": "quantiles", "column": name, "at": [0.25, 0.5, 0.75]} for name in names]
    together = [{"ask": "correlation", "columns": names}]
    return {
        "describe": describe,
        "describe, histograms of 20 bins": [*describe, *shown],
        "describe, quartiles": [*describe, *quantiles],
        "correlation": together,
    }


def written(folder: Path, silos: int, columns: int, rows: int) -> dict[str, str]:
    """Each silo's file."""
    files = {}
    for number in range(silos):
        values = np.random.default_rng(number).normal(50, 10, (rows, columns)).clip(0, 100).round(2)
        lines = [",".join(f"c{place}" for place in range(columns))]
        lines += [",".join(map(str, row)) for row in values.tolist()]
        path = folder / f"silo-{number}.csv"
        path.write_text("\n".join(lines) + "\n")
        files[f"silo-{number}"] = str(path)
    return files


def survey_of(folder: Path, columns: int, files: dict[str, str], questions: list[Any]) -> SurveyFile:
    """A survey over those files, masked."""
    path = folder / "survey.toml"
    path.write_text('table = "wide"\ncolumns = {}\nquestions = []\n')
    described = {f"c{place}": {"least": 0, "most": 100} for place in range(columns)}
    return load_survey(path, {"columns": described, "questions": questions, "silos": files})


def timed(survey: SurveyFile) -> tuple[SurveyAnswers, float, float]:
    """(answers, processor seconds, seconds on the clock)."""
    clock, processor = time.perf_counter(), time.process_time()
    found = analyse(survey)
    return found, time.process_time() - processor, time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for key, default in (("silos", 10), ("columns", 50), ("rows", 2000)):
        parser.add_argument(f"--{key}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = written(folder, options.silos, options.columns, options.rows)
        small = [{"ask": "describe", "columns": ["c0"]}]
        timed(survey_of(folder, 1, files, small))  # Imports, and what is made once for a process.
        print(f"{options.silos} silos x {options.rows} rows x {options.columns} columns, masked")
        for name, questions in asked(options.columns).items():
            found, processor, clock = timed(survey_of(folder, options.columns, files, questions))
            results.append(
                {"survey": name, "rounds": found.rounds, "processor_s": processor, "clock_s": clock}
            )
            print(f"{name:34} {found.rounds:3} rounds {processor:7.2f} s processor {clock:7.2f} s clock")
    if options.json is not None:
        options.json.write_text(json.dumps({**vars(options), "json": None, "results": results}, indent=2))


if __name__ == "__main__":
    main()
