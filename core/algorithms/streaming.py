"""Streaming DiLoCo: a round sends one fragment of the model, and silos go on from their own weights of the
others (Douillard et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from blake3 import blake3
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition, Sent
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.encodings.composed.fragments import MOST_FRAGMENTS, Fragments, FragmentTable
from roundtable.core.toml_tables import Finite

_OWN, _SEEN, _ROUND = "own", "seen", "round"


class StreamingTable(AlgorithmTable):
    """`[algorithm]` with name = "streaming"."""

    hints: ClassVar[Mapping[str, str]] = {
        **AlgorithmTable.hints,
        **dict.fromkeys(
            ("overlap", "tau", "delay"),
            "there is no overlap: a round's fragment is there before the next round begins, and is applied "
            "without delay (τ = 0); leave it out",
        ),
        "alpha": "the paper's α is `mixing`",
    }

    fragments: int = Field(
        ge=1, le=MOST_FRAGMENTS, description="P, fragments of the model: a round sends one, in turn"
    )
    order: Literal["strided", "sequential"] = Field(
        "strided", description="which layers are a fragment: each P-th one, or neighbours"
    )
    mixing: Finite = Field(
        0.0, ge=0, lt=1, description="α, what a silo keeps of its own weights where a fragment comes back"
    )

    @property
    def cut(self) -> FragmentTable:
        """How the model is cut."""
        return FragmentTable(count=self.fragments, order=self.order)

    @override
    def stage(self) -> str:
        return self.cut.stage


class Streaming(ClientAlgorithm):
    """Algorithm 2 with τ = 0. In round t fragment p = (t − 1) mod P is due: a silo sends θ_p − R_p of its own
    weights θ and the global ones R, the server moves R_p by its optimizer, and when the silo trains next
    θ_p ← α θ_p + (1 − α) R_p. The rest of θ stays with it. A round has H/P steps, so a fragment is due every
    H.

    What has come back is seen by the global weights themselves, which differ from those that the silo saw
    last: so rounds that made no model or that it missed need no account. A silo that was away takes what has
    changed meanwhile as it is. P = 1 and α = 0 are DiLoCo.
    """

    Table = StreamingTable
    keeps = "its own weights of the model"
    composition = Composition(
        own_optimizers=True,
        schedule=True,
        masked=False,
        averaged_buffers=False,
        reason="a round sends a fragment of weights that have gone on at a silo for many rounds, and masks "
        "and bounds are for updates of one round",
    )

    @override
    @contextmanager
    def while_training(self, round: ClientRound, module: nn.Module) -> Iterator[None]:
        """Trains from θ in the place of R."""
        put(module, round.layout, self._start(round))
        yield
        round.scratch[_OWN] = round.layout.flatten(module, torch.empty_like(round.vector))

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        fragments = self._fragments(round)
        sent = torch.zeros_like(update)
        for place in fragments.places(fragments.due(round.context.round)):
            sent[place] = update[place]
        kept = {
            _OWN: round.scratch.pop(_OWN),
            _SEEN: self._marks(round),
            _ROUND: torch.tensor(round.context.round),
        }
        return Sent(sent, {}, kept)

    def _start(self, round: ClientRound) -> Tensor:
        """θ [d] as the silo begins the round with it."""
        if _OWN not in round.kept:
            return round.vector
        fragments, own = self._fragments(round), round.kept[_OWN].clone()
        away = int(round.kept[_ROUND]) != round.context.round - 1
        share = 0.0 if away else self._table.mixing
        for number in torch.nonzero(self._marks(round) != round.kept[_SEEN]).flatten().tolist():
            for place in fragments.places(number):
                own[place] = torch.lerp(round.vector[place], own[place], share)
        return own

    def _marks(self, round: ClientRound) -> Tensor:
        """Of each fragment of R 64 bits that tell it from another, int64 [P]."""
        fragments, marks = self._fragments(round), []
        for number in range(self._table.fragments):
            hasher = blake3()
            for place in fragments.places(number):
                hasher.update(round.vector[place].contiguous().numpy().data.cast("B"))
            marks.append(int.from_bytes(hasher.digest(8), "little", signed=True))
        return torch.tensor(marks)

    def _fragments(self, round: ClientRound) -> Fragments:
        return Fragments(self._table.cut, round.layout.averaged)

    @property
    def _table(self) -> StreamingTable:
        assert isinstance(self.table, StreamingTable)
        return self.table
