"""`[dashboard]` says what is wrong before anything is served."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from page_world import page_world

from roundtable.core.errors import ConfigError, ResourceError
from roundtable.server import ServerConfig


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"listen": "nonsense"}, "is not host:port"),
        ({"listen": "0.0.0.0:7445", "tls": False}, "this machine itself alone"),
        ({"certificate": "page.crt"}, "certificate and key go together"),
        ({"grafana": "javascript:alert(1)"}, "is no address of a page"),
    ],
)
def test_mistakes_are_named(
    settings: Callable[..., ServerConfig], values: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**values)


async def test_the_page_links_to_the_metrics_and_back(settings: Callable[..., ServerConfig]) -> None:
    place = "https://grafana.example.org/d/roundtable"
    async with page_world(settings(grafana=place)) as world:
        browser = world.browser()
        await browser.sign_in(world.tokens["viewer"])
        assert (await browser.ask("GET", "/api/session")).values["grafana"] == place
    board = json.loads((Path(__file__).parents[2] / "deploy/grafana/roundtable.json").read_text())
    assert [link["url"] for link in board["links"]] == ["${page}"]
    assert "page" in [each["name"] for each in board["templating"]["list"]]


async def test_an_address_that_is_taken_and_a_certificate_that_is_none(
    settings: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match=r"dashboard\.listen = .* cannot be taken"):
            async with page_world(settings(listen=f"127.0.0.1:{taken.getsockname()[1]}")):
                pass
    for name in ("page.crt", "page.key"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(Exception, match=r"page\.crt"):
        async with page_world(
            settings(certificate=str(tmp_path / "page.crt"), key=str(tmp_path / "page.key"))
        ):
            pass
