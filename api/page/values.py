"""Messages of the wire as plain values for a browser, and a browser's values as messages."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from roundtable.core.errors import ConfigError
from roundtable.core.foreign_text import printable

MessageT = TypeVar("MessageT", bound=Message)
EXACT = 1 << 53
"""Whole numbers from here on are texts: a browser's numbers do not hold them."""


def values_of(message: Message) -> dict[str, Any]:
    """Every field by its name.

    Whole numbers of 2^53 or more become text, bytes base 64, NaN and infinities None. A field with
    presence that was not set is left out.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {str(key): _plain(each) for key, each in value.items()}
        elif isinstance(value, (str, bytes, int, float, Message)):
            if not field.has_presence or message.HasField(field.name):
                found[field.name] = _value(field, value)
        else:
            found[field.name] = [_value(field, each) for each in value]
    return found


def message_of(kind: type[MessageT], values: Mapping[str, Any]) -> MessageT:
    """The message with these fields. ConfigError for a field that it has not, or a value of another kind."""
    try:
        return json_format.ParseDict(dict(values), kind())
    except (json_format.ParseError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"this is no {kind.__name__}: {printable(error, 200)}") from error


def _value(field: Any, value: Any) -> Any:
    return values_of(value) if field.message_type is not None else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return values_of(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= EXACT:
        return str(value)
    return value
