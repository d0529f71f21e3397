"""Whether the places outside that settings name can be reached, and take what they are given."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from shlex import quote
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from typing_extensions import override

from roundtable.core import extras
from roundtable.core.errors import UnavailableError
from roundtable.doctor.inquiries import Check
from roundtable.doctor.machine_checks import folder_writable

CALL_SECONDS = 5.0
_EXPORTER = "opentelemetry.exporter.otlp"


def webhook(address: str) -> Iterator[Check]:
    """Asks for no more than the headers: nobody is alerted. Whoever answers at all was reached."""
    before = time.monotonic()
    request = urllib.request.Request(address, method="HEAD")
    try:
        # Only http and https get here, AlertTable sees to that: no file:, no scheme of anybody's own.
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:  # nosec B310
            status = answer.status
    except HTTPError as error:
        status = error.code
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"{_shown(address)} cannot be reached: {reason}") from error
    told = f"{_shown(address)} answers in {time.monotonic() - before:.2f} s, to HEAD with status {status}"
    # 405 and the like: it wants a POST. What is not there, or not for us, takes no POST either.
    if status in (401, 403, 404, 407, 410) or status >= 500:
        yield Check("webhook", "warn", told, trying(address))
    else:
        yield Check("webhook", "ok", told)


def trying(address: str) -> str:
    """The command that shows what is wrong with an address."""
    parts = urlsplit(address)
    # What follows the host is the receiver's secret, as a rule.
    host = parts.netloc.rpartition("@")[2]
    return f"`curl -v -m 10 {quote(f'{parts.scheme}://{host}/')}` says why; mend it there or in the settings"


def _shown(address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"


def traces(address: str) -> Iterator[Check]:
    """Sends an export without a span, as the service would send one with spans, its headers and keys too."""
    module = extras.load(f"{_EXPORTER}.proto.http.trace_exporter", f"traces = {address!r}")
    results = extras.load("opentelemetry.sdk.trace.export", f"traces = {address!r}").SpanExportResult
    exporter = module.OTLPSpanExporter(endpoint=address, timeout=CALL_SECONDS)
    before = time.monotonic()
    with _complaints(_EXPORTER) as said:
        result = exporter.export([])
        exporter.shutdown()
    if result is not results.SUCCESS:
        reason = said[-1] if said else "it does not take what it is sent"
        raise UnavailableError(f"no collector takes spans at {address}: {reason}")
    yield Check("traces", "ok", f"{address} takes spans; tried in {time.monotonic() - before:.2f} s")


@contextmanager
def _complaints(logger: str) -> Iterator[list[str]]:
    """What a library writes into its log meanwhile, and nowhere else."""
    said: list[str] = []

    class ComplaintKeeper(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    keeper, library = ComplaintKeeper(), logging.getLogger(logger)
    before = library.propagate
    library.addHandler(keeper)
    library.propagate = False
    try:
        yield said
    finally:
        library.removeHandler(keeper)
        library.propagate = before


def place(name: str, setting: str, address: str, home: Path | None = None) -> Iterator[Check]:
    """Stores something at a place outside, reads it back and deletes it. A folder of this machine is only
    looked at where it is not there yet; on the disk of `home` it would be no copy."""
    from roundtable.server.storage.location import Location

    location = Location(address, setting)
    if (folder := location.folder) is not None:
        writable = folder_writable(name, folder, setting)
        if writable.state != "ok" or not folder.exists():
            yield writable
            return
        if home is not None and home.exists() and home.stat().st_dev == folder.stat().st_dev:
            message = f"{folder} is on the same disk as {home}: what takes the one takes the other"
            yield Check(
                name,
                "warn",
                message,
                f"`findmnt -T {quote(str(folder))}` shows the disk; set {setting} to another",
            )
    before = time.monotonic()
    location.probe()
    yield Check(name, "ok", f"{address} keeps what it is given; tried in {time.monotonic() - before:.2f} s")
