"""DP-SGD at a silo (Abadi et al. 2016): Poisson batches, clipped sums, noise once, then the optimizer's step.

    with make_private(model, optimizer, loss_fn, fetch, len(data), privacy) as training:
        account.check(training.charge(steps))
        for indices in training.batches(steps):
            training.step(indices)

The loss, and how many examples a batch had, are private and therefore not returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.dp_sgd_charge import step_charge
from roundtable.privacy.example_level.checks import Fetch, check_model
from roundtable.privacy.example_level.held_state import HeldState
from roundtable.privacy.example_level.lone_losses import checked
from roundtable.privacy.example_level.per_example_clipping import ClippedSum, LossFunction
from roundtable.privacy.example_level.probe import choose
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.gaussian_mechanism import noise_onto, normals_onto
from roundtable.privacy.mechanisms.noise import NoiseSource, SecureNoise, bernoulli_mask

Sources = Callable[[str], NoiseSource]


def secure_sources(purpose: str) -> NoiseSource:
    """A fresh cryptographic generator for every purpose."""
    return SecureNoise()


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction,
    fetch: Fetch,
    dataset_size: int,
    privacy: ExampleLevel,
    *,
    total_steps: int | None = None,
    mode: str = "auto",
    physical_batch: int = 256,
    sources: Sources = secure_sources,
    group: dist.ProcessGroup | None = None,
) -> PrivateTraining:
    """Prepares training whose every step is differentially private for one example.

    `loss_fn(model, batch)` gives the mean over the examples, or one loss for each; `fetch(indices)` gives
    the batch of these examples of the silo. `privacy` brings `clip_norm`, `batch_size` (expected, over all
    processes), and `noise_multiplier`, or the `epsilon` that `total_steps` steps over the whole job may
    cost. `physical_batch` bounds how many examples are in memory at once. `mode` is `auto` (a probe of two
    steps decides), `first` (the first of `MODES` that is right, whatever the clock says: a simulation that
    is repeated gives the same bits) or the `mode` of an earlier training of the same model. With `group`,
    each process brings its own part of the data; the noise is added once. `sources` seeds the noise in a
    simulation.

    Raises `PrivacyError` for a model or a loss that cannot be made private, with what to do about it.
    """
    check_model(model)
    total = _total(dataset_size, group, next(model.parameters()).device)
    charge = step_charge(privacy, total, total_steps)
    assert privacy.batch_size is not None
    size = min(physical_batch, max(2, round(privacy.batch_size)), dataset_size)
    sums = choose(model, checked(loss_fn), fetch, dataset_size, size, privacy.clip_norm, mode)
    return PrivateTraining(
        model, optimizer, sums, fetch, dataset_size, charge, privacy, physical_batch, sources, group
    )


class PrivateTraining:
    """A model whose only way to learn is a noisy step. Made by `make_private`; close it when done."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sums: ClippedSum,
        fetch: Fetch,
        dataset_size: int,
        charge: Charge,
        privacy: ExampleLevel,
        physical_batch: int,
        sources: Sources,
        group: dist.ProcessGroup | None,
    ) -> None:
        assert privacy.batch_size is not None
        self._optimizer = optimizer
        self._sums = sums
        self._fetch = fetch
        self._dataset_size = dataset_size
        self._charge = charge
        self._std = charge.noise_multiplier * privacy.clip_norm
        self._expected_batch = float(privacy.batch_size)
        self._physical = physical_batch
        self._coins = sources("batches")
        self._group = group
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._flat, self._views = _flat_views(self._parameters)
        # Fresh memory for every step would cost as much as a part of the noise.
        self._gradient, self._gradients = _flat_views(self._parameters)
        self._noise = _NoiseAhead(sources("noise"), self._flat.numel()) if self._leads() else None
        self._held = HeldState(model)
        self.guarantee = self._coins.guarantee
        self._forget_gradients()

    @property
    def mode(self) -> str:
        """How per-example gradients are clipped; give it to the next `make_private` to spare the probe."""
        return self._sums.name

    @property
    def sampling_rate(self) -> float:
        """The probability with which an example joins a step."""
        return self._charge.rate

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients, over the clip norm."""
        return self._charge.noise_multiplier

    def charge(self, steps: int) -> Charge:
        """What `steps` steps cost."""
        return self._charge.repeated(steps)

    def batches(self, steps: int) -> Iterator[Tensor]:
        """`steps` Poisson samples of this process's examples, as indices; some may be empty."""
        for _ in range(steps):
            mask = bernoulli_mask(self._coins, self._dataset_size, self._charge.rate)
            yield torch.from_numpy(mask).nonzero().flatten()

    def step(self, indices: Tensor, correct: Callable[[], None] | None = None) -> None:
        """One step on the examples at `indices`; an empty batch steps with pure noise.

        `correct` is called with the noisy gradient in each `.grad`, before the optimizer: the place for a
        proximal term or a control variate, which depend on no example and must not be clipped.
        """
        self._flat.zero_()
        for part in torch.split(indices, self._physical) if len(indices) else ():
            self._sums.accumulate(self._fetch(part), len(part), self._views)
            self._held.check()
        self._reduce()
        self._add_noise()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        if correct is not None:
            correct()
        self._optimizer.step()
        self._forget_gradients()

    def close(self) -> None:
        """Takes everything off the model; it is then an ordinary one again."""
        self._sums.close()
        if self._noise is not None:
            self._noise.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leads(self) -> bool:
        return self._group is None or dist.get_rank(self._group) == 0

    def _reduce(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._flat, group=self._group)

    def _add_noise(self) -> None:
        """The sum with noise over the expected batch size. One process adds it, after the sum is whole."""
        gradient = self._gradient
        if self._noise is not None:
            self._noise.onto(self._flat, self._std, gradient, self._expected_batch)
        if self._group is not None:
            dist.broadcast(gradient, dist.get_global_rank(self._group, 0), group=self._group)

    def _forget_gradients(self) -> None:
        """Nothing is left in `.grad`, so that stepping the optimizer past the noise does nothing."""
        for parameter in self._parameters:
            parameter.grad = None


class _NoiseAhead:
    """Draws the next step's noise in a thread while this step computes, where there is a core to spare."""

    def __init__(self, source: NoiseSource, count: int) -> None:
        self._source = source
        self._count = count
        self._thread = ThreadPoolExecutor(1, "noise") if torch.get_num_threads() > 1 else None
        self._drawn: Future[Tensor] | None = None

    def onto(self, values: Tensor, standard_deviation: float, out: Tensor, divisor: float) -> None:
        """As `noise_onto`; the same draws with or without the thread."""
        if self._thread is None:
            noise_onto(values, standard_deviation, self._source, out, divisor)
            return
        drawn = self._drawn or self._ask(self._thread)
        self._drawn = self._ask(self._thread)
        normals_onto(values, standard_deviation, drawn.result(), out, divisor)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _ask(self, thread: ThreadPoolExecutor) -> Future[Tensor]:
        return thread.submit(standard_normal, self._source, self._count)


def _flat_views(parameters: list[nn.Parameter]) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    if len(kinds := {(p.dtype, p.device) for p in parameters}) > 1:
        raise PrivacyError(f"the trainable parameters differ in dtype or device: {kinds}; make them alike")
    flat = torch.zeros(
        sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
    )
    sizes = [p.numel() for p in parameters]
    views = (part.view_as(p) for part, p in zip(torch.split(flat, sizes), parameters, strict=True))
    return flat, dict(zip(parameters, views, strict=True))


def _total(size: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    if group is None:
        return size
    total = torch.tensor([float(size)], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return math.floor(float(total))
