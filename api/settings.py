"""A coordinator's settings as its service reads them: the file, and the variables beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.server.config import ServerConfig

DATABASE = "ROUNDTABLE_DATABASE"
# systemd has read the file for its services, who need not be able to read it themselves.
_SYSTEMD = "INVOCATION_ID"
_VARIABLE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.ASCII)


def take_variables(settings: Path) -> None:
    """Puts what the file beside `settings` that ends in .env says into the environment; what is there wins.

    Raises ConfigError where it cannot be read, or for a line that is none.
    """
    file = settings.with_suffix(".env")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        if _SYSTEMD in os.environ:
            return
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{file} cannot be read: {reason}; the service reads it: run this with sudo"
        ) from error
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line[0] in "#;":
            continue
        assignment = _VARIABLE.fullmatch(line)
        if assignment is None:
            raise ConfigError(f"{file}:{number}: expected NAME=value")
        value = assignment["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        os.environ.setdefault(assignment["name"], value)


def coordinator_settings(file: Path) -> ServerConfig:
    """What the coordinator of this file runs with. Raises ConfigError for what is wrong there."""
    from roundtable.server.config import load_server_config

    take_variables(file)
    return load_server_config(file, {"database": os.environ.get(DATABASE) or None})
