"""The package as a graph: which module imports which, and what that makes of its rooms (its folders)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from pathlib import Path
from typing import TypeVar

from tree import ROOT, package_dirs

Node = TypeVar("Node", bound=Hashable)
Graph = dict[Node, set[Node]]


def modules() -> dict[str, Path]:
    """Dotted name → file of every module that people wrote; a package stands for its `__init__`."""
    found = {}
    for name, folder in package_dirs().items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            if "examples" not in inner and not file.stem.endswith(("_pb2", "_pb2_grpc")):
                found[".".join((name, *inner)).removesuffix(".__init__")] = file
    return found


def trees(files: Mapping[str, Path]) -> dict[str, ast.Module]:
    """The modules, parsed."""
    return {name: ast.parse(file.read_text(), str(file)) for name, file in files.items()}


def imports(parsed: Mapping[str, ast.Module]) -> Graph[str]:
    """Module → modules of ours that it imports, within functions and under TYPE_CHECKING included."""
    graph: Graph[str] = {name: set() for name in parsed}
    for name, tree in parsed.items():
        for target in _imported(tree):
            home = next((part for part in (target, target.rpartition(".")[0]) if part in parsed), None)
            if home is not None and home != name:
                graph[name].add(home)
    return graph


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def collapse(graph: Mapping[str, Set[str]], home: Callable[[str], str | None]) -> Graph[str]:
    """The graph of homes: an arrow wherever a member of one points at a member of another."""
    result: Graph[str] = {place: set() for name in graph if (place := home(name)) is not None}
    for name, targets in graph.items():
        if (start := home(name)) is not None:
            ends = {place for target in targets if (place := home(target)) is not None}
            result[start] |= ends - {start}
    return result


def room_in(container: str, files: Mapping[str, Path], *, alone: bool) -> Callable[[str], str | None]:
    """Gives a module's folder below `container`; with `alone`, its own name where it is in no folder there.

    The `__init__` of the container belongs to nothing: it repeats names of all its modules.
    """

    def home(name: str) -> str | None:
        inner = name.removeprefix(f"{container}.")
        if inner == name:
            return None
        first, _, rest = inner.partition(".")
        if rest or files[name].name == "__init__.py":
            return f"{container}.{first}"
        return name if alone else None

    return home


def cycles(graph: Mapping[Node, Set[Node]]) -> list[set[Node]]:
    """Sets of more than one node that reach each other (Tarjan 1972, as strongly connected components)."""
    number: dict[Node, int] = {}
    lowest: dict[Node, int] = {}
    stack: list[Node] = []
    found: list[set[Node]] = []

    def visit(node: Node) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in number:
            visit(node)
    return found


def reduced(graph: Mapping[Node, Set[Node]]) -> Graph[Node]:
    """An acyclic graph without the arrows that follow from others."""

    def below(node: Node) -> set[Node]:
        return set(graph[node]).union(*(below(target) for target in graph[node]))

    return {
        node: {end for end in ends if not any(end in below(other) for other in ends - {end})}
        for node, ends in graph.items()
    }
