"""The regions of a simulation: who is in which, what each trains from, and what they add up to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from roundtable.aggregation import AggregationConfig
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.engine import Mean, NumberedNames, RegionModel, Rows, sum_by_region
from roundtable.engine.validation.sum_composition import OWN_MODELS, check_sums
from roundtable.simulation.backend import World
from roundtable.simulation.world.config import RegionsTable, regions_table

NEEDS_SUMS = "simulation.regions: a region sends one sum, and"


class Regions:
    """Clients by region, in the order of their numbers; every `rounds` rounds the models become one."""

    def __init__(self, table: RegionsTable, names: NumberedNames, rounds: int) -> None:
        self._client_names = names
        self.sizes = dict(table.members) or _equal(len(names), table.count or 1)
        self.rounds = rounds
        self._names = list(self.sizes)
        self._ends = list(accumulate(self.sizes.values()))

    @classmethod
    def of(cls, world: World) -> Regions | None:
        """The job's regions; None where it has none."""
        table = regions_table(world.job)
        return None if table is None else cls(table, world.names, world.job.regions.rounds)

    def region_of(self, index: int) -> str:
        """The region of a client by its number."""
        return self._names[bisect_right(self._ends, index)]

    def starts(
        self, model: Tensor, held: Mapping[str, RegionModel], indices: Sequence[int]
    ) -> Iterable[tuple[Tensor, Sequence[int]]]:
        """The vectors that clients train from, each with those who do: their region's, or the global one."""
        if not held:
            return [(model, indices)]
        groups: dict[str, list[int]] = {}
        for index in indices:
            groups.setdefault(self.region_of(index), []).append(index)
        return [(held[region].vector, here) for region, here in groups.items()]

    def mean(
        self,
        config: AggregationConfig,
        rows: Rows,
        model: Tensor,
        held: Mapping[str, RegionModel],
        round: int,
    ) -> Mean:
        """What round `round` (from 1) makes of the clients' updates; errors as of `sum_by_region`."""
        members: dict[str, list[str]] = {region: [] for region in self._names}
        for update in rows.updates:
            members[self.region_of(self._client_names.index_of(update.client))].append(update.client)
        return sum_by_region(config, rows, members, model, held, goes_up=round % self.rounds == 0)

    def described(self) -> str:
        """For people, before round 1."""
        few = ", ".join(f"{name} ({size})" for name, size in list(self.sizes.items())[:5])
        more = f" and {len(self.sizes) - 5} more" if len(self.sizes) > 5 else ""
        said = f"clients are in {len(self.sizes)} regions: {few}{more}; each adds its clients' updates up"
        if self.rounds == 1:
            return said
        return (
            f"{said}, and every {self.rounds} rounds the regions' models become one; what is measured "
            "between is their mean, which no client has"
        )


def _equal(clients: int, count: int) -> dict[str, int]:
    return {f"region-{n + 1}": clients // count + (n < clients % count) for n in range(count)}


def check_regions(job: JobConfig, algorithm: ClientAlgorithm) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what cannot be made of sums by region."""
    table = regions_table(job)
    if table is None and job.regions.sum:
        raise ConfigError(
            "regions.sum: which client is behind which relay a simulation is told by [simulation.regions], "
            "and there is none; add it, or leave regions.sum out"
        )
    if table is None:
        return
    check_sums(job, NEEDS_SUMS)
    if job.simulation.attack.get("name", "label_flip") != "label_flip":
        raise ConfigError(
            f"{NEEDS_SUMS} simulation.attack replaces single updates, knowing all others; label_flip alone "
            "goes with regions"
        )
    if job.regions.rounds > 1 and job.cohort.on_failure == "skip":
        raise ConfigError(
            f"{OWN_MODELS} a coordinator that goes on after a failed round gives up all since the last one "
            'that went up, which is not simulated; set cohort.on_failure = "pause"',
            key=("cohort", "on_failure"),
        )
    server = algorithm.server()
    if server is not None and server.merges():
        raise ConfigError(
            f"{NEEDS_SUMS} algorithm.name = {job.algorithm.name!r} merges the factors of single clients; "
            "leave out the regions"
        )
