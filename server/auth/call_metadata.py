"""What a caller says of itself and of its call beside the messages: gRPC's metadata."""

from __future__ import annotations

from roundtable.core.bounds import is_word
from roundtable.core.observability.logs import REQUEST_KEY
from roundtable.server.auth.message_flow import Context

_REQUEST = 32


def call_identifier(context: Context) -> str:
    """The identifier that the caller has given the call; empty where there is none that could be logged."""
    return metadata_word(context, REQUEST_KEY)[:_REQUEST]


def metadata_word(context: Context, wanted: str) -> str:
    """An identifier in the call's metadata; empty where there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted and isinstance(value, str) and is_word(value):
            return value
    return ""


def bearer_in(context: Context) -> str:
    """The token in the call's metadata; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and str(value).startswith("Bearer "):
            return str(value).removeprefix("Bearer ").strip()
    return ""
