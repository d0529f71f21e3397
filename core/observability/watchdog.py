"""What systemd is told of a service (sd_notify(3)): that it is up, how it stands, and that it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from roundtable.core.foreign_text import printable

log = logging.getLogger("roundtable.watchdog")

START_SECONDS = 20.0


def tell_systemd(status: str, *, ready: bool = False) -> None:
    """Shows a line in `systemctl status`; `ready` ends the start. Without systemd nothing."""
    _send(f"STATUS={printable(status, 500)}" + ("\nREADY=1" if ready else ""))


async def keep_watchdog() -> None:
    """Says that the event loop turns, for as long as it does; else systemd starts the service anew.

    A start that waits for something else is thereby not ended at the unit's TimeoutStartSec.
    """
    seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6 or START_SECONDS
    while True:
        _send(f"WATCHDOG=1\nEXTEND_TIMEOUT_USEC={2e6 * seconds:.0f}")
        await asyncio.sleep(seconds)


def _send(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ stands for a name outside the file system.
    place = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.setblocking(False)
            notify.connect(place)
            notify.send(text.encode())
    except OSError as error:
        log.warning("systemd cannot be told at NOTIFY_SOCKET: %s", error)
