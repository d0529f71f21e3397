"""What a round's updates looked like, and what the rule made of each: for people who have to act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roundtable.aggregation.rows.gram import squared_distances
from roundtable.aggregation.validation import Exclusion
from roundtable.core.paths import AnyPath

_ARRAYS = ("norms", "influence", "contribution", "cosine", "distance")


@dataclass(frozen=True)
class Diagnosis:
    """A round's updates, by client.

    clients: whose updates the rule saw, in order. norms: their lengths. influence: share of each in the
    result, 1/n each in a plain mean, 0 for a rejected one. contribution: share of each in the squared length
    of the result, negative for an update that pulled the other way. cosine, distance: between pairs, [n, n].
    Whatever was not measured is None; coordinate-wise rules are sampled. details: what the rule found.
    """

    rule: str
    clients: tuple[str, ...]
    excluded: tuple[Exclusion, ...] = ()
    clipped: tuple[Exclusion, ...] = ()
    norms: np.ndarray | None = None
    influence: np.ndarray | None = None
    contribution: np.ndarray | None = None
    cosine: np.ndarray | None = None
    distance: np.ndarray | None = None
    details: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Everything as plain lists and numbers, for JSON."""
        values: dict[str, object] = {
            name: None if (array := getattr(self, name)) is None else array.tolist() for name in _ARRAYS
        }
        values["rule"] = self.rule
        values["clients"] = list(self.clients)
        for name in ("excluded", "clipped"):
            values[name] = [vars(exclusion) for exclusion in getattr(self, name)]
        values["details"] = {key: _plain(value) for key, value in self.details.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """The diagnosis that `to_dict` wrote, as a round's record holds it."""
        measured = {
            name: None if values.get(name) is None else np.array(values[name], dtype=np.float64)
            for name in _ARRAYS
        }
        left_out, clipped = (
            tuple(Exclusion(**fault) for fault in values.get(name, ())) for name in ("excluded", "clipped")
        )
        details = dict(values.get("details", {}))
        clients = tuple(values["clients"])
        return cls(values["rule"], clients, left_out, clipped, details=details, **measured)

    def verdicts(self) -> list[tuple[str, str]]:
        """`(client, verdict)`: used, left out and why, rejected, or weighed down and by how much."""
        rows = [(exclusion.client, f"left out: {exclusion.message}") for exclusion in self.excluded]
        clipped: dict[str, str] = {}
        for exclusion in self.clipped:
            clipped[exclusion.client] = "; ".join(
                filter(None, (clipped.get(exclusion.client), exclusion.message))
            )
        fair = 1 / max(len(self.clients), 1)
        for index, client in enumerate(self.clients):
            share = None if self.influence is None else float(self.influence[index])
            if share is None or share >= 0.9 * fair:
                verdict = "used"
            elif share <= 1e-12:
                verdict = f"rejected by {self.rule}"
            else:
                verdict = f"weighed down by {self.rule} to {share / fair:.0%} of an equal share"
            note = f"; clipped: {clipped[client]}" if client in clipped else ""
            rows.append((client, verdict + note))
        return sorted(rows)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of text, for a terminal; of cosines and distances the median over all others."""
        header = ["silo", "norm", "cosine", "distance", "influence", "contribution", "verdict"]
        cosine, distance = _to_others(self.cosine), _to_others(self.distance)
        index = {client: position for position, client in enumerate(self.clients)}

        def cell(values: np.ndarray | None, client: str, style: str) -> str:
            return format(values[index[client]], style) if values is not None and client in index else "–"

        return header, [
            [
                client,
                cell(self.norms, client, ".4g"),
                cell(cosine, client, ".2f"),
                cell(distance, client, ".4g"),
                cell(self.influence, client, ".1%"),
                cell(self.contribution, client, ".1%"),
                verdict,
            ]
            for client, verdict in self.verdicts()
        ]

    def plot(self, path: AnyPath) -> None:
        """Draws cosines and distances of all pairs as heat maps into a PNG, SVG or PDF file."""
        if self.cosine is None or self.distance is None:
            raise ValueError(
                "this diagnosis holds no pairwise values; ask aggregate for them with diagnose=True"
            )
        from matplotlib.figure import Figure

        figure = Figure(
            figsize=(5 + 0.5 * len(self.clients), 2 + 0.25 * len(self.clients)), layout="constrained"
        )
        panels = figure.subplots(1, 2)
        pictures = (
            (self.cosine, "cosine", "coolwarm", -1.0, 1.0),
            (self.distance, "distance", "viridis", 0.0, None),
        )
        for panel, (values, title, colours, low, high) in zip(panels, pictures, strict=True):
            image = panel.imshow(values, cmap=colours, vmin=low, vmax=high)
            panel.set_title(f"{title} of updates")
            panel.set_xticks(range(len(self.clients)), self.clients, rotation=90)
            panel.set_yticks(range(len(self.clients)), self.clients)
            figure.colorbar(image, ax=panel, shrink=0.8)
        figure.savefig(path)


def pairwise(products: np.ndarray) -> dict[str, np.ndarray]:
    """norms [n], cosine [n, n] and distance [n, n] from the Gram matrix; the cosine of a zero row is 0."""
    norms = np.sqrt(np.diagonal(products))
    lengths = np.outer(norms, norms)
    cosine = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    distance = np.sqrt(squared_distances(products))
    return {"norms": norms, "cosine": np.clip(cosine, -1.0, 1.0), "distance": distance}


def contributions(products: np.ndarray, influence: np.ndarray) -> np.ndarray:
    """influence[i] ⟨row i, a⟩ / ‖a‖² for the result a = Σ_i influence[i] · row i, [n]; they sum to 1."""
    along = products @ influence
    length = float(influence @ along)
    return influence * along / length if length > 0 else np.zeros_like(influence)


def _to_others(pairs: np.ndarray | None) -> np.ndarray | None:
    """The median of each row without its diagonal, [n]; None where it was not measured or has one row."""
    if pairs is None or len(pairs) < 2:
        return None
    others = pairs[~np.eye(len(pairs), dtype=bool)].reshape(len(pairs), -1)
    return np.asarray(np.median(others, axis=1))


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
