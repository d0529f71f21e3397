"""`roundtable clients`: the agents that a coordinator knows."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import ago, as_dict, print_json, print_table


@click.command()
@connection_options
@json_option
def clients(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List the agents that the coordinator knows, and what they do."""
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
        )
        for client in known
    ]
    columns = ("client", "state", "seen", "tasks", "devices", "rounds", "version")
    print_table(columns, rows, "No agent has connected yet; `roundtable invite SILO` asks a silo in.")
