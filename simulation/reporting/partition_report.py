"""Who has what: a partition in numbers, in words and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from roundtable.core.foreign_text import printable
from roundtable.core.paths import AnyPath
from roundtable.simulation.reporting.notebook import picture
from roundtable.simulation.reporting.plots import new_figure
from roundtable.simulation.world.partition import make_partition

_BARS = 40
_ROWS = 12


@dataclass(frozen=True)
class PartitionReport:
    """How many rows of each label each client has: `counts` is [clients, labels], `labels` their names;
    `names` are the clients' where the partition names them, else they have numbers."""

    counts: np.ndarray
    labels: tuple[str, ...]
    names: tuple[str, ...] | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each client."""
        sizes: np.ndarray = self.counts.sum(axis=1)
        return sizes

    @property
    def heterogeneity(self) -> float:
        """Mean total variation distance between a client's mixture of labels and everyone's: 0 for equal
        mixtures, near 1 where each client has a label of its own. Empty clients are left out."""
        present = self.counts[self.sizes > 0]
        own = present / present.sum(axis=1, keepdims=True)
        whole = self.counts.sum(axis=0) / self.counts.sum()
        return float(0.5 * np.abs(own - whole).sum(axis=1).mean())

    @override
    def __str__(self) -> str:
        sizes, kinds = self.sizes, (self.counts > 0).sum(axis=1)
        lines = [
            f"{len(sizes)} clients, {sizes.sum()} rows, {len(self.labels)} labels",
            f"rows a client: {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}",
            f"labels a client: {kinds.min()} to {kinds.max()}, median {np.median(kinds):g}",
            f"distance from the whole mixture (0 to 1): {self.heterogeneity:.3f}",
        ]
        if len(self.labels) <= _ROWS:
            names = ["client", *self._names(_ROWS)]
            wide = max(map(len, names))
            cells = [[label[:7] for label in self.labels], *self.counts[:_ROWS]]
            lines += [
                f"{name:>{wide}}  " + " ".join(f"{cell:>7}" for cell in row)
                for name, row in zip(names, cells, strict=True)
            ]
            if len(sizes) > _ROWS:
                lines.append(f"… and {len(sizes) - _ROWS} more clients")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return picture(self.plot, "labels of each client, and sizes") + f"<pre>{escape(str(self))}</pre>"

    def _names(self, most: int) -> list[str]:
        """Of the first clients."""
        shown = range(len(self.counts))[:most]
        return [printable(self.names[index], 20) if self.names else str(index) for index in shown]

    def plot(self, path: AnyPath | None = None) -> Any:
        """A matplotlib Figure: labels of each client (of the first 40), and all clients' sizes in order.

        Raises ResourceError where matplotlib is not installed.
        """
        figure, (left, right) = new_figure(2)
        shown = self.counts[:_BARS]
        base = np.zeros(len(shown))
        for place, label in enumerate(self.labels[:_BARS]):
            left.bar(range(len(shown)), shown[:, place], bottom=base, width=0.9, label=label)
            base += shown[:, place]
        left.set_xlabel("client")
        if self.names:
            left.set_xticks(range(len(shown)), self._names(_BARS), rotation=90, fontsize="xx-small")
        left.set_ylabel("rows")
        if len(self.labels) <= _ROWS:
            left.legend(fontsize="xx-small", ncols=2)
        right.plot(np.sort(self.sizes)[::-1])
        right.set_xlabel("clients, largest first")
        right.set_ylabel("rows")
        right.set_ylim(bottom=0)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def describe_partition(
    spec: Mapping[str, Any],
    labels: np.ndarray | Tensor | list[Any],
    clients: int,
    seed: int = 0,
    folder: AnyPath | None = None,
) -> PartitionReport:
    """What a `[simulation.partition]` table does to these labels: the split of a job with this seed.

    `folder` is the job's, for a partition in a file. Raises ConfigError as the job would.
    """
    values = np.asarray(labels)
    assignment = make_partition(spec, seed, folder).assignment(values, clients)
    kinds, codes = np.unique(values, return_inverse=True)
    owners = np.repeat(np.arange(clients), assignment.sizes)
    counts = np.zeros((clients, len(kinds)), dtype=np.int64)
    np.add.at(counts, (owners, codes.reshape(-1)[assignment.rows]), 1)
    return PartitionReport(counts, tuple(str(kind) for kind in kinds.tolist()), assignment.names)
