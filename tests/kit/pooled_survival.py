"""Data sets with times to an event, split between silos, and what pooled libraries find on them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pooled_tables import Frame, split

FOLDER = Path(__file__).parents[1] / "core" / "analyses" / "survival"


def pooled_survival(kind: str) -> list[dict[str, Any]]:
    """The cases of one kind of question."""
    found: list[dict[str, Any]] = json.loads((FOLDER / "pooled_survival.json").read_text())[kind]
    return found


@cache
def pooled(name: str) -> Frame:
    """A data set as columns of doubles."""
    if name == "ties":
        r = np.arange(40)
        made = {"time": 1 + 7 * r % 9, "event": 5 * r % 7 != 0, "x": (11 * r % 13) / 4, "z": 3 * r % 5 - 2}
        return {key: value.astype(float) for key, value in made.items()}
    with (FOLDER / f"{name}.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}


def silos_of(case: Mapping[str, Any]) -> list[Frame]:
    """The rows of each silo."""
    if not isinstance(case["data"], str):
        return [{key: np.array(v, float) for key, v in silo.items()} for silo in case["data"].values()]
    frame, rule = pooled(case["data"]), case["split"]
    rows = len(next(iter(frame.values())))
    if "row_mod" in rule:
        return split(frame, np.arange(rows) % rule["row_mod"])
    if "blocks" in rule:
        return split(frame, np.repeat(np.arange(len(rule["blocks"])), rule["blocks"]))
    return split(frame, frame[rule["column"]])
