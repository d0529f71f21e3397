"""`roundtable server`: the coordinator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from roundtable.cli.shared.install import install_server
from roundtable.cli.shared.service_process import service_process

if TYPE_CHECKING:
    from roundtable.server.config import ServerConfig
    from roundtable.server.dashboard import Dashboard
    from roundtable.server.jobs.trusted_training import TrustedTraining


class _Server(click.Command):
    """Takes a file, or the word `install`; a file of that name is `./install`."""

    def get_command(self, _: click.Context, name: str) -> click.Command:
        return install_server if name == "install" else self

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["install"]:
            return install_server.make_context(f"{info_name} install", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Server)
@click.argument("config", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--listen", metavar="HOST:PORT", help="Where agents and operators connect; port 0 takes a free one."
)
@click.option(
    "--operators",
    metavar="HOST:PORT",
    help="Where operators connect instead, with certificates; default: where agents do.",
)
@click.option(
    "--enrolment",
    metavar="HOST:PORT",
    help="Where invited silos and operators with tokens connect; default: none.",
)
@click.option("--page", metavar="HOST:PORT", help="Where browsers find the page for people; default: none.")
@click.option(
    "--state", type=click.Path(path_type=Path), help="Folder of the embedded database and the artifacts."
)
@click.option(
    "--database",
    metavar="URL",
    envvar="ROUNDTABLE_DATABASE",
    show_envvar=True,
    help="sqlite:///... or postgresql://...; with a password in it, better by the variable.",
)
@click.option(
    "--bucket",
    metavar="URL",
    help="Object store that holds models and updates, such as s3://bucket/prefix; default: none.",
)
@click.option(
    "--credentials", type=click.Path(path_type=Path), help="Folder with ca.crt, node.crt and node.key."
)
def server(
    config: Path | None,
    listen: str | None,
    operators: str | None,
    enrolment: str | None,
    page: str | None,
    state: Path | None,
    database: str | None,
    bucket: str | None,
    credentials: Path | None,
) -> int:
    """Run the coordinator.

    With the settings of CONFIG (coordinator.toml); options win. Ctrl-C stops it cleanly; started again on the
    same state it goes on with every job. `roundtable server install --systemd CONFIG` makes it a service of
    this machine.
    """
    from roundtable.server.config import load_server_config
    from roundtable.settings import DATABASE, take_variables

    if config is not None:
        take_variables(config)
        database = database or os.environ.get(DATABASE) or None
    options = {"listen": listen, "operators": operators, "enrolment": enrolment}
    stores = {"database": database, "bucket": bucket}
    pages = {"dashboard.listen": page}
    folders = {"state": _absolute(state), "credentials": _absolute(credentials)}
    settings = load_server_config(config, {**options, **stores, **pages, **folders})
    verbosity = service_process(
        settings.log_format, settings.log_levels, lambda: load_server_config(config).log_levels
    )
    # What it brings along may warn: in the form of the log.
    from roundtable.server.coordinator import run_server

    return run_server(settings, _trusted(settings), verbosity, _dashboard(settings))


def _trusted(settings: ServerConfig) -> TrustedTraining | None:
    """Without trusted data the coordinator needs no task, and imports no training code."""
    if not settings.root_data:
        return None
    from roundtable.trusted import TrustedData

    return TrustedData(settings.root_data)


def _dashboard(settings: ServerConfig) -> Dashboard | None:
    """Without a page the coordinator imports no web server."""
    if not settings.dashboard.listen:
        return None
    from roundtable.page.serving import CoordinatorDashboard

    return CoordinatorDashboard(settings)


def _absolute(path: Path | None) -> Path | None:
    """Paths of the command line are relative to where it is typed, not to the file's folder."""
    return path.absolute() if path else None
