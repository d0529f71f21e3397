"""Refuses mistakes that would show as a hang later: a network interface that is missing, a port in use.

And numbers of nodes, devices and restarts that are none, under the names of the launch files, which run
`python -m roundtable.cluster.agent.preflight HEAD:29400` before torchrun.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Mapping

from roundtable.core.errors import ConfigError

_STARTED = (
    (
        "NODES",
        re.compile(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?"),
        "number of nodes; write 2, or 1:4 for as many as there are",
    ),
    (
        "DEVICES",
        re.compile(r"[1-9]\d{0,5}|gpu|cpu|auto"),
        "number of ranks on this node; write 8, or gpu for one on each",
    ),
    ("RESTARTS", re.compile(r"\d{1,6}"), "number of restarts; write 3, or 0 for none"),
)


def check_interface(name: str | None) -> None:
    """Raises ConfigError for an interface that this machine does not have."""
    there = [each for _, each in socket.if_nameindex()]
    for one in (name or "").split(","):
        if one and one.lstrip("^=") not in there:
            raise ConfigError(
                f"[cluster] interface = {name!r}: this machine has no {one!r}; it has {', '.join(there)}"
            )


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for an address that is none, and, on the rendezvous's own node, for a port in use.

    On the other nodes the port cannot be checked, and nothing is refused.
    """
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{endpoint!r} is not an endpoint; write it as node01:29400")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"no address is known of the node {host!r} ({error.strerror})") from error
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port} of {host} is in use, perhaps by ranks that still run; end them or "
                        "set PORT to a free one on all nodes"
                    ) from error


def check_started(environment: Mapping[str, str]) -> None:
    """Raises ConfigError for numbers that torchrun could start no ranks by; what is not set has a default."""
    for name, form, said in _STARTED:
        text = environment.get(name)
        least, _, most = (text or "").partition(":")
        if text is not None and not (form.fullmatch(text) and (not most or int(least) <= int(most))):
            raise ConfigError(f"{name} = {text[:40]!r} is no {said}")


def main() -> int:
    """Runs all checks; returns 1, with the reason printed, for what would hang."""
    try:
        check_started(os.environ)
        check_endpoint(sys.argv[1])
        check_interface(os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"))
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
