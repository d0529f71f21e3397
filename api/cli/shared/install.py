"""`client install` and `server install`: the agent or the coordinator as a service of this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pwd import struct_passwd

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import tell
from roundtable.core.errors import ConfigError
from roundtable.core.machine.possible import must_be_possible

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
    """What differs between the units: the words after `roundtable`, and what it reads and writes."""

    unit: str
    words: Sequence[str]
    config: Path
    credentials: Path
    folders: Sequence[Path]


@click.command("install")
@systemd_option
@out_option
@user_option
@json_option
@click.pass_context
def install(context: click.Context, systemd: bool, out: Path, user: str | None, as_json: bool) -> None:
    """Write a hardened service that runs this silo's agent.

    Says how it is started and stopped. Variables such as ROUNDTABLE_PASSPHRASE_FILE belong into a file beside
    agent.toml, agent.env.
    """
    from roundtable.client.policy.config import load_agent_config

    assert context.parent is not None
    file: Path = context.parent.params["config"].resolve()
    config = load_agent_config(file)
    words = ("client", "--config", str(file))
    service = Service("roundtable-agent", words, file, config.credentials, [config.state.resolve()])
    write_unit(service, systemd, out, user, as_json)


@click.command("install")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@systemd_option
@out_option
@user_option
@json_option
def install_server(config: Path, systemd: bool, out: Path, user: str | None, as_json: bool) -> None:
    """Write the service that runs the coordinator of CONFIG, hardened, and say how it is started.

    A database's address with its password belongs into a file beside CONFIG, ending in .env instead of
    .toml, as ROUNDTABLE_DATABASE=postgresql://...
    """
    from roundtable.settings import coordinator_settings

    file = config.resolve()
    settings = coordinator_settings(file)
    folders = [Path(settings.state), Path(settings.artifacts)]
    if settings.database.startswith("sqlite:///"):
        folders.append(Path(settings.database.removeprefix("sqlite:///")).parent)
    folders += [Path(place) for place in settings.copies if place.startswith("/")]
    folders = [Path(os.path.normpath(folder)) for folder in folders]
    words = ("server", str(file))
    service = Service("roundtable-coordinator", words, file, Path(settings.credentials), folders)
    write_unit(service, systemd, out, user, as_json)


def write_unit(service: Service, systemd: bool, out: Path, user: str | None, as_json: bool) -> None:
    """Writes the unit and makes the service's folders. Raises ConfigError where that cannot be done."""
    if not systemd:
        raise click.UsageError("say which kind of service: --systemd")
    must_be_possible("install")
    import pwd

    who, unit = user or getpass.getuser(), f"{service.unit}.service"
    text = _unit(service, who)
    try:
        entry = pwd.getpwnam(who)
        for folder in service.folders:
            if not folder.exists():
                folder.mkdir(parents=True, mode=0o700)
                if who != getpass.getuser():
                    shutil.chown(folder, who)
        _check_access(service, entry)
        (out / unit).write_text(text)
    except LookupError as error:
        raise ConfigError(f"--user {who}: this machine knows no such user") from error
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out / unit} cannot be written: {error.strerror}; run this with sudo, "
            "or name a folder with --out"
        ) from error
    name = service.unit
    tell(
        as_json,
        {"unit": str(out / unit), "service": name, "user": who},
        f"Wrote {out / unit}. Start it, also at each boot: systemctl enable --now {name}",
        f"Its log: journalctl -u {name} -f. Stop it at once: systemctl stop {name}",
    )


def _check_access(service: Service, user: struct_passwd) -> None:
    """ConfigError unless the user may read the settings and credentials and write the folders."""
    if user.pw_uid == os.geteuid():
        return
    read = [service.config, *sorted(service.credentials.glob("*"))]
    asked = [f"r{place}" for place in read] + [f"w{place}" for place in service.folders]
    script = 'for each; do test -"${each%"${each#?}"}" "${each#?}" || echo "${each#?}"; done'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *asked],
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if closed := done.stdout.splitlines():
        owned = {str(service.credentials), *map(str, service.folders)}
        give = sorted({place for place in owned if any(Path(each).is_relative_to(place) for each in closed)})
        remedy = f"chown -R {user.pw_name} {' '.join(give)}, and " if give else ""
        raise ConfigError(
            f"{user.pw_name} may not use {', '.join(closed)}: {remedy}"
            "let that user into the folders above (`namei -l` shows them)"
        )


def _unit(service: Service, user: str) -> str:
    """The unit that is shipped, with this machine's own command, user and folders."""
    program = shutil.which("roundtable") or str(Path(sys.executable).with_name("roundtable"))
    outermost = [
        folder
        for folder in dict.fromkeys(service.folders)
        if not any(folder != other and folder.is_relative_to(other) for other in service.folders)
    ]
    changed = {
        "ExecStart": [f"ExecStart={' '.join(map(_word, (program, *service.words)))}"],
        "EnvironmentFile": [f"EnvironmentFile=-{_escaped(service.config.with_suffix('.env'))}"],
        "User": [f"User={user}"],
        "Group": [],
        "StateDirectory": [f"ReadWritePaths={_word(folder)}" for folder in outermost],
        "StateDirectoryMode": [],
    }
    # What lies in somebody's home, as pipx puts it there, must at least be readable.
    if any(
        Path(place).is_relative_to(home) for place in (program, service.config) for home in ("/home", "/root")
    ):
        changed["ProtectHome"] = ["ProtectHome=read-only"]
    lines: list[str] = []
    for line in (
        resources.files("roundtable.cli.shared").joinpath(f"{service.unit}.service").read_text().splitlines()
    ):
        lines += changed.get(line.partition("=")[0], [line])
    return "\n".join((*lines, ""))


def _escaped(place: str | Path) -> str:
    """As a unit takes it: a percent sign begins a specifier."""
    return str(place).replace("%", "%%")


def _word(place: str | Path) -> str:
    """One word of a unit's list, in quotes where it needs them."""
    text = _escaped(place)
    return f'"{text}"' if any(character.isspace() for character in text) else text
