"""What a local algorithm declares and does: a `ClientAlgorithm`, and a `ServerAlgorithm` where it needs one.

The class attributes are declarations, from which every backend, privacy level and party accepts or refuses a
job before round 1. The methods are hooks; one that is not overridden costs nothing.

    state       at the client: named tensors that `end` returns and the next round's `begin` finds in `kept`
                at the server: named vectors of `ServerAlgorithm`, committed with the model
    places      vectors behind the model in the one flat vector: down they hold what the server last put
                there, up what the client adds; whatever is done to an update is done to all of it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from roundtable.core.algorithms.factor_rows import FactorRows, MergedFactors
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork, Held
from roundtable.core.algorithms.round_context import Context, OuterStep
from roundtable.core.algorithms.step import LocalStep
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.layout import Layout
from roundtable.core.tables.table_reading import DataTable

Compare = Callable[[str, DataTable, int], None]
Noised = Callable[[npt.NDArray[np.float64], bytes], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class AlgorithmPlace:
    """A named vector behind the model; `shape` None: one value for each of the model's.

    Where it is not `sent` the server alone fills it, no update holds it, and the rules are about nothing.
    Each rule says what may be done to what a client sends there; None where nobody has shown that it is
    sound, and a job that would do it is refused.

    clipping     "joint": in one norm with the update; the client has brought it to the update's units
    noise        "joint": as much on each value as on the update's, which joint clipping makes sound
    masks        "sum": the server needs no more than the weighted sum over clients
    compression  "as_update": in the job's encoding, with its rounding
    rules        "mean", or "rows": any rule that weighs whole rows, as for the update
    remedy       what a job can set so that a rule holds that is missing here
    """

    name: str
    shape: tuple[int, ...] | None = None
    clipping: Literal["joint"] | None = None
    noise: Literal["joint"] | None = None
    masks: Literal["sum"] | None = None
    compression: Literal["as_update"] | None = None
    rules: Literal["mean", "rows"] = "mean"
    sent: bool = True
    remedy: str = ""

    def size(self, model: int) -> int:
        """Values that it takes behind a model of so many."""
        return model if self.shape is None else prod(self.shape)


@dataclass(frozen=True)
class Composition:
    """What an algorithm goes together with, beside its places' rules; the reason is part of a refusal.

    levels: of privacy. weightings: of the mean. Local training: `momentum`, `weight_decay`, a task's own
    optimizer, gradient clipping by `max_gradient_norm`. At the server: sums that are `masked`, a
    `server_optimizer` other than plain averaging, `averaged_buffers` (running statistics in the flat vector),
    `local_parameters` (trained, and not in it).
    `schedule`: a learning rate that changes within a round. `rules`: "mean", or any that gives one vector for
    many. `unequal_steps`: whether slow clients may take fewer steps without a bias towards the others.
    `adaptive_clipping`: whether updates may be clipped to a norm that clients do not know before, or by
    layer. The rest: `buffered` rounds, tasks without gradients (ArrayTask). `one_by_one`: a round asks one
    client, in turn. `task_method`: what the task must have beside its own. `outer_step`: whether clients take
    their own share in the server's step, so that they must know all of it.
    """

    levels: frozenset[str] = frozenset({"none"})
    weightings: frozenset[str] | None = None
    momentum: bool = True
    weight_decay: bool = True
    own_optimizers: bool = False
    gradient_clipping: bool = True
    schedule: bool = False
    unequal_steps: bool = False
    masked: bool = True
    server_optimizer: bool = True
    averaged_buffers: bool = True
    local_parameters: bool = True
    rules: Literal["mean", "any"] = "any"
    adaptive_clipping: bool = True
    buffered: bool = False
    arrays: bool = False
    one_by_one: bool = False
    task_method: str = ""
    outer_step: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ClientRound:
    """A round as one client begins it. All vectors are float32 on CPU and must be left alone.

    vector: the model as received [d]. down: the places as received. kept: what `end` returned in the last
    round that counted; empty before the first. layout: of [d]. trained: where in [d] the trained parameters
    lie. `measure` gives (mean loss, gradient [d]) over all training examples at the weights as they are, in
    training mode, for an algorithm that declares `measures`. bound: the norm to which all that a client sends
    is clipped by the job, None where it is not. `tune(module, steps, rate)` takes steps of plain SGD with the
    job's batches on a module; in an evaluation alone. alone: whether others see what
    this client sends as its own, as at a silo without masks. `compare(name, table, least)` raises where the
    table differs from what analyses read before in fewer rows, and keeps it. `noised(sums, about)`, at
    level example, gives float64 numbers, of which one record changes all rounds' together by 1 at most (L2),
    with the noise that hides it; the same when this round is asked again about the same. outer: where the
    algorithm declares `outer_step`.
    scratch: what hooks hand to later hooks of the same round.
    """

    context: Context
    step: LocalStep
    rate: float
    vector: Tensor
    down: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    layout: Layout
    trained: Sequence[slice]
    measure: Callable[[], tuple[float, Tensor]] | None = None
    tune: Callable[[nn.Module, int, float], None] | None = None
    bound: float | None = None
    alone: bool = False
    compare: Compare | None = None
    noised: Noised | None = None
    outer: OuterStep | None = None
    scratch: dict[str, Any] = field(default_factory=dict)

    def on_trained(self, values: Tensor) -> Tensor:
        """A copy of `values` [d] with zeros where no parameter is trained (running statistics)."""
        found = torch.zeros_like(values)
        for place in self.trained:
            found[place] = values[place]
        return found

    def clipped(self, update: Tensor, times: float = 1.0) -> Tensor:
        """The update as the job will clip it, for state that must agree with what arrives; `times` is what it
        and its places measure together for each unit of its own norm."""
        norm = times * float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if self.bound is None or not norm > self.bound:
            return update
        return update * (self.bound / norm)


@dataclass(frozen=True)
class Sent:
    """What a client's round ends with: its update [d], its places, and what it keeps for the next round."""

    update: Tensor
    up: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)


SECOND, BEGINS, ENDS = "second", "begins", "ends"


@dataclass(frozen=True)
class SecondModel:
    """A client's second model: trained from `start` [d] when the round's is done, on the round's batches from
    the first, in a circle, by steps as `step` says at learning rate `rate`.

    `constant` [d] is what each step adds where `step` is corrected; its pull is towards `start`. steps: as
    many as the round's where None. What it ends with is `round.scratch[SECOND]` [d] in `end`.
    """

    start: Tensor
    step: LocalStep
    rate: float
    constant: Tensor | None = None
    steps: int | None = None


class ClientAlgorithm:
    """One way to train at a client. An instance serves one job; what differs by client is in the round.

    tells_loss: whether a client's loss can be told from what it sends, by the server that does its part.
    looks_back: whether `gradients` looks at the batch of the step before. resizes: whether `while_training`
    gives the module smaller parameters; it is then entered before the first step too, with tensors without
    values, whose memory is counted. keeps: what a client goes on from in the next round beside the global
    model, for people, where `end` gives some to keep.
    """

    Table: ClassVar[type[AlgorithmTable]] = AlgorithmTable
    places: tuple[AlgorithmPlace, ...] = ()
    composition: Composition = Composition()
    measures: bool = False
    tells_loss: bool = False
    answers: bool = False
    looks_back: bool = False
    resizes: bool = False
    keeps: str = ""

    def __init__(self, table: AlgorithmTable) -> None:
        self.table = table

    def check_clients(self, names: Collection[str]) -> None:
        """Raises ConfigError where it names a client that is none of these: in a simulation all, at a
        coordinator those that have ever connected."""

    def step(self) -> LocalStep:
        """What it does to a step, as far as a `LocalStep` can say it."""
        return LocalStep.of(self.table)

    def server(self) -> ServerAlgorithm | None:
        """The server's part; needed where there are places."""
        return None

    def counted_on(self) -> bool:
        """Whether the server goes by what a client keeps: one that has lost that takes no part any more."""
        return bool(self.places)

    def local_tensors(self, model: nn.Module) -> Sequence[str]:
        """Names of tensors of the model that never leave a client (FedBN, FedPer)."""
        return ()

    def resting(self, model: nn.Module) -> Sequence[str]:
        """Names of parameters that the task trains and no step of the round's model moves (FedBABU)."""
        return ()

    def begin(self, round: ClientRound) -> Tensor | None:
        """The round's constant k [d], for a step that is `corrected`."""
        return None

    def second(self, round: ClientRound) -> SecondModel | None:
        """A model of the client's own beside the round's; after `begin`."""
        return None

    def begins(self, round: ClientRound) -> Tensor | None:
        """The weights [d] that the client trains from in the place of the model as received; None for that.

        The update is from the model as received all the same. `end` finds them in `round.scratch` under
        BEGINS, and under ENDS what training made of them, which it may change.
        """
        return None

    def while_training(self, round: ClientRound, module: nn.Module) -> AbstractContextManager[None]:
        """Entered with the model as received in `module`, left after the last step, or when one fails.

        It may set weights that are trained, and put into the module what it takes out again; the update is
        from the model as received to what is left then.
        """
        return nullcontext()

    def goes_ahead(self) -> bool:
        """Whether a client that was in the round before trains from what that left alone, so that it may do
        so before the round's model is there: of hooks only `end` finds that model in `round.vector`."""
        return False

    def holds(self, round: ClientRound) -> Held:
        """What the client holds beside its model until the round's end, as it is at first; after `begin`.

        `end` finds in `round.scratch` what became of it, by name. Running statistics of a vector [d] are
        moved by passes that say so.
        """
        return {}

    def phase(self, round: ClientRound, number: int) -> Hashable:
        """What kind of step the round's step `number`, from 1, is, where `gradients` tells several apart."""
        return None

    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        """Loss [] and gradient of a step, before correction, clipping and the step; what has None stays."""
        return work.gradients()

    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        """After the last step: `update` is local − global [d] of so many steps, and may be changed."""
        return Sent(update)

    def answer(self, round: ClientRound, data: Any) -> Sent:
        """In the place of training, where it `answers`: what a client sends of its data, the task's own."""
        raise NotImplementedError

    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        """With the global model in `module`, before it is evaluated at the client."""

    def hooked(self) -> str | None:
        """The hook by which it changes a step in a way that `step` does not say; None if there is none."""
        for name in ("while_training", "begins", "gradients"):
            if getattr(type(self), name) is not getattr(ClientAlgorithm, name):
                return name
        return None

    @classmethod
    def goes_on(cls) -> bool:
        """Whether a client trains from weights of its own."""
        return cls.begins is not ClientAlgorithm.begins

    @classmethod
    def makes_gradients(cls) -> bool:
        """Whether a step's gradient is another than that of the task's loss."""
        return cls.gradients is not ClientAlgorithm.gradients

    @classmethod
    def rests(cls) -> bool:
        """Whether some of what the task trains is `resting`."""
        return cls.resting is not ClientAlgorithm.resting

    @classmethod
    def personal(cls) -> bool:
        """Whether a client evaluates another model than the global one."""
        return cls.before_evaluation is not ClientAlgorithm.before_evaluation

    @classmethod
    def keeps_own(cls) -> bool:
        """Whether a client's model is not the global one alone."""
        return cls.personal() or cls.local_tensors is not ClientAlgorithm.local_tensors


@dataclass(frozen=True)
class ClientShare:
    """What the server knows of an update's work: its share of the mean, the training examples that its client
    claims, and the steps that the coordinator gave it by its speed, None for the job's own."""

    share: float
    examples: int
    steps: int | None = None


@dataclass(frozen=True)
class ServerRound:
    """A round as the server ends it: `model` [d] and `places` are those that the clients began from.

    update, up: the job's aggregate of what came back, a sum divided by `divisor`, the number of updates if
    no noise asks for a constant. present of population: the clients whose updates are in it, or as many as
    were expected where that is a secret, of all that there are now; more may join. bound: as at the client.
    state: what the last committed round's `step` returned. work: of each update, where single updates are
    known. `optimize` moves the model by an update as the job's server
    optimizer does, once.
    """

    number: int
    model: Tensor
    places: Mapping[str, Tensor]
    update: Tensor
    up: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    present: float
    population: int
    optimize: Callable[[Tensor], Tensor]
    work: Sequence[ClientShare] = ()
    divisor: float = 0.0
    bound: float | None = None


@dataclass(frozen=True)
class Moved:
    """What the server makes of a round: the new model [d], what the places hold next, and its state.

    `told` are figures for the round's record, as (sum, count) by name, which `[stop]` may watch.
    """

    model: Tensor
    places: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    told: Mapping[str, tuple[float, int]] = field(default_factory=dict)


class ServerAlgorithm:
    """The server's part of an algorithm."""

    def init(self, columns: int) -> Mapping[str, Tensor]:
        """The state before round 1 for a model of `columns` values: named float32 tensors."""
        return {}

    def step(self, round: ServerRound) -> Moved:
        """The new model. The arguments must be left alone: a round may be repeated."""
        return Moved(round.optimize(round.update))

    def check_factors(self, ranks: Sequence[int]) -> None:
        """Raises ConfigError where it cannot merge factors of these ranks; asked before round 1."""

    def merge(self, factors: FactorRows) -> MergedFactors:
        """For each pair of low-rank factors, in the place of their means. All else is averaged."""
        raise NotImplementedError

    @classmethod
    def merges(cls) -> bool:
        """Whether it does: then single clients' factors must be known where updates are combined."""
        return cls.merge is not ServerAlgorithm.merge
