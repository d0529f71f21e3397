"""A script of NVFLARE's client API as one at the second door, with a job."""

from __future__ import annotations

import ast
import keyword
import re
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError
from roundtable.migration.job_text import job_text
from roundtable.migration.outcome import Migration
from roundtable.migration.sources import (
    UNKNOWN,
    Source,
    arguments_of,
    assignment_of,
    calls_of,
    last_name,
    read_sources,
    value_of,
)

_API = "nvflare.client"
_RECIPES = ("FedAvgRecipe", "FedAvgJob", "BaseFedJob", "CyclicRecipe", "ScaffoldRecipe", "FedOptRecipe")
_BRANCHES = ("is_evaluate", "is_submit_model")


def migrate_nvflare(path: Path) -> Migration:
    """What a script of the client API needs to run here. `path` is the script or its folder; nothing is run.

    Raises ConfigError where no such script is found, or where a file cannot be read.
    """
    sources = read_sources(path)
    script = _script(path, sources)
    outcome = Migration("NVFLARE", script.path.parent)
    _note_script(outcome, script)
    recipe = _Recipe(outcome, sources)
    name = recipe.task_name(script)
    said = f"Made by `roundtable migrate nvflare` of {script.path.name}."
    outcome.files["silo.py"] = _silo_text(said, script, name, recipe.arguments)
    outcome.files[f"{name}.py"] = _task_text(said, name, *_model(outcome, script, recipe))
    tables = {"cohort": {"minimum": recipe.minimum}} if recipe.minimum else {}
    outcome.files["job.toml"] = job_text(said, name, recipe.rounds, tables)
    outcome.carried += [
        (script.path.name, "silo.py: python silo.py agent.toml, at every silo"),
        ("num_rounds", f"rounds = {recipe.rounds}"),
        ("metrics of the received model", "train_NAME of the round"),
    ]
    return outcome


class _Recipe:
    """What job.py says beside the script."""

    def __init__(self, outcome: Migration, sources: list[Source]) -> None:
        self.rounds = 10
        self.minimum = 0
        self.arguments: list[str] = []
        self.source: Source | None = None
        self.model: ast.expr | None = None
        self._name = ""
        for source in sources:
            for kind, call in calls_of(source.tree, _RECIPES):
                self._read(outcome, source, kind, call)
                return

    def task_name(self, script: Source) -> str:
        """A name for the task's file that hides no other."""
        name = re.sub(r"\W+", "_", self._name or f"{script.path.parent.name}").strip("_").lower()
        if not name.isidentifier() or keyword.iskeyword(name) or name == "silo":
            name = "federated"
        return name if not (script.path.parent / f"{name}.py").exists() else f"{name}_task"

    def _read(self, outcome: Migration, source: Source, kind: str, call: ast.Call) -> None:
        function = source.function_around(call)
        bodies = [source.tree] if function is None else [function, source.tree]
        given = arguments_of(call)
        self.source = source
        self.model = given.get("initial_model", given.get("model"))
        if isinstance(self.model, ast.Name):
            self.model = assignment_of(self.model.id, bodies) or self.model

        def known(key: str, otherwise: Any) -> Any:
            if key not in given:
                return otherwise
            value = value_of(given[key], bodies, {})
            if value is UNKNOWN:
                outcome.lose(
                    f"{kind}({key}=…)", source, call, "its value is not written there; set it by hand"
                )
                return otherwise
            return value

        self.rounds = known("num_rounds", 10)
        self.minimum = known("min_clients", known("n_clients", 0))
        self._name = str(known("name", ""))
        self.arguments = str(known("train_args", "")).split()
        if kind not in ("FedAvgRecipe", "FedAvgJob", "BaseFedJob"):
            outcome.lose(kind, source, call, "[algorithm] and [aggregation] of the job: docs/algorithms.md")
        for key in ("exclude_vars", "aggregation_weights", "key_metric", "stop_cond", "patience"):
            if key in given:
                outcome.lose(f"{kind}({key}=…)", source, call, "[model] local, weighting, [stop] of the job")


def _script(path: Path, sources: list[Source]) -> Source:
    found = [each for each in sources if any(m.startswith(_API) for m in each.modules())]
    if path.is_file():
        found = [each for each in found if each.path == path.resolve()]
    receiving = [each for each in found if any(calls_of(each.tree, ("receive",)))]
    if not receiving:
        raise ConfigError(f"{path}: no script there imports {_API} and calls receive()")
    return receiving[0]


def _note_script(outcome: Migration, script: Source) -> None:
    for name, call in calls_of(script.tree, _BRANCHES):
        outcome.lose(
            f"flare.{name}()", script, call, "never true: silos are evaluated by tasks, not by scripts"
        )
    for node in ast.walk(script.tree):
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Attribute) and last_name(decorator.value) == "flare":
                outcome.lose(f"@flare.{decorator.attr}", script, node, "call receive() and send()")
    for module, line in script.modules().items():
        if module.startswith("nvflare") and module not in (
            _API, f"{_API}.tracking", "nvflare.app_common.abstract.fl_model", "nvflare.apis.analytix",
        ):  # fmt: skip
            outcome.lose(module, script, line, "the adapter knows the client API alone")
    imports = script.imports()
    for writer in ("MLflowWriter", "WandBWriter"):
        if writer in imports:
            outcome.lose(writer, script, 1, "trackers are the coordinator's: [tracking] of the job")
    for _, call in calls_of(script.tree, ("FLModel",)):
        meta = arguments_of(call).get("meta")
        if "params" in arguments_of(call) and "NUM_STEPS_CURRENT_ROUND" not in (
            "" if meta is None else ast.unparse(meta)
        ):
            outcome.lose(
                "a weight for the mean",
                script,
                call,
                'each silo counts as 1 without meta["NUM_STEPS_CURRENT_ROUND"]',
            )


def _model(outcome: Migration, script: Source, recipe: _Recipe) -> tuple[list[str], str]:
    """Imports and an expression for the model that gives the first weights; ([], "") where none is found."""
    source, model = (recipe.source, recipe.model) if recipe.model is not None else (script, None)
    if model is None:
        for _, call in calls_of(script.tree, ("load_state_dict",)):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if isinstance(owner, ast.Name):
                model = assignment_of(owner.id, [script.tree])
                break
    assert source is not None
    if isinstance(model, ast.Call):
        imports = source.imports()
        names = {node.id for node in ast.walk(model) if isinstance(node, ast.Name)}
        if names <= imports.keys() and not any("nvflare" in imports[name] for name in names):
            return [imports[name] for name in sorted(names)], ast.unparse(model)
    outcome.lose("the first weights", source, model or 1, "write model() or weights() of the task")
    return [], ""


def _silo_text(said: str, script: Source, task: str, arguments: list[str]) -> str:
    given = f"sys.argv[2:] or {arguments!r}" if arguments else "sys.argv[2:]"
    return (
        f'"""{said}\n\npython silo.py agent.toml\n"""\n\nimport sys\n\nimport roundtable as rt\n\n'
        f'rt.nvflare_script("{script.path.name}", {given}, config=sys.argv[1], task="{task}")\n'
    )


def _task_text(said: str, name: str, imports: list[str], model: str) -> str:
    kind = "".join(part.capitalize() for part in name.split("_"))
    head = [f'"""{said} What the coordinator needs: the first weights."""', ""]
    if model:
        body = [f"class {kind}(rt.Task):", "    def model(self):", f"        return {model}"]
        return "\n".join([*head, *imports, "", "import roundtable as rt", "", "", *body, ""])
    body = [
        f"class {kind}(rt.ArrayTask):",
        "    def weights(self):",
        '        """By name, as NumPy arrays."""',
    ]
    body += [f'        raise NotImplementedError("{name}.py: write weights()")']
    return "\n".join([*head, "import roundtable as rt", "", "", *body, ""])
