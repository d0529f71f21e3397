"""A coordinator for chaos: as ever, but for its noise, which repeats itself, and its clock, which jumps."""

from __future__ import annotations

import sys
from pathlib import Path

from unvarying import follow_clock, unvary


def main() -> int:
    file = Path(sys.argv[1])
    follow_clock(file.with_suffix(".clock"))
    import logging

    from roundtable.core.errors import RoundtableError
    from roundtable.server import load_server_config, run_server

    unvary("coordinator")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        return run_server(load_server_config(file))
    except RoundtableError as error:
        # As the command line says it, and a service manager starts it again.
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
