"""pFedMe: personal models as Moreau envelopes of the global one (Dinh et al. 2020)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, ClientRound, Composition, Sent
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork, Held
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError
from roundtable.core.toml_tables import Finite

_OWN = "own"


class PFedMeTable(AlgorithmTable):
    """`[algorithm]` with name = "pfedme"; β of the paper is the server optimizer's learning rate."""

    pull: Finite = Field(gt=0, description="λ of the envelope; learning_rate · λ must be at most 2")
    inner_steps: int = Field(5, ge=1, description="steps on each batch towards the envelope's minimum")
    personal_learning_rate: Finite = Field(gt=0, description="of those steps")
    personal_weight_decay: Finite = Field(0.0, ge=0, description="of those steps; 0.001 in its authors' code")
    inner_start: Literal["own", "local"] = Field(
        "own",
        description="where they start: at the personal model of the batch before, a round's "
        "first at the model "
        "received; or at the local one",
    )


class PFedMe(ClientAlgorithm):
    """Algorithm 1: for each batch θ ≈ argmin f(θ) + λ/2 ‖θ − w‖², then w ← w − η λ (w − θ); θ stays at the
    client."""

    Table = PFedMeTable
    keeps = "its own model"
    composition = Composition(
        levels=WHOLE_UPDATE_LEVELS,
        momentum=False,
        weight_decay=False,
        reason="its local step is the gradient of the envelope alone",
    )

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        assert isinstance(table, PFedMeTable)
        if table.learning_rate * table.pull > 2:
            raise ConfigError(
                f"algorithm: learning_rate · pull = {table.learning_rate * table.pull:g}: above "
                "2 the local steps diverge"
            )

    @override
    def holds(self, round: ClientRound) -> Held:
        return {_OWN: round.vector}

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, PFedMeTable)
        table, own = self.table, work.held(_OWN)
        if table.inner_start == "local":
            for theta, local in zip(own, work.weights, strict=True):
                theta.copy_(local)
        for _ in range(table.inner_steps):
            loss, gradients = work.gradients(own, held=_OWN)
            for theta, local, gradient in zip(own, work.weights, gradients, strict=True):
                slope = (theta - local) * table.pull
                slope = slope if gradient is None else slope + gradient
                if table.personal_weight_decay:
                    slope = slope + theta * table.personal_weight_decay
                theta.sub_(slope, alpha=table.personal_learning_rate)
        pairs = zip(work.weights, own, strict=True)
        return loss, [(local - theta) * table.pull for local, theta in pairs]

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        return Sent(update, {}, {_OWN: round.scratch[_OWN]})

    @override
    def before_evaluation(self, round: ClientRound, module: nn.Module) -> None:
        if _OWN in round.kept:
            put(module, round.layout, round.kept[_OWN])
