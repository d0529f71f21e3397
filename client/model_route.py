"""The way to a model over what changed since one that the silo holds, where that is shorter than the
whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundtable.client.door.model_names import ArtifactName, ModelHop
from roundtable.core.encodings import Encoding, get_encoding
from roundtable.core.model_delta import NAME_LENGTH


@dataclass(frozen=True)
class ModelRoute:
    """The hops that the coordinator offers, encoded as the job says."""

    encoding: Encoding
    hops: Sequence[ModelHop]

    @classmethod
    def of(cls, down: str, hops: Sequence[ModelHop]) -> ModelRoute | None:
        """None where models travel whole."""
        return cls(get_encoding(down), hops) if down != "float32" and hops else None

    def to(self, artifact: ArtifactName, held: Callable[[str], bool]) -> tuple[ModelHop, ...]:
        """The shortest chain from a model that is `held`; none where none is, or the whole model is
        shorter."""
        by_model = {hop.model: hop for hop in self.hops}
        chain: list[ModelHop] = []
        at, size = artifact.digest[:NAME_LENGTH], 0
        while (hop := by_model.pop(at, None)) is not None:
            chain.insert(0, hop)
            size += hop.delta.size
            if size >= artifact.size:
                return ()
            if held(hop.base):
                return tuple(chain)
            at = hop.base
        return ()
