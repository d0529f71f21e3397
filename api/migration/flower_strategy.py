"""What Flower's server app says of a run, as a job file: rounds, strategy, first weights."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Mapping
from typing import Any, cast

from typing_extensions import override

from roundtable.migration.outcome import Migration
from roundtable.migration.sources import (
    UNKNOWN,
    Function,
    Source,
    arguments_of,
    assignment_of,
    calls_of,
    last_name,
    value_of,
)

RULES = {
    "FedMedian": "median",
    "FedTrimmedAvg": "trimmed_mean",
    "Krum": "krum",
    "MultiKrum": "multi_krum",
    "Bulyan": "bulyan",
}
OPTIMIZERS: dict[str, dict[str, tuple[str, float]]] = {
    "FedAdam": {"learning_rate": ("eta", 0.1), "beta_1": ("beta_1", 0.9), "beta_2": ("beta_2", 0.99),
                "tau": ("tau", 1e-3)},
    "FedYogi": {"learning_rate": ("eta", 0.01), "beta_1": ("beta_1", 0.9), "beta_2": ("beta_2", 0.99),
                "tau": ("tau", 1e-3)},
    "FedAdagrad": {"learning_rate": ("eta", 0.1), "tau": ("tau", 1e-3)},
    "FedAvgM": {"learning_rate": ("server_learning_rate", 1.0), "momentum": ("server_momentum", 0.0)},
}  # fmt: skip
"""Our keys, Flower's names of them, its defaults (1.42). These differ from ours: all are written out."""
PLAIN = ("FedAvg", "FedProx")
STRATEGIES = (*PLAIN, *RULES, *OPTIMIZERS)
NO_PLACE = {
    "QFedAvg": "no rule here does the same; a rule of your own: docs/extending.md",
    "FedXgbBagging": "trees of changing size cannot be averaged",
    "FedXgbCyclic": "trees of changing size cannot be averaged",
    "DifferentialPrivacyClientSideAdaptiveClipping": "[privacy] level = \"client\", with another accountant",
    "DifferentialPrivacyClientSideFixedClipping": "[privacy] level = \"client\", with another accountant",
    "DifferentialPrivacyServerSideAdaptiveClipping": "[privacy] level = \"client\", with another accountant",
    "DifferentialPrivacyServerSideFixedClipping": "[privacy] level = \"client\", with another accountant",
    "SecAggPlusWorkflow": "[privacy] secure_aggregation = true",
}  # fmt: skip
_FIRST = "def first_weights():"


class ServerReading:
    """What is read of the server's file; `job` is filled as tables of the job file."""

    def __init__(self, outcome: Migration, settings: Mapping[str, Any], clients: int) -> None:
        self.outcome = outcome
        self.settings = settings
        self.clients = clients
        self.cohort = clients
        self.rounds = 10
        self.train_config: dict[str, Any] = {}
        self.evaluate_config: dict[str, Any] = {}
        self.first = ""
        self.tables: dict[str, dict[str, Any]] = {}

    def read(self, sources: list[Source]) -> None:
        """The first file that starts a strategy, or makes one."""
        for source in sources:
            for name, call in calls_of(source.tree, (*STRATEGIES, *NO_PLACE)):
                self._strategy(source, name, call)
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) and any(
                    last_name(base) in ("Strategy", *STRATEGIES) for base in node.bases
                ):
                    self.outcome.lose(
                        f"strategy {node.name}", source, node, "a rule of your own: docs/extending.md"
                    )
            for _, call in calls_of(source.tree, ("start",)):
                if "initial_arrays" in arguments_of(call) or "num_rounds" in arguments_of(call):
                    self._start(source, call)
            for name, call in calls_of(source.tree, ("send_and_receive", "push_messages")):
                if last_name(cast("ast.Attribute", call.func).value) == "grid":
                    self.outcome.lose(f"grid.{name}()", source, call, "the coordinator runs the rounds")

    def _value(self, source: Source, node: ast.expr | None, around: ast.AST) -> Any:
        function = source.function_around(around)
        bodies = [source.tree] if function is None else [function, source.tree]
        return value_of(node, bodies, self.settings)

    def _strategy(self, source: Source, name: str, call: ast.Call) -> None:
        if name in NO_PLACE:
            self.outcome.lose(name, source, call, NO_PLACE[name])
            return
        given = {key: self._value(source, node, call) for key, node in arguments_of(call).items()}
        for key in [key for key, value in given.items() if value is UNKNOWN]:
            self.outcome.lose(
                f"{name}({key}=…)", source, call, "its value is not written there; set it by hand"
            )
            del given[key]
        self._participation(source, name, call, given)
        if name in OPTIMIZERS:
            table = {key: given.get(theirs, default) for key, (theirs, default) in OPTIMIZERS[name].items()}
            self.tables["aggregation.server_optimizer"] = {"name": name.lower(), **table}
            if "eta_l" in given:
                self.outcome.lose(f"{name}(eta_l=…)", source, call, "the client's own learning rate")
        if name in RULES:
            self._rule(name, given)
        if name == "FedProx" and "proximal_mu" in given:
            self.train_config["proximal-mu"] = given["proximal_mu"]
        self.outcome.carried.append((f"strategy {name}", self._said(name)))

    def _said(self, name: str) -> str:
        if name in OPTIMIZERS:
            return f'[aggregation.server_optimizer] name = "{name.lower()}"'
        return f'[aggregation] rule = "{RULES.get(name, "mean")}"'

    def _rule(self, name: str, given: Mapping[str, Any]) -> None:
        parameters: dict[str, Any] = {}
        if name == "FedTrimmedAvg":
            parameters["f"] = math.floor(given.get("beta", 0.2) * self.cohort)
        elif name != "FedMedian":
            parameters["f"] = given.get("num_malicious_nodes", 0)
        if name == "MultiKrum":
            parameters["m"] = given.get("num_nodes_to_select", 1)
        self.tables["aggregation"] = {
            "rule": RULES[name],
            **({"parameters": parameters} if parameters else {}),
        }

    def _participation(self, source: Source, name: str, call: ast.Call, given: Mapping[str, Any]) -> None:
        least = given.get("min_train_nodes", 2)
        if (share := given.get("fraction_train", 1.0)) < 1:
            self.cohort = max(least, int(share * self.clients))
            self.tables.setdefault("cohort", {})["size"] = self.cohort
        if least <= self.cohort:
            self.tables.setdefault("cohort", {})["minimum"] = least
        share = given.get("fraction_evaluate", 1.0)
        if share == 0:
            self.tables["evaluation"] = {"every": 0}
        elif share < 1:
            self.outcome.lose(
                f"{name}(fraction_evaluate={share})",
                source,
                call,
                'all evaluate, or evaluation.clients = "cohort"',
            )
        if given.get("weighted_by_key", "num-examples") != "num-examples":
            self.outcome.lose(f"{name}(weighted_by_key=…)", source, call, "the weight is num-examples")
        for key in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            if key in arguments_of(call):
                self.outcome.lose(
                    f"{name}({key}=…)", source, call, "means over examples, or the job's [metrics]"
                )

    def _start(self, source: Source, call: ast.Call) -> None:
        given = arguments_of(call)
        rounds = self._value(source, given.get("num_rounds"), call)
        if isinstance(rounds, int):
            self.rounds = rounds
        elif "num_rounds" in given:
            self.outcome.lose("num_rounds", source, call, "rounds of job.toml is 10; set it")
        for key, table in (("train_config", self.train_config), ("evaluate_config", self.evaluate_config)):
            if key not in given:
                continue
            value = self._value(source, given[key], call)
            if isinstance(value, dict):
                table.update(value)
            else:
                self.outcome.lose(f"start({key}=…)", source, call, f"give flower_app() {key} by hand")
        if "evaluate_fn" in given:
            self.outcome.lose(
                "start(evaluate_fn=…)",
                source,
                call,
                "a test set at the server: test_data of an rt.Task, in simulations",
            )
        timeout = self._value(source, given.get("timeout"), call)
        if isinstance(timeout, (int, float)):
            self.tables.setdefault("cohort", {})["deadline"] = float(timeout)
        if "initial_arrays" in given:
            self._first_weights(source, call, given["initial_arrays"])

    def _first_weights(self, source: Source, call: ast.Call, arrays: ast.expr) -> None:
        function = source.function_around(call)
        body = source.tree.body if function is None else function.body
        lines, free = _slice(body, call, arrays, self.settings)
        imports = source.imports()
        made = [imports[name] for name in sorted(free) if name in imports and "flwr" not in imports[name]]
        unknown = [name for name in sorted(free) if name not in imports and not hasattr(builtins, name)]
        constants = [(name, assignment_of(name, [source.tree])) for name in unknown]
        if any(value is None for _, value in constants):
            lacking = ", ".join(name for name, value in constants if value is None)
            self.outcome.lose(
                f"the first weights (they need {lacking})",
                source,
                call,
                "write first_weights() in federated.py",
            )
            return
        set_before = [f"{name} = {ast.unparse(value)}" for name, value in constants if value is not None]
        said = f'    """As {source.shown} makes them."""'
        self.first = "\n".join([_FIRST, said, *(f"    {line}" for line in (*made, *set_before, *lines))])


class _Plain(ast.NodeTransformer):
    """Records of arrays as what they are made of, and settings as their values."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    @override
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        return inner[0] if last_name(node.func) == "ArrayRecord" and inner else node

    @override
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        value = value_of(node, [], self._settings)
        return node if value is UNKNOWN else ast.parse(repr(value), mode="eval").body


def _slice(
    body: list[ast.stmt], until: ast.Call, wanted: ast.expr, settings: Mapping[str, Any]
) -> tuple[list[str], set[str]]:
    """The statements before `until` that `wanted` comes from, and the names that they need from outside."""
    plain = _Plain(settings)
    last = cast("ast.expr", plain.visit(wanted))
    needed = _names(last)
    kept: list[ast.stmt] = []
    before = [each for each in body if each.lineno < until.lineno and not isinstance(each, Function)]
    for statement in reversed(before):
        if any(node is until for node in ast.walk(statement)):
            continue
        changes = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        touched = _names(statement) & needed if changes else _assigned(statement) & needed
        if touched:
            statement = cast("ast.stmt", plain.visit(statement))
            kept.insert(0, statement)
            needed |= _names(statement)
    made = set().union(*(_assigned(each) for each in kept)) if kept else set()
    return [ast.unparse(each) for each in kept] + [f"return {ast.unparse(last)}"], needed - made


def _names(node: ast.AST) -> set[str]:
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def _assigned(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return set()
    return {
        each.id
        for each in ast.walk(statement)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
