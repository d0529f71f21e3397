"""`roundtable demo`: the whole thing once, on this machine."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.job_view import loading_lines
from roundtable.cli.jobs.watch import Silent, follow, make_display
from roundtable.cli.shared.output import duration, interruptible, print_json, say
from roundtable.core.machine.stop_signals import on_closed

if TYPE_CHECKING:
    from roundtable.demo import DemoResult
    from roundtable.operator import OperatorClient


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="roundtable-demo",
    show_default=True,
    help="Where everything is put; what an earlier demo left there is removed.",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Rounds to run; default: as in the example's job file."
)
@click.option(
    "--page",
    metavar="HOST:PORT",
    is_flag=False,
    flag_value="127.0.0.1:7445",
    help="Show it in a browser on this machine, until Ctrl-C.  [default: 127.0.0.1:7445]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result, and only that, as JSON.")
def demo(folder: Path, rounds: int | None, page: str | None, as_json: bool) -> None:
    """Train a model with a coordinator and three agents.

    They are separate processes that speak over mutual TLS. The silos hold non-IID shards of real handwritten
    digits. Takes well under a minute.
    """
    from roundtable.demo import Demo

    def show(operator: OperatorClient, job: str) -> None:
        follow(operator.watch(job, patience=15.0), Silent() if as_json else make_display(False))

    # A terminal that is closed, or a plain kill, must not leave processes behind.
    on_closed(_interrupt)
    began = time.monotonic()
    with interruptible(f"All processes are stopped; what was written is in {folder}."):
        overrides = {} if rounds is None else {"rounds": rounds}

        def done(result: DemoResult) -> None:
            seconds = time.monotonic() - began
            if as_json:
                print_json(_values(result, seconds))
            else:
                _report(result, folder, seconds)
            if page is not None:
                say("The page stays until Ctrl-C.", err=True)
                with suppress(KeyboardInterrupt):
                    threading.Event().wait()

        Demo(folder, overrides, page).run(
            show,
            lambda sentence: say(f"{sentence} ...", err=as_json),
            lambda link: say(f"In a browser: {link}", err=as_json),
            done,
        )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _values(result: DemoResult, seconds: float) -> dict[str, Any]:
    return {
        "accuracy": result.accuracy,
        "centralised_accuracy": result.centralised,
        "rounds": len(result.history),
        "model": str(result.model),
        "learning_curve": str(result.curve) if result.curve else None,
        "seconds": seconds,
    }


def _report(result: DemoResult, folder: Path, seconds: float) -> None:
    from roundtable.core.job_tables.task_table import JobTaskTable

    say()
    say(f"Federated test accuracy    {result.accuracy:.4f}  after {len(result.history)} rounds")
    say(f"Centralised test accuracy  {result.centralised:.4f}  (all data in one place)")
    say(f"Time                       {duration(seconds)}")
    say(f"Learning curve             {result.curve or 'pip install matplotlib to have it drawn'}")
    say(f"Model                      {result.model}")
    say("Load it with:")
    for line in loading_lines(JobTaskTable(name=str(result.task)), result.model):
        say(f"  {line}")
    say(f"Logs, certificates and the silos' data are in {folder}; delete it whenever you like.")
