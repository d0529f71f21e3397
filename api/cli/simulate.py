"""`roundtable simulate`: a job on this machine, in virtual time."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from roundtable.cli.shared.options import json_option, set_arguments, set_option
from roundtable.cli.shared.output import console, duration, interruptible, print_json, say, say_above
from roundtable.cli.shared.rounds import round_line

if TYPE_CHECKING:
    from roundtable.run_page import RunPage
    from roundtable.simulation import Progress, Result


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@set_option
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where results go: configuration, history, curves, model. Without it nothing is saved.",
)
@click.option("--resume", is_flag=True, help="Resume the run in --run-dir after its last round.")
@click.option(
    "--cross-site", is_flag=True, help="At the end, measure the model and each client's own at all clients."
)
@click.option(
    "--page",
    metavar="HOST:PORT",
    is_flag=False,
    flag_value="127.0.0.1:7445",
    help="Show the run in a browser on this machine, until Ctrl-C.  [default: 127.0.0.1:7445]",
)
@json_option
def simulate(
    file: Path,
    overrides: dict[str, Any],
    run_dir: Path | None,
    resume: bool,
    cross_site: bool,
    page: str | None,
    as_json: bool,
) -> int:
    """Run a job over simulated clients, on this machine.

    FILE describes the job; the engine is the one that runs in production.
    """
    if resume and run_dir is None:
        raise click.UsageError("--resume also needs --run-dir: the folder of the run to resume")
    from roundtable.simulation import simulate as run

    again = ["roundtable", "simulate", str(file), "--run-dir", str(run_dir), "--resume", *set_arguments()]
    hint = (
        f"Go on from the last round with `{shlex.join(again)}`."
        if run_dir
        else "Nothing is kept; with --run-dir FOLDER a run can go on from its last round."
    )
    display = _display(as_json)
    with interruptible(hint), _shown(page, file, overrides, run_dir if resume else None, as_json) as shown:

        def told(progress: Progress) -> None:
            display.report(progress)
            shown.report(progress)

        try:
            result = run(
                file,
                overrides=overrides,
                run_dir=run_dir,
                resume=resume,
                progress=told,
                cross_site=cross_site,
            )
        finally:
            display.close()
        shown.ended(result.status, result.reason)
        if as_json:
            print_json(_values(result))
        else:
            _report(result)
        shown.wait()
    return 0 if result.status == "finished" else 1


class _Shown:
    """Without --page nothing is shown, and no web server is imported."""

    def __init__(self, page: RunPage | None = None, link: str = "") -> None:
        self._page = page
        self._link = link

    def report(self, progress: Progress) -> None:
        """Tells the page what has happened."""
        if self._page is not None:
            self._page.report(progress)

    def ended(self, status: str, reason: str) -> None:
        """Tells the page that the run is over."""
        if self._page is not None:
            self._page.ended(status, reason)

    def wait(self) -> None:
        """The page stays until Ctrl-C, which is how such a run ends."""
        if self._page is None:
            return
        say(f"The page stays until Ctrl-C: {self._link}", err=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


@contextmanager
def _shown(
    listen: str | None, file: Path, overrides: dict[str, Any], resumed: Path | None, as_json: bool
) -> Iterator[_Shown]:
    if listen is None:
        yield _Shown()
        return
    from roundtable.core.config import load_job
    from roundtable.run_page import RunPage, run_page
    from roundtable.simulation.reporting.run_directory import committed_rounds

    page = RunPage(load_job(file, overrides), committed_rounds(resumed) if resumed else ())
    with run_page(page, listen) as link:
        say(f"The run in a browser: {link}", err=as_json)
        yield _Shown(page, link)


class _Display(Protocol):
    def report(self, progress: Progress) -> None:
        """Shows what has happened."""

    def close(self) -> None:
        """Ends the display: no more events follow."""


def _display(as_json: bool) -> _Display:
    if as_json:
        return _Silent()
    return _Bars() if console().is_terminal else _Lines()


class _Silent:
    def report(self, progress: Progress) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """One line for each round, and for what went wrong in between."""

    def report(self, progress: Progress) -> None:
        if sentence := _sentence(progress):
            say(sentence)

    def close(self) -> None:
        pass


class _Bars:
    """Rounds scroll by; below them one bar for the rounds and one for the clients of this one."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
        )
        self._bars = RichProgress(*columns, console=console(), transient=True)
        self._rounds = self._bars.add_task("rounds", total=None, note="")
        self._clients = self._bars.add_task("clients", total=None, note="")
        self._bars.start()

    def report(self, progress: Progress) -> None:
        if sentence := _sentence(progress):
            say_above(self._bars.console, sentence)
        if progress.kind == "clients":
            self._bars.update(
                self._clients, completed=progress.done, total=progress.total, note=progress.phase
            )
        elif progress.kind == "round":
            left = "" if progress.seconds_left is None else f"{duration(progress.seconds_left)} left, "
            note = f"{left}{progress.usage}"
            self._bars.update(self._rounds, completed=progress.round, total=progress.rounds, note=note)

    def close(self) -> None:
        self._bars.stop()


def _sentence(progress: Progress) -> str:
    """What is worth a line: a committed round, a failure; who was selected is not."""
    if progress.record is not None:
        from roundtable.core.observability.metric_sums import means

        record = progress.record
        figures = {
            "training": means(record.training),
            "evaluation": means(record.evaluation),
            "before": means(record.before),
            "central": means(record.central),
            "contributors": len(record.contributors),
            "cohort": len(record.cohort),
            **({"epsilon": record.charge["epsilon"]} if "epsilon" in record.charge else {}),
        }
        return round_line(progress.round, progress.rounds, figures)
    if progress.note is not None and progress.note.kind not in ("round_started", "round_committed"):
        return progress.note.message
    return ""


def _values(result: Result) -> dict[str, Any]:
    from roundtable.core.initial_model import travel_note

    return {
        "name": result.job.title,
        "status": result.status,
        "reason": result.reason,
        "backend": result.backend,
        "history": [dict(row) for row in result.history],
        "best": asdict(result.best) if result.best else None,
        "kept": list(result.models),
        "secure_aggregation": result.secure_aggregation,
        "privacy": result.model.metadata.get("privacy"),
        "clients": list(result.clients),
        "cross_site": None if result.cross_site is None else list(result.cross_site),
        "fairness": result.clients.plain_fairness,
        "frozen": travel_note(result.job, result.model.layout),
        "run_dir": str(result.run_dir) if result.run_dir else None,
        "job": json.loads(result.job.to_json()),
    }


def _report(result: Result) -> None:
    say()
    say(f"{result.job.title}: {result.status}, {result.reason}")
    if result.best is not None:
        say(f"The run gives the model of round {result.best.round}.")
    say(f"Backend: {result.backend}.")
    if result.job.privacy.level != "none":
        say(
            "Differential privacy: no guarantee. The noise of a simulation can be repeated; epsilon is "
            "what a real run with these settings would spend."
        )
    if result.secure_aggregation:
        say(f"Secure aggregation: {result.secure_aggregation}.")
    if len(result.clients.rows) > 1:
        say(f"Clients, by the model of round {result.clients.round}:")
        for line in result.clients.lines():
            say(f"  {line}")
    if result.cross_site is not None:
        say(f"Each model (rows) at each client, after round {result.cross_site.round}:")
        for line in repr(result.cross_site).splitlines():
            say(f"  {line}")
    if result.run_dir is not None:
        say(f"Results are in {result.run_dir}.")
