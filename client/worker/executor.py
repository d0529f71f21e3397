"""Does the training process's orders; task, data and model stay loaded between rounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.first_batch.enough_memory import Room, room_on
from roundtable.client.policy.gpus import bound_gpu_memory
from roundtable.client.streams.kept_position import NAME
from roundtable.client.trainer import TrainedUpdate
from roundtable.client.training.algorithm_round import preparation
from roundtable.client.training.evaluation import evaluate
from roundtable.client.training.local_training import (
    check_evaluation,
    is_plain,
    module_of,
    split_data,
    train,
)
from roundtable.client.training.local_work import BeforeBatch, Execution, LocalWork, Progress
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.module_state import borrowed
from roundtable.client.training.silo_account import Protection, payment
from roundtable.client.training.task_composition import check_task_with
from roundtable.client.training.tuning import tuner
from roundtable.client.worker.earlier_readings import READINGS, EarlierReadings
from roundtable.client.worker.kept_generations import keep_generations
from roundtable.client.worker.kept_release import KeptRelease
from roundtable.client.worker.leaving_update import write_leaving
from roundtable.client.worker.lost_state import (
    Trouble,
    say_if_lost,
    say_what_is_lost,
)
from roundtable.client.worker.own_model import has_own_model, remember
from roundtable.client.worker.silo_state import SiloState, rank_file
from roundtable.client.worker.step_room import check_step, part_of_batch, settled_rank, tried_step
from roundtable.client.worker.torch_devices import choose_device
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.factors.own_ranks import RankedAlgorithm
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.encodings.feedback import without_memory
from roundtable.core.errors import EncodingError, ModelMismatch, ResourceError, TaskError
from roundtable.core.foundation.huggingface_task import HuggingFaceTask
from roundtable.core.foundation.model_difference import model_difference
from roundtable.core.foundation.pretrained_task import PINNED, PretrainedTask
from roundtable.core.initial_model import job_layout, whole_model
from roundtable.core.layout import Layout
from roundtable.core.models import Model, open_model
from roundtable.core.privacy_table import masking_of
from roundtable.core.task import AnyTask, Site, initial_state, load_task

log = logging.getLogger("roundtable.worker")


@dataclass(frozen=True)
class Settings:
    """The settings of a training process, for all its life; see AgentConfig."""

    client: str
    folder: str
    jobs: str
    device: str
    threads: int | None
    data: dict[str, Any]
    epsilon: float | None = None
    delta: float | None = None
    data_of: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: int | None = None
    gpu_memory: int | None = None
    generations: int = 0


@dataclass
class _WarmJob:
    """Task, data and model of the job that ran last."""

    job: str
    config: JobConfig
    task: AnyTask
    algorithm: ClientAlgorithm
    model: nn.Module | dict[str, Tensor]
    layout: Layout
    out: Tensor
    mode: str = "auto"
    rank: int = 0
    has_room: set[int] = field(default_factory=set)

    @property
    def goes_ahead(self) -> bool:
        """Whether a round of it can be trained before its order is here."""
        plain = is_plain(self.layout.model) and isinstance(self.model, nn.Module)
        return plain and self.algorithm.goes_ahead()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The module may be evaluated inside, in the middle of its training: weights and modes are put back.

        What else it holds, `evaluate` puts back itself.
        """
        module = module_of(self.model)
        modes = [(part, part.training) for part in module.modules()]
        state = module.state_dict()
        held = {
            spec.name: state[spec.name].detach().to("cpu", copy=True) for spec in self.layout.model.averaged
        }
        try:
            yield
        finally:
            state = module.state_dict()
            for name, value in held.items():
                state[name].copy_(value)
            for part, training in modes:
                part.training = training


class Executor:
    """Does orders, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._state = SiloState(Path(settings.jobs))
        self._data: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._warm: _WarmJob | None = None
        self.device = choose_device(settings.device)
        bound_gpu_memory(settings.gpu_memory, self.device)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)

    def train(
        self,
        order: Order,
        progress: Progress,
        before_batch: BeforeBatch | None = None,
        trouble: Trouble = lambda kind, detail, action: None,
        arrives: Callable[[], Order] | None = None,
        ranked: Callable[[int], None] = lambda rank: None,
    ) -> TrainedUpdate:
        """Trains, writes the encoded update to `order.output`, and saves tensors that stay at the silo.

        `before_batch` is called before each batch, and may raise Stopped: nothing is written then, and what
        was paid for stays paid. `trouble` hears, before the first batch, of state that the silo has lost.
        With `arrives` the order is a guess (`Order.next`): after the last step that waits for the real one,
        which goes on from the same state, and gives it. `ranked` hears the rank of the silo's factors, where
        its memory has chosen that.
        """
        warm, start = self._prepare(order)

        def arriving() -> Tensor:
            nonlocal order, start
            assert arrives is not None
            order = arrives()
            _, start = self._prepare(order)
            self._remember(order, warm)
            return start.vector

        data, _ = self._data_of(order.task, warm)
        local = self._kept(order, warm, trouble)
        if arrives is None:
            self._remember(order, warm)
        protection = self._protection(order, warm.mode)
        work = LocalWork(
            warm.config,
            warm.layout,
            start.vector,
            order.round,
            self.settings.client,
            start.local if local is None else local,
            warm.algorithm,
            alone=masking_of(warm.config.privacy) is None,
            compare=EarlierReadings(Path(self.settings.jobs).parent / READINGS).compare,
        ).of_steps(order.steps)
        work = self._of_own_rank(order, warm, data, work)
        if warm.rank:
            ranked(warm.rank)
        self._check_room(order, warm, data, work)
        update = train(
            warm.task,
            warm.model,
            data,
            work,
            Execution(
                device=self.device,
                progress=progress,
                out=warm.out,
                protection=protection,
                micro_batch=part_of_batch(warm.config, order.halvings) if order.halvings else None,
                before_batch=before_batch,
                arrives=None if arrives is None else arriving,
            ),
        )
        warm.mode = protection.mode
        if NAME in update.local and local is None:
            say_if_lost(order)
        written = write_leaving(
            order,
            warm.config,
            warm.algorithm,
            Model(warm.layout, start.vector, start.local),
            self.settings.client,
            self._state,
            update.delta,
            update.local,
        )
        return TrainedUpdate(written.digest, written.size, update.examples, update.metrics, written.writing)

    def _of_own_rank(self, order: Order, warm: _WarmJob, data: Any, work: LocalWork) -> LocalWork:
        """With factors of the rank that the silo's memory chooses, where the job leaves it to that."""
        rules, client = warm.algorithm, self.settings.client
        if isinstance(rules, RankedAlgorithm) and (choices := rules.rank_choices(client)):
            step = tried_step(warm.task, warm.model, data, work, self.device)
            warm.rank = settled_rank(step, choices, self._room(), rank_file(self.settings.jobs, order.job))
            warm.algorithm = rules.of_rank(client, warm.rank)
        return replace(work, algorithm=warm.algorithm)

    def _room(self) -> Room | None:
        return room_on(self.device, self.settings.memory, self.settings.gpu_memory)

    def _check_room(self, order: Order, warm: _WarmJob, data: Any, work: LocalWork) -> None:
        """Once for each size of parts."""
        if order.halvings not in warm.has_room:
            check_step(warm.task, warm.model, data, work, self.device, self._room(), order.halvings)
            warm.has_room.add(order.halvings)

    def _protection(self, order: Order, mode: str) -> Protection:
        settings, folder = self.settings, Path(self.settings.jobs).parent / "privacy"
        step = (order.job, order.round, order.attempt)
        release = KeptRelease(Path(settings.jobs) / order.job / f"released-{order.round}.safetensors")
        return Protection(
            payment(folder, *step, settings.epsilon, settings.delta), mode=mode, release=release
        )

    def can_go_ahead(self, order: Order) -> bool:
        """Whether the round behind an order that was done can be trained before its own is here."""
        warm = self._warm
        return warm is not None and warm.job == order.job and warm.goes_ahead

    def has_kept(self, order: Order) -> bool:
        """Whether what the silo goes on from, as the order says, is still there."""
        return self._state.find(order.job, order.counted) is not None

    def evaluate_between(self) -> AbstractContextManager[None]:
        """Inside, the model of the job that is trained may be evaluated."""
        assert self._warm is not None
        return self._warm.lent()

    def check(self, order: Order) -> None:
        """Makes the model. ModelMismatch where it is not the order's."""
        self._prepare(order)

    def evaluate(self, order: Order, before_batch: BeforeBatch | None = None) -> Metrics:
        """Evaluates the model, with the silo's own tensors in it, on the silo's test data. `before_batch` is
        called before each batch, and may raise Stopped."""
        warm, start = self._prepare(order)
        check_evaluation(warm.config, warm.layout)
        training, data = self._data_of(order.task, warm)
        work = self._work(order, warm, start)
        self._remember(order, warm)
        measured = evaluate(
            warm.task,
            warm.model,
            data,
            warm.layout,
            start.vector,
            device=self.device,
            local=work.local,
            prepare=preparation(
                work, self.device, tuner(warm.task, training, work, self.device, before_batch)
            ),
            context=work.evaluation_context(self.device),
            batch_size=part_of_batch(warm.config, order.halvings, evaluation=True),
            before_batch=before_batch,
        )
        if self.settings.generations and isinstance(warm.task, HuggingFaceTask):
            try:
                self._generate(order, warm.task, work, data, before_batch)
            except (
                ResourceError,
                RuntimeError,
            ) as error:  # Out of memory, or of disk: the figures are there.
                log.warning("%s: no text was written on after round %d: %s", order.job, order.round, error)
        return measured

    def _generate(
        self,
        order: Order,
        task: HuggingFaceTask,
        work: LocalWork,
        data: Any,
        before_text: BeforeBatch | None,
    ) -> None:
        """Has the global model write on texts of the test data, into the silo's state folder alone."""
        assert self._warm is not None
        assert isinstance(self._warm.model, nn.Module)
        layout = work.layout
        module = self._warm.model.to(self.device)
        with borrowed(module, layout.model, work.vector[: layout.model.size], work.local):
            found = task.generated(module, data, self.settings.generations, before_text)
        keep_generations(Path(self.settings.jobs).parent, order.job, order.round, found)

    def personal(self, order: Order) -> dict[str, Tensor]:
        """The state dict of the model that the silo itself would use: what `evaluate` measures, on CPU.

        Raises TaskError for an ArrayTask, and what `evaluate` raises.
        """
        warm, start = self._prepare(order)
        if not isinstance(warm.model, nn.Module):
            raise TaskError(f"{type(warm.task).__name__} is an ArrayTask: it has no model to write")
        training, _ = self._data_of(order.task, warm)
        work = self._work(order, warm, start)
        own = preparation(work, self.device, tuner(warm.task, training, work, self.device))
        layout = warm.layout
        module = warm.model.to(self.device)
        with borrowed(module, layout.model, start.vector[: layout.model.size], work.local):
            if own is not None:
                own(module)
            return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}

    def whole(self, order: Order) -> dict[str, Tensor]:
        """The state dict of the global model of an order, with the frozen tensors of the silo's task."""
        warm, start = self._prepare(order)
        return whole_model(warm.config, warm.task, start).state_dict()

    def _work(self, order: Order, warm: _WarmJob, start: Model) -> LocalWork:
        """The work of an order on a model that is there, with what the silo kept."""
        kept = self._kept(order, warm)
        local = start.local if kept is None else kept
        client = self.settings.client
        return LocalWork(warm.config, warm.layout, start.vector, order.round, client, local, warm.algorithm)

    def _remember(self, order: Order, warm: _WarmJob) -> None:
        if has_own_model(warm.algorithm, warm.layout):
            remember(Path(self.settings.jobs), self.settings.client, order)

    def _kept(self, order: Order, warm: _WarmJob, trouble: Trouble | None = None) -> dict[str, Tensor] | None:
        """What the silo goes on from. `trouble` hears what is lost; EncodingError where the server counts on
        it."""
        kept = self._state.load(order.job, order.counted)
        if kept is None and order.counted is not None and warm.algorithm.counted_on():
            place = self._state.path(order.job, *order.counted)
            raise EncodingError(
                f"what round {order.counted[0]} of job {order.job} left at this silo is lost ({place.name} "
                f"in its state folder), and the server of algorithm {warm.config.algorithm.name!r} counts on "
                "it: the silo can take part in a new job that begins with this one's model"
            )
        if trouble is not None:
            say_what_is_lost(order, warm.config, warm.algorithm, warm.layout, kept, trouble)
        return without_memory(kept)

    def _prepare(self, order: Order) -> tuple[_WarmJob, Model]:
        warm = self._warm
        if warm is None or warm.job != order.job:
            self._warm = None
            config = job_from_json(order.config)
            task = load_task(order.task, Path(self.settings.folder), parameters=config.task.parameters)
            model = _made(task, config.seed)
            algorithm = make_algorithm(config.algorithm)
            layout = job_layout(config, algorithm, model)
            check_task_with(config, algorithm, task, layout)
            out = torch.empty(layout.sent.size)
            warm = self._warm = _WarmJob(order.job, config, task, algorithm, model, layout, out)
        start = open_model(Path(order.model), warm.layout)
        if not warm.layout.fingerprint == start.layout.fingerprint == order.layout:
            self._warm = None  # It may be mended before the next order.
            raise ModelMismatch(model_difference(warm.layout, start.layout, warm.task))
        return warm, start

    def _data_of(self, reference: str, warm: _WarmJob) -> tuple[Any, Any]:
        standardise = warm.config.standardise
        stated = None if standardise is None else standardise.model_dump_json()
        # Rows of tokens are of the tokenizer that was there: another one may lie in its place by now.
        pins = [spec.name for spec in warm.layout.tensors if spec.name.startswith(f"{PINNED}.")]
        key = reference, json.dumps([warm.config.task.parameters, stated, pins], sort_keys=True)
        if key not in self._data:
            options = self.settings.data_of.get(reference, self.settings.data)
            site = Site(self.settings.client, options=options, standardise=standardise)
            self._data = {key: split_data(warm.task, site)}
        return self._data[key]


def _made(task: AnyTask, seed: int) -> nn.Module | dict[str, Tensor]:
    """The task's model. ModelMismatch for a base that is not here, or cannot be used."""
    try:
        return initial_state(task, seed)
    except TaskError as error:
        if not isinstance(task, PretrainedTask):
            raise
        raise ModelMismatch(str(error)) from error
