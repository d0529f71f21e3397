"""Writes the tables of docs/algorithms.md and docs/compression.md: what goes together, asked of the checks
themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundtable.aggregation import RULES
from roundtable.cluster.plan.step_composition import check_step
from roundtable.core import JobConfig
from roundtable.core.algorithms.known_algorithms import BUILTINS, make_algorithm
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import make_plan

PAGE, ENCODED_PAGE = Path("docs/algorithms.md"), Path("docs/compression.md")
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
    "streaming": {"fragments": 2},
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
    "robust rules": {"aggregation": {"rule": "median"}},
    "FedAdam": {"aggregation": {"server_optimizer": {"name": "fedadam", "learning_rate": 0.1}}},
    "buffered": {"round": {"mode": "buffered", "buffer": 2}},
    "momentum": {"algorithm": {"momentum": 0.9}},
    "by speed": {"algorithm": {"steps": 4, "work": "by_speed"}},
}
"""A job of each kind, beside what the algorithm itself needs."""
_SAID: Mapping[str, Document] = {
    **{rule: {} for rule in ("median", "geometric_median", "fltrust", "foolsgold")},
    "centred_clipping": {"tau": 1.0},
    "monna": {"f": 1, "pivot": "client-0"},
}
ROBUST: Mapping[str, Document] = {
    rule: {"aggregation": {"rule": rule, "parameters": _SAID.get(rule, {"f": 1})}}
    for rule in sorted(RULES)
    if rule != "mean"
}
"""A job of each robust rule: what the column of robust rules is made of."""
RULE_COLUMN, CLUSTER, HOOKED = "robust rules", "silo cluster", "recorded steps"
ENCODED: Mapping[str, Document] = {
    "`bfloat16`": {"up": "bfloat16"},
    "`int4`": {"up": "int4(block=64)"},
    "`int4`, stochastic": {"up": "int4(block=64, rounding=stochastic)"},
    "`sign`, feedback": {"up": "sign(block=64)"},
    "top-k, feedback": {"up": "topk(ratio=0.1) | int8(block=64)"},
    "top-k, momentum": {"up": "topk(ratio=0.1)", "momentum": 0.5},
    "top-k, EF21": {"up": "topk(ratio=0.25)", "feedback": "ef21"},
    "low rank, feedback": {"up": "lowrank(rank=1)"},
    "by tensor, feedback": {"up": "multilevel(small=8, large=40, ratio=0.2)"},
    "`auto`": {"up": "auto"},
    "random-k": {"up": "randomk(ratio=0.25)"},
    "random-k, feedback": {"up": "randomk(ratio=0.25, scaled=false)"},
    "`int8` down": {"down": "int8(block=64)"},
}
"""`[transfer]` of each column of the second table: rounded, biased, unbiased, sparse, with memory; down."""


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
    if composition.outer_step:
        document["cohort"] = {"size": 3, "minimum": 3}
    if column in ENCODED:
        document["transfer"] = dict(ENCODED[column])
    if document.get("transfer", {}).get("feedback") == "ef21":
        # What it asks of a job: the same clients in each round, with the same weights.
        document.setdefault("cohort", {"size": 3, "minimum": 3})
        uniform = weightings is None or "uniform" in weightings
        weighting = "uniform" if uniform else document["aggregation"]["weighting"]
        document["aggregation"] = {"weighting": weighting, "validation": {"norm_ratio": "off"}}
    for table, values in {**COLUMNS, **ROBUST}.get(column, {}).items():
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
            by_itself = f"its {hook} works on each client's module, which trains by itself there"
            own = "each client begins with weights of its own, and trains by itself there"
            return {"while_training": by_itself, "begins": own}.get(hook or "", "")
        else:
            make_plan(job, 8)
    except (ConfigError, PrivacyError) as error:
        return str(error)
    return ""


def encoded_vectors(name: str) -> tuple[str, str]:
    """What travels (up, down) in the job's encoding, by the declarations; what does not is in brackets."""
    algorithm = make_algorithm(JobConfig.model_validate(document_of(name)).algorithm)
    ways = []
    for first, places in (("update", [p for p in algorithm.places if p.sent]), ("model", algorithm.places)):
        shown = [f"`{place.name}`" if place.compression else f"(`{place.name}`)" for place in places]
        ways.append(", ".join([first, *shown]))
    return ways[0], ways[1]


def markdown() -> str:
    """The table of algorithms, and the reasons that its cells name."""
    return _table([HOOKED, CLUSTER, *COLUMNS], {})


def encoded_markdown() -> str:
    """The table of encodings, and the reasons that its cells name."""
    return _table([*ENCODED], {"up": 0, "down": 1})


def _reason(name: str, column: str) -> str:
    """Why it is refused, in words that cells of a kind share."""
    why = refusal(name, column).replace(f"algorithm {ROWS[name]['name']!r}", "it")
    why = re.sub(r"(transfer.\w+) = '.*?'", r"\1", why)
    if column in ROBUST:
        why = why.replace(f"aggregation.rule = {column!r}", "a robust aggregation.rule")
    return re.sub(r"privacy.level = '\w+': it (is not.*?)(?:; it goes with.*)", r"it \1", why)


def _table(columns: list[str], vectors: Mapping[str, int]) -> str:
    reasons: dict[str, int] = {}
    heads = ["algorithm", *vectors, *columns]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name in ROWS:
        cells = [encoded_vectors(name)[way] for way in vectors.values()]
        for column in columns:
            parts = ROBUST if column == RULE_COLUMN else [column]
            refused = {part: why for part in parts if (why := _reason(name, part))}
            numbers = sorted({reasons.setdefault(why, len(reasons) + 1) for why in refused.values()})
            no = "no" if len(refused) == len(parts) else f"not {', '.join(f'`{part}`' for part in refused)}"
            cells.append(f"{no} ({', '.join(map(str, numbers))})" if refused else "yes")
        plain, _, variant = name.partition(", ")
        label = f"`{plain}`, {variant}" if variant else f"`{plain}`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in reasons.items())])


def main() -> None:
    """Writes the tables into their pages."""
    for page, table in ((PAGE, markdown()), (ENCODED_PAGE, encoded_markdown())):
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
