"""Does orders on a whole group of ranks; each rank runs this, and all take every branch together."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from roundtable.client.durable_files import digest_of
from roundtable.client.failures import before_batches
from roundtable.client.streams.kept_position import NAME, kept_position, position_tensor
from roundtable.client.trainer import TrainedUpdate
from roundtable.client.training.batches import count_examples
from roundtable.client.training.loaders import drops_last
from roundtable.client.training.local_training import check_evaluation, check_privacy, split_data
from roundtable.client.training.local_work import steps_of
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.silo_account import affordable, payment
from roundtable.client.training.task_composition import check_task_with
from roundtable.client.worker.lost_state import say_if_lost
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import prepare_update, write_deltas
from roundtable.cluster.plan.arithmetic import count_work
from roundtable.cluster.plan.device_peaks import peak_flops
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.cluster.plan.replica_composition import check_replicas
from roundtable.cluster.stepping.compile_trial import TrialMemory
from roundtable.cluster.stepping.loss_scaling import NAME as SCALE
from roundtable.cluster.stepping.loss_scaling import LossScale
from roundtable.cluster.train.checkpoint_places import Mirror, Position, checkpoint_folder, mirrors
from roundtable.cluster.train.checkpoints import Checkpoints
from roundtable.cluster.train.fellow_replicas import FellowReplicas
from roundtable.cluster.train.frozen_weights import frozen_weights
from roundtable.cluster.train.group_plan import Group, LoadedCode, plan_together
from roundtable.cluster.train.local_state import OwnTensors, save_local
from roundtable.cluster.train.loss_guard import CheckpointTimes, last_sound
from roundtable.cluster.train.pretrained_weights import pretrained_weights
from roundtable.cluster.train.private_rounds import RoundCharge, fit_examples_privately, noise_on_parts
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import (
    RoundFigures,
    RoundProgress,
    Watch,
    Wishes,
    report_round,
    round_metrics,
)
from roundtable.cluster.train.streams import why_shared
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import EVALUATION_BATCHES, JobConfig, job_from_json
from roundtable.core.errors import InvalidUpdate, LayoutError, ResourceError, TaskError
from roundtable.core.models import Model, open_model
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel, hides_figures
from roundtable.core.task import ArrayTask, Site, Task, ToldTask, in_context, load_task


class GroupExecutor:
    """Does orders, one at a time; model, optimizer and data of the last job stay warm."""

    def __init__(self, group: Group, peers: FellowReplicas | None = None) -> None:
        """`peers`: this group is one of several replicas that train each batch together."""
        self._group = group
        self.peers = peers
        self._state = SiloState(Path(group.settings.jobs))
        self._job = ""
        self._ended = 0
        self._code = LoadedCode(Path(group.settings.folder))
        self._saved: Checkpoints | None = None
        self._trainer: RankTrainer | None = None
        self._data: tuple[Any, Any] = (None, None)
        self._site = Site(group.settings.client)
        self._task = Task()
        self._pretrained: Mapping[str, Tensor] | None = None

    def train(self, order: Order, watch: Watch, withdrawn: Callable[[], bool]) -> TrainedUpdate:
        """Trains from the order's model; every rank writes its parts of the update to `order.output`.

        Raises Stopped, on every rank, once the order is withdrawn, as rank 0 knows it.
        """
        trainer, start, digest = self._prepare(order)
        check_privacy(trainer.job, protected=True)
        others = self._others(order, start)
        trainer.load(start.vector, others)
        if trainer.strategy.precision == "float16":
            trainer.scale = LossScale.kept(others)
        checkpoints = self._checkpoints(order)
        self._begin(trainer, checkpoints, order)
        if isinstance(trainer.job.privacy, ExampleLevel):
            return self._train_on_noise(trainer, checkpoints, order, start, digest, watch, Wishes(withdrawn))
        done, batches = RoundProgress(), trainer.batches(self._data[0], order.round, kept_position(others))
        saved = self._resume(trainer, checkpoints, order, digest, done, batches)
        times = CheckpointTimes(self._group.table)

        def save(step: int) -> None:
            scale = trainer.scale
            stream = batches.place(step, self._group.control)
            position = Position(
                order.round,
                digest,
                step,
                seen=done.seen,
                loss_sum=done.loss_sum,
                stream=stream,
                scale=None if scale is None else (scale.scale, scale.good, done.skipped),
            )
            self._save(trainer, checkpoints, position)
            times.saved()

        wishes, figures = Wishes(withdrawn, times.due), RoundFigures(trial=trainer.replica.trial)
        try:
            trainer.fit(
                batches, order.round, done, figures.seen_by(watch), wishes=wishes, save=save, times=times
            )
        except InvalidUpdate as error:
            checkpoints.finish()
            sound = last_sound(checkpoints.written or saved)
            raise InvalidUpdate(error.reason, f"{error}; {sound}") from error
        if self.peers is not None and not self.peers.delivers():
            # Another replica writes what all have learnt; this one goes on from the same.
            checkpoints.finish()
            self._ended = order.round
            return TrainedUpdate(digest="", size=0, examples=0, metrics={})
        self._end(trainer, checkpoints, order, Position.end_of(order.round, digest, batches.position))
        place = batches.place(batches.steps, self._group.control)
        kept = {} if place is None else {NAME: position_tensor(place)}
        if kept and NAME not in others and dist.get_rank() == 0:
            say_if_lost(order)
        if trainer.scale is not None:
            kept[SCALE] = trainer.scale.to_tensor()
        if isinstance(trainer.job.privacy, ClientLocalLevel):
            round_charge = self._round_charge(order)
            noise = noise_on_parts(trainer, start.vector, round_charge)
            return self._deliver_privately(trainer, order, start, round_charge, noise, kept)
        trainer.check_weights()
        digest, size = self._deliver(trainer, order, start, kept=kept)
        group, changes = self._group, self.peers.changes if self.peers is not None else None
        about = (trainer.strategy, group.folder, group.control, group.resources.memory, changes)
        try:
            report_round(figures, order, *about)
        except (OSError, ResourceError) as error:
            # The update is there: its figures are no reason to train it again.
            _say(f"the figures of round {order.round} are not kept: {error}")
        return TrainedUpdate(
            digest=digest,
            size=size,
            examples=batches.examples,
            metrics=round_metrics(trainer.task, done, private=hides_figures(trainer.job.privacy)),
        )

    def _train_on_noise(
        self,
        trainer: RankTrainer,
        checkpoints: Checkpoints,
        order: Order,
        start: Model,
        digest: str,
        watch: Watch,
        wishes: Wishes,
    ) -> TrainedUpdate:
        """Trains by DP-SGD, without checkpoints: a broken round begins anew, with new samples and noise."""
        round_charge = self._round_charge(order)
        control = self._group.control
        fit_examples_privately(trainer, self._data[0], order.round, round_charge, watch, wishes, control)
        self._end(trainer, checkpoints, order, Position.end_of(order.round, digest, 0))
        return self._deliver_privately(trainer, order, start, round_charge)

    def _begin(self, trainer: RankTrainer, checkpoints: Checkpoints, order: Order) -> None:
        """Makes the optimizer: fresh, or with the state that the counted round left, on whichever ranks."""
        keep, counted = trainer.job.algorithm.optimizer_state == "keep", _counted_round(order)
        fresh = not (keep and 0 < self._ended == counted)
        if fresh:
            trainer.optimizer = None
        # Until this round has ended the state is of no round's end.
        self._ended = 0
        trainer.begin(order.round)
        assert trainer.optimizer is not None
        if keep and fresh and counted:
            if (newest := checkpoints.end(counted, packed=trainer.replica.packed)) is not None:
                checkpoints.load(newest[0], trainer.replica, trainer.optimizer, trainer.outer, weights=False)
            elif dist.get_rank() == 0:
                _say(
                    f"{order.job}: round {order.round} begins with a fresh optimizer, as no checkpoint of "
                    f"the end of round {counted} is here, the newest of this silo's that counts"
                )

    def _end(self, trainer: RankTrainer, checkpoints: Checkpoints, order: Order, position: Position) -> None:
        """Keeps the optimizer's state, where the job says so, for the ranks that train the next round."""
        if trainer.job.algorithm.optimizer_state == "keep":
            self._save(trainer, checkpoints, position)
            self._ended = order.round
        checkpoints.finish()

    def _round_charge(self, order: Order) -> RoundCharge:
        """The charge against the silo's account, the same as of a silo with one device."""
        settings, folder = self._group.settings, Path(self._group.settings.jobs).parent / "privacy"
        limit = (settings.epsilon, settings.delta)
        pay = payment(folder, order.job, order.round, order.attempt, *limit)
        return RoundCharge(affordable(folder, *limit), pay)

    def _deliver_privately(
        self,
        trainer: RankTrainer,
        order: Order,
        start: Model,
        round_charge: RoundCharge,
        change: Callable[[Tensor], Tensor] | None = None,
        kept: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> TrainedUpdate:
        """Pays, then delivers; nothing exact leaves beside what has its noise: neither loss nor count."""
        trainer.check_weights()
        round_charge.settle(self._group.control)
        digest, size = self._deliver(trainer, order, start, change, kept)
        return TrainedUpdate(digest=digest, size=size, examples=1, metrics={})

    def check(self, order: Order) -> None:
        """Finds what is frozen in the model, to be at hand. ModelMismatch where it is not the order's."""
        _, start, _ = self._prepare(order, steps=0)
        self._others(order, start)

    def evaluate(self, order: Order, beat: Callable[[], None] = lambda: None) -> Metrics:
        """Evaluates the order's model on the silo's test data; `beat` is called with each batch."""
        trainer, start, _ = self._prepare(order, steps=0)
        check_evaluation(trainer.job, trainer.layout)
        trainer.load(start.vector, self._others(order, start))
        size = trainer.job.evaluation.batch_size or EVALUATION_BATCHES * max(trainer.strategy.micro_batch, 1)
        return trainer.evaluate(self._data[1], size, beat)

    def _prepare(self, order: Order, steps: int | None = None) -> tuple[RankTrainer, Model, str]:
        """The trainer, told of the order and that it takes `steps` (those of its training), and the model."""
        self._code.check(order.task)
        start = open_model(Path(order.model))
        digest = Path(order.model).stem
        if self._trainer is None or self._job != order.job:
            self._trainer, self._ended = None, 0
            self._trainer, self._job = self._set_up(order, start), order.job
        if isinstance(self._trainer.task, ToldTask):
            self._trainer.task.tell(self._context(order, self._trainer.job, steps))
        if not self._trainer.layout.fingerprint == start.layout.fingerprint == order.layout:
            raise LayoutError("the job announces another layout than its model has")
        return self._trainer, start, digest

    def _set_up(self, order: Order, start: Model) -> RankTrainer:
        group, job = self._group, job_from_json(order.config)
        with before_batches():
            task = load_task(order.task, Path(group.settings.folder), parameters=job.task.parameters)
            if isinstance(task, ArrayTask):
                raise TaskError(
                    f"{type(task).__name__} is an ArrayTask: a cluster spreads PyTorch modules only"
                )
            check_task_with(job, make_algorithm(job.algorithm), task, start.layout)
            options = group.settings.data_of.get(order.task, group.settings.data)
            self._site = Site(group.settings.client, options=options, standardise=job.standardise)
            self._task, self._pretrained = task, None
            self._data = split_data(task, self._site)
            task = in_context(task, self._context(order, job))
            strategy, split = plan_together(task, job, self._data[0], group)
        if self.peers is not None:
            check_replicas(task, job, self._data[0], strategy.precision, strategy.optimizer_bits)
        meshes = Meshes(strategy.mesh, group.device.type, apart=strategy.local_steps > 0)
        trainer = RankTrainer(
            task=task,
            job=job,
            layout=start.layout,
            strategy=strategy,
            meshes=meshes,
            device=group.device,
            client=group.settings.client,
            tensor_parallel=split,
            peers=self.peers,
            uneven=group.table.shares == "measured" and strategy.mesh.data > 1,
        )
        key = (start.layout.fingerprint, str(strategy), type(task).__name__, group.links.key)
        memory = TrialMemory(group.folder, key, group.control)
        trainer.replica.try_compiled(group.table.compile, memory, apart=self.peers is not None)
        if dist.get_rank() == 0:
            # Only the rank that reports needs the operations of a step.
            trainer.work = count_work(task, example_batch(self._data[0]))
            trainer.peak = peak_flops(group.table, group.device, strategy.precision)
            if reason := why_shared(self._data[0], strategy.mesh.data):
                _say(reason)
        return trainer

    def _context(self, order: Order, job: JobConfig, steps: int | None = None) -> Context:
        """What the task's methods are told of the order, if they ask; ranks differ in the device."""
        group = self._group
        if steps is None:
            steps = steps_of(job, count_examples(self._data[0]), drop_last=drops_last(self._data[0]))
        return Context(
            job.title,
            order.round,
            group.settings.client,
            steps,
            group.device,
            job.seed,
            job.algorithm.learning_rate,
        )

    def _others(self, order: Order, start: Model) -> Mapping[str, Tensor]:
        """Tensors that do not travel: the silo's own values, else the model's, else the task's file's."""
        path = self._state.find(order.job, order.counted)
        known: list[Mapping[str, Tensor]] = [start.local if path is None else OwnTensors(path)]
        if self._pretrained is None:
            assert self._trainer is not None
            file: Callable[[Site], Path] | None = getattr(self._task, "pretrained", None)
            own = {} if file is None else pretrained_weights(file(self._site), self._task)
            held = (own, self._group.folder, self._group.control)
            self._pretrained = frozen_weights(self._task, self._trainer.job.seed, start.layout, *held)
        known.append(self._pretrained)
        # The type asks for mutable maps, but nothing writes.
        return ChainMap(*known)  # type: ignore[arg-type]

    def _checkpoints(self, order: Order) -> Checkpoints:
        """The job's checkpoints, when what the order before was writing is written."""
        if self._saved is not None:
            self._saved.finish()
        table, job = self._group.table, order.job
        folder = checkpoint_folder(self._group.folder, job)
        copies: tuple[Mirror, ...] = ()
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            copies = mirrors(table, job)
        counted = _counted_round(order)
        self._saved = Checkpoints(folder, copies, table.keep, self._group.saving, _say, counted)
        return self._saved

    def _resume(
        self,
        trainer: RankTrainer,
        checkpoints: Checkpoints,
        order: Order,
        digest: str,
        done: RoundProgress,
        batches: Any,
    ) -> int:
        """Loads the newest checkpoint of this round; returns its step, 0 for none."""
        newest = checkpoints.newest(order.round, digest, packed=trainer.replica.packed)
        if newest is None:
            return 0
        path, position = newest
        assert trainer.optimizer is not None
        checkpoints.load(path, trainer.replica, trainer.optimizer, trainer.outer)
        batches.load_state_dict({"position": position.step, "stream": position.stream})
        done.seen, done.loss_sum = position.seen, position.loss_sum
        if position.scale is not None and trainer.scale is not None:
            scale, good, done.skipped = position.scale
            trainer.scale = LossScale(scale, good)
        return position.step

    def _save(self, trainer: RankTrainer, checkpoints: Checkpoints, position: Position) -> None:
        assert trainer.optimizer is not None
        checkpoints.save(trainer.replica, trainer.optimizer, position, trainer.outer)

    def _deliver(
        self,
        trainer: RankTrainer,
        order: Order,
        start: Model,
        change: Callable[[Tensor], Tensor] | None = None,
        kept: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[str, int]:
        """Writes all ranks' parts of the delta into one file; (digest, bytes) on rank 0, ("", 0) on others.

        `kept`, the same on all ranks, stays at the silo beside the tensors that do not travel.

        At level example buffers stay as they were: no noise covers what training fills them with.
        """
        output, encoding = Path(order.output), trainer.job.writes.up
        tensors = list(trainer.replica.tensors())
        leaving = [each for each in tensors if _learns(each[1]) or not is_example_level(trainer.job)]
        first = dist.get_rank() == 0
        if first:
            prepare_update(output, encoding, trainer.layout)
        dist.barrier(self._group.control)
        write_deltas(output, encoding, leaving, trainer.places, start.vector, trainer.meshes, change)
        save_local(self._state, order, tensors, kept, trainer.layout, trainer.meshes, self._group.control)
        dist.barrier(self._group.control)
        return (digest_of(output), output.stat().st_size) if first else ("", 0)


_say = partial(print, flush=True)


def _counted_round(order: Order) -> int:
    """The newest round of this silo's whose update is in the model; 0 for none."""
    return 0 if order.counted is None else order.counted[0]


def _learns(each: Tensor) -> bool:
    return isinstance(each, nn.Parameter) and each.requires_grad
