"""What passes from round to round beside the model, and its form as an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from roundtable.aggregation import OptimizerState
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.models import Model, model_head, tensor_blocks
from roundtable.engine.combining.received import RegionModel
from roundtable.engine.combining.server_step import initial_optimizer_state, sent_size
from roundtable.engine.validation.round_noise import CorrelatedRounds, FreshNoise
from roundtable.engine.validation.round_plan import Plan


@dataclass(frozen=True)
class ServerState:
    """The server optimizer's vectors and counters, and what the job's rule or noise goes on from.

    previous: the last aggregate [d], where the rule starts from it. clip_norm: where it adapts. drawn: of
    noise that is correlated over rounds what later draws depend on, [kept, d], with `draws` the number of
    rounds that had theirs. exact: the model without what encoding the way down has left out [d], where a job
    encodes it. estimate: with EF21 the mean of what all silos have sent so far [d], and `silos` who they are.
    past: the sum of each client's updates so far [d], where the rule compares them. regions: the models that
    regions have between two rounds that go up.
    """

    optimizer: OptimizerState = field(default_factory=OptimizerState)
    previous: Tensor | None = None
    clip_norm: float | None = None
    drawn: Tensor | None = None
    draws: int = 0
    past: Mapping[str, Tensor] = field(default_factory=dict)
    exact: Tensor | None = None
    estimate: Tensor | None = None
    silos: tuple[str, ...] = ()
    regions: Mapping[str, RegionModel] = field(default_factory=dict)

    def blocks(self) -> Iterator[bytes | memoryview]:
        """As an artifact, without a copy: vectors become tensors, numbers metadata; `from_model` is exact."""
        vectors = {f"optimizer.{name}": value for name, value in self.optimizer.vectors.items()}
        if self.previous is not None:
            vectors["previous"] = self.previous
        if self.exact is not None:
            vectors["exact"] = self.exact
        if self.estimate is not None:
            vectors["estimate"] = self.estimate
        metadata = {f"optimizer.{name}": str(value) for name, value in self.optimizer.scalars.items()}
        if self.clip_norm is not None:
            metadata["clip_norm"] = self.clip_norm.hex()
        if self.silos:
            metadata["silos"] = json.dumps(self.silos)
        if self.drawn is not None:
            vectors |= {f"drawn.{slot}": noise for slot, noise in enumerate(self.drawn)}
            metadata["draws"] = str(self.draws)
        vectors |= {f"past.{client}": total for client, total in self.past.items()}
        vectors |= {f"region.{name}": kept.vector for name, kept in self.regions.items()}
        metadata |= {f"region.{name}": kept.weight.hex() for name, kept in self.regions.items()}
        layout = Layout.of(vectors)
        yield model_head(Model(layout, torch.empty(0), metadata=metadata))
        for spec in layout.averaged:
            yield from tensor_blocks(vectors[spec.name].float())

    @classmethod
    def from_model(cls, model: Model) -> ServerState:
        """The state that `blocks` wrote. Raises EncodingError for another kind of artifact."""
        tensors = model.state_dict()
        vectors = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        numbers = {
            n.removeprefix("optimizer."): v for n, v in model.metadata.items() if n.startswith("optimizer.")
        }
        clip_norm = model.metadata.get("clip_norm")
        try:
            scalars = {name: int(value) for name, value in numbers.items()}
            bound = float.fromhex(clip_norm) if clip_norm is not None else None
            draws = int(model.metadata.get("draws", 0))
            regions = {
                name: RegionModel(tensors[f"region.{name}"], float.fromhex(weight))
                for key, weight in model.metadata.items()
                if (name := key.removeprefix("region.")) != key
            }
            silos = tuple(str(name) for name in json.loads(model.metadata.get("silos", "[]")))
        except (ValueError, KeyError) as error:
            raise EncodingError(f"the server optimizer's state cannot be read: {error}") from error
        slots = sum(name.startswith("drawn.") for name in tensors)
        drawn = torch.stack([tensors[f"drawn.{slot}"] for slot in range(slots)]) if slots else None
        if "draws" in model.metadata and drawn is None:
            drawn = torch.empty(0, 0)
        past = {name.removeprefix("past."): t for name, t in tensors.items() if name.startswith("past.")}
        previous, exact = tensors.get("previous"), tensors.get("exact")
        optimizer, estimate = OptimizerState(vectors, scalars), tensors.get("estimate")
        return cls(optimizer, previous, bound, drawn, draws, past, exact, estimate, silos, regions)

    @property
    def worth_keeping(self) -> bool:
        """Whether a later round needs any of it."""
        return bool(self.optimizer.vectors or self.optimizer.scalars or self.past or self.regions) or any(
            kept is not None
            for kept in (self.previous, self.clip_norm, self.drawn, self.exact, self.estimate)
        )


def initial_server_state(plan: Plan, columns: int) -> ServerState:
    """The state before round 1 of a model with `columns` values, with what lies behind it."""
    columns -= plan.common.basis_size if plan.common is not None else 0
    state = ServerState(initial_optimizer_state(plan, columns))
    match plan.noise:
        case FreshNoise(mechanism) if mechanism.adaptive is not None:
            return replace(state, clip_norm=mechanism.bound)
        case CorrelatedRounds(ftrl=ftrl):
            return replace(state, drawn=ftrl.init(sent_size(plan, columns)).history)
        case _:
            return state
