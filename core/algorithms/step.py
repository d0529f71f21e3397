"""One step of local training but for its gradient, as a value that every way to train takes its step from."""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.core.algorithms.table import AlgorithmTable


@dataclass(frozen=True)
class LocalStep:
    """How a gradient g moves the weights w at learning rate η, in a round that began at x:

        g ← g + pull · (w − x) + k        k a constant vector of the client's round, where `corrected`
        g ← g · min(1, max_norm / ‖g‖)
        v ← momentum · v + g + weight_decay · w
        w ← w − η v

    FedProx has pull = μ; SCAFFOLD k = c − c_i; FedDyn pull = α and k = −g_i. What no such step says (a
    second pass, another loss) is done by hooks of the algorithm, and by the backends that call those.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    pull: float = 0.0
    max_norm: float | None = None
    corrected: bool = False

    @classmethod
    def of(cls, table: AlgorithmTable, *, pull: float = 0.0, corrected: bool = False) -> LocalStep:
        """The step of a job's table, with what the algorithm adds."""
        return cls(table.momentum, table.weight_decay, pull, table.max_gradient_norm, corrected)

    @property
    def plain(self) -> bool:
        """Whether gradients can be added where they are made: nothing looks at them as a whole."""
        return self.momentum == 0.0 and self.max_norm is None

    @property
    def shifted(self) -> bool:
        """Whether something beside the loss moves the weights towards a vector: x, k, or both."""
        return bool(self.pull) or self.corrected

    def effective_steps(self, steps: int, rate: float) -> float:
        """‖a‖₁ (Wang et al. 2020, section 4.1): by how many gradients of the start `steps` steps move.

        The step is taken on one number from 0 with gradient 1: K for plain SGD,
        (1 − (1 − η pull)^K) / (η pull) with a proximal term, and so on. Weight decay is part of the gradient.
        """
        if not self.momentum and not self.pull:
            return float(steps)
        moved = velocity = 0.0
        for _ in range(steps):
            velocity = self.momentum * velocity + 1.0 - self.pull * rate * moved
            moved += velocity
        return moved
