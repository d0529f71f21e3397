"""How a job runs where nothing is distributed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from roundtable.core.toml_tables import Open, Table, as_tuple


class SimulationTable(Table):
    """`[simulation]`: what only a simulation needs; ignored when the job is submitted."""

    clients: int = Field(10, ge=1, description="clients in the population")
    partition: Open = Field(
        default_factory=lambda: {"name": "iid"},
        description="how a data set is split among them, as a table with a name",
    )
    data: Open = Field(default_factory=dict, description="what a silo's [data] table would hold")
    backend: Literal["auto", "sequential", "vectorised", "stacked", "processes", "ray"] = Field(
        "auto", description="how clients run"
    )
    workers: int | None = Field(None, ge=1, description="processes; default: the cores there are")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what clients train on")
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="what losses and gradients are computed in; weights are float32 in either case"
    )
    masking: Literal["real", "fast"] = Field(
        "real", description="secure aggregation: run its protocol, or only compute the sum that it gives"
    )
    devices: Open = Field(
        default_factory=dict, description="speed, bandwidth and availability of devices, in virtual time"
    )
    dropouts: Open = Field(default_factory=dict, description="dropouts and crashes to draw")
    metadata: Open = Field(
        default_factory=dict,
        description="what clients declare, as silos do in [metadata]: a value, a list of values, or values "
        "with their shares",
    )
    capacity: Open = Field(
        default_factory=dict, description="gpus, memory and disk of clients, in the same three forms"
    )
    declare: Annotated[tuple[Literal["examples", "labels"], ...], BeforeValidator(as_tuple)] = Field(
        (), description="what clients declare of their data: examples (how many), labels (how many of each)"
    )
    attack: Open = Field(default_factory=dict, description="byzantine clients: name, count and parameters")
    regions: Open = Field(
        default_factory=dict,
        description="regions that add updates up: count or members",
    )
    test_every: int = Field(
        1,
        ge=0,
        description="rounds between measurements on the task's test_data, the last included; 0 for never",
    )
    root_examples: int = Field(
        100, ge=1, description="examples that the coordinator trusts, for a rule such as fltrust"
    )

    @property
    def splits(self) -> bool:
        """Whether the job says itself how a data set is split; evenly and at random is nobody's wish."""
        return self.partition != {"name": "iid"}
