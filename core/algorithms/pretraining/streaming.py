"""Streaming DiLoCo: a round sends one fragment of the model, and silos go on from their own weights of the
others (Douillard et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from blake3 import blake3
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ENDS, ClientAlgorithm, ClientRound, Composition, Sent
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.encodings.composed.fragments import MOST_FRAGMENTS, Fragments, FragmentTable
from roundtable.core.toml_tables import Finite

_OWN, _SEEN, _ROUND = "own", "seen", "round"


class StreamingTable(AlgorithmTable):
    """`[algorithm]` with name = "streaming"."""

    hints: ClassVar[Mapping[str, str]] = {
        **AlgorithmTable.hints,
        "delay": "the paper's τ is 0, or as many steps as a round has: `overlap = true`",
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

    overlap: bool = Field(
        False,
        description="a fragment comes back one round later, the paper's τ being a round's steps, so that "
        "silos train on while it is on its way",
    )

    @model_validator(mode="after")
    def _comes_back_in_time(self) -> Self:
        if self.overlap and self.fragments == 1:
            raise ValueError(
                "overlap = true and fragments = 1: the one fragment would be due again before it has come "
                'back; set more fragments, or name = "eager", which sends the whole model'
            )
        return self

    @property
    def cut(self) -> FragmentTable:
        """How the model is cut."""
        return FragmentTable(count=self.fragments, order=self.order)

    @override
    def stage(self) -> str:
        return self.cut.stage


class Streaming(ClientAlgorithm):
    """Algorithm 2. In round t fragment p = (t − 1) mod P is due: a silo sends θ_p − R_p of its own weights θ
    and the global ones R, the server moves R_p by its optimizer, and when the silo trains next
    θ_p ← α θ_p + (1 − α) R_p. The rest of θ stays with it. A round has H/P steps, so a fragment is due every
    H.

    That is τ = 0. With `overlap` it is H/P: the silo trains round t + 1 from its own θ, and takes what round
    t made of p at that round's end. R_p as it was sent from is still there, since P ≥ 2.

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
    def begins(self, round: ClientRound) -> Tensor:
        """θ, for which with `overlap` R need not be there yet."""
        if _OWN not in round.kept:
            return round.vector
        own = round.kept[_OWN]
        if self._table.overlap and self._went_on(round):
            return own
        return self._merged(round, own.clone(), self._marks(round))

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        fragments, marks = self._fragments(round), self._marks(round)
        due = fragments.due(round.context.round)
        for number in range(self._table.fragments):
            for place in fragments.places(number) if number != due else ():
                update[place] = 0.0
        own = round.scratch[ENDS]
        if self._table.overlap and self._went_on(round):
            own = self._merged(round, own, marks)
        return Sent(update, {}, {_OWN: own, _SEEN: marks, _ROUND: torch.tensor(round.context.round)})

    @override
    def goes_ahead(self) -> bool:
        return self._table.overlap

    def _merged(self, round: ClientRound, merged: Tensor, marks: Tensor) -> Tensor:
        """θ [d] of `merged` and the fragments of R, marked so, that are others than the silo has seen; in its
        place."""
        fragments = self._fragments(round)
        share = self._table.mixing if self._went_on(round) else 0.0
        for number in torch.nonzero(marks != round.kept[_SEEN]).flatten().tolist():
            for place in fragments.places(number):
                merged[place] = torch.lerp(round.vector[place], merged[place], share)
        return merged

    def _went_on(self, round: ClientRound) -> bool:
        """Whether the silo was in the round before."""
        return _ROUND in round.kept and int(round.kept[_ROUND]) == round.context.round - 1

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
