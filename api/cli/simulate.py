"""`roundtable simulate`: a job on this machine, in virtual time."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from roundtable.cli.shared.options import json_option, set_arguments, set_option
from roundtable.cli.shared.output import console, duration, interruptible, print_json, say, say_above
from roundtable.cli.shared.rounds import round_line

if TYPE_CHECKING:
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
@json_option
def simulate(
    file: Path,
    overrides: dict[str, Any],
    run_dir: Path | None,
    resume: bool,
    cross_site: bool,
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
    with interruptible(hint):
        try:
            result = run(
                file,
                overrides=overrides,
                run_dir=run_dir,
                resume=resume,
                progress=display.report,
                cross_site=cross_site,
            )
        finally:
            display.close()
    if as_json:
        print_json(_values(result))
    else:
        _report(result)
    return 0 if result.status == "finished" else 1


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
        from roundtable.engine import means

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
