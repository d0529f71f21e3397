"""`roundtable client install`: the agent as a service of this machine."""

from __future__ import annotations

import getpass
import shutil
import sys
from importlib import resources
from pathlib import Path

import click

from roundtable.core.errors import ConfigError

UNIT = "roundtable-agent.service"


@click.command("install")
@click.option("--systemd", is_flag=True, help="Write a unit for systemd; the only kind so far.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="/etc/systemd/system",
    show_default=True,
    help="Folder for the unit.",
)
@click.option("--user", help="Who the agent runs as; default: you.")
@click.pass_context
def install(context: click.Context, systemd: bool, out: Path, user: str | None) -> None:
    """Write the service that runs this silo's agent, hardened, and say how it is started and stopped."""
    from roundtable.client.config import load_agent_config

    if not systemd:
        raise click.UsageError("say which kind of service: --systemd")
    assert context.parent is not None
    file: Path = context.parent.params["config"].absolute()
    config = load_agent_config(file)
    program = shutil.which("roundtable") or str(Path(sys.executable).with_name("roundtable"))
    who = user or getpass.getuser()
    # What lies in somebody's home, as pipx puts it there, must at least be readable.
    at_home = any(
        Path(place).is_relative_to(home) for place in (program, file) for home in ("/home", "/root")
    )
    unit = _unit(f"{program} client --config {file}", who, config.state, at_home)
    try:
        if not config.state.exists():
            config.state.mkdir(parents=True, mode=0o700)
            if who != getpass.getuser():
                shutil.chown(config.state, who)
        (out / UNIT).write_text(unit)
    except (OSError, LookupError) as error:
        if isinstance(error, LookupError):
            raise ConfigError(f"--user {who}: this machine knows no such user") from error
        raise ConfigError(
            f"{out / UNIT} cannot be written: {error.strerror}; run this with sudo, "
            "or name a folder with --out"
        ) from error
    click.echo(f"Wrote {out / UNIT}. Start it, also at each boot: systemctl enable --now roundtable-agent")
    click.echo("Its log: journalctl -u roundtable-agent -f. Stop it at once: systemctl stop roundtable-agent")


def _unit(command: str, user: str, state: Path, at_home: bool) -> str:
    """The unit that is shipped, with this silo's own command, user and folder."""
    changed = {
        "ExecStart": [f"ExecStart={command}"],
        "User": [f"User={user}"],
        "Group": [],
        "StateDirectory": [f"ReadWritePaths={state}"],
        "StateDirectoryMode": [],
    }
    if at_home:
        changed["ProtectHome"] = ["ProtectHome=read-only"]
    lines: list[str] = []
    for line in resources.files("roundtable.cli").joinpath(UNIT).read_text().splitlines():
        lines += changed.get(line.partition("=")[0], [line])
    return "\n".join((*lines, ""))
