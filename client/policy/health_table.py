"""`[[health]]` of agent.toml: checks of the silo's own, without which it takes no new round."""

from __future__ import annotations

from pydantic import Field, model_validator

from roundtable.core.toml_tables import Name, Names, Seconds, Table


class HealthTable(Table):
    """One `[[health]]`: a command, or an installed function, that says whether the silo is ready."""

    name: Name = Field(description="operators are told it with the reason")
    command: Names = Field(
        (), max_length=50, description="program and arguments, without a shell; JSON in, JSON out"
    )
    entry: str = Field(
        "", max_length=100, description="instead: an entry point of the group roundtable.health_checks"
    )
    every: Seconds = Field(300.0, ge=1, le=86400, description="how often it runs")
    timeout: Seconds = Field(30.0, gt=0, le=600, description="one that takes longer has failed")
    before_work: bool = Field(True, description="also before each step that the silo is asked for")

    @model_validator(mode="after")
    def _one_way(self) -> HealthTable:
        if bool(self.command) == bool(self.entry):
            raise ValueError("say what to run: either command or entry")
        return self
