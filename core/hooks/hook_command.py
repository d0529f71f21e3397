"""Commands of the people of one machine that are asked something: one JSON object in, one out, no shell."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from roundtable.core.errors import ResourceError
from roundtable.core.foreign_text import printable
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.stop_signals import kill_group

MOST_OUTPUT = 64 << 10
_END_SECONDS = 2.0


async def ask_command(command: Sequence[str], inquiry: Mapping[str, Any]) -> Any:
    """What the command answers to this object. Cancelling the call kills it and all that it has started.

    Raises ResourceError where it cannot be started, fails, writes too much or no JSON; the message is for the
    log of that machine, as it holds what the command wrote.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            limit=MOST_OUTPUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ResourceError(f"{command[0]} cannot be started: {error.strerror}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(inquiry).encode())
            await process.stdin.drain()
        process.stdin.close()
        output, errors = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
        status = await process.wait()
    finally:
        if process.returncode is None:
            # With all that it has started: what hangs below a script holds its pipes.
            kill_group(process)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
    if len(output) > MOST_OUTPUT:
        raise ResourceError(f"{command[0]} wrote more than {MOST_OUTPUT >> 10} KiB")
    if status:
        said = printable(errors.decode(errors="replace").strip(), 500)
        raise ResourceError(f"{command[0]} ended with status {status}: {said}")
    try:
        return json.loads(output)
    except (ValueError, RecursionError) as error:
        raise ResourceError(f"{command[0]} wrote no JSON: {printable(error, 200)}") from error


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    """What comes, up to a byte more than is taken; the rest is read and dropped, so that nobody blocks."""
    kept = bytearray()
    while block := await stream.read(1 << 14):
        kept += block[: max(0, MOST_OUTPUT + 1 - len(kept))]
    return bytes(kept)
