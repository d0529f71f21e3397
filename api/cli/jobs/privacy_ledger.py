"""`roundtable privacy show|budget|export`: what has been spent on whose privacy, over all jobs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import ago, as_dict, print_json, print_table, say, say_lines
from roundtable.core.errors import ResourceError
from roundtable.core.paths import written_whole

if TYPE_CHECKING:
    from roundtable.proto import operator_pb2

_NOTHING = "Nothing has been charged and no budget set yet."
_FIELDS = (
    "record",
    "population",
    "silo",
    "epsilon",
    "delta",
    "relation",
    "releases",
    "job",
    "round",
    "attempt",
    "released",
    "time",
    "charge",
    "statement",
)


@click.command("show")
@click.argument("population", required=False)
@click.option("--delta", type=float, help="Take epsilon at this delta, not at the budget's or the jobs'.")
@click.option(
    "--account",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A silo's own account instead: privacy/example.json or client.json in its state folder.",
)
@click.option(
    "--group",
    type=click.IntRange(min=1),
    help="With --account: also for one person with so many of the silo's records.",
)
@connection_options
@json_option
def show(
    population: str | None,
    delta: float | None,
    account: Path | None,
    group: int | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Show the privacy spent, over all jobs.

    On every population and its silos; or on POPULATION, in words.
    """
    if account is not None:
        _show_account(account, group or 1, as_json)
        return
    if group is not None:
        raise click.UsageError("--group is about the records of one silo: give its account, --account FILE")
    with connect(coordinator, credentials) as operator:
        reply = operator.privacy(population or "", delta or 0.0)
    if as_json:
        print_json(as_dict(reply))
        return
    columns = ("population", "silo", "epsilon", "delta", "budget", "in flight", "releases", "jobs")
    print_table(columns, _rows(reply), _NOTHING)
    if population:
        for each in reply.accounts:
            say()
            say(f"{each.silo or 'Every silo'}: {each.statement}")
    if reply.kept_by_silos:
        say(
            f"\nOf {', '.join(reply.kept_by_silos)} each silo alone keeps the account of its records: "
            "`roundtable privacy show --account FILE` shows it there."
        )


@click.command("budget")
@click.argument("population", required=False)
@click.option("--epsilon", type=float, help="The most that all jobs together may spend.")
@click.option("--delta", type=float, help="At this delta: below 1 / number of silos.")
@click.option("--accountant", default="pld", show_default=True, help="pld, rdp or prv.")
@click.option("--remove", is_flag=True, help="Take the budget of POPULATION away.")
@connection_options
@json_option
def budget(
    population: str | None,
    epsilon: float | None,
    delta: float | None,
    accountant: str,
    remove: bool,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Show the budgets in force, or set one.

    With --epsilon and --delta, that of POPULATION is set. What was spent stays charged, whatever the budget.
    """
    if (epsilon is None) != (delta is None):
        raise click.UsageError("a budget is --epsilon and --delta together")
    if remove and epsilon is not None:
        raise click.UsageError("--remove takes a budget away: leave out --epsilon and --delta")
    if not population and (remove or epsilon is not None):
        raise click.UsageError("say whose budget: roundtable privacy budget POPULATION ...")
    with connect(coordinator, credentials) as operator:
        if remove:
            was = operator.remove_privacy_budget(population or "")
            say(
                f"No budget for {population}: epsilon = {was.epsilon:g} at {was.delta:g} is removed.",
                err=as_json,
            )
        elif epsilon is not None and delta is not None:
            operator.set_privacy_budget(population or "", epsilon, delta, accountant)
        budgets = operator.privacy(population or "").budgets
    if as_json:
        print_json([as_dict(each) for each in budgets])
    elif not remove:
        columns = ("population", "epsilon", "delta", "accountant", "set by", "when")
        print_table(
            columns,
            [_budget(each) for each in budgets],
            "No budget is set; jobs are bound by their own epsilon alone.",
        )


def _budget(each: operator_pb2.PrivacyBudget) -> tuple[Any, ...]:
    limit = f"{each.epsilon:g}", f"{each.delta:g}"
    return each.population, *limit, each.accountant, each.author, ago(each.time)


@click.command("export")
@click.argument("population", required=False)
@click.option("--delta", type=float, help="Take epsilon at this delta, not at the budget's or the jobs'.")
@click.option("--format", "kind", type=click.Choice(["json", "csv"]), default="json", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False))
@connection_options
def export(
    population: str | None,
    delta: float | None,
    kind: str,
    output: Path | None,
    coordinator: str | None,
    credentials: Path | None,
) -> None:
    """Write the whole ledger for an auditor.

    Accounts, their statements in words, and every charge.
    """
    with connect(coordinator, credentials) as operator:
        reply = operator.privacy(population or "", delta or 0.0)
        charges = list(operator.privacy_charges(population or ""))
    text = _as_json(reply, charges) if kind == "json" else _as_csv(reply, charges)
    if output is None:
        say_lines(text.rstrip("\n"))
        return
    try:
        with written_whole(output) as file:
            file.write(text)
    except OSError as error:
        raise ResourceError(f"{output} cannot be written: {error.strerror}") from error
    say(f"{len(reply.accounts)} accounts and {len(charges)} charges are in {output}")


def _rows(reply: operator_pb2.PrivacyReply) -> list[tuple[Any, ...]]:
    limits = {each.population: f"{each.epsilon:g} at {each.delta:g}" for each in reply.budgets}
    return [
        (
            each.population,
            each.silo or "(every silo)",
            f"{each.epsilon:.4f}",
            f"{each.delta:g}",
            limits.get(each.population, "none"),
            f"{each.reserved_epsilon - each.epsilon:+.4f}" if each.reserved_epsilon > each.epsilon else "",
            each.releases,
            len(each.jobs),
        )
        for each in reply.accounts
    ]


def _charge(each: operator_pb2.PrivacyCharge) -> dict[str, Any]:
    moment = datetime.fromtimestamp(each.time, UTC).isoformat()
    return {**as_dict(each), "charge": json.loads(each.charge), "time": moment}


def _as_json(reply: operator_pb2.PrivacyReply, charges: Sequence[operator_pb2.PrivacyCharge]) -> str:
    whole = {**as_dict(reply), "charges": [_charge(each) for each in charges]}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _as_csv(reply: operator_pb2.PrivacyReply, charges: Sequence[operator_pb2.PrivacyCharge]) -> str:
    """One row an account, then one a charge: `record` says which."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for account in reply.accounts:
        writer.writerow({"record": "account", **as_dict(account), "job": " ".join(account.jobs)})
    for each in charges:
        row = _charge(each)
        writer.writerow({"record": "charge", **row, "charge": json.dumps(row["charge"], sort_keys=True)})
    return text.getvalue()


def _show_account(path: Path, group: int, as_json: bool) -> None:
    from roundtable.privacy import account_statement, group_epsilon
    from roundtable.privacy.example_level import SiloAccount

    try:
        account = SiloAccount.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from error
    spent, charges = account.spent(), [entry.charge for entry in account.entries]
    level = "example" if path.stem == "example" else "client_local"
    words = account_statement(spent, [level], charges)
    of_group = group_epsilon(charges, group, spent.delta)
    if as_json:
        told = {"epsilon": spent.epsilon, "delta": spent.delta, "jobs": spent.jobs, "statement": words}
        print_json({**told, **({"group": group, "group_epsilon": of_group} if group > 1 else {})})
        return
    columns = ("epsilon", "delta", "releases", "jobs")
    print_table(columns, [(f"{spent.epsilon:.4f}", f"{spent.delta:g}", spent.releases, len(spent.jobs))], "")
    if group > 1:
        say(f"For {group} of these units that are one person's: epsilon = {of_group:.4f} at the same delta.")
    say()
    say(f"{words}")
