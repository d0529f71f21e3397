"""A job's progress: live in a terminal, one plain line for each event elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import click

from roundtable.cli.shared.output import as_dict, console, duration
from roundtable.cli.shared.rounds import round_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roundtable.proto.common_pb2 import Event
    from roundtable.proto.operator_pb2 import ClientActivity, Job, JobDetail, JobUpdate

# How the job ended is said once, after the display.
_QUIET = {"update_received", "job_running", "job_finished", "job_cancelled", "job_failed", "job_paused"}
_STYLES = {"training": "cyan", "uploading": "blue", "done": "green", "dropped": "red", "offline": "yellow"}


class Display(Protocol):
    """Where a job's updates are shown."""

    def show(self, update: JobUpdate) -> None:
        """Something has happened."""

    def close(self) -> None:
        """Nothing more will come."""


def follow(updates: Iterable[JobUpdate], display: Display) -> Job | None:
    """Shows updates until the job has ended or is paused; gives the job as it then stands."""
    job = None
    try:
        for update in updates:
            display.show(update)
            job = update.detail.job
            told = not update.events or update.events[-1].kind == "job_paused"
            if job.status == "paused" and told:
                break
    finally:
        display.close()
    return job


def make_display(as_json: bool) -> Display:
    """JSON lines if asked for, live in a terminal, plain lines elsewhere."""
    if as_json:
        return JsonLines()
    return Live() if console().is_terminal else PlainLines()


class Silent:
    """Nothing is shown; only how it ends matters."""

    def show(self, update: JobUpdate) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLines:
    """One JSON object for each event."""

    def show(self, update: JobUpdate) -> None:
        for event in update.events:
            values = as_dict(event)
            values["detail"] = json.loads(event.detail or "{}")
            click.echo(json.dumps(values, ensure_ascii=False))

    def close(self) -> None:
        pass


class PlainLines:
    """One line for each event, with its time."""

    def show(self, update: JobUpdate) -> None:
        for event in update.events:
            if event.kind not in _QUIET:
                click.echo(
                    f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {_sentence(event, update)}"
                )

    def close(self) -> None:
        pass


class Live:
    """Committed rounds scroll by; below them stands who does what, and whom the round waits for."""

    def __init__(self) -> None:
        from rich.live import Live as RichLive

        self._live = RichLive(console=console(), refresh_per_second=8, transient=True)
        self._live.start()

    def show(self, update: JobUpdate) -> None:
        for event in update.events:
            if event.kind not in _QUIET and event.kind != "round_started":
                self._live.console.print(_sentence(event, update), markup=False)
        self._live.update(_panel(update.detail))

    def close(self) -> None:
        self._live.stop()


def _sentence(event: Event, update: JobUpdate) -> str:
    if event.kind == "round_committed":
        return round_line(event.round, update.detail.job.rounds, json.loads(event.detail or "{}"))
    return event.message


def _panel(detail: JobDetail) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    job = detail.job
    head = Table.grid(padding=(0, 2))
    deadline = detail.deadline - time.time()
    head.add_row(
        Text(job.name, style="bold"),
        f"round {detail.round}/{job.rounds}",
        ProgressBar(total=max(1, job.rounds), completed=job.rounds_done, width=30),
        detail.phase or job.status,
        Text(f"deadline in {duration(max(0.0, deadline))}" if detail.deadline else "", style="dim"),
    )
    silos = Table.grid(padding=(0, 2))
    for client in detail.clients:
        bar = ProgressBar(total=client.total, completed=client.done, width=20) if client.total else ""
        silos.add_row(
            client.client, Text(client.state, style=_STYLES.get(client.state, "default")), bar, _loss(client)
        )
    return Group(head, silos, Text(detail.waiting_for, style="dim"))


def _loss(client: ClientActivity) -> str:
    if client.note:
        return client.note
    said = f"loss {client.loss:.4f}" if client.total and client.loss == client.loss else ""
    if client.figures.tokens_per_second:
        return f"{said}, {client.figures.tokens_per_second:,.0f} tokens/s"
    return said
