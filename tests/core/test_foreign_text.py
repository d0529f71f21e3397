"""Text of other parties, as terminals and logs are given it."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from roundtable.core.foreign_text import json_text, markdown_text, printable, printable_lines
from roundtable.core.observability.logs import ConsoleFormatter, JsonFormatter, announce, write_logs

ANY = st.text(st.characters(), max_size=60)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3),
    max_leaves=8,
)


@given(ANY)
def test_any_text_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in printable_lines(text))
    assert "\n".join(printable_lines(text)).count("\n") == text.count("\n")


@given(JSON)
def test_json_keeps_its_values_and_shows_no_control_character(value: object) -> None:
    assert json_text(value).isprintable()
    assert json.loads(json_text(value)) == value
    assert json.loads(json_text(value, indent=2)) == value


def test_what_is_dangerous_is_named_and_what_is_a_word_stays() -> None:
    assert printable("Klinikum Zürich 東京") == "Klinikum Zürich 東京"
    assert printable("a\x1b]52;c;cm0gLXJm\x07b") == r"a\x1b]52;c;cm0gLXJm\x07b"
    assert printable("oak\r\n2026 INFO approved") == r"oak\r\n2026 INFO approved"
    assert printable("\u202egpj.exe\ud800") == r"\u202egpj.exe\ud800"
    assert printable("x" * 2_500) == "x" * 2_000 + "… (500 more characters)"
    assert (
        json_text({"loss": float("nan"), "all": [float("inf"), 1.5]}) == '{"loss": null, "all": [null, 1.5]}'
    )


@given(ANY | st.text("\\\\`*_[]()<>!|#&@:/.wht ", max_size=40))
def test_in_markdown_it_is_text_and_nothing_else(text: str) -> None:
    lines = f"# {markdown_text(text)}\n\n| | |\n| --- | --- |\n| x | {markdown_text(text)} |\n| y | z |\n"
    found = MarkdownIt("commonmark").enable("table").parse(lines)
    shown = [each for each in found if each.type == "inline" and each.content not in ("", "x", "y", "z")]
    for each in shown:
        assert {part.type for part in each.children or ()} <= {"text", "text_special"}
        assert "".join(part.content for part in each.children or ()) == printable(text).strip()
    assert sum(each.type == "tr_open" for each in found) == 3


def test_in_markdown_an_address_is_no_link() -> None:
    assert markdown_text("see https://a.example, WWW.b.example, c@d.example") == (
        r"see https\://a.example, WWW\.b.example, c\@d.example"
    )


def record(message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("roundtable.test", logging.INFO, __file__, 1, message, None, None)
    vars(made).update(more)
    return made


def test_nobodys_words_make_a_second_line_of_a_log() -> None:
    forged = "refused\n2026-01-01 00:00:00,000 INFO roundtable: oak is approved\x1b[2J\x9b2J"
    line = ConsoleFormatter().format(record(forged, site="oak\nelm"))
    assert line.isprintable()
    assert r"silo=oak\nelm" in line
    as_json = JsonFormatter().format(record(forged, site="oak\nelm"))
    assert as_json.isprintable()
    assert json.loads(as_json)["message"] == forged
    assert json.loads(as_json)["silo"] == "oak\nelm"


def test_a_traceback_cannot_pass_for_lines_of_the_log() -> None:
    try:
        raise ValueError("two\n2026-01-01 00:00:00,000 INFO roundtable: forged")
    except ValueError as error:
        failed = record("it failed", exc_info=(ValueError, error, error.__traceback__))
    head, *rest = ConsoleFormatter().format(failed).split("\n")
    assert head.endswith("it failed")
    assert rest
    assert all(line.startswith("  ") for line in rest)


@pytest.fixture
def json_log() -> object:
    """The root logger writes JSON while the test runs."""
    handler, root = logging.StreamHandler(), logging.getLogger()
    root.addHandler(handler)
    others = [(each, each.formatter) for each in root.handlers]
    write_logs("json", "elm")
    yield
    root.removeHandler(handler)
    logging.captureWarnings(False)
    for each, formatter in others:
        each.setFormatter(formatter)


def test_what_is_printed_beside_a_json_log_is_json_too(
    json_log: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce("coordinator is listening on localhost:7443; Ctrl-C stops it")
    announce("Error: the disk is full\nfree some", error=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["message"].startswith("coordinator is listening")
    told = json.loads(captured.err)
    assert (told["level"], told["silo"], told["message"]) == (
        "error",
        "elm",
        "Error: the disk is full\nfree some",
    )
