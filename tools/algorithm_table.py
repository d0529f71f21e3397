"""Writes the table of docs/algorithms.md: what goes together, asked of the checks themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundtable.cluster.plan.step_composition import check_step
from roundtable.core import JobConfig
from roundtable.core.algorithms.known_algorithms import BUILTINS, make_algorithm
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import make_plan

PAGE = Path("docs/algorithms.md")
BEGIN, END = "<!-- table: tools/algorithm_table.py -->", "<!-- end of table -->"

Document = dict[str, Any]

NEEDED: Mapping[str, Document] = {
    "fedprox": {"mu": 0.1},
    "feddyn": {"alpha": 0.1},
    "fedsam": {"rho": 0.05},
    "qfedavg": {"q": 1.0},
    "finetuning": {"tuning_steps": 2},
    "fedbabu": {"tuning_steps": 2},
    "ditto": {"pull": 0.5},
    "pfedme": {"pull": 5.0, "personal_learning_rate": 0.05},
    "perfedavg": {"inner_learning_rate": 0.05},
    "fedrep": {"head_steps": 2},
}
"""Hyperparameters without a default."""

ROWS: Mapping[str, Document] = {
    **{name: {"name": name, "steps": 4} for name in BUILTINS},
    "scaffold, epochs": {"name": "scaffold", "usual_steps": 4},
    "scaffold, option 1": {"name": "scaffold", "option": 1, "steps": 4},
    "fednova, epochs": {"name": "fednova"},
    "scaffold, by speed": {"name": "scaffold", "steps": 4, "work": "by_speed"},
    "fednova, by speed": {"name": "fednova", "steps": 4, "work": "by_speed"},
}
"""`[algorithm]` of each line: with steps, and where epochs or steps by speed make a difference."""

_CLIPPED = {"clip_norm": 10.0}
_NOISY = {**_CLIPPED, "delta": 1e-5, "noise_multiplier": 1.0}
COLUMNS: Mapping[str, Document] = {
    "secure sums": {"privacy": {"level": "none", "secure_aggregation": True, **_CLIPPED}},
    "`client`": {"privacy": {"level": "client", **_NOISY}},
    "`distributed`": {"privacy": {"level": "distributed", **_NOISY}},
    "`client_local`": {"privacy": {"level": "client_local", **_NOISY}},
    "`example`": {"privacy": {"level": "example", **_NOISY}},
    "median": {"aggregation": {"rule": "median"}},
    "FedAdam": {"aggregation": {"server_optimizer": {"name": "fedadam", "learning_rate": 0.1}}},
    "buffered": {"round": {"mode": "buffered", "buffer": 2}},
    "momentum": {"algorithm": {"momentum": 0.9}},
    "by speed": {"algorithm": {"steps": 4, "work": "by_speed"}},
}
"""A job of each kind, beside what the algorithm itself needs."""
CLUSTER, HOOKED = "silo cluster", "recorded steps"


def document_of(name: str, column: str = "") -> Document:
    """The job, as its file would say it, of an algorithm in a column of the table."""
    own = {**NEEDED.get(ROWS[name]["name"], {}), **ROWS[name]}
    kind = BUILTINS[own["name"]]
    composition = kind(kind.Table.model_validate(own)).composition
    weightings = composition.weightings
    document: Document = {
        "task": "t",
        "rounds": 2,
        "evaluation": {"every": 0},
        "algorithm": own,
        "aggregation": {"weighting": min(weightings) if weightings else "examples"},
    }
    if composition.one_by_one:
        document["cohort"] = {"size": 1, "strategy": "round_robin"}
    for table, values in COLUMNS.get(column, {}).items():
        document[table] = {**document.get(table, {}), **values}
    if document.get("privacy", {}).get("level", "none") != "none":
        document["aggregation"]["weighting"] = "uniform"
    return document


def refusal(name: str, column: str) -> str:
    """Why a job refuses this; "" where it runs."""
    job = JobConfig.model_validate(document_of(name, column))
    try:
        if column == CLUSTER:
            check_step(job)
        elif column == HOOKED:
            hook = make_algorithm(job.algorithm).hooked()
            return f"its {hook} works on each client's module, which trains by itself there" if hook else ""
        else:
            make_plan(job, 8)
    except (ConfigError, PrivacyError) as error:
        return str(error)
    return ""


def markdown() -> str:
    """The table, and the reasons that its cells name."""
    columns = [HOOKED, CLUSTER, *COLUMNS]
    reasons: dict[str, int] = {}
    lines = [f"| algorithm | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for name in ROWS:
        cells = []
        for column in columns:
            why = refusal(name, column).replace(f"algorithm {ROWS[name]['name']!r}", "it")
            why = re.sub(r"privacy.level = '\w+': it (is not.*?)(?:; it goes with.*)", r"it \1", why)
            cells.append(f"no ({reasons.setdefault(why, len(reasons) + 1)})" if why else "yes")
        plain, _, variant = name.partition(", ")
        label = f"`{plain}`, {variant}" if variant else f"`{plain}`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in reasons.items())])


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
