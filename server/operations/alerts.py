"""Telling people of incidents: a webhook, a command, or both; without holding anything up."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.request
from http.client import HTTPException
from typing import Any

from pydantic import Field, field_validator

from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.toml_tables import Table
from roundtable.server.operations.incidents import SEVERITIES, Incident, Severity

log = logging.getLogger("roundtable.server.operations.alerts")

WAITING = 1000
TRIES = 3
PAUSE_SECONDS = 2.0
CALL_SECONDS = 10.0


class AlertTable(Table):
    """`[alerts]` of coordinator.toml."""

    webhook: str = Field("", description="http(s) address that gets each alert as JSON by POST")
    command: list[str] = Field(
        default_factory=list, description="program and arguments; gets each alert as JSON on standard input"
    )
    severity: Severity = Field("error", description="the least that is worth an alert: info … critical")

    @field_validator("webhook")
    @classmethod
    def _http(cls, value: str) -> str:
        if value and not value.startswith(("https://", "http://")):
            raise ValueError(f"{value!r} is not an address: https://host/path")
        return value


class Alerts:
    """Passes incidents on, the oldest first; if too many wait already, a new one is dropped and logged."""

    def __init__(self, table: AlertTable) -> None:
        self._table = table
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(WAITING)

    def tell(self, incident: Incident, message: str, time: float, job: str = "", name: str = "") -> None:
        """Queues an alert if the incident is severe enough; returns at once."""
        table = self._table
        worth = SEVERITIES.index(incident.severity) >= SEVERITIES.index(table.severity)
        if not worth or not (table.webhook or table.command):
            return
        alert = {"time": time, "job": job, "name": name, "message": message, **incident.plain()}
        try:
            self._waiting.put_nowait(alert)
        except asyncio.QueueFull:
            log.error("an alert is dropped, because %d wait already: %s", WAITING, message)

    async def run(self) -> None:
        """Passes alerts on; runs until cancelled."""
        while True:
            data = json.dumps(await self._waiting.get()).encode()
            if self._table.webhook:
                await self._post(data)
            if self._table.command:
                await self._execute(data)

    async def _post(self, data: bytes) -> None:
        for attempt in range(1, TRIES + 1):
            try:
                await asyncio.to_thread(_send, self._table.webhook, data)
                return
            except (OSError, HTTPException, ValueError) as error:
                log.warning("the webhook did not take an alert (try %d of %d): %s", attempt, TRIES, error)
                await asyncio.sleep(attempt * PAUSE_SECONDS)

    async def _execute(self, data: bytes) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._table.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            )
            try:
                await asyncio.wait_for(process.communicate(data), CALL_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        except OSError as error:
            log.warning("the command for alerts cannot be run: %s", error)
            return
        if process.returncode:
            log.warning("the command for alerts ended with status %d", process.returncode)


def _send(address: str, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data, headers, method="POST")
    # Only http and https get here, AlertTable sees to that: no file:, no scheme of anybody's own.
    with urllib.request.urlopen(request, timeout=CALL_SECONDS):  # nosec B310
        return
