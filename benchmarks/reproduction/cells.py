"""The published figures, as data: `cells/GROUP.toml`, checked when it is read.

A group is one publication's table: what all its cells share, its cells, and orders between cells where the
publication shows curves and prints no figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.config import JobConfig, read_job
from roundtable.core.errors import ConfigError
from roundtable.core.toml import TomlDocument, read_toml, validate
from roundtable.core.toml_tables import Finite, Open, Table, as_tuple

HERE = Path(__file__).parent
CELLS = HERE / "cells"
Evidence = Literal["seen", "recalled"]


class GroupTable(Table):
    """`[group]`: one publication, and what its cells share."""

    title: str
    about: str = Field(description="what is trained on what, in words for the page")
    source: str = Field(description="where the figures stand")
    evidence: Evidence = Field(description="whether they were read there, or are from memory of the paper")
    deviation_over: str = Field(description="what their deviation is over, and how many seeds there are")
    parts: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        (), description="further figures of each run, in the order of the page"
    )
    unit: Literal["accuracy", "loss", "rounds", "points²"] = "accuracy"
    first_seed: int = Field(0, ge=0, description="seeds are counted from here")
    seeds: int = Field(20, ge=1, description="seeds of ours that a cell needs before it is judged")
    data: str = Field("", description="data that have to be given: the name of a command-line option")
    job: Open = Field(description="the job of each cell, before its own keys")


class CellTable(Table):
    """`[[cell]]`: one figure."""

    id: str = Field(pattern=r"^[a-z0-9_.]+(/[a-z0-9_.]+)+$")
    method: str
    value: Finite | None = Field(None, description="as published; none for what is only shown beside it")
    deviation: Finite | None = Field(None, ge=0)
    by_part: Annotated[tuple[Finite, ...], BeforeValidator(as_tuple)] = ()
    by_part_deviation: Annotated[tuple[Finite, ...], BeforeValidator(as_tuple)] = Field(
        (), description="of each part; with them each part is judged like the cell itself"
    )
    judged: bool = Field(True, description="whether ours has to agree")
    found: Open = Field(
        default_factory=dict, description="by part: what was found out about one that differs, for the page"
    )
    note: str = Field("", description="of the page; why it is not judged")
    seeds: int | None = Field(None, ge=1, description="instead of the group's")
    options: Open = Field(default_factory=dict, description="of what runs it, beside the job")
    job: Open = Field(default_factory=dict, description="keys of its own")

    @model_validator(mode="after")
    def _judged_by_something(self) -> CellTable:
        if self.judged and (self.value is None or self.deviation is None):
            raise ValueError(f"cell {self.id}: judged = true needs value and deviation")
        if not self.judged and not self.note:
            raise ValueError(f"cell {self.id}: judged = false needs a note that says why")
        return self


class OrderTable(Table):
    """`[[order]]`: of two cells the first has the smaller figure, in the mean over the same seeds."""

    claim: str
    smaller: str
    larger: str
    share: Finite = Field(1.0, gt=0, description="the smaller figure is below this share of the larger")


class GroupFile(Table):
    """A whole file of `cells/`."""

    group: GroupTable
    cell: Annotated[tuple[CellTable, ...], BeforeValidator(as_tuple)]
    order: Annotated[tuple[OrderTable, ...], BeforeValidator(as_tuple)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> GroupFile:
        ids = [cell.id for cell in self.cell]
        if doubled := {name for name in ids if ids.count(name) > 1}:
            raise ValueError(f"two cells of one id: {', '.join(sorted(doubled))}")
        for cell in self.cell:
            for name in ("by_part", "by_part_deviation"):
                if (given := getattr(cell, name)) and len(given) != len(self.group.parts):
                    raise ValueError(
                        f"cell {cell.id}: {name} has {len(given)} of {len(self.group.parts)} parts"
                    )
            if cell.by_part_deviation and (not cell.by_part or min(cell.by_part_deviation) < 0):
                raise ValueError(f"cell {cell.id}: by_part_deviation needs by_part, and figures from 0")
            if unknown := cell.found.keys() - set(self.group.parts):
                raise ValueError(
                    f"cell {cell.id}: found names {', '.join(sorted(unknown))}, which is no part"
                )
        for order in self.order:
            if unknown := {order.smaller, order.larger} - set(ids):
                raise ValueError(f"order {order.claim!r}: there is no cell {', '.join(sorted(unknown))}")
        return self

    def job(self, cell: CellTable, seed: int) -> JobConfig:
        """The job of a cell under a seed. Raises ConfigError that names the cell."""
        values = merged(merged(self.group.job, cell.job), {"seed": seed})
        return read_job(TomlDocument(values, cell.id, ""), HERE)

    def digest(self, cell: CellTable) -> str:
        """Of all that decides what a run of the cell is: results of other settings are none of it."""
        settings = [merged(self.group.job, cell.job), cell.options]
        return blake3(json.dumps(settings, sort_keys=True).encode()).hexdigest(8)

    def seeds(self, cell: CellTable) -> int:
        """How many seeds the cell needs."""
        return cell.seeds or self.group.seeds


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def groups() -> dict[str, GroupFile]:
    """All groups by name. Raises ConfigError with file, line and key of each mistake."""
    found = {}
    for path in sorted(CELLS.glob("*.toml")):
        group = validate(GroupFile, read_toml(path))
        for cell in group.cell:
            if not cell.id.startswith(f"{path.stem}/"):
                raise ConfigError(f"{path}: cell {cell.id!r} must begin with {path.stem}/")
        found[path.stem] = group
    return found


def chosen(known: Mapping[str, GroupFile], only: list[str]) -> Iterator[tuple[str, GroupFile, CellTable]]:
    """The cells that `only` names by group, by the beginning of an id or by the id; all without it."""
    for name in only:
        every = [cell.id for group in known.values() for cell in group.cell]
        if not any(_named(cell, name) for cell in every):
            raise ConfigError(f"--only {name}: no such group or cell; groups are {', '.join(known)}")
    for title, group in known.items():
        for cell in group.cell:
            if not only or any(_named(cell.id, name) for name in only):
                yield title, group, cell


def _named(cell: str, name: str) -> bool:
    return cell == name or cell.startswith(name.rstrip("/") + "/")
