"""What a rank is told by whoever starts it: torchrun's variables, checked before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roundtable.core.errors import ConfigError

_STARTED = (
    "torchrun gives it to each rank: start ranks with deploy/cluster/torchrun.sh, or with slurm.sbatch or "
    "kubernetes.yaml beside it"
)


@dataclass(frozen=True)
class LaunchVariables:
    """A rank's place: of `world` ranks, and on its own node; they meet at `address`, `port`."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> LaunchVariables:
        """Raises ConfigError, naming the variable, for one that is missing or no number that it can be."""
        world = _number(environment, "WORLD_SIZE", 1)
        nearby = world
        if "LOCAL_WORLD_SIZE" in environment:
            nearby = _number(environment, "LOCAL_WORLD_SIZE", 1, world)
        return cls(
            rank=_number(environment, "RANK", 0, world - 1),
            world=world,
            local_rank=_number(environment, "LOCAL_RANK", 0, nearby - 1),
            address=_given(environment, "MASTER_ADDR"),
            port=_number(environment, "MASTER_PORT", 1, (1 << 16) - 1),
        )

    def device_of(self, count: int) -> int:
        """This rank's of so many devices of its node. Raises ConfigError where there are fewer."""
        if self.local_rank < count:
            return self.local_rank
        raise ConfigError(
            f"LOCAL_RANK = {self.local_rank}: this node shows {count} CUDA devices; start at most so many "
            "ranks on it (DEVICES of deploy/cluster/torchrun.sh), or give it more (CUDA_VISIBLE_DEVICES)"
        )


def _given(environment: Mapping[str, str], name: str) -> str:
    if text := environment.get(name, "").strip():
        return text
    raise ConfigError(f"{name} is not set; {_STARTED}")


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = _given(environment, name)
    if text.isascii() and text.isdigit() and len(text) < 10:
        number = int(text)
        if number >= least and (most is None or number <= most):
            return number
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ConfigError(f"{name} = {text[:40]!r} is no whole number {bounds}; {_STARTED}")
