"""Messages that nobody sends: noise, strange values of the right types, damaged ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from roundtable.proto import administration_pb2, agent_pb2, operator_pb2, relay_pb2


def _services() -> Iterator[tuple[str, Any]]:
    for module, name in (
        (agent_pb2, "Agents"),
        (operator_pb2, "Operators"),
        (administration_pb2, "Administration"),
        (administration_pb2, "Enrolment"),
        (relay_pb2, "Relays"),
    ):
        for method in module.DESCRIPTOR.services_by_name[name].methods:
            yield f"{name}/{method.name}", method


METHODS = dict(_services())
_INTERESTING = (0, 1, -1, 2**31 - 1, 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_WORDS = ("", "x", "olga", "../x", "0" * 64, "\0", "é" * 40, "[" * 2000, "{}", "job", "train", "secure")


def _value(field: FieldDescriptor, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice([0, 1, 32, 4000]))
        return chance.choice(_WORDS)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice([0.0, -1.0, 1e308, float("inf"), float("nan"), chance.random()])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice([0, 1, 99])
    return chance.choice(_INTERESTING)


def fill(message: Message, descriptor: Descriptor, chance: random.Random, depth: int = 0) -> None:
    """Values of the right type that nobody sends."""
    for field in descriptor.fields:
        if chance.random() < 0.3 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            with contextlib.suppress(ValueError, UnicodeEncodeError):
                value = _value(field.message_type.fields_by_name["value"], chance)
                key = chance.choice(("key", *_WORDS)).replace("\0", "")
                entries[key] = value.replace("\0", "") if isinstance(value, str) else value
        elif field.message_type is not None:
            place = getattr(message, field.name)
            many = hasattr(place, "add")
            inner = place.add() if many else place
            fill(inner, field.message_type, chance, depth + 1)
            if not many:
                inner.SetInParent()
        else:
            with contextlib.suppress(ValueError, UnicodeEncodeError):
                value = _value(field, chance)
                if hasattr(getattr(message, field.name), "append"):
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)


def request_for(method: Any, chance: random.Random) -> bytes:
    """Noise, a message of strange values, or a damaged one."""
    how = chance.random()
    if how < 0.25:
        return chance.randbytes(chance.randrange(300))
    made = method.input_type._concrete_class()
    fill(made, method.input_type, chance)
    data = bytearray(made.SerializeToString())
    if how > 0.6 and data:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        del data[chance.randrange(len(data)) :]
    return bytes(data)
