"""Log lines with their places, spreads, traces by key."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundtable.core.observability.histograms import Histogram, ProcessMetrics
from roundtable.core.observability.logs import ConsoleFormatter, JsonFormatter, belongs_to
from roundtable.core.observability.tracing import Span, Tracer, span_of, trace_of
from roundtable.core.observability.watchdog import keep_watchdog, tell_systemd


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What is logged; formatted at once, as a stream's handler does."""
    found: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.as_json = json.loads(JsonFormatter("elm").format(record))
            record.as_text = ConsoleFormatter().format(record)
            found.append(record)

    handler = Keep()
    logger = logging.getLogger("roundtable.test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)


async def test_lines_of_a_task_and_of_tasks_that_it_starts_say_where_they_belong(
    lines: list[logging.LogRecord],
) -> None:
    log = logging.getLogger("roundtable.test")
    place = {"job": "j1", "round": 2, "attempt": 1, "phase": "train"}

    async def inner() -> None:
        log.info("within %d", 1, extra={"site": "oak", "round": 3})

    async def outer() -> None:
        belongs_to(lambda: place)
        log.info("outer")
        await asyncio.create_task(inner())
        place["round"] = 5
        await asyncio.to_thread(log.info, "in a thread")

    await asyncio.create_task(outer())
    log.info("elsewhere")
    told = [record.as_json for record in lines]  # type: ignore[attr-defined]
    assert [line["message"] for line in told] == ["outer", "within 1", "in a thread", "elsewhere"]
    assert [line["round"] for line in told] == [2, 3, 5, None]
    assert [line["silo"] for line in told] == ["elm", "oak", "elm", "elm"]
    assert {tuple(line)[:9] for line in told} == {
        ("time", "level", "logger", "message", "job", "round", "attempt", "phase", "silo")
    }
    assert lines[1].as_text.endswith("within 1 [job=j1 round=3 attempt=1 phase=train silo=oak]")  # type: ignore[attr-defined]


def test_a_traceback_is_one_line_of_json(lines: list[logging.LogRecord]) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("roundtable.test").error("it failed", exc_info=sys.exc_info())
    assert "ValueError: two\nlines" in lines[0].as_json["traceback"]  # type: ignore[attr-defined]
    assert "\n" not in JsonFormatter().format(lines[0])


async def test_the_watchdog_is_told_that_the_service_is_up_and_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        tell_systemd("waiting\nREADY=1")
        tell_systemd("active", ready=True)
        kept, loop = asyncio.create_task(keep_watchdog()), asyncio.get_running_loop()
        told = [await loop.sock_recv(systemd, 100) for _ in range(4)]
        kept.cancel()
    assert b"\n" not in told[0], "what another wrote is one line of status, and no word of ours"
    lives = b"WATCHDOG=1\nEXTEND_TIMEOUT_USEC=20000"
    assert told[1:] == [b"STATUS=active\nREADY=1", lives, lives]


def test_a_spread_counts_up_to_each_bound() -> None:
    spread = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        spread.add(value)
    assert spread.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert spread.total == 12.0


def test_counts_are_found_by_their_labels() -> None:
    tally = ProcessMetrics()
    tally.count("updates", "accepted")
    tally.count("updates", "accepted")
    tally.count("rounds", "failed")
    assert tally.of("updates") == {("accepted",): 2}


def test_both_sides_name_the_same_span() -> None:
    assert trace_of("a", 1) == trace_of("a", 1) != trace_of("a", 2)
    assert span_of("a", 1, 1, ("train",)) != span_of("a", 1, 2, ("train",))
    assert 0 < trace_of("a", 1) < 1 << 128
    assert 0 < span_of("a", 1, 1, ()) < 1 << 64


def test_spans_of_two_processes_are_one_tree() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    hub, silo = Tracer("coordinator", exporter), Tracer("elm", exporter)
    silo.tell(Span("j", 1, 1, ("train", "elm"), 2.0, 3.0))
    hub.tell(Span("j", 1, 1, ("train",), 1.0, 4.0))
    hub.tell(Span("j", 1, 1, (), 0.0, 5.0, "given up"))
    silo._provider.force_flush()
    hub._provider.force_flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["elm"].parent.span_id == spans["train"].context.span_id
    assert spans["train"].parent.span_id == spans["round 1"].context.span_id
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert spans["round 1"].parent is None
    assert spans["round 1"].status.description == "given up"
    assert (spans["elm"].start_time, spans["elm"].end_time) == (2_000_000_000, 3_000_000_000)
