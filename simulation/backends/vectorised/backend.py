"""Clients through recorded steps: what the sequential backend does, without autograd's and Python's cost.

The step of a task (forward, backward, update) is recorded once for each shape of batch and replayed
as straight operations over one flat vector of weights. Whatever cannot be recorded is named, and
the job's clients then run sequentially.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import AlgorithmRound, trained_slices
from roundtable.client.training.batches import (
    Batch,
    as_tensors,
    count_examples,
    epoch_orders,
    ordered_batches,
    ordering_of,
)
from roundtable.client.training.local_training import whole_loss
from roundtable.client.training.local_work import LocalWork
from roundtable.client.training.metrics import training_sums
from roundtable.client.training.module_state import borrowed
from roundtable.client.training.stream_batches import RoundBatches
from roundtable.core.algorithms.contract import ClientAlgorithm, SecondModel
from roundtable.core.errors import InvalidUpdate, RoundtableError
from roundtable.core.initial_model import hooked_parameter
from roundtable.core.privacy_table import OwnNoise
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.task import ArrayTask, Task, initial_state, told
from roundtable.simulation.backend import Failed, Measured, Trained, Work, World
from roundtable.simulation.backends.sequential import Sequential, answer_of
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.recorded_steps import Steps, gathered
from roundtable.simulation.backends.vectorised.recorded_work import Manner
from roundtable.simulation.backends.vectorised.recording import Unrecordable
from roundtable.simulation.backends.vectorised.shared_evaluation import SharedEvaluation
from roundtable.simulation.backends.vectorised.staying import StayingTensors, is_counter, stays
from roundtable.simulation.world.simulated_clients import Clients

log = logging.getLogger("roundtable.simulation")


def why_not_recorded(world: World) -> str | None:
    """Why a job's clients cannot run through recorded steps, as far as can be told without running one."""
    if world.job.simulation.precision != "float32":
        return f"simulation.precision = {world.job.simulation.precision!r}, and recorded steps are float32"
    kind, name = type(world.algorithm), world.job.algorithm.name
    if kind.second is not ClientAlgorithm.second or kind.holds is not ClientAlgorithm.holds:
        for spec in world.layout.tensors:
            if stays(spec) and not is_counter(spec):
                return f"algorithm {name!r} has a second model, and tensor {spec.name!r} stays at each client"
    hook = world.algorithm.hooked()
    if hook == "while_training":
        return f"algorithm {name!r} works on each client's module by its while_training, one client at a time"
    if hook == "begins":
        return f"algorithm {name!r} has each client begin with weights of its own"
    return why_not(world, staying=True)


def why_not(world: World, *, staying: bool) -> str | None:
    """The same for any way to run clients that does not let each of them go through `client.training`; some
    know tensors that are `staying` at each client."""
    task = world.task
    if world.job.algorithm.scheduled:
        return "the learning rate changes within a round (algorithm.schedule), and recorded steps have one"
    if "loss" in told(task):
        return (
            f"{type(task).__name__}.loss() is told its context, so that it may differ from client to client"
        )
    if isinstance(task, ArrayTask):
        return "an ArrayTask trains with code of its own, not with torch"
    if isinstance(world.job.privacy, OwnNoise):
        return f"at privacy.level = {world.job.privacy.level!r} each client makes its update private itself"
    if world.job.algorithm.optimizer_state == "keep":
        return "each client's optimizer keeps its state between rounds"
    if getattr(type(task), "optimizer", Task.optimizer) is not Task.optimizer:
        return f"{type(task).__name__} brings an optimizer of its own"
    for spec in world.layout.tensors:
        if stays(spec) and not staying:
            return (
                f"tensor {spec.name!r} does not travel (rule {spec.rule!r}), for example a BatchNorm counter"
            )
        if not is_counter(spec) and spec.dtype != "float32":
            return f"tensor {spec.name!r} is {spec.dtype}, not float32"
    return None


_Ended = Callable[[Callable[[SecondModel], object]], None]


class Vectorised:
    """The backend `vectorised` in one process, on one device."""

    name = "vectorised"
    chunk = 4

    def __init__(self, world: World, clients: Clients | None = None, device: str | None = None) -> None:
        self.world = world
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.clients = clients or Clients(world)
        self.refused = why_not_recorded(world)
        self._barred = self.refused is not None
        kind = Sequential if self._barred else SharedEvaluation
        self.fallback = kind(world, self.clients, str(self.device))
        self._recorded = False
        self._steps: Steps | None = None
        self._staying: StayingTensors | None = None
        self._trained: Sequence[slice] = ()
        if self.refused is None and self.device.type == "cpu":
            # On a machine's first run the kernels are compiled while clients' data is loaded.
            threading.Thread(target=load, name="kernels", daemon=True).start()

    @property
    def description(self) -> str:
        if self.refused is None:
            return f"recorded steps on {self.device}"
        if self._recorded:
            return f"recorded steps on {self.device}; some clients not recorded because {self.refused}"
        return f"{self.fallback.description}; not recorded because {self.refused}"

    def rows(self, count: int) -> Tensor:
        return self.fallback.rows(count)

    def examples(self, work: Sequence[Work]) -> list[int | None]:
        return self.fallback.examples(work)

    def train(
        self, round: int, vector: Tensor, work: Sequence[Work], rows: Sequence[Tensor]
    ) -> Iterator[Trained | Failed]:
        for item, row in zip(work, rows, strict=True):
            answer = answer_of(item, partial(self._try, round, vector, item, row))
            if answer is None:
                yield from self.fallback.train(round, vector, [item], [row])
            else:
                yield answer

    def evaluate(self, round: int, vector: Tensor, work: Sequence[Work]) -> Iterator[Measured | Failed]:
        return self.fallback.evaluate(round, vector, work)

    def close(self) -> None:
        self.fallback.close()
        self._steps = None

    def _try(self, round: int, vector: Tensor, item: Work, row: Tensor) -> Trained | None:
        """None where a step of this client cannot be recorded; that is said once.

        Each client is tried: which way it trains must not follow from who came before it in this process.
        """
        if self._barred:
            return None
        try:
            trained = self._train(round, vector, item, row)
        except Unrecordable as error:
            if self.refused is None:
                self.refused = str(error)
                log.warning("clients run sequentially: a training step cannot be recorded because %s", error)
            return None
        except IndexError:
            return None  # The plain loop ends at the same batch, and torch says which value it was.
        self._recorded = True
        return trained

    def _train(self, round: int, vector: Tensor, item: Work, row: Tensor) -> Trained:
        job, data = self.world.job, self.clients.data(item.index)[0]
        steps, rate, size = self._ready(), job.algorithm.rate(round), self.world.layout.model.size
        work = self.world.local_work(round, vector, item)
        job = work.job
        measure = partial(self._measured, steps, data, work)
        rules = AlgorithmRound(work, work.context(data, self.device), self._trained, measure)
        step = rules.step
        staying = self._staying
        assert staying is not None
        start = staying.whole(vector[:size], item.local)
        steps.begin(start, step, staying.longer(rules.constant))
        steps.held.begin(rules.held)
        out = row[:size] if start.numel() == size else torch.empty_like(start)
        mine: dict[str, Tensor] = {}
        batches = RoundBatches(data, work, self.device)

        def ended(again: Callable[[SecondModel], object]) -> None:
            """After the round's steps; `again` takes those of a second model."""
            if not steps.change(start, out):
                raise weights_not_finite()
            if out.numel() != size:
                row[:size].copy_(out[:size])
            mine.update(staying.kept(steps.weights, steps.counts, item.local))
            if rules.held:
                rules.ends_held(steps.held.ended())
            if (second := rules.second) is not None:
                steps.begin(second.start, second.step, second.constant)
                again(second)
                steps.settle()
                rules.ends_second(steps.weights.to("cpu", copy=True))

        found = self._gathered(steps, data, rules, rate, work, ended)
        losses, sizes = found or self._replayed(steps, batches, rules, rate, work, ended)
        loss_sum = _checked_sum(losses, sizes, f"round {round}")
        kept = mine | rules.end(row, len(sizes)) | batches.kept()
        seen = sum(sizes)
        examples = count_examples(data)
        metrics = training_sums(self.world.task, loss_sum, seen)
        return Trained(item.client, examples or seen, len(sizes), loss_sum / seen, metrics, kept)

    def _measured(self, steps: Steps, data: Any, work: LocalWork) -> tuple[float, Tensor]:
        """What an algorithm asks of all of a client's data, by autograd as `client.training` does it."""
        if as_tensors(data):
            # A step that cannot be recorded is found before a pass over the data is spent.
            for batch in islice(ordered_batches(data, work.job.algorithm.batch_size, self.device), 1):
                steps.prepare(batch.data, Manner(work.rules().step()))
        task, layout = self.world.task, work.layout.model
        module = self.fallback.module.to(self.device)
        assert not isinstance(task, ArrayTask)
        with borrowed(module, layout, work.vector[: layout.size], work.local):
            return whole_loss(task, module, data, work, self.device)

    def _gathered(
        self, steps: Steps, data: Any, rules: AlgorithmRound, rate: float, work: LocalWork, ended: _Ended
    ) -> tuple[Tensor, list[int]] | None:
        """Training where the kernels can fetch the examples of each batch themselves; else None."""
        job, examples, manner = work.job, as_tensors(data), self._manner(rules)
        if not examples or not examples[0].shape[0] or rules.algorithm.looks_back:
            return None
        size = job.algorithm.batch_size
        orders = epoch_orders(examples[0].shape[0], **ordering_of(job, work.round, work.client))
        first = next(orders)
        if not steps.takes_rows(examples, first[:size], manner(1)):
            return None
        taken = list(chain([first], orders))
        found = steps.take_rows(examples, taken, size, manner, rate)

        def again(second: SecondModel) -> None:
            plain = Manner(second.step)
            if second.steps in (None, len(found[1])):
                steps.take_rows(examples, taken, size, lambda _: plain, second.rate)
                return
            rows = [some for order in taken for some in torch.split(order, size)]
            for some in islice(cycle(rows), second.steps):
                steps.take(gathered(examples, some), plain, second.rate)

        ended(again)
        return found

    def _replayed(
        self,
        steps: Steps,
        batches: RoundBatches,
        rules: AlgorithmRound,
        rate: float,
        work: LocalWork,
        ended: _Ended,
    ) -> tuple[Tensor, list[int]]:
        """Chance is seeded as `client.training` seeds it, from the first step on, where there is any."""
        left, seen, manner = iter(batches), list[Batch](), self._manner(rules)
        first, back = next(left), rules.algorithm.looks_back
        steps.prepare(first.data, manner(1), (first.data,) if back else ())
        seed = derive_seed(work.job.seed, work.round, work.client, "training")
        chance = isolated_randomness(seed, self.device) if steps.random else nullcontext()

        def noted(batch: Batch) -> Batch:
            if rules.second is not None:
                seen.append(batch)
            return batch

        with chance:
            found = steps.take_all(map(noted, chain([first], left)), manner, rate, back)

            def again(second: SecondModel) -> None:
                count, plain = second.steps or len(found[1]), Manner(second.step)
                steps.take_all(islice(cycle(seen), count), lambda _: plain, second.rate)

            ended(again)
        return found

    @staticmethod
    def _manner(rules: AlgorithmRound) -> Callable[[int], Manner]:
        """How step `number` of the client's round is taken."""
        if not type(rules.algorithm).makes_gradients():
            plain = Manner(rules.step)
            return lambda _: plain
        return lambda number: Manner(rules.step, True, rules.phase(number))

    def _first_examples(self) -> Sequence[Tensor] | None:
        """Those of the population's first client, whoever trains here; None where they are no tensors."""
        try:
            return as_tensors(self.clients.data(0)[0])
        except RoundtableError:
            return None  # The client fails where it trains.

    def _ready(self) -> Steps:
        if self._steps is None:
            model = initial_state(self.world.task, self.world.job.seed)
            assert isinstance(model, nn.Module)
            assert isinstance(self.world.task, Task) or not isinstance(self.world.task, ArrayTask)
            if (hooked := hooked_parameter(model)) is not None:
                self._barred = True
                raise Unrecordable(f"{hooked!r} has a hook on its gradient, which other tensors do not have")
            self._staying = StayingTensors(self.world.layout.model, model)
            layout = self._staying.layout
            self._trained = trained_slices(model, self.world.layout)
            resting = set(self.world.algorithm.resting(model))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name not in resting)
            algorithm = self.world.algorithm
            self._steps = Steps(
                self.world.task, model, layout, self.device, self._first_examples(), algorithm
            )
        return self._steps


def _checked_sum(losses: Tensor, sizes: Sequence[int], place: str) -> float:
    total = 0.0
    for number, (loss, size) in enumerate(zip(losses.tolist(), sizes, strict=True), 1):
        if not math.isfinite(loss):
            raise loss_not_finite(loss, number, place)
        total += loss * size
    return total


def loss_not_finite(loss: float, step: int, place: str) -> InvalidUpdate:
    """The error of a client whose loss is infinite or no number at `step`, from 1."""
    return InvalidUpdate(
        "non_finite",
        f"the training loss is {loss} at step {step} of {place}; lower [algorithm] learning_rate, "
        "set max_gradient_norm, or look for bad values in the data",
    )


def weights_not_finite() -> InvalidUpdate:
    """The error of a client whose last step made such weights."""
    return InvalidUpdate(
        "non_finite",
        "training ended with weights that are not finite; lower [algorithm] learning_rate",
    )
