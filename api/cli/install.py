"""`client install` and `server install`: the agent or the coordinator as a service of this machine."""

from __future__ import annotations

import getpass
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import click

from roundtable.core.errors import ConfigError

systemd_option = click.option(
    "--systemd", is_flag=True, help="Write a unit for systemd; the only kind so far."
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="/etc/systemd/system",
    show_default=True,
    help="Folder for the unit.",
)
user_option = click.option("--user", help="Who the service runs as; default: you.")


@dataclass(frozen=True)
class Service:
    """What differs between the units: the words after `roundtable`, and the folders that it writes.

    `changes` replaces further lines of the unit that is shipped, by the word before their "=".
    """

    unit: str
    words: Sequence[str]
    config: Path
    folders: Sequence[Path]
    changes: dict[str, str] = field(default_factory=dict)


@click.command("install")
@systemd_option
@out_option
@user_option
@click.pass_context
def install(context: click.Context, systemd: bool, out: Path, user: str | None) -> None:
    """Write the service that runs this silo's agent, hardened, and say how it is started and stopped."""
    from roundtable.client.config import load_agent_config

    assert context.parent is not None
    file: Path = context.parent.params["config"].absolute()
    config = load_agent_config(file)
    words = ("client", "--config", str(file))
    write_unit(Service("roundtable-agent", words, file, [config.state]), systemd, out, user)


@click.command("install")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@systemd_option
@out_option
@user_option
def install_server(config: Path, systemd: bool, out: Path, user: str | None) -> None:
    """Write the service that runs the coordinator of CONFIG, hardened, and say how it is started.

    A database's address with its password belongs into a file beside CONFIG, ending in .env instead of
    .toml, as ROUNDTABLE_DATABASE=postgresql://...
    """
    from roundtable.server.config import load_server_config

    file = config.absolute()
    settings = load_server_config(file)
    folders = [Path(settings.state), Path(settings.artifacts)]
    if settings.database.startswith("sqlite:///"):
        folders.append(Path(settings.database.removeprefix("sqlite:///")).parent)
    folders += [Path(place) for place in settings.copies if place.startswith("/")]
    changes = {"EnvironmentFile": f"EnvironmentFile=-{file.with_suffix('.env')}"}
    write_unit(
        Service("roundtable-coordinator", ("server", str(file)), file, folders, changes), systemd, out, user
    )


def write_unit(service: Service, systemd: bool, out: Path, user: str | None) -> None:
    """Writes the unit and makes the service's folders. Raises ConfigError where that cannot be done."""
    if not systemd:
        raise click.UsageError("say which kind of service: --systemd")
    who, unit = user or getpass.getuser(), f"{service.unit}.service"
    text = _unit(service, who)
    try:
        for folder in service.folders:
            if not folder.exists():
                folder.mkdir(parents=True, mode=0o700)
                if who != getpass.getuser():
                    shutil.chown(folder, who)
        (out / unit).write_text(text)
    except LookupError as error:
        raise ConfigError(f"--user {who}: this machine knows no such user") from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out / unit} cannot be written: {error.strerror}; run this with sudo, "
            "or name a folder with --out"
        ) from error
    name = service.unit
    click.echo(f"Wrote {out / unit}. Start it, also at each boot: systemctl enable --now {name}")
    click.echo(f"Its log: journalctl -u {name} -f. Stop it at once: systemctl stop {name}")


def _unit(service: Service, user: str) -> str:
    """The unit that is shipped, with this machine's own command, user and folders."""
    program = shutil.which("roundtable") or str(Path(sys.executable).with_name("roundtable"))
    outermost = [
        folder
        for folder in dict.fromkeys(service.folders)
        if not any(folder != other and folder.is_relative_to(other) for other in service.folders)
    ]
    changed = {
        "ExecStart": [f"ExecStart={' '.join((program, *service.words))}"],
        "User": [f"User={user}"],
        "Group": [],
        "StateDirectory": [f"ReadWritePaths={folder}" for folder in outermost],
        "StateDirectoryMode": [],
        **{word: [line] for word, line in service.changes.items()},
    }
    # What lies in somebody's home, as pipx puts it there, must at least be readable.
    if any(
        Path(place).is_relative_to(home) for place in (program, service.config) for home in ("/home", "/root")
    ):
        changed["ProtectHome"] = ["ProtectHome=read-only"]
    lines: list[str] = []
    for line in (
        resources.files("roundtable.cli").joinpath(f"{service.unit}.service").read_text().splitlines()
    ):
        lines += changed.get(line.partition("=")[0], [line])
    return "\n".join((*lines, ""))
