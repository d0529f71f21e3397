"""`roundtable client requests`: what operators ask to know of this silo, and a person's answer."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import ago, amount, confirm, print_json, print_table, say_lines, tell

if TYPE_CHECKING:
    from roundtable.client.sharing.report_requests import ReportRequests


@click.group("requests", invoke_without_command=True)
@json_option
@click.pass_context
def requests(context: click.Context, as_json: bool) -> None:
    """List what operators ask to know of this silo; answer it.

    They ask for a report when something does not work here: versions, settings without secrets, the doctor's
    findings, the newest lines of the log. Nothing of it leaves before a person approves, unless [diagnostics]
    of agent.toml says so.
    """
    if context.invoked_subcommand is not None:
        return
    found = list(_files(context).open_ones())
    if as_json:
        print_json(
            [
                {
                    **asdict(each.wish),
                    "report": each.digest,
                    "bytes": each.report.stat().st_size,
                    "approved": each.answer.approved if each.answer else None,
                }
                for each in found
            ]
        )
        return
    rows = [
        (
            each.wish.request,
            each.wish.author,
            each.wish.reason,
            ago(each.wish.created),
            time.strftime("%Y-%m-%d", time.localtime(each.wish.expires)),
            amount(each.report.stat().st_size),
            ("approved" if each.answer.approved else "denied") if each.answer else "waits for an answer",
        )
        for each in found
    ]
    columns = ("request", "who asks", "reason", "asked", "until", "report", "here")
    print_table(columns, rows, "Nobody asks for a report.")


@requests.command("show")
@click.argument("request")
@click.pass_context
def show(context: click.Context, request: str) -> None:
    """Print exactly what would be sent."""
    say_lines(_files(context).find(request).report.read_text(encoding="utf-8"))


@requests.command("approve")
@click.argument("request")
@click.option("--yes", is_flag=True, help="Do not show the report and ask.")
@json_option
@click.pass_context
def approve(context: click.Context, request: str, yes: bool, as_json: bool) -> None:
    """Let the agent send the report as `show` prints it.

    And nothing else.
    """
    if as_json and not yes:
        raise click.UsageError("--json asks nobody: look at the report with `requests show`, and say --yes")
    files = _files(context)
    found = files.find(request)
    if not yes:
        say_lines(found.report.read_text(encoding="utf-8"))
        confirm(f"Send this to {found.wish.author}, by way of the coordinator?")
    answer = files.answer(found, True)
    size = found.report.stat().st_size
    tell(
        as_json,
        {"request": found.wish.request, "approved": True, "report": answer.digest, "bytes": size},
        f"Approved: the agent sends it, {amount(size)}, BLAKE3 {answer.digest[:12]}.",
    )


@requests.command("deny")
@click.argument("request")
@click.option("--reason", default="", help="For who asks: one line.")
@json_option
@click.pass_context
def deny(context: click.Context, request: str, reason: str, as_json: bool) -> None:
    """Send nothing; who asks is told, with the reason."""
    files = _files(context)
    found = files.find(request)
    files.answer(found, False, reason)
    tell(
        as_json,
        {"request": found.wish.request, "approved": False, "reason": reason},
        f"Denied: {found.wish.author} is told, and nothing is sent.",
    )


def _files(context: click.Context) -> ReportRequests:
    from roundtable.client.policy.config import load_agent_config
    from roundtable.client.sharing.report_requests import ReportRequests

    return ReportRequests(load_agent_config(context.obj).state)
