"""A Flower project as a task and a job here; an app that only asks, as a survey."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError
from roundtable.migration.flower_queries import survey_of
from roundtable.migration.flower_strategy import ServerReading
from roundtable.migration.job_text import job_text
from roundtable.migration.outcome import Migration
from roundtable.migration.sources import Source, calls_of, last_name, project_table, read_sources, root_of

_KINDS = ("train", "evaluate", "query")
_HARMLESS = ("message_size_mod", "arrays_size_mod")
_NO_WEIGHTS = '''def first_weights():
    """To be written: the model, its state_dict, or the list of arrays that round 1 starts from."""
    raise NotImplementedError("federated.py: write first_weights()")'''


def migrate_flower(path: Path) -> Migration:
    """What a Flower project needs to run here. `path` is its folder or its client's file; nothing is run.

    Raises ConfigError where no client is found, or where a file cannot be read.
    """
    sources = read_sources(path)
    client = _client(path, sources)
    root = client.source.root
    outcome = Migration("Flower", root)
    table = project_table(root).get("tool", {}).get("flwr", {})
    settings = dict(_flat(table.get("app", {}).get("config", {}), ""))
    _note_client(outcome, client)
    if client.handlers and "train" not in client.handlers:
        survey_of(outcome, client.source, sources, settings)
        return outcome
    reading = ServerReading(outcome, settings, _clients(table))
    reading.read(sources)
    if not reading.first:
        reading.first = _NO_WEIGHTS
        if not any(each.what.startswith("the first weights") for each in outcome.lost):
            outcome.lose("the first weights", client.source, 1, "write first_weights() in federated.py")
    tables = {"model": {"integers": "average"}, **reading.tables, "simulation": {"clients": reading.clients}}
    said = f"Made by `roundtable migrate flower` of {client.source.shown}."
    outcome.files["federated.py"] = _task_text(said, client, reading)
    outcome.files["job.toml"] = job_text(said, "federated.py:task", reading.rounds, tables)
    outcome.carried += [
        (f"{client.source.shown}:{client.name}", "federated.py:task, by rt.flower_app"),
        ("num_rounds", f"rounds = {reading.rounds}"),
        ("whole numbers are averaged", '[model] integers = "average"'),
        (
            "every update counts as it is",
            "[aggregation.validation]: what weighs or measures too much is left out",
        ),
    ]
    return outcome


class _FoundClient:
    """Where the client is made, by which name, and what it handles."""

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name
        self.handlers: dict[str, ast.AST] = {}
        self.odd: list[tuple[str, ast.AST]] = []
        for node in ast.walk(source.tree):
            for decorator in getattr(node, "decorator_list", []):
                call = decorator if isinstance(decorator, ast.Call) else None
                target = decorator.func if call is not None else decorator
                if (
                    isinstance(target, ast.Attribute)
                    and target.attr in _KINDS
                    and last_name(target.value) == name
                ):
                    if call is not None and call.args:
                        self.odd.append((f"@{name}.{target.attr}({ast.unparse(call.args[0])})", node))
                    else:
                        self.handlers[target.attr] = node


def _client(path: Path, sources: list[Source]) -> _FoundClient:
    """The app that pyproject.toml names, else the first that is made; else a client_fn."""
    root = root_of(path)
    components = project_table(root).get("tool", {}).get("flwr", {}).get("app", {}).get("components", {})
    module, _, name = str(components.get("clientapp", "")).partition(":")
    wanted = [each for each in sources if each.path == path.resolve()]
    named = [each for each in sources if each.shown == f"{module.replace('.', '/')}.py"]
    if named and not wanted:
        return _FoundClient(named[0], name or "app")
    for source in [*wanted, *sources]:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            if isinstance(node.value, ast.Call) and last_name(node.value.func) == "ClientApp":
                return _FoundClient(source, node.targets[0].id)
    for source in [*wanted, *sources]:
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "client_fn":
                return _FoundClient(source, "client_fn")
    raise ConfigError(f"{path}: no ClientApp and no client_fn is made there")


def _note_client(outcome: Migration, client: _FoundClient) -> None:
    source = client.source
    for what, node in client.odd:
        outcome.lose(what, source, node, "only the plain train and evaluate are asked for")
    if "train" in client.handlers and "query" in client.handlers:
        outcome.lose("@app.query", source, client.handlers["query"], "an analysis: docs/analytics.md")
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "state"
            and last_name(node.value) in ("context", "ctx")
        ):
            outcome.lose("context.state", source, node, "[model] local for weights that stay at a silo")
        if isinstance(node, ast.FunctionDef) and node.name == "get_properties":
            outcome.lose("get_properties", source, node, "[metadata] of the silo's agent.toml")
    imports = source.imports()
    for name, statement in imports.items():
        if statement.startswith("from flwr.") and ".mod import" in statement and name not in _HARMLESS:
            outcome.lose(statement, source, _line(source, name), "privacy is the job's [privacy] table")
    for module, line in source.modules().items():
        if module.startswith(("flwr.server", "flwr.simulation")):
            outcome.lose(
                f"{module} in the client's file", source, line, "keep the server in a file of its own"
            )
        if module.startswith("flwr_datasets"):
            outcome.lose(
                "data by flwr_datasets",
                source,
                line,
                "at a silo read its own: context.run_config is its [data] table",
            )
    for name, call in calls_of(source.tree, ("start_client", "start_numpy_client")):
        outcome.lose(f"{name}()", source, call, 'put it under `if __name__ == "__main__":`')


def _line(source: Source, name: str) -> int:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return node.lineno
    return 1


def _clients(table: dict[str, Any]) -> int:
    """How many nodes the project simulates, 10 where it does not say."""
    for federation in table.get("federations", {}).values():
        if isinstance(federation, dict):
            found = dict(_flat(federation, "")).get("options.num-supernodes")
            if isinstance(found, int):
                return found
    return 10


def _task_text(said: str, client: _FoundClient, reading: ServerReading) -> str:
    lines = [f'"""{said}"""', "", "import roundtable as rt", "", "", reading.first, "", ""]
    lines += ["task = rt.flower_app(", f'    "{client.source.shown}:{client.name}",', "    first_weights,"]
    for name in ("train_config", "evaluate_config"):
        if table := getattr(reading, name):
            lines.append(f"    {name}={table!r},")
    return "\n".join([*lines, ")", ""])


def _flat(table: Any, before: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items() if isinstance(table, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
