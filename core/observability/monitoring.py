"""/metrics, /healthz and /readyz: what an agent and a coordinator tell those who watch over them.

A small HTTP server in the process's own event loop: that it answers says that the loop turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import prometheus_client
from prometheus_client import core

from roundtable.core.errors import ResourceError
from roundtable.core.identity.handshake import split_address
from roundtable.core.identity.lifetimes import Lifetime
from roundtable.core.observability.histograms import Histogram, ProcessMetrics

log = logging.getLogger("roundtable.monitoring")

REQUEST_SECONDS = 10.0
MOST_HEADER_BYTES = 16384
TEXT = "text/plain; charset=utf-8"
PAGE = "text/plain; version=0.0.4; charset=utf-8"

STEP_GAUGES = {
    "loss": "training loss of the newest step",
    "learning_rate": "learning rate of the newest step",
    "gradient_norm": "the gradient's norm before clipping",
    "examples_per_second": "examples trained on a second, by all devices",
    "tokens_per_second": "tokens trained on a second, by all devices",
    "flops_utilisation": "share of the devices' peak that the model's own operations come to",
    "memory_bytes": "most memory that a device held",
    "seconds": "how long the newest step took",
    "communication_seconds": "of it with a collective under way, overlapped or not",
    "waiting_seconds": "of it waiting for data",
}
"""Of a training step, by the names of the wire's StepFigures; the loss travels beside them."""

Values = Mapping[Any, float]
"""By the tuple of its labels' values."""


class Watched(Protocol):
    """What is watched. `figures` gives prometheus_client's metric families; `ready` raises nothing."""

    async def ready(self) -> tuple[bool, str]:
        """Whether it can do its work, and how it stands in words."""
        ...

    async def figures(self) -> Iterable[core.Metric]:
        """Families made with `Families`."""
        ...


class Families:
    """Makes prometheus_client's families with few words; the only place that knows that library."""

    def __init__(self) -> None:
        self.made: list[core.Metric] = []

    def gauge(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> None:
        """Adds a gauge: the present value for each set of labels."""
        family = core.GaugeMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(key, value)
        self.made.append(family)

    def counter(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> None:
        """What has happened since the start, by its labels; `name` without "_total"."""
        family = core.CounterMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            family.add_metric(key, value)
        self.made.append(family)

    def histogram(self, name: str, text: str, spreads: Mapping[str, Histogram], label: str = "") -> None:
        """How long things took, by one label or none."""
        family = core.HistogramMetricFamily(name, text, labels=[label] if label else [])
        for value, spread in spreads.items():
            family.add_metric([value] if label else [], spread.buckets(), spread.total)
        self.made.append(family)

    def process(self, tally: ProcessMetrics, sent: int, received: int) -> None:
        """What every process of ours tells: bytes of artifacts and the lag of its event loop."""
        name = "roundtable_transfer_bytes"
        values = {("out",): float(sent), ("in",): float(received)}
        self.counter(name, "bytes of models and updates, by direction", values, ("direction",))
        lag = {"": tally.lag}
        self.histogram("roundtable_event_loop_lag_seconds", "how late the event loop wakes a task", lag)

    def surroundings(self, folders: Mapping[str, Path], certificates: Mapping[str, Lifetime]) -> None:
        """Free disk space by what it is for, and how long certificates hold (Unix time) by whose they are."""
        free = {(name,): float(free_bytes(folder)) for name, folder in folders.items()}
        self.gauge("roundtable_disk_free_bytes", "free on the disk of this folder", free, ("folder",))
        total = {(name,): float(_usage(folder).total) for name, folder in folders.items()}
        self.gauge("roundtable_disk_size_bytes", "size of the disk of this folder", total, ("folder",))
        label = ("certificate",)
        ends = {(name,): lifetime.expires for name, lifetime in certificates.items()}
        text = "when this party's certificate ends, and those of the authorities that it trusts"
        self.gauge("roundtable_certificate_expires_timestamp_seconds", text, ends, label)
        begins = {(name,): lifetime.issued for name, lifetime in certificates.items()}
        self.gauge("roundtable_certificate_issued_timestamp_seconds", "when they began", begins, label)


def free_bytes(folder: Path) -> int:
    """What is free where the folder is, or will be."""
    return int(_usage(folder).free)


@asynccontextmanager
async def monitored(address: str, watched: Watched) -> AsyncIterator[int]:
    """Serves while the block lasts; gives the port (0 for an empty address: nothing is served).

    Raises ResourceError where the address cannot be had.
    """
    if not address:
        yield 0
        return
    process = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=process)

    async def page(path: str) -> tuple[int, str, bytes]:
        if path == "/healthz":
            return 200, TEXT, b"ok\n"
        if path == "/readyz":
            ready, answer = await watched.ready()
            return (200 if ready else 503), TEXT, f"{answer}\n".encode()
        if path == "/metrics":
            families = [*process.collect(), *await watched.figures()]
            return 200, PAGE, prometheus_client.generate_latest(_Fixed(families))
        return 404, TEXT, b"there are /metrics, /healthz and /readyz\n"

    server = await _listen(address, page)
    try:
        port = server.sockets[0].getsockname()[1]
        log.info("metrics are at port %d of %s", port, address.rpartition(":")[0])
        yield port
    finally:
        server.close()
        await server.wait_closed()


class _Fixed:
    """Families as a registry that is asked once."""

    def __init__(self, families: list[core.Metric]) -> None:
        self._families = families

    def collect(self) -> list[core.Metric]:
        return self._families


Page = Callable[[str], Awaitable[tuple[int, str, bytes]]]
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}


async def _listen(address: str, page: Page) -> asyncio.Server:
    host, port = address.rpartition(":")[0].strip("[]"), int(address.rpartition(":")[2])
    if port:
        host, port = split_address(address)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await _answer(reader, writer, page)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a request for metrics broke off")
        finally:
            writer.close()

    try:
        return await asyncio.start_server(serve, host, port, limit=MOST_HEADER_BYTES)
    except OSError as error:
        raise ResourceError(
            f"metrics = {address!r}: this address cannot be taken ({os.strerror(error.errno or 0)}); "
            "choose another one, or leave it out"
        ) from error


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: Page) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    method, path, *_ = [*head.split("\r\n", 1)[0].split(" "), "", ""]
    if method in ("GET", "HEAD"):
        status, kind, body = await _safely(page, path.partition("?")[0])
    else:
        status, kind, body = 405, TEXT, b"only GET\n"
    reason = _REASONS.get(status, "Service Unavailable")
    lines = (f"HTTP/1.1 {status} {reason}", f"Content-Type: {kind}", f"Content-Length: {len(body)}")
    writer.write("\r\n".join((*lines, "Connection: close", "", "")).encode())
    if method != "HEAD":
        writer.write(body)
    await writer.drain()


async def _safely(page: Page, path: str) -> tuple[int, str, bytes]:
    try:
        return await page(path)
    except Exception:  # watching must never end what is watched
        log.exception("the page %s cannot be made", path)
        return 500, TEXT, b"see the log\n"


def _usage(folder: Path) -> Any:
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(place)


class Interval:
    """For slow work that is asked for more often than it is worth doing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._done = -math.inf

    def due(self) -> bool:
        """Whether it is time again; counts as done."""
        if time.monotonic() - self._done < self._seconds:
            return False
        self._done = time.monotonic()
        return True
