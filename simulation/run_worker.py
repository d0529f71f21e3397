"""One run of a sweep in a process of its own: a request on standard input, behind it a task that only the
sweep's own process has, and the outcome in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError, RoundtableError


def main() -> int:
    """Runs what the request says. The outcome is a number of rounds, or what is wrong."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    packed = sys.stdin.buffer.read(request["packed"])
    from roundtable.simulation.backends.carried_task import unpack_task
    from roundtable.simulation.simulate import simulate

    task = unpack_task(packed) if packed else None
    try:
        result = simulate(
            request["job"], task, overrides=request["overrides"], run_dir=request["folder"], resume=True
        )
    except RoundtableError as error:
        said = {"error": str(error), "refused": isinstance(error, ConfigError)}
        Path(request["outcome"]).write_text(json.dumps(said), encoding="utf-8")
        return 1
    except KeyboardInterrupt:
        # Stopped with its sweep; the run goes on from its last committed round.
        return 130
    Path(request["outcome"]).write_text(json.dumps({"rounds": len(result.history)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
