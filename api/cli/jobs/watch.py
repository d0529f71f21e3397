"""A job's progress: live in a terminal, one plain line for each event elsewhere."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from roundtable.cli.shared.output import (
    as_dict,
    cell,
    console,
    duration,
    grid,
    interruptible,
    print_json_line,
    say,
    say_above,
)
from roundtable.cli.shared.rounds import round_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roundtable.operator import OperatorClient
    from roundtable.proto.common_pb2 import Event
    from roundtable.proto.operator_pb2 import ClientActivity, Job, JobDetail, JobUpdate

# How the job ended is said once, after the display.
_QUIET = {
    "update_received",
    "update_ready",
    "job_running",
    "job_finished",
    "job_cancelled",
    "job_failed",
    "job_paused",
}
_STYLES = {
    "queued": "magenta",
    "training": "cyan",
    "uploading": "blue",
    "done": "green",
    "dropped": "red",
    "offline": "yellow",
}


class Display(Protocol):
    """Where a job's updates are shown."""

    def show(self, update: JobUpdate) -> None:
        """Shows what has happened."""

    def away(self, why: str) -> None:
        """Says that the coordinator is waited for, and why."""

    def close(self) -> None:
        """Ends the display: no more events follow."""


def follow(updates: Iterable[JobUpdate], display: Display) -> Job | None:
    """Shows updates until the job has ended or is paused; gives the job as it then stands."""
    job = None
    try:
        for update in updates:
            display.show(update)
            job = update.detail.job
            caught_up = not update.events or update.events[-1].kind == "job_paused"
            if job.status == "paused" and caught_up:
                break
    finally:
        display.close()
    return job


def watch_to_its_end(operator: OperatorClient, name: str, start: int, as_json: bool) -> int:
    """Shows a job's events until it has ended or is paused; gives the exit code of the command."""
    hint = f"The job goes on; see it again with `roundtable job watch {shlex.quote(name)}`."
    with interruptible(hint):
        display = make_display(as_json)
        ended = follow(operator.watch(name, start, away=display.away), display)
    if ended is None:
        return 0
    if not as_json:
        say(
            f"Job {ended.id} is {ended.status}: {ended.reason}"
            if ended.reason
            else f"Job {ended.id} is {ended.status}."
        )
        if ended.status == "paused":
            say(f"Go on with `roundtable job resume {shlex.quote(ended.id)}`.")
    return 0 if ended.status == "finished" else 1


def make_display(as_json: bool) -> Display:
    """JSON lines if asked for, live in a terminal, plain lines elsewhere."""
    if as_json:
        return JsonLines()
    return Live() if console().is_terminal else PlainLines()


class Silent:
    """Shows nothing, for callers that want only the job's end."""

    def show(self, update: JobUpdate) -> None:
        pass

    def away(self, why: str) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLines:
    """One JSON object for each event."""

    def show(self, update: JobUpdate) -> None:
        for event in update.events:
            values = as_dict(event)
            values["detail"] = json.loads(event.detail or "{}")
            print_json_line(values)

    def away(self, why: str) -> None:
        say(why, err=True)

    def close(self) -> None:
        pass


class PlainLines:
    """One line for each event, with its time."""

    def show(self, update: JobUpdate) -> None:
        for event in update.events:
            if event.kind not in _QUIET:
                say(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {_sentence(event, update)}")

    def away(self, why: str) -> None:
        say(f"{time.strftime('%H:%M:%S')}  {why}", err=True)

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
                say_above(self._live.console, _sentence(event, update))
        self._live.update(progress_panel(update.detail))

    def away(self, why: str) -> None:
        say_above(self._live.console, why)

    def close(self) -> None:
        self._live.stop()


def _sentence(event: Event, update: JobUpdate) -> str:
    if event.kind == "round_committed":
        return round_line(event.round, update.detail.job.rounds, json.loads(event.detail or "{}"))
    return event.message


def progress_panel(detail: JobDetail) -> RenderableType:
    """Where a job stands, for a terminal: its round, what each silo does, and whom it waits for."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar

    job = detail.job
    left = duration(max(0.0, detail.deadline - time.time())) if detail.deadline else ""
    head = grid(
        (
            cell(job.name, "bold"),
            cell(f"round {detail.round}/{job.rounds}"),
            ProgressBar(total=max(1, job.rounds), completed=job.rounds_done, width=30),
            cell(detail.phase or job.status),
            cell(f"deadline in {left}" if left else "", "dim"),
        )
    )
    silos = grid(
        *(
            (
                cell(client.client),
                cell(client.state, _STYLES.get(client.state, "default")),
                ProgressBar(total=client.total, completed=client.done, width=20)
                if client.total
                else cell(""),
                cell(_loss(client)),
            )
            for client in detail.clients
        )
    )
    return Group(head, silos, cell(detail.waiting_for, "dim"))


def _loss(client: ClientActivity) -> str:
    if client.note:
        return client.note
    loss = f"loss {client.loss:.4f}" if client.total and client.loss == client.loss else ""
    if client.figures.tokens_per_second:
        return f"{loss}, {client.figures.tokens_per_second:,.0f} tokens/s"
    return loss
