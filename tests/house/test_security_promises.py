"""Each promise of docs/security.md has tests that attack it, and the page shows which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from security_table import PAGE, ROOT, Promise, promises, promises_as_markdown

TESTS = ROOT / "tests"
NOT_PROMISES = {"Identity", "Promises", "What was tried", "What this does not do"}
"""Headings whose bold parts promise, or that promise nothing."""


@cache
def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The tests of a file by name."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {node.name: node for node in found}


def parts() -> Iterator[str]:
    """What the page states: its headings, and the bold words that its points begin with."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## What was tried")[0]
    yield from (name for name in re.findall(r"^##+ (.+)$", text, re.MULTILINE) if name not in NOT_PROMISES)
    yield from (name.rstrip(".,:") for name in re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE))


def refuses(file: str, node: ast.AST, depth: int = 2) -> bool:
    """Whether a test can fail by what it finds, itself or in what it calls of its own file.

    With `suppress` every error fails it but those that it names.
    """
    called = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    if any(isinstance(part, ast.Assert) for part in ast.walk(node)) or called & {
        "pytest.raises",
        "contextlib.suppress",
    }:
        return True
    helpers = called & functions(file).keys() if depth else ()
    return any(refuses(file, functions(file)[name], depth - 1) for name in helpers)


def test_every_part_of_the_page_is_attacked() -> None:
    stated = set(parts())
    assert len(stated) > 20
    attacked = {promise.part for promise in promises()}
    assert stated - attacked == set(), "these promises have no test: add them to tests/security/promises.toml"
    assert attacked - stated == set(), "these are in tests/security/promises.toml, and not on the page"


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: f"{promise.part}: {promise.tries}"[:60])
def test_a_promise_names_tests_that_are_there_and_can_fail(promise: Promise) -> None:
    assert promise.tests
    assert len(set(promise.tests)) == len(promise.tests)
    for test in promise.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"{test}: there is no such file"
        assert name.startswith("test_"), test
        assert name in functions(file), f"{test}: there is no such test"
        node = functions(file)[name]
        marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
        assert "skip(" not in marks, f"{test} is never run"
        assert "xfail" not in marks, f"{test} may fail"
        assert refuses(file, node), f"{test} asserts nothing"


def test_the_page_shows_the_table() -> None:
    assert promises_as_markdown() in PAGE.read_text(encoding="utf-8"), "run: python tools/security_table.py"


def test_every_test_that_the_page_speaks_of_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for file in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / file).exists(), file
