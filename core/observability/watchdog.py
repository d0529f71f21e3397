"""systemd's watchdog: a service whose event loop no longer turns is started anew (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket


async def keep_watchdog() -> None:
    """Says that the service is up, then that it lives, for as long as it does; without systemd nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ stands for a name outside the file system.
    place = f"\0{address[1:]}" if address.startswith("@") else address
    seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.setblocking(False)
        notify.connect(place)
        notify.send(b"READY=1")
        while seconds:
            notify.send(b"WATCHDOG=1")
            await asyncio.sleep(seconds)
