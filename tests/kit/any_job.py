"""Jobs that are drawn at random, and how two ways of running one are compared."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import algorithm_table as table
import unvarying
from any_job_config import REGIONS, SILOS, table_at
from hypothesis import note
from hypothesis import strategies as st
from torch import Tensor

from roundtable.cli.shared.resolved import toml_value
from roundtable.core import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.privacy_table import hides_figures, masking_of
from roundtable.engine import record_to_plain
from roundtable.simulation import simulate

TASK = f"""
import sys
KIT = {str(Path(unvarying.__file__).parent)!r}
if KIT not in sys.path:
    sys.path.append(KIT)
from any_job_task import made as Toy
from unvarying import unvary
unvary("noise")
"""
"""A silo's file: the noise of its training process, too, is that of the simulation."""
Document = dict[str, Any]
AXES: dict[str, list[Document]] = tomllib.loads(Path(__file__).with_name("any_job.toml").read_text())
KNOWN = {
    "a simulation has virtual time": "started ended trials "
    "up_seconds down_seconds encoding_seconds decoding_seconds",
    "a simulation stores no model of a round": "model optimizer",
    "a simulation's noise and masks are seeded or pretended": "guarantee secure_aggregation protocol",
    "a coordinator's ledger is in its database, a simulation's in its records": "charged_attempts paid",
    "a simulation hides nothing from its owner": "withheld",
    "a silo may have the model already, a simulated client is sent each": "down down_plain",
    "a simulation does not measure it of arrays that are only rounded": "error",
    "who fails first ends an attempt at once, in virtual time after all": "closed",
}
"""Why fields of a round's record are not compared."""
AGAIN = ("transfers", "failures", "charge")
"""What is not compared where work was done again: bytes were sent twice, somebody was away."""
OF_REGIONS = {"cohort", "contributors", "weights", "within"}
FIGURES = re.compile(r"-?\d+\.\d+(e-?\d+)?")
OF_A_TASK = re.compile(r"ValueError")
SKIPPED = {name for names in KNOWN.values() for name in names.split()}


def job_of(
    name: str, lines: Sequence[Document], number: int, folder: Path, changes: Mapping[str, Document] = {}
) -> JobConfig:
    """The job of this algorithm that says so; its number gives it a seed and a privacy account of its own.

    `folder` is where its files lie; `changes` of its tables come last.
    """
    document = table.document_of(name)
    document |= {"name": f"any-{number}", "seed": number + 1, "rounds": 3, "evaluation": {}}
    document["task"] = {"name": f"toy{number}.py:Toy", "normalised": name == "fedbn"}
    document["simulation"] = {"clients": SILOS, "backend": "sequential", "root_examples": 1000}
    document["algorithm"] |= {"batch_size": 8, "learning_rate": 0.05}
    for line in lines:
        for key, values in line.items():
            document[key] = {**document.get(key, {}), **values}
    privacy, evaluation = document.get("privacy", {}), document["evaluation"]
    if "level" in privacy:
        document["privacy"] = {"clip_norm": 1.0, "delta": 1e-3, **privacy}
    if "level" in privacy or document.get("transfer", {}).get("feedback") == "ef21":
        document["aggregation"]["weighting"] = "uniform"
    if "standardise" in document:
        document["task"]["tabled"] = True
    if document["task"].get("tabled"):
        document["simulation"]["data"] = {"people": [table_at(folder, place) for place in range(SILOS)]}
    if "regions" in document:
        document["simulation"]["regions"] = {"members": REGIONS}
        off = {"norm_ratio": "off", "weight_ratio": "off"}
        document["aggregation"]["validation"] = {**off, **document["aggregation"].get("validation", {})}
    if privacy and "bounds" not in evaluation and "public_evaluation" not in privacy:
        evaluation["every"] = 0
    if "round" not in document:
        document.setdefault("cohort", {"size": SILOS, "minimum": SILOS})
    document["cohort"] = {"retries": 0, "deadline": 600, **document.get("cohort", {})}
    for key, values in changes.items():
        document[key] = {**document.get(key, {}), **values}
    note("\n".join(["", *(f"{key} = {toml_value(value)}" for key, value in document.items())]))
    return JobConfig.model_validate(document)


@dataclass(frozen=True)
class Run:
    """How a job went: each round's record as JSON has it, and the model at the end."""

    status: str
    reason: str
    records: list[Document]
    model: Tensor

    def differences(
        self, other: Run, job: JobConfig, loose: float = 2e-5, again: bool = False
    ) -> Iterator[str]:
        """Between a simulation and `other`, where they are more than `loose`, relative or absolute.

        `again`: work was done again at `other`, so that it may have taken other ways and attempts; another
        attempt may have another cohort, and then its figures are its own.
        """
        # Masked values are rounded to the ring's integers, at random.
        loose = max(loose, 5e-3) if masking_of(job.privacy) else loose
        yield from _differences(self.status, other.status, loose, "status")
        if self.status != "paused":
            yield from _differences(self.reason, other.reason, loose, "reason")
        if again and any(record["attempt"] > 1 for record in other.records):
            yield from _differences(len(self.records), len(other.records), loose, "rounds")
            return
        others = {record["round"]: record for record in other.records}
        for mine in self.records:
            if mine["round"] % job.regions.rounds and mine["round"] not in others:
                # It was one within regions, of which a coordinator is told what they come to.
                continue
            theirs = others.get(mine["round"])
            if theirs is None:
                yield f"round {mine['round']}: there is none otherwise"
                return
            gone = {*theirs["withheld"], *(AGAIN if again else ())}
            if job.regions.rounds > 1:
                gone |= OF_REGIONS
            if hides_figures(job.privacy):
                gone.add("transfers")
            if job.privacy.level == "example":
                # The silos alone keep this account.
                gone.add("charge")
            both = ({key: value for key, value in each.items() if key not in gone} for each in (mine, theirs))
            yield from _differences(*both, loose, f"round {mine['round']}")
        yield from _differences(self.model.tolist(), other.model.tolist(), loose, "model")


def _differences(one: Any, other: Any, loose: float, where: str) -> Iterator[str]:
    """Of two values of JSON, the first places first; numbers may differ by `loose`, relative or absolute."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - SKIPPED):
            yield from _differences(one.get(key), other.get(key), loose, f"{where}, {key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, loose, f"{where}, {place}")
    elif isinstance(one, int | float) and isinstance(other, int | float):
        if not math.isclose(one, other, rel_tol=loose, abs_tol=loose) and not (one != one and other != other):
            yield f"{where}: {one} in the simulation, {other} otherwise"
    elif isinstance(one, str) and isinstance(other, str):
        # Numbers in sentences are as near as others, and where a task fails a silo's own words stay there.
        if _without_figures(one) != _without_figures(other):
            yield f"{where}: {one} in the simulation, {other} otherwise"
    elif one != other:
        yield f"{where}: {one} in the simulation, {other} otherwise"


def _without_figures(sentence: str) -> str:
    if OF_A_TASK.search(sentence):
        return "the task failed"
    return FIGURES.sub("#", sentence)


def simulated(job: JobConfig, folder: Path) -> Run | str:
    """The run, or why it is refused."""
    try:
        found = simulate(job, progress=False, folder=folder)
    except RoundtableError as error:
        return str(error)
    records = json.loads(json.dumps([record_to_plain(record) for record in found.history.records]))
    return Run(found.status, found.reason, records, found.model.vector)


NAMED = st.just("fedavg") | st.sampled_from(sorted(name for name in table.ROWS if "by speed" not in name))
LINES = st.lists(st.sampled_from(sorted(AXES)), max_size=4, unique=True).flatmap(
    lambda axes: st.tuples(*(st.sampled_from(AXES[axis]) for axis in axes))
)
_REGIONS: list[Document] = [{"sum": True}, {"sum": True, "close": 0.5}, {"sum": True, "rounds": 2}]
REGION_LINES = st.sampled_from([{}, *({"regions": each} for each in _REGIONS)])
"""What relays do: hand on, add up, run rounds of their own."""
