"""Python files as they are written: names, values and imports, found without running anything."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError

_MOST_FILES = 200
_LEFT_OUT = ("tests", "test", "build", "dist", "venv", "node_modules", "__pycache__")
UNKNOWN = object()
"""The value of an expression that only running would tell."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file and its syntax tree. `root` is the folder from which its imports go."""

    path: Path
    root: Path
    tree: ast.Module

    @property
    def shown(self) -> str:
        """The path as the project's people know it."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def package(self) -> str:
        """The package that relative imports begin at."""
        return ".".join(self.path.parent.relative_to(self.root).parts)

    def imports(self) -> dict[str, str]:
        """Each name that an import makes, and a statement that makes it alone, without relative dots."""
        made: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    own = alias.asname or alias.name.partition(".")[0]
                    behind = f" as {alias.asname}" if alias.asname else ""
                    made[own] = f"import {alias.name}{behind}"
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                for alias in node.names:
                    behind = f" as {alias.asname}" if alias.asname else ""
                    made[alias.asname or alias.name] = f"from {module} import {alias.name}{behind}"
        return made

    def modules(self) -> dict[str, int]:
        """Every module that is imported from, and the first line that does."""
        found: dict[str, int] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.setdefault(alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                found.setdefault(self._absolute(node), node.lineno)
        return found

    def function_around(self, inner: ast.AST) -> Function | None:
        """The innermost function that holds a node."""
        found = None
        for node in ast.walk(self.tree):
            if isinstance(node, Function) and any(each is inner for each in ast.walk(node)):
                found = node
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        above = parts[: len(parts) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def read_sources(path: Path) -> list[Source]:
    """The Python files of a project: those of a folder, or a file and those beside it.

    Raises ConfigError for a path that is not there, a file that is no Python, and too many files.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    folder = path if path.is_dir() else path.parent
    files = sorted(file for file in folder.rglob("*.py") if _belongs(file.relative_to(folder)))
    if len(files) > _MOST_FILES:
        raise ConfigError(f"{folder} holds {len(files)} Python files; name the file or the app's own folder")
    return [_source(file) for file in files]


def root_of(path: Path) -> Path:
    """The folder from which the imports of a file go."""
    folder = path if path.is_dir() else path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def project_table(root: Path) -> dict[str, Any]:
    """pyproject.toml beside the sources; {} where there is none."""
    file = root / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def calls_of(tree: ast.AST, names: Sequence[str]) -> Iterator[tuple[str, ast.Call]]:
    """Calls of functions or classes by the last part of their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := last_name(node.func)) in names:
            yield name, node


def last_name(node: ast.AST) -> str:
    """`FedAvg` of `fl.strategy.FedAvg`; "" where there is no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def arguments_of(call: ast.Call) -> dict[str, ast.expr]:
    """A call's arguments by keyword."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def assignment_of(name: str, bodies: Sequence[ast.AST]) -> ast.expr | None:
    """What a name is last given in the first of `bodies` that gives it anything."""
    for body in bodies:
        found: ast.expr | None = None
        for node in ast.walk(body):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found = node.value
        if found is not None:
            return found
    return None


def value_of(
    node: ast.expr | None, bodies: Sequence[ast.AST], settings: Mapping[str, Any], depth: int = 8
) -> Any:
    """What an expression comes to, as far as that stands there; UNKNOWN otherwise.

    Names are looked up in `bodies`; `context.run_config["x"]` in `settings`.
    """
    if node is None or depth == 0:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Name):
        return value_of(assignment_of(node.id, bodies), bodies, settings, depth - 1)
    if isinstance(node, ast.Subscript) and last_name(node.value) == "run_config":
        key = value_of(node.slice, bodies, settings, depth - 1)
        return settings.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
    if isinstance(node, ast.Dict):
        values = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            key = value_of(key_node, bodies, settings, depth - 1)
            value = value_of(value_node, bodies, settings, depth - 1)
            if key is UNKNOWN or value is UNKNOWN:
                return UNKNOWN
            values[key] = value
        return values
    if isinstance(node, ast.Call):
        return _value_of_call(node, bodies, settings, depth)
    return UNKNOWN


def _value_of_call(node: ast.Call, bodies: Sequence[ast.AST], settings: Mapping[str, Any], depth: int) -> Any:
    name = last_name(node.func)
    inner = value_of(node.args[0], bodies, settings, depth - 1) if node.args else UNKNOWN
    kinds = {"int": int, "float": float, "str": str, "bool": bool, "ConfigRecord": dict, "dict": dict}
    if isinstance(node.func, ast.Attribute) and name == "get":
        if last_name(node.func.value) == "run_config" and isinstance(inner, str):
            otherwise = value_of(node.args[1], bodies, settings, depth - 1) if node.args[1:] else UNKNOWN
            return settings.get(inner, otherwise)
        return UNKNOWN
    if isinstance(node.func, ast.Attribute) and name == "split" and len(node.args) == 1:
        text = value_of(node.func.value, bodies, settings, depth - 1)
        return text.split(inner) if isinstance(text, str) and isinstance(inner, str) else UNKNOWN
    if name not in kinds or inner is UNKNOWN:
        return UNKNOWN
    try:
        return kinds[name](inner)
    except (TypeError, ValueError):
        return UNKNOWN


def _belongs(path: Path) -> bool:
    return not any(part.startswith(".") or part in _LEFT_OUT for part in path.parts)


def _source(file: Path) -> Source:
    file = file.resolve()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from error
    return Source(file, root_of(file), tree)
