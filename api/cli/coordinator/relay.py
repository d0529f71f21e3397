"""`roundtable relay`: a region's process between its silos and the coordinator."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.shared.service_process import service_process


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default="relay.toml",
    show_default=True,
    help="The relay's settings.",
)
@click.option("--coordinator", metavar="HOST:PORT", help="Where the coordinator listens.")
@click.option("--listen", metavar="HOST:PORT", help="Where agents connect; port 0 takes a free one.")
def relay(config: Path, coordinator: str | None, listen: str | None) -> int:
    """Run a relay: serve a region's silos over one connection.

    It downloads each model once for all of them, and keeps their updates on disk until the coordinator has
    them. Ctrl-C stops it cleanly; started again on the same state it goes on.
    """
    from roundtable.relay.config import load_relay_config

    settings = load_relay_config(config, {"coordinator": coordinator, "listen": listen})
    verbosity = service_process(
        settings.log_format, settings.log_levels, lambda: load_relay_config(config).log_levels
    )
    # What it brings along may warn: in the form of the log.
    from roundtable.relay.relay import run_relay

    return run_relay(settings, verbosity)
