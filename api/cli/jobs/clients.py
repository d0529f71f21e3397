"""`roundtable clients`: the agents that a coordinator knows, and whether jobs may ask them."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.jobs.client_report import diagnose_client
from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import ago, amount, as_dict, print_json, print_table, say
from roundtable.proto.operator_pb2 import Client


@click.group()
def clients() -> None:
    """List agents; disable and enable them; ask for a report."""


@clients.command("list")
@connection_options
@json_option
def list_clients(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List the agents and what they do.

    Also why jobs ask some of them for nothing new.
    """
    with connect(coordinator, credentials) as operator:
        known = operator.clients()
    if as_json:
        print_json([as_dict(client) for client in known])
        return
    rows = [
        (
            client.name,
            client.state or "offline",
            ago(client.last_seen),
            ", ".join(client.tasks),
            ", ".join(client.devices),
            f"{client.completed}/{client.selected}",
            client.version,
            line_of(client),
            _held(client),
        )
        for client in known
    ]
    held = "asked for nothing new"
    columns = ("client", "state", "seen", "tasks", "devices", "rounds", "version", "line", held)
    print_table(columns, rows, "No agent has connected yet; `roundtable invite SILO` asks a silo in.")


@clients.command("disable")
@click.argument("name")
@click.option("--reason", default="", help="For the silo, for other operators and for the audit log.")
@connection_options
@json_option
def disable(name: str, reason: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Let no job ask an agent for anything new.

    The agent NAME finishes what it was asked, and is told why. It stays connected and keeps its certificate,
    unlike after `roundtable revoke`.
    """
    with connect(coordinator, credentials) as operator:
        client = operator.disable_client(name, reason)
    if as_json:
        print_json(as_dict(client))
        return
    say(f"Disabled {client.name}: {client.disabled}. `roundtable clients enable {client.name}` ends that.")


@clients.command("enable")
@click.argument("name")
@connection_options
@json_option
def enable(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Let jobs ask the agent NAME again."""
    with connect(coordinator, credentials) as operator:
        client = operator.enable_client(name)
    if as_json:
        print_json(as_dict(client))
        return
    still = f"; its silo has drained it: {client.drained}" if client.drained else ""
    say(f"Enabled {client.name}{still}.")


clients.add_command(diagnose_client)


def line_of(client: Client) -> str:
    """What was measured of the line to a silo, in words; empty for nothing."""
    link = client.link
    said = [
        f"{name} {amount(round(value))}/s"
        for name, value in (("up", link.up), ("down", link.down), ("encodes", link.encoding))
        if value
    ]
    return ", ".join([*said, *([f"{1000 * link.round_trip:.0f} ms"] if link.round_trip else [])])


def _held(client: Client) -> str:
    said = [f"disabled: {client.disabled}"] if client.disabled else []
    return "; ".join([*said, *([f"drained: {client.drained}"] if client.drained else [])])
