"""Hands rounds to a script's own thread, and takes its answers: the inside of `join`."""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.client.failures import WorkFailed
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, its_turn, write_remembering
from roundtable.client.training.arrays import arrays_of, state_of
from roundtable.client.training.local_training import check_evaluation, check_privacy
from roundtable.client.training.metrics import Metrics, as_sums, checked
from roundtable.client.training.private_training import add_own_noise
from roundtable.client.training.silo_account import Protection, payment
from roundtable.client.worker.silo_state import SiloState
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.feedback import LOST_ESTIMATE, forgotten, without_memory
from roundtable.core.errors import (
    ConfigError,
    EncodingError,
    InvalidUpdate,
    LayoutError,
    PrivacyError,
    TaskError,
)
from roundtable.core.layout import Layout
from roundtable.core.models import Model, open_model
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel

Weights = nn.Module | Mapping[str, Tensor] | Mapping[str, np.ndarray]
Evaluator = Callable[["Round"], Mapping[str, tuple[float, int]]]


class Round:
    """One round as a script sees it: weights to start from, and a way to answer.

    `number` counts from 1 to `rounds`; `job` is the job's identifier, `options` its `[algorithm]` table.
    """

    def __init__(self, work: StepWork, start: Model, local: Mapping[str, Tensor] | None) -> None:
        if start.layout.fingerprint != work.layout:
            raise LayoutError("the job announces another layout than its model has")
        self.job = work.step.job
        self.number = work.step.round
        self.rounds = work.job.rounds
        self.options = work.job.algorithm.model_dump()
        self.model_layout: Layout = start.layout
        self._vector = start.vector
        self._local = dict(start.local if local is None else local)
        self._answer: asyncio.Future[tuple[Tensor, dict[str, Tensor], int, Metrics]] = (
            asyncio.get_running_loop().create_future()
        )
        self._loop = asyncio.get_running_loop()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The global weights under the module's names, and the silo's own where they never travel.

        Frozen weights, which the script's own model has, are not among them: load these with `strict=False`.
        """
        state = {**self.model_layout.unflatten(self._vector.clone()), **self._local}
        for spec in self.model_layout.tensors:
            if spec.alias_of in state:
                state.setdefault(spec.name, state[spec.alias_of])
        return state

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The same as NumPy arrays, which may be written into."""
        return arrays_of(self.model_layout, self._vector, self._local)

    @property
    def wanted(self) -> bool:
        """Whether the coordinator still waits for this round; a long training may look at it."""
        return not self._answer.done()

    def submit(self, weights: Weights, *, examples: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Answers with the trained weights: a module, a state dict, or NumPy arrays.

        `examples` is the number of training examples behind them; `metrics` are means over those
        examples, or (sum, count) pairs. A round that is no longer wanted takes the answer and drops it.
        Raises LayoutError for weights of other names or shapes and for frozen ones of other values,
        InvalidUpdate for zero examples or weights that are not finite.
        """
        if examples < 1 or int(examples) != examples:
            raise InvalidUpdate("examples", f"submit needs the number of training examples, not {examples!r}")
        state = _state(self.model_layout, weights)
        self.model_layout.check_frozen(state)
        delta = self.model_layout.flatten(state, torch.empty(self.model_layout.size)).sub_(self._vector)
        if not math.isfinite(delta.sum(dtype=torch.float64).item()):
            raise InvalidUpdate("non_finite", "the weights to submit hold NaN or infinity")
        mine = {s.name: state[s.name].detach().cpu().clone() for s in self.model_layout.tensors if _stays(s)}
        sums = _sums(metrics or {}, int(examples))
        self._in_loop(lambda: self._resolve((delta, mine, int(examples), sums)))

    def _resolve(self, answer: tuple[Tensor, dict[str, Tensor], int, Metrics]) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def _in_loop(self, action: Callable[[], None]) -> None:
        # Once the agent has ended there is nobody to tell; why it ended is raised where rounds are awaited.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def _skip(self) -> None:
        """Refuses the round, as the script went on to the next without an answer."""
        self._in_loop(self._refuse)

    def _refuse(self) -> None:
        if not self._answer.done():
            reason = "the silo's script went on without submitting anything for this round"
            self._answer.set_exception(WorkFailed("refused", reason))


class ScriptTrainer:
    """A Trainer that puts rounds into `rounds`; None there means that no more will come."""

    def __init__(
        self,
        jobs: Path,
        evaluate: Evaluator | None,
        epsilon: float | None = None,
        delta: float | None = None,
    ) -> None:
        self.rounds: queue.Queue[Round | None] = queue.Queue()
        self._state = SiloState(jobs)
        self._accounts = jobs.parent / "privacy"
        self._limit = (epsilon, delta)
        self._evaluate = evaluate
        self._turn = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See Trainer."""

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        """See Trainer: waits until the script has submitted."""
        check_privacy(work.job, protected=True)
        if isinstance(work.job.privacy, ExampleLevel):
            raise PrivacyError(
                'privacy.level = "example" bounds the gradient of every example, and a script submits '
                'weights: write a Task with a model and a loss, or use level "client_local"'
            )
        check_script(work.job)
        local = self._state.load(work.step.job, work.kept)
        start = await asyncio.to_thread(open_model, work.model)
        transfer = work.job.writes
        encoding = get_encoding(work.encoding or transfer.up)
        if transfer.memory.way == "ef21" and work.kept and forgotten(encoding, transfer.memory, local):
            raise EncodingError(LOST_ESTIMATE)
        round = Round(work, start, without_memory(local))
        # A script answers one round after the other.
        async with its_turn(self._turn, work):
            self.rounds.put(round)
            delta, mine, examples, metrics = await round._answer
        if isinstance(work.job.privacy, ClientLocalLevel):
            pay = payment(self._accounts, *work.step[:3], *self._limit)
            delta = await asyncio.to_thread(add_own_noise, delta, work.job, Protection(pay))
            examples, metrics = 1, {}
        key = StreamKey(work.job.seed, work.client, work.step.round, work.step.attempt)
        written = await asyncio.to_thread(
            write_remembering,
            work.output,
            delta,
            transfer,
            start.layout.sent,
            key,
            local,
            work.encoding,
            start.vector[start.layout.basis],
        )
        left = {**mine, **written.memory}
        if left:
            self._state.save(work.step.job, (work.step.round, work.step.attempt), left, work.kept)
        return TrainedUpdate(written.digest, written.size, examples, metrics, written.writing)

    async def check(self, work: StepWork) -> None:
        """See Trainer: a script's own model is seen when it submits."""

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        """See Trainer: by the script's function, in a thread of its own; without one there are no metrics."""
        start = await asyncio.to_thread(open_model, work.model)
        check_evaluation(work.job, start.layout)
        if self._evaluate is None:
            return {}
        local = self._state.load(work.step.job, work.kept)
        metrics = await asyncio.to_thread(self._evaluate, Round(work, start, without_memory(local)))
        return checked(metrics, self._evaluate)

    def release(self, job: str, *, met: bool) -> None:
        """See Trainer: the script's loop ends, unless it waits for another job than this one."""
        if met:
            self.rounds.put(None)
        releasing = asyncio.create_task(self._release(job))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, job: str) -> None:
        async with self._turn:
            await asyncio.to_thread(self._state.forget, job)

    async def close(self) -> None:
        """See Trainer."""
        await asyncio.gather(*self._releasing)
        self.rounds.put(None)


def check_script(job: JobConfig) -> None:
    """Raises ConfigError for an algorithm that does more than a script can do by itself."""
    algorithm = make_algorithm(job.algorithm)
    more = type(algorithm).end is not ClientAlgorithm.end or type(algorithm).personal()
    if more or algorithm.server() is not None or _names_tensors(algorithm):
        raise ConfigError(
            f"algorithm.name = {job.algorithm.name!r} works on what is sent and what stays, and a script "
            "submits trained weights: write a Task, or use an algorithm that a script can "
            "follow, such as fedavg"
        )


def _names_tensors(algorithm: ClientAlgorithm) -> bool:
    return type(algorithm).local_tensors is not ClientAlgorithm.local_tensors


def _state(layout: Layout, weights: Any) -> Mapping[str, Tensor]:
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    if not isinstance(weights, Mapping):
        kind = type(weights).__name__
        raise TaskError(f"submit takes a module, a state dict or a dict of arrays, not a {kind}")
    if all(isinstance(value, Tensor) for value in weights.values()):
        return weights
    return state_of(layout, weights)


def _stays(spec: Any) -> bool:
    return bool(spec.rule == "local" and spec.alias_of is None)


def _sums(metrics: Mapping[str, Any], examples: int) -> Metrics:
    pairs = {
        name: value if isinstance(value, tuple) else (float(value) * examples, examples)
        for name, value in metrics.items()
    }
    try:
        return as_sums(pairs, metrics)
    except TaskError as error:
        raise TaskError("metrics of submit() are numbers, or (sum, count) pairs") from error
