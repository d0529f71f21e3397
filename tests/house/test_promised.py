"""Each promise of a page that tools/promises.py names has tests that attack it, and the page shows which."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from promises import PAGES, PRIVACY, ROOT, TESTS, Page, Promise

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def definitions(file: str) -> dict[str, ast.AST]:
    """The tests, helpers and machines of a file by name."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}


def refuses(file: str, node: ast.AST, depth: int = 2) -> bool:
    """Whether a test can fail by what it finds, itself or in what it uses of its own file.

    With `suppress` every error fails it but those that it names.
    """
    called = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    refusing = {"pytest.raises", "contextlib.suppress", "torch.testing.assert_close"}
    if any(isinstance(part, ast.Assert) for part in ast.walk(node)) or called & refusing:
        return True
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    helpers = used & definitions(file).keys() if depth else ()
    return any(refuses(file, definitions(file)[name], depth - 1) for name in helpers)


@each_page
def test_every_part_of_a_page_is_attacked(page: Page) -> None:
    stated = set(page.parts())
    assert len(stated) > 15
    attacked = {promise.part for promise in page.promises()}
    assert stated - attacked == set(), f"these promises have no test: add them to tests/{page.listed}"
    assert attacked - stated == set(), f"these are in tests/{page.listed}, and not on the page"


def test_no_point_of_the_privacy_page_promises_without_a_name() -> None:
    text = PRIVACY.path.read_text(encoding="utf-8").partition("\n## Promises")[0]
    assert re.findall(r"^[-*] (?!\*\*).*", text, re.MULTILINE) == []


@pytest.mark.parametrize(
    "promise",
    [promise for page in PAGES for promise in page.promises()],
    ids=lambda promise: f"{promise.part}: {promise.tries}"[:60],
)
def test_a_promise_names_tests_that_are_there_and_can_fail(promise: Promise) -> None:
    assert promise.tests
    assert len(set(promise.tests)) == len(promise.tests)
    for test in promise.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"{test}: there is no such file"
        assert name.startswith("test_"), test
        node = definitions(file).get(name)
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), f"{test}: there is no such test"
        marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
        assert "skip(" not in marks, f"{test} is never run"
        assert "xfail" not in marks, f"{test} may fail"
        assert refuses(file, node), f"{test} asserts nothing"


@each_page
def test_a_page_shows_its_table(page: Page) -> None:
    assert page.table() in page.path.read_text(encoding="utf-8"), f"run: python tools/{page.tool}"


@each_page
def test_every_test_that_a_page_speaks_of_is_there(page: Page) -> None:
    for file in re.findall(r"`(tests/[\w/.]+)`", page.path.read_text(encoding="utf-8")):
        assert (ROOT / file).exists(), file
