"""`roundtable client drain|resume`: the silo goes into maintenance, and comes back."""

from __future__ import annotations

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import ago, tell
from roundtable.cli.silo.silo import silo_of


@click.command("drain")
@click.option("--reason", default="", help="For the coordinator's operators: one line; no data.")
@json_option
@click.pass_context
def drain(context: click.Context, reason: str, as_json: bool) -> None:
    """Take no new rounds; finish those that run.

    The agent stays connected. It holds until `roundtable client resume`, over restarts of the agent. The
    coordinator is told at once, or when the agent connects next, and selects other silos.
    """
    from roundtable.client.policy.maintenance import Maintenance

    config, _ = silo_of(context)
    before = Maintenance(config.state).drain(reason)
    if before is not None and before.reason == reason:
        tell(
            as_json,
            {"drained": True, "changed": False, "by": before.by, "since": before.since, "reason": reason},
            f"Drained already, by {before.by}, {ago(before.since)}; nothing was changed.",
        )
        return
    tell(
        as_json,
        {"drained": True, "changed": True, "reason": reason},
        "Drained: the agent takes no new round, also after a restart; its log says once nothing is under "
        "way.",
        "`roundtable client resume` ends that.",
    )


@click.command("resume")
@json_option
@click.pass_context
def resume(context: click.Context, as_json: bool) -> None:
    """Take part in new rounds again, after `client drain`."""
    from roundtable.client.policy.maintenance import Maintenance

    config, _ = silo_of(context)
    before = Maintenance(config.state).resume()
    tell(
        as_json,
        {"drained": False, "changed": before is not None},
        "Not drained; nothing was changed." if before is None else "Resumed: the silo takes part again.",
    )
