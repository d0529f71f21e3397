"""What was measured: one line of JSON for each run of a cell under a seed, appended as it ends."""

from __future__ import annotations

import fcntl
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from roundtable.core.errors import ConfigError

from .cells import CellTable, GroupFile


@dataclass(frozen=True)
class Outcome:
    """One run; `settings` is the digest of what was run."""

    cell: str
    settings: str
    seed: int
    value: float
    parts: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A cell over its seeds; deviations are of the population, as in FLamby's table."""

    seeds: int
    mean: float
    deviation: float
    parts: Mapping[str, float]
    part_deviations: Mapping[str, float]
    seconds: float


class Results:
    """The outcomes of a folder, a file for each group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str, group: GroupFile, cell: CellTable) -> dict[int, Outcome]:
        """By seed, those with the cell's settings of today."""
        digest = group.digest(cell)
        return {o.seed: o for o in self._read(name) if (o.cell, o.settings) == (cell.id, digest)}

    def measured(self, name: str, group: GroupFile, cell: CellTable) -> Measured | None:
        """Over the first seeds that the cell needs, or those that are there; None without any."""
        first = group.group.first_seed
        wanted = range(first, first + group.seeds(cell))
        found = [o for seed, o in sorted(self.of(name, group, cell).items()) if seed in wanted]
        if not found:
            return None
        values = [outcome.value for outcome in found]
        by_part = {part: [outcome.parts[part] for outcome in found] for part in found[0].parts}
        return Measured(
            len(found),
            statistics.fmean(values),
            statistics.pstdev(values),
            {part: statistics.fmean(single) for part, single in by_part.items()},
            {part: statistics.pstdev(single) for part, single in by_part.items()},
            statistics.fmean(outcome.seconds for outcome in found),
        )

    def add(self, name: str, outcome: Outcome) -> None:
        """Appends one line. Raises ValueError for a figure that is none."""
        if not all(map(math.isfinite, (outcome.value, *outcome.parts.values()))):
            raise ValueError(
                f"{outcome.cell}, seed {outcome.seed}: measured {outcome.value}, {outcome.parts}"
            )
        with self._file(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """While no other process runs cells of the group into the folder. Raises ConfigError if one does.

        A line that a killed process left unfinished is cut off: its run is done again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f".{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process runs {name} into {self.folder}: wait for it, or give another --out"
                ) from None
            file = self._file(name)
            if file.exists() and not (text := file.read_text(encoding="utf-8")).endswith("\n"):
                file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
            yield

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _read(self, name: str) -> Iterator[Outcome]:
        file = self._file(name)
        if not file.exists():
            return
        lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                yield Outcome(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{file}:{number}: no outcome of a run: {error}; delete the line") from None
