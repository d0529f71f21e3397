"""Federated quadratics, of which everything is known: f_i(x) = ½ xᵀ H_i x + g_iᵀ x.

Each H_i is diagonal with μ in one half of its places and L in the other. The g_i, the gradients at 0, have
the mean 0: so the mean of the f_i has its minimum at 0, and a model's length is its distance from there. All
of it is set in [simulation.data]:

    mu, L     the curvatures
    spread    ζ, the root of the mean of ‖g_i‖² over clients; 0 unless set, and then all H_i are the same.
              Else they differ, and g_i is large where H_i is, the worst that can be for averaging
    sigma     each gradient has noise of variance sigma² (the sum over all places)
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

import roundtable as rt

DIMENSION = 1024
# So many vectors of noise that a client draws from, centred and of the stated variance.
NOISES = 256
DEFAULTS = {"mu": 0.5, "L": 1.0, "spread": 0.0, "sigma": 0.0}


class Point(nn.Module):
    """The model."""

    def __init__(self, distance: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((DIMENSION,), distance / math.sqrt(DIMENSION)))

    def forward(self) -> Tensor:
        return self.x


class Quadratics(rt.Task):
    """Begins at a distance from the minimum."""

    def __init__(self, distance: float = 1.0) -> None:
        self._distance = distance

    def model(self) -> nn.Module:
        return Point(self._distance)

    def data(self, site: rt.Site) -> tuple[tuple[Tensor, Tensor], None]:
        given = {**DEFAULTS, **site.options}
        clients = range(site.count) if given["spread"] else [0] * site.count
        curves = np.stack([curvature(client, given["mu"], given["L"]) for client in clients])
        curve, pull = curves[site.index], gradients(curves, given["spread"])[site.index]
        noise = np.random.default_rng(site.index).standard_normal((NOISES, DIMENSION))
        noise = (noise - noise.mean(0)) / noise.std(0) * given["sigma"] / math.sqrt(DIMENSION)
        rows = (np.broadcast_to(curve, noise.shape), pull + noise)
        return (torch.tensor(rows[0], dtype=torch.float32), torch.tensor(rows[1], dtype=torch.float32)), None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        curve, pull = batch
        x = model()
        return (0.5 * curve * x * x + pull * x).sum(1).mean()


def curvature(client: int, mu: float, largest: float) -> np.ndarray:
    """The diagonal of H_i [d]: μ and L in an order of the client's own, in each half the same number."""
    return np.where(np.arange(DIMENSION) >> (client % 10) & 1, largest, mu)


def gradients(curves: np.ndarray, spread: float) -> np.ndarray:
    """g_i [clients, d] with the mean 0, and `spread` as the root of their mean square length."""
    apart = curves - curves.mean(0)
    length = math.sqrt((apart**2).sum(1).mean())
    return apart * (spread / length) if length > 0 else apart
