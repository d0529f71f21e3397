"""What boosted trees cost over many silos, beside xgboost on the pooled rows: processor time on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.boosted_trees [--silos 20] [--rows 50000] [--features 100]
    OMP_NUM_THREADS=1 python -m benchmarks.boosted_trees --rows 1000000 --repeats 1    # 20 M rows in 12 GB

All silos and the coordinator run in this process, one after the other, with what an analysis computes in a
round: public numbers, gradients, histograms, digits, their sum, splits, and what the coordinator keeps. Not
counted: making bins (on either side), what travels, masks, and the engine. The cuts are xgboost's own, and
the trees are compared with its trees. Both take turns, `--repeats` times; seconds and ratios are medians.

Rows are made silo by silo, for xgboost's bins and again for ours, and what is kept of them are bins: on both
sides together about 450 bytes a row of 100 features (20 x 100,000 rows: 1.3 GB in all). It says what it took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgboost
from pydantic import TypeAdapter

from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

SPENT: dict[str, float] = defaultdict(float)


@contextmanager
def spent(name: str) -> Iterator[None]:
    """Adds the processor seconds of a block to `SPENT`."""
    start = time.process_time()
    yield
    SPENT[name] += time.process_time() - start


@dataclass(frozen=True)
class Rows:
    """What the silos hold: made anew whenever it is looked at."""

    options: argparse.Namespace

    @property
    def names(self) -> list[str]:
        """Of the features."""
        return [f"f{place}" for place in range(self.options.features)]

    def of(self, silo: int) -> tuple[Any, Any]:
        """A silo's features [rows, features] of so many values, and an outcome of 0 or 1 that depends on some
        of them, alike at all silos."""
        options, draw = self.options, np.random.default_rng((1, silo))
        shape = (options.rows, options.features)
        matrix = draw.integers(0, options.values, shape, dtype=np.int16).astype(np.float32)
        own = min(8, options.features - 1)
        weights = np.random.default_rng(0).normal(size=own)
        linear = (matrix[:, :own] * (2 / options.values) - 1) @ weights + np.sin(matrix[:, own] / 20)
        chance = 1 / (1 + np.exp(-linear))
        return matrix, (draw.random(options.rows) < chance).astype(np.float32)


class InTurn(xgboost.DataIter):
    """The rows of all silos, one after the other."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self._silo = 0

    def next(self, input_data: Any) -> bool:
        """Hands over the next silo's rows; False behind the last."""
        if self._silo == self._rows.options.silos:
            return False
        matrix, outcome = self._rows.of(self._silo)
        input_data(data=matrix, label=outcome, feature_names=self._rows.names)
        self._silo += 1
        return True

    def reset(self) -> None:
        """Begins with the first silo."""
        self._silo = 0


@dataclass
class Pooled:
    """xgboost on all rows, which it has binned."""

    held: Any
    options: argparse.Namespace

    @classmethod
    def of(cls, rows: Rows) -> Pooled:
        """With xgboost's own cuts."""
        held = xgboost.QuantileDMatrix(InTurn(rows), max_bin=rows.options.bins, nthread=1)
        return cls(held, rows.options)

    @property
    def edges(self) -> dict[str, list[float]]:
        """The cuts of each feature."""
        offsets, values = self.held.get_quantile_cut()
        spans = zip(self.held.feature_names, itertools.pairwise(offsets), strict=True)
        return {name: values[start + 1 : stop].tolist() for name, (start, stop) in spans}

    def grow(self) -> tuple[Any, float]:
        """The trees, and their processor seconds."""
        asked = {"objective": "binary:logistic", "tree_method": "hist", "max_bin": self.options.bins}
        asked |= {"base_score": 0.5, "eta": 0.3, "max_depth": self.options.depth, "nthread": 1}
        start = time.process_time()
        found = xgboost.train(asked, self.held, self.options.trees)
        return found, time.process_time() - start


@dataclass
class Federated:
    """The question of many silos, each with its table."""

    survey: Survey
    parts: list[DataTable]

    @classmethod
    def of(cls, rows: Rows, edges: dict[str, list[float]]) -> Federated:
        """Each silo's rows as bins."""
        options = rows.options
        columns = {name: ColumnTable(least=0, most=options.values) for name in edges}
        columns["y"] = ColumnTable(kind="category", values=(0, 1))
        asked = {"ask": "boosted_trees", "outcome": "y", "on": list(edges), "edges": edges, "base_score": 0.5}
        asked |= {"rounds": options.trees, "max_depth": options.depth}
        question = TypeAdapter(AnyQuestion).validate_python(asked)
        survey = Survey.of(columns, [question], 1, None, options.silos)
        return cls(survey, [_binned(survey, *rows.of(silo), list(edges)) for silo in range(options.silos)])

    def grow(self) -> tuple[Any, int]:
        """The answer, and the rounds that trees took, whose seconds are `SPENT`."""
        survey, parts = self.survey, self.parts
        public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
        down, held = survey.public_places.pack(public), torch.zeros(survey.kept_places.size)
        rounds = 0
        for part in parts:
            for key in [key for key in part.derived if key[0] == "boosted"]:
                del part.derived[key]  # All but bins and outcomes is done again.
        while survey.open(public):
            if rounds == 1:
                SPENT.clear()  # Trees begin.
            total = None
            for part in parts:
                with spent("silos: public numbers, gradients, histograms and digits"):
                    sent = survey.sum_places.encode(survey.sums(part, survey.public_places.unpack(down)))
                with spent("digits added"):
                    total = sent if total is None else total.add_(sent)
            with spent("digits added"):
                mean = total / len(parts)
            with spent("coordinator: sums of digits"):
                sums = survey.sum_places.decode(mean, len(parts))
            with spent("coordinator: public and kept numbers"):
                now = survey.public_places.unpack(down) | survey.kept_places.unpack(held)
            with spent("coordinator: splits"):
                after = survey.step(now, sums)
            with spent("coordinator: public and kept numbers"):
                down, held = survey.public_places.pack(after), survey.kept_places.pack(after)
            public = {name: after[name] for name in public}
            rounds += 1
        return survey.answers(public)[0], rounds - 1


def _binned(survey: Survey, matrix: Any, outcome: Any, names: list[str]) -> DataTable:
    """A silo's table that remembers bins and outcomes, and has no other column any more."""
    whole = DataTable(dict(zip(names, matrix.T, strict=True)) | {"y": outcome}, survey.columns)
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    kept = survey.kept_places.unpack(torch.zeros(survey.kept_places.size))
    first = survey.sums(whole, public)
    sums = survey.sum_places.decode(survey.sum_places.encode(first), 1)
    after = survey.step({**public, **kept, "silos": np.ones(1)}, sums)
    survey.sums(whole, {name: after[name] for name in public})
    for key, found in whole.derived.items():
        if key[0] == "boosted rows":
            found["features"] = found["features"][:, :0].copy()
    return DataTable({"y": outcome}, survey.columns, whole.derived)


def same(mine: Any, theirs: Any) -> bool:
    """Whether two models split alike."""
    keys = ("left_children", "split_indices", "default_left", "split_conditions")
    found = [model["learner"]["gradient_booster"]["model"]["trees"] for model in (mine, theirs)]
    leaf = [[np.array(tree["left_children"]) < 0 for tree in trees] for trees in found]
    return len(found[0]) == len(found[1]) and all(
        all(one[key] == two[key] for key in keys[:3])
        and np.array_equal(np.array(one[keys[3]])[~here], np.array(two[keys[3]])[~there])
        for one, two, here, there in zip(*found, *leaf, strict=True)
    )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    numbers = (("silos", 20), ("rows", 50000), ("features", 100), ("bins", 256), ("depth", 6), ("trees", 1))
    for key, default in (*numbers, ("values", 256), ("repeats", 3)):
        parser.add_argument(f"--{key}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    options = parser.parse_args()
    rows = Rows(options)
    pooled = Pooled.of(rows)
    federated = Federated.of(rows, pooled.edges)
    pooled.grow()
    taken, parts = [], []
    for _ in range(options.repeats):
        wanted, seconds = pooled.grow()
        taken.append(seconds)
        answer, rounds = federated.grow()
        parts.append(dict(SPENT))
    alone = float(np.median(taken))
    shares = [sum(each.values()) / seconds for each, seconds in zip(parts, taken, strict=True)]
    print(
        f"{options.silos} silos x {options.rows:,} rows x {options.features} features, {options.bins} bins:"
    )
    print(f"{'xgboost on the pooled rows':58}{alone:8.3f} s")
    middle = {name: float(np.median([each[name] for each in parts])) for name in parts[0]}
    for name, seconds in middle.items():
        print(f"{name:58}{seconds:8.3f} s")
    together = float(np.median([sum(each.values()) for each in parts]))
    ratios = f"{np.median(shares):.2f} of xgboost's beside it ({min(shares):.2f} to {max(shares):.2f})"
    print(f"{'all silos and the coordinator':58}{together:8.3f} s, {ratios}")
    values = federated.survey.sum_places.size
    print(f"{rounds} rounds, in each of which a silo sends {4 * values / 1e6:.2f} MB")
    alike = same(answer.model, json.loads(wanted.save_raw("json")))
    print(f"the same trees as xgboost {xgboost.__version__}: {alike}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory of both sides at its highest: {memory / 1e9:.2f} GB")
    if options.json is not None:
        figures = {"xgboost_s": alone, "together_s": together, "parts_s": middle, "rounds": rounds}
        figures |= {"ratios": shares, "memory": memory}
        asked = {**vars(options), "json": None, "values_a_round": values, "same_trees": alike}
        options.json.write_text(json.dumps({**asked, **figures}, indent=2))


if __name__ == "__main__":
    main()
