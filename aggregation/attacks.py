"""Attacks of byzantine clients, for simulations: from the honest updates of a round to the hostile ones.

Every attack but label flipping is a function of the honest rows [h, d] and returns [count, d]: the attackers
know everything and act as one, which is the worst case that robust rules are meant for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Literal

import torch

from roundtable.core.errors import ConfigError
from roundtable.core.seeds import torch_generator

Defence = Callable[[torch.Tensor], torch.Tensor]
"""What the server does: all rows [n, d], the hostile ones last, to the aggregate [d]."""


def _repeat(row: torch.Tensor, count: int) -> torch.Tensor:
    return row.expand(count, -1).clone()


def sign_flip(honest: torch.Tensor, count: int, scale: float = 1.0) -> torch.Tensor:
    """−scale · mean of the honest updates."""
    return _repeat(honest.mean(dim=0) * -scale, count)


def a_little_is_enough(honest: torch.Tensor, count: int, z: float | None = None) -> torch.Tensor:
    """mean − z · standard deviation of each coordinate, with n − 1 in the denominator (Baruch et al. 2019,
    algorithm 3). z is `alie_z_max` unless given; a negative one goes the other way."""
    if z is None:
        z = alie_z_max(len(honest) + count, count)
    return _repeat(honest.mean(dim=0) - z * honest.std(dim=0), count)


def alie_z_max(n: int, f: int) -> float:
    """The largest z at which enough honest updates lie farther out than the hostile ones: Φ(z) =
    (n − f − s) / (n − f) with s = ⌊n/2 + 1⌋ − f supporters (Baruch et al. 2019, algorithm 3)."""
    supporters = n // 2 + 1 - f
    below = (n - f - supporters) / (n - f)
    if not 0 < below < 1:
        raise ConfigError(f"ALIE needs 0 < f < n/2 + 1 attackers, not f = {f} of n = {n}")
    return NormalDist().inv_cdf(below)


def inner_product_manipulation(honest: torch.Tensor, count: int, tau: float = 2.0) -> torch.Tensor:
    """−tau · mean of the honest updates (Xie et al. 2020, section 4): a small tau hides it among them."""
    return _repeat(honest.mean(dim=0) * -tau, count)


def mimic(honest: torch.Tensor, count: int, index: int = 0) -> torch.Tensor:
    """All attackers copy one honest client, whose data thereby count too much (Karimireddy et al. 2022,
    section 3.2)."""
    return _repeat(honest[index], count)


def gaussian(honest: torch.Tensor, count: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Independent normal noise with standard deviation `scale`."""
    noise = torch.randn(
        count, honest.shape[1], generator=torch_generator(seed, "gaussian"), dtype=honest.dtype
    )
    return (noise * scale).to(honest.device)


def infinities(honest: torch.Tensor, count: int) -> torch.Tensor:
    """+∞ everywhere."""
    return torch.full((count, honest.shape[1]), math.inf, dtype=honest.dtype, device=honest.device)


def not_a_number(honest: torch.Tensor, count: int) -> torch.Tensor:
    """NaN everywhere."""
    return torch.full((count, honest.shape[1]), math.nan, dtype=honest.dtype, device=honest.device)


def flip_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """classes − 1 − label: what an attacker trains on who poisons data instead of updates."""
    return classes - 1 - labels


STRENGTHS: dict[str, tuple[float, ...]] = {
    "alie": (-8.0, -4.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    "ipm": (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0),
}
"""What a tuned attacker tries: z of ALIE, in both directions, and tau of IPM."""


def tuned(
    honest: torch.Tensor,
    count: int,
    defence: Defence,
    kind: Literal["alie", "ipm"],
    factors: Sequence[float] | None = None,
) -> torch.Tensor:
    """ALIE or IPM by an attacker who knows the defence: tries `factors` for z or tau and takes the one that
    moves the server's aggregate farthest from the honest mean (Shejwalkar & Houmansadr 2021, section 4)."""
    if kind not in STRENGTHS:
        raise ConfigError(f"a tuned attack is one of {', '.join(STRENGTHS)}, not {kind!r}")
    attack = a_little_is_enough if kind == "alie" else inner_product_manipulation
    target = honest.mean(dim=0)
    best, worst_rows = -1.0, attack(honest, count, 0.0)
    for factor in factors or STRENGTHS[kind]:
        rows = attack(honest, count, factor)
        damage = float((defence(torch.cat([honest, rows])) - target).norm())
        if damage > best:
            best, worst_rows = damage, rows
    return worst_rows
