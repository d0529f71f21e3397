"""A round as a trace, across the coordinator and its silos.

Identifiers follow from (job, round, attempt, phase), as everything else that must be the same on both
sides: an agent names the coordinator's span as its parent without being told, and a coordinator that was
started again goes on with the same trace. Spans are told when they have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from roundtable.core import extras


@dataclass(frozen=True)
class Span:
    """Something that took time (Unix seconds). `path` leads from the attempt down to it, by name."""

    job: str
    round: int
    attempt: int
    path: tuple[str, ...]
    began: float
    ended: float
    error: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def trace_of(job: str, round: int) -> int:
    """128 bits that name a round's trace."""
    return _bits(16, job, str(round))


def span_of(job: str, round: int, attempt: int, path: tuple[str, ...]) -> int:
    """64 bits that name a span in its round's trace."""
    return _bits(8, job, str(round), str(attempt), *path)


class Tracer:
    """Passes spans on; without an exporter to nobody."""

    def __init__(self, service: str, exporter: Any = None) -> None:
        """`exporter` is an OpenTelemetry SpanExporter."""
        self._tracer: Any = None
        if exporter is None:
            return
        sdk = extras.load("opentelemetry.sdk.trace", "traces = …")
        export = extras.load("opentelemetry.sdk.trace.export", "traces = …")
        resources = extras.load("opentelemetry.sdk.resources", "traces = …")
        self._names = _Names()
        resource = resources.Resource.create({"service.name": service})
        self._provider = sdk.TracerProvider(
            id_generator=self._names, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("roundtable")

    def tell(self, span: Span) -> None:
        """A span has ended. Returns at once."""
        if self._tracer is None:
            return
        api = extras.load("opentelemetry.trace", "traces = …")
        at = (span.job, span.round, span.attempt)
        self._names.trace, self._names.span = trace_of(span.job, span.round), span_of(*at, span.path)
        context = extras.load("opentelemetry.context", "traces = …").Context()
        if span.path:
            parent = api.SpanContext(
                self._names.trace, span_of(*at, span.path[:-1]), True, api.TraceFlags(api.TraceFlags.SAMPLED)
            )
            context = api.set_span_in_context(api.NonRecordingSpan(parent), context)
        values = {"job": span.job, "round": span.round, "attempt": span.attempt, **span.values}
        name = span.path[-1] if span.path else f"round {span.round}"
        span_out = self._tracer.start_span(
            name, context, attributes=values, start_time=_nanoseconds(span.began)
        )
        if span.error:
            span_out.set_status(api.Status(api.StatusCode.ERROR, span.error))
        span_out.end(_nanoseconds(max(span.began, span.ended)))

    def close(self) -> None:
        """Sends what waits."""
        if self._tracer is not None:
            self._provider.shutdown()


def open_tracer(address: str, service: str) -> Tracer:
    """Sends spans to an OpenTelemetry collector by OTLP over HTTP; an empty address to nobody.

    Raises ConfigError without the extra.
    """
    if not address:
        return Tracer(service)
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    exporter = extras.load(module, f"traces = {address!r}")
    return Tracer(service, exporter.OTLPSpanExporter(endpoint=address))


class _Names:
    """OpenTelemetry's IdGenerator that gives what it was told."""

    trace = span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span

    def is_trace_id_random(self) -> bool:
        return True


def _bits(size: int, *words: str) -> int:
    return int.from_bytes(blake3("\0".join(words).encode()).digest(size), "big") or 1


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
