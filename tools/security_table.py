"""Writes the tables of docs/security.md: calls and roles, and what is promised."""

from __future__ import annotations

from promises import SECURITY

from roundtable.server.auth.permissions import as_markdown

if __name__ == "__main__":
    SECURITY.write({"| call |": as_markdown()})
