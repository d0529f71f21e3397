"""The silo's page beside an agent, and the token that opens it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from roundtable.client.policy.config import AgentConfig
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.silo_page.shown_state import ShownState
from roundtable.silo_page.silo_addresses import SiloApplication
from roundtable.web.guard import LOCAL
from roundtable.web.web_server import served_beside

log = logging.getLogger("roundtable.silo_page")

ADDRESS = "127.0.0.1:7446"
TOKEN_FILE = "page-token"


def page_token(state: Path) -> str:
    """The page's token, made where there is none yet; the file is the account's own.

    ResourceError for a state folder that cannot be written or a file that is not such a token.
    """
    path = state / TOKEN_FILE
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        except FileExistsError:
            pass
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"the page's token cannot be kept in {path}: {error}") from error
    if len(token) < 32:
        raise ResourceError(f"{path} holds no token of the page: delete it, and another one is made")
    return token


def page_link(listen: str, state: Path) -> str:
    """The address that opens the page signed in: a browser never sends what stands behind the #."""
    return f"http://{listen}/#{page_token(state)}"


@contextmanager
def silo_page(load: Callable[[], AgentConfig], listen: str) -> Iterator[int]:
    """Serves the page meanwhile; gives its port.

    Raises ConfigError for an address that is not this machine's own, ResourceError for one that is taken.
    """
    if listen.rpartition(":")[0].strip("[]") not in LOCAL:
        raise ConfigError(
            f"the silo's page listens on this machine itself alone, not {listen!r}: give {ADDRESS}, and from "
            f"another machine use a tunnel: ssh -L 7446:{ADDRESS} THIS-MACHINE"
        )
    application = SiloApplication(ShownState(load), page_token(load().state))
    with served_beside(application.app, LOCAL, listen, "page") as port:
        log.info("the silo's page is at http://%s:%d", listen.rpartition(":")[0], port)
        yield port
