"""What the tables of TOML files are made of: strict pydantic models, and the kinds of values in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from roundtable.core.bounds import DIGEST
from roundtable.core.quantities import parse_duration

Seconds = Annotated[float, BeforeValidator(parse_duration)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Table(BaseModel):
    """A table of a TOML file: unknown keys are refused, values are frozen.

    `hints` says what to write instead of a key or a choice that people look for in this table, but that
    stands elsewhere.
    """

    # A job uses few of all tables there are: each is compiled when it is first read.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)
    hints: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A mistake in a table that is not ours is told where its file is run."""
        if not cls.__module__.startswith("roundtable."):
            cls.model_rebuild(raise_errors=False)


def as_tuple(value: Any) -> Any:
    """A list as a tuple, which frozen tables hold."""
    return tuple(value) if isinstance(value, list) else value


def json_only(value: Any, key: str = "") -> Any:
    """The value; ValueError for what JSON cannot say, as the job travels as JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            json_only(inner, f"{name}: ")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            json_only(inner, key)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}{value} is not a number that can be used here")
    elif not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f"{key}{value} is a {type(value).__name__}; write it as text in quotes")
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
ApprovedCode = dict[str, Annotated[str, Field(pattern=rf"^{DIGEST}$")]]
"""Code of others by name → BLAKE3 of what was read and allowed."""

Open = Annotated[dict[str, Any], AfterValidator(json_only)]
