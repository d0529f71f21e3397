"""Writes the table of calls and roles into docs/security.md, from server/auth/permissions.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from roundtable.server.auth.permissions import as_markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "security.md"


def main() -> int:
    """Replaces the table that is there."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"\| call \|(?:.*\n\|)*.*", lambda _: as_markdown(), text, count=1), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
