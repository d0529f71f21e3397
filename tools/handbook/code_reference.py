"""Reference pages of what is no file of a user's: commands, Python, errors, events, metrics, the wire."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping

import click
from environments import ROOT

import roundtable
from handbook.table_reference import cell, code
from roundtable.cli.main import cli
from roundtable.core import errors
from roundtable.core.observability.monitoring import STEP_GAUGES
from roundtable.core.observability.released import EVENTS
from roundtable.server.operations.incidents import _OF_SILOS

EXIT_CODES = (
    (0, "it is done"),
    (1, "it failed, or a job that was watched is cancelled, failed or paused"),
    (2, "the command line, a file of yours or the task that it names is wrong"),
    (
        3,
        "`audit verify`, `audit verify-model`, `model verify`: nothing contradicts, something is unproven",
    ),
    (130, "Ctrl-C"),
)
METRIC_FILES = (
    "server/metrics_page.py",
    "client/agent/agent_observer.py",
    "api/relay/relay_page.py",
    "core/observability/monitoring.py",
)
_KINDS = ("gauge", "counter", "histogram")


def commands_page() -> list[str]:
    """Every command with its arguments and options."""
    about = "Every command, out of its parser. `roundtable COMMAND --help` says the same."
    lines = ["# Commands", "", about, ""]
    for words, command in _commands(("roundtable",), cli):
        lines += _command_lines(words, command)
    return lines


def _commands(
    words: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            inner = command.commands[name]
            if not inner.hidden:
                yield from _commands((*words, name), inner)


def _command_lines(words: tuple[str, ...], command: click.Command) -> list[str]:
    context = click.Context(command, info_name=" ".join(words))
    usage = " ".join([*words, *command.collect_usage_pieces(context)])
    told = inspect.cleandoc(command.help or "").replace("\b\n", "")
    lines = [f"## {' '.join(words)}", "", "```text", usage, "```", "", _paragraphs(told), ""]
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        lines += ["| option | what it does | default |", "| --- | --- | --- |"]
        lines += [
            f"| {', '.join(f'`{name}`' for name in (*each.opts, *each.secondary_opts))} "
            f"| {cell(each.help or '')}{_choices(each)} | {_default(each)} |"
            for each in options
        ]
        lines.append("")
    return lines


def _paragraphs(text: str) -> str:
    return text.replace("<", "&lt;").replace("[", "\\[")


def _choices(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return f" ({', '.join(f'`{choice}`' for choice in option.type.choices)})"
    return ""


def _default(option: click.Option) -> str:
    plain = option.default
    if option.required:
        return "required"
    shown = isinstance(plain, (str, int, float)) and not isinstance(plain, bool) and plain != ""
    return code(str(plain)) if shown else ""


def python_page() -> list[str]:
    """What `import roundtable as rt` gives: mkdocstrings fills it in from the sources."""
    lines = ["# Python", "", "What `import roundtable as rt` gives.", ""]
    for name in roundtable.__all__:
        if name != "__version__":
            home = "roundtable.core" if name == "metrics" else roundtable._HOMES[name]
            lines += [f"::: {home}.{'measures' if name == 'metrics' else name}", ""]
    return lines


def errors_page() -> list[str]:
    """Exit codes, classes of errors, and the kinds of failures that a round records."""
    lines = [
        "# Errors and exit codes",
        "",
        "What a command ends with, what Python raises, what a round records.",
        "",
    ]
    lines += ["## Exit codes", "", "| code | when |", "| --- | --- |"]
    lines += [f"| {number} | {text} |" for number, text in EXIT_CODES]
    lines += [
        "",
        "## Errors",
        "",
        "All are `RoundtableError`; a message names what was wrong, where, and the remedy.",
        "",
    ]
    lines += ["| class | is a | when |", "| --- | --- | --- |"]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            told = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
            lines.append(f"| `{name}` | `{kind.__bases__[0].__name__}` | {cell(told)} |")
    lines += ["", "## Failures of silos", "", "Each failure in a round has one of these kinds.", ""]
    lines += ["| kind | severity | what to do | what the coordinator does |", "| --- | --- | --- | --- |"]
    for name in errors.FAILURE_KINDS:
        severity, advice, action = _OF_SILOS[name]
        lines.append(f"| `{name}` | {severity} | {cell(advice)} | {cell(action)} |")
    return [*lines, ""]


def events_page() -> list[str]:
    """The events of a job's history, with what each carries."""
    about = (
        "A job's history, as `roundtable job watch --json` prints it and `OperatorClient.watch` gives it. A "
        "level of privacy may withhold a message or a value: what each tells of the silos stands beside it."
    )
    lines = [
        "# Events",
        "",
        about,
        "",
        "| event | its message tells of | values in `detail` |",
        "| --- | --- | --- |",
    ]
    for name, event in EVENTS.items():
        detail = ", ".join(f"`{key}` ({kind.name.lower()})" for key, kind in event.detail.items())
        tells = " and ".join(kind.name.lower() for kind in event.message)
        lines.append(f"| `{name}` | {tells}{', about one silo' if event.about else ''} | {detail} |")
    return [*lines, ""]


def metrics_page() -> list[str]:
    """The families of /metrics of coordinator, agent and relay."""
    lines = ["# Metrics", "", "What `/metrics` gives, in the form that Prometheus reads.", ""]
    for file in METRIC_FILES:
        title = {"server": "Coordinator", "client": "Agent", "api": "Relay"}.get(
            file.split("/")[0], "Every process"
        )
        lines += [f"## {title}", "", "| metric | kind | what it is | labels |", "| --- | --- | --- | --- |"]
        found = dict.fromkeys(metrics_of((ROOT / file).read_text()))
        lines += [f"| `{name}` | {kind} | {cell(text)} | {labels} |" for name, kind, text, labels in found]
        lines.append("")
    return lines


def metrics_of(source: str) -> Iterator[tuple[str, str, str, str]]:
    """(name, kind, text, labels) of the families of a module; ValueError for one that cannot be read."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(function.body, {}, {each.arg for each in function.args.args})


def _statements(
    body: list[ast.stmt], known: dict[str, str], own: set[str]
) -> Iterator[tuple[str, str, str, str]]:
    for statement in body:
        if isinstance(statement, ast.Assign):
            _learn(statement, known)
        if isinstance(statement, ast.For):
            for values in _turns(statement, known):
                yield from _statements(statement.body, {**known, **values}, own)
        elif isinstance(statement, (ast.If, ast.With, ast.AsyncWith, ast.Try)):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, inner, []), known, own)
        elif isinstance(statement, ast.Expr):
            yield from _families(statement.value, known, own)


def _learn(statement: ast.Assign, known: dict[str, str]) -> None:
    for target in statement.targets:
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))
        for name, value in pairs:
            if isinstance(name, ast.Name):
                known[name.id] = _text(value, known)


def _turns(loop: ast.For, known: Mapping[str, str]) -> Iterator[dict[str, str]]:
    names = [each.id for each in getattr(loop.target, "elts", [loop.target]) if isinstance(each, ast.Name)]
    if isinstance(loop.iter, (ast.Tuple, ast.List)):
        for each in loop.iter.elts:
            values = each.elts if isinstance(each, ast.Tuple) else [each]
            yield {name: _text(value, known) for name, value in zip(names, values, strict=False)}
    elif ast.unparse(loop.iter).startswith("STEP_GAUGES"):
        for pair in STEP_GAUGES.items():
            yield dict(zip(names, pair, strict=True))
    else:
        yield {}


def _families(call: ast.expr, known: Mapping[str, str], own: set[str]) -> Iterator[tuple[str, str, str, str]]:
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return
    local = isinstance(call.func, ast.Name) and call.func.id == "each"
    if local or (isinstance(call.func, ast.Attribute) and call.func.attr in _KINDS):
        if isinstance(call.args[0], ast.Name) and call.args[0].id in own:
            return
        kind = "gauge" if local else call.func.attr  # type: ignore[union-attr]
        labels = "job_id" if local else _text(call.args[3], known) if len(call.args) > 3 else ""
        name = _text(call.args[0], known)
        if not name.startswith("roundtable_"):
            raise ValueError(f"the name of a metric cannot be read: {ast.unparse(call)}")
        yield name + ("_total" if kind == "counter" else ""), kind, _text(call.args[1], known), labels


def _text(value: ast.expr, known: Mapping[str, str]) -> str:
    if isinstance(value, ast.Constant):
        return f"{value.value}"
    if isinstance(value, ast.Tuple):
        return ", ".join(_text(each, known) for each in value.elts)
    if isinstance(value, ast.IfExp) and isinstance(value.test, ast.Compare):
        same = _text(value.test.left, known) == _text(value.test.comparators[0], known)
        return _text(value.body if same else value.orelse, known)
    if isinstance(value, ast.Name):
        return known.get(value.id, "")
    if isinstance(value, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in value.values]
        return "".join(_text(each, known) for each in parts)
    return ""


def wire_page() -> list[str]:
    """The services of proto/, with what each call is for."""
    lines = [
        "# The wire",
        "",
        "The calls of `proto/`, over gRPC with mutual TLS. The files have the messages.",
        "",
    ]
    for file in sorted((ROOT / "proto").glob("*.proto")):
        text = file.read_text()
        for service in re.finditer(r"^((?://.*\n)*)service (\w+) \{\n([\s\S]*?)^\}", text, re.MULTILINE):
            lines += [f"## {service[2]}", "", f"`proto/{file.name}`. {_comment(service[1])}", ""]
            lines += ["| call | takes | gives | what it is for |", "| --- | --- | --- | --- |"]
            pattern = r"((?:^ *//.*\n)*)^ *rpc (\w+)\(([^)]*)\) returns \(([^)]*)\)"
            for call in re.finditer(pattern, service[3], re.MULTILINE):
                lines.append(f"| `{call[2]}` | `{call[3]}` | `{call[4]}` | {cell(_comment(call[1]))} |")
            lines.append("")
    return lines


def _comment(text: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in text.splitlines())
