"""Which task a job is about, and what that is made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from roundtable.core.toml_tables import Table, json_only


class JobTaskTable(Table):
    """`[task]`: which task, and its parameters; `task = "NAME"` is the same without any.

    All keys but `name` are handed to the task's class, or to the function that makes it, by name; whether it
    takes them is checked when it is loaded.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]

    name: str = Field(
        min_length=1, description="an installed entry point, a file beside this one, or module:Class"
    )

    @model_validator(mode="after")
    def _can_travel(self) -> JobTaskTable:
        for key, value in self.parameters.items():
            if not key.isidentifier():
                raise ValueError(f"{key!r} cannot be the name of a parameter in Python")
            json_only(value, f"{key}: ")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """What the task is made with."""
        return dict(self.__pydantic_extra__)


def named_task(value: Any) -> Any:
    """`task = "NAME"` as its table."""
    if not isinstance(value, str | Mapping | JobTaskTable):
        raise ValueError(
            f'{value!r} is not a task: write its name in quotes, or a table [task] with name = "…"'
        )
    return {"name": value} if isinstance(value, str) else value
