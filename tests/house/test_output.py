"""One place prints: whatever another party wrote is escaped there, and no command goes round it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["api", "core", "aggregation", "privacy", "engine", "client", "cluster", "server", "simulation"]
PRINTER = ROOT / "api/cli/shared/output.py"
LOGS = ROOT / "core/observability/logs.py"
RANKS = (
    "tools/local_ranks.py",
    "train/group.py",
    "train/group_plan.py",
    "train/rank.py",
    "stepping/rank_shares.py",
    "agent/preflight.py",
)
"""Programs of a silo's own ranks in cluster/: it goes to who started them, or into their log."""
CLICK = {"echo", "secho", "echo_via_pager", "prompt", "confirm"}
STREAMS = {f"sys.{stream}.{verb}" for stream in ("stdout", "stderr") for verb in ("write", "writelines")}
BUILDERS = {"rich.text", "rich.table", "rich.panel", "rich.markup", "rich"}
"""Parts of rich that take words, as markup unless told otherwise; bars and live displays only hold others."""


def prints_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in a module that shows words to people."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print()"
        elif isinstance(node, ast.Attribute) and node.attr == "print":
            yield node.lineno, ".print"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "click" and node.attr in CLICK:
                yield node.lineno, f"click.{node.attr}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in STREAMS:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in BUILDERS:
            yield node.lineno, f"from {node.module}"


def modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The module without what only the type checker reads."""
    for node in list(tree.body):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            tree.body.remove(node)
    return tree


def test_nothing_else_prints() -> None:
    allowed = {PRINTER, LOGS, *(ROOT / "cluster" / name for name in RANKS)}
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in modules()
        if file not in allowed and "examples" not in file.parts
        for line, what in prints_of(without_type_checking(ast.parse(file.read_text())))
    ]
    assert not found, found
    assert any(prints_of(ast.parse(PRINTER.read_text()))), "the search finds what it looks for"


def test_the_printer_escapes_all_that_it_prints() -> None:
    """Every call that shows words has an argument made by one of the escaping functions."""
    safe = {"printable", "printable_lines", "json_text", "cell", "assemble", "join"}
    for node in ast.walk(ast.parse(PRINTER.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in ("echo", "confirm", "add_column"):
            call = node.args[0]
            assert isinstance(call, ast.Call), ast.unparse(node)
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            assert name in safe, ast.unparse(node)
