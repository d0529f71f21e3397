"""One rank's work on a job: model, optimizer and data stay warm between rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import lanes_of
from roundtable.client.streams.shares import ReadingShare, largest_share
from roundtable.client.training.batches import count_examples
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.sgd import Correction, RoundSchedule
from roundtable.cluster.parallel.apply_strategy import set_products
from roundtable.cluster.parallel.experts import expert_loads
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import Places, finite
from roundtable.cluster.parallel.shared_batch_norm import batch_norms, refuse_parts
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.arithmetic import ExampleCost
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.cluster.stepping.agreed_step import AgreedStep, PendingFigures
from roundtable.cluster.stepping.diloco import OuterOptimizer
from roundtable.cluster.stepping.local_parameters import drop_gradients
from roundtable.cluster.stepping.loss_scaling import LossScale
from roundtable.cluster.stepping.rank_evaluation import RankEvaluation
from roundtable.cluster.stepping.rank_shares import ForwardClock, next_shares
from roundtable.cluster.stepping.sharded_optimizer import (
    align_gradients,
    make_optimizer,
    set_decay,
    sharded_correction,
)
from roundtable.cluster.train.collective_sampling import CollectiveSampler
from roundtable.cluster.train.fellow_replicas import FellowReplicas, RoundState
from roundtable.cluster.train.frozen_weights import FrozenParts
from roundtable.cluster.train.loss_guard import CheckpointTimes
from roundtable.cluster.train.prefetch import Prefetched
from roundtable.cluster.train.replica import Replica
from roundtable.cluster.train.round_course import RoundCourse, StepTimes
from roundtable.cluster.train.round_reports import RoundProgress, StepReport, Watch, Wishes, most_memory
from roundtable.cluster.train.shared_batches import Share, SharedBatches, Sharing, step_seed
from roundtable.cluster.train.streams import StreamedBatches
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, InvalidUpdate
from roundtable.core.layout import Layout
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import Task


@dataclass
class RankTrainer:
    """A job on this rank; `mode` is how per-example gradients are computed, where they are.

    `scale` is float16's, None for other precisions. `uneven`: ranks get examples by the speed each had in
    the round before, `shares`, None for equal ones. `lags`: the host may look at a step's figures while the
    next one runs, where nothing needs them earlier.
    """

    task: Task
    job: JobConfig
    layout: Layout
    strategy: Strategy
    meshes: Meshes
    device: torch.device
    client: str
    tensor_parallel: TensorParallel | None = None
    work: ExampleCost | None = None
    peak: float = 0.0
    replica: Replica = field(init=False)
    places: Places = field(init=False)
    optimizer: torch.optim.Optimizer | None = None
    outer: OuterOptimizer | None = None
    scale: LossScale | None = None
    mode: str = "auto"
    uneven: bool = False
    shares: tuple[float, ...] | None = None
    peers: FellowReplicas | None = None
    lags: bool = field(init=False)
    _correction: Correction | None = None

    def __post_init__(self) -> None:
        self.replica = Replica(
            self.task,
            self.layout,
            self.strategy,
            self.meshes,
            self.device,
            self.tensor_parallel,
            seed=self.job.seed,
            plain=is_example_level(self.job),
        )
        self.places = Places(self.layout)
        self.lags = self.device.type == "cuda"
        set_products(self.strategy.precision, self.device)
        self.sampler = CollectiveSampler(self.device, wanted=dist.get_rank() == 0)

    def load(self, vector: Tensor, others: Mapping[str, Tensor]) -> None:
        """Loads a model, each rank its own parts; `others` are tensors that do not travel."""
        self.replica.load(self.places, vector, others)
        self._frozen = FrozenParts(self.replica.tensors(), self.layout)
        if self.outer is not None:
            self.outer.depart()
        # What pulls towards the round's model starts from it, and not from a checkpoint of the round.
        step = make_algorithm(self.job.algorithm).step()
        self._correction = sharded_correction(step, self.replica.parameters())

    def batches(
        self, data: Any, round: int, start: dict[str, Any] | None = None
    ) -> SharedBatches | StreamedBatches:
        """The round's steps, this rank's share of each; those of a stream from its place `start` on."""
        table = self.job.algorithm
        mesh = self.strategy.mesh
        sharing = Sharing(
            rank=self.meshes.data_rank,
            ranks=mesh.data,
            micro_batch=self.strategy.micro_batch,
            pipeline=mesh.pp,
            interleaved=self.strategy.virtual_stages > 1,
            apart=mesh.dp if self.strategy.local_steps else 1,
            shares=self.shares,
        )
        share = largest_share(table.batch_size, mesh.data, lanes_of(data))
        if reason := refuse_parts(batch_norms(self.replica.model), self.strategy, share):
            raise ConfigError(reason)
        if count_examples(data) is None:
            return StreamedBatches(
                data,
                sharing,
                batch_size=table.batch_size,
                steps=table.steps,
                seed=StreamSeed(self.job.seed, self.client),
                start=start,
            )
        return SharedBatches(
            data,
            sharing,
            batch_size=table.batch_size,
            stream=(self.job.seed, round, self.client),
            epochs=table.passes,
            steps=table.steps,
        )

    def begin(self, round: int) -> float:
        """Makes a fresh optimizer where none is kept; returns the round's learning rate."""
        parameters = self.replica.parameters()
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.task, parameters, self.job, self.strategy, self.meshes)
            self.outer = self._outer()
            if self.replica.hook is not None:
                # What was not sent is for this optimizer's next step, as its own state is.
                self.replica.hook.reset()
        if self.strategy.precision == "float16":
            self.scale = self.scale or LossScale()
        return set_decay(self.optimizer, self.job, round)

    def fit(
        self,
        batches: SharedBatches | StreamedBatches,
        round: int,
        done: RoundProgress,
        watch: Watch,
        *,
        wishes: Wishes | None = None,
        save: Callable[[int], None] | None = None,
        times: CheckpointTimes | None = None,
    ) -> None:
        """Takes the steps that are left; `watch` is called after each, on every rank, and may raise.

        `save` is called, on every rank, with the steps taken, at the `times` of checkpoints; before the step
        where its loss or gradient is what makes one worth it. Raises Stopped, on every rank, after the step
        in which that was wished; InvalidUpdate, on every rank, for a loss or a gradient that is not finite:
        the step is not taken then.
        """
        wishes = wishes or Wishes()
        self.begin(round)
        assert self.optimizer is not None
        schedule = RoundSchedule(self.optimizer, self.job, round, batches.steps)
        if save is not None and self.peers is not None:
            save = self._saved_by_first(save)
        # What a reduction keeps has taken up a step's gradient by the time that its figures are known.
        before = not self.strategy.travel.keeps
        course = RoundCourse(
            round, batches.steps, done, watch, self._completed, save, times, self.scale, before
        )
        taking = self._taking()
        lags = self.lags and taking.lags and not course.looks_ahead and self.peers is None
        self.replica.train()
        if self.uneven:
            self.replica.clock = self.replica.clock or ForwardClock(self.device)
            self.replica.clock.begin()
        if self.peers is not None:
            self.peers.meet(self._state(batches, done))
        step = batches.position
        pending: tuple[PendingFigures, StepTimes] | None = None
        # However the round ends, so do processes that read ahead.
        with closing(iter(batches)) as shares:
            arriving = Prefetched(shares, self.device, partial(self._randomness, round, "data"), step)
            ended = time.perf_counter()
            while (share := arriving.take()) is not None:
                step += 1
                arrived = time.perf_counter()
                self.replica.begin_step((self.job.seed, round, self.client, "gradients", step))
                with self._randomness(round, "training", step), self.sampler.step():
                    told = self._gradients(share, taking, arriving, wishes)
                    found = None if lags else told.read()
                    if found is None or course.allows(step, found):
                        schedule.before(step)
                        # Of replicas that train apart, one without examples has no gradient to step by.
                        if share.together or self.outer is None:
                            taking.take(ask=lags)
                if self.outer and (step % self.strategy.local_steps == 0 or step == batches.steps):
                    self.outer.meet()
                rate = self.optimizer.param_groups[0]["lr"]
                present = StepTimes(step, told.total, rate, ended, arrived)
                if found is not None:
                    course.note(found, present)
                    if self.peers is not None:
                        self.peers.settle(self._state(batches, done))
                else:
                    # The figures of the step before are there by now, while this one's kernels run.
                    self._catch_up(course, pending)
                    pending = told, present
                ended = time.perf_counter()
        self._catch_up(course, pending)
        self.finish()

    def _catch_up(self, course: RoundCourse, pending: tuple[PendingFigures, StepTimes] | None) -> None:
        """Looks at a step that was taken unless the device found that it may not be."""
        if pending is not None:
            found = pending[0].read()
            course.refuse(pending[1].step, found)
            course.note(found, pending[1])

    def _taking(self) -> AgreedStep:
        assert self.optimizer is not None
        parameters = self.replica.parameters()
        return AgreedStep(
            self.optimizer,
            parameters,
            self.meshes,
            self.device,
            max_norm=self.job.algorithm.max_gradient_norm,
            correction=self._correction,
            scale=self.scale,
            # Stages have experts that others do not.
            loads=expert_loads(self.replica.model) if self.strategy.mesh.pp == 1 else None,
        )

    def _saved_by_first(self, save: Callable[[int], None]) -> Callable[[int], None]:
        """Of several replicas the first keeps checkpoints."""

        def first(step: int) -> None:
            if self.peers is None or self.peers.place == 0:
                save(step)

        return first

    def _state(self, batches: SharedBatches | StreamedBatches, done: RoundProgress) -> RoundState:
        assert self.optimizer is not None
        assert isinstance(batches, SharedBatches), "replicas that come and go do not share streams"
        return RoundState(self.replica, self.optimizer, batches, done)

    def check_weights(self) -> None:
        """Raises InvalidUpdate, on every rank, where the trained weights are not all finite, TaskError where
        training changed a frozen one."""
        self._frozen.check()
        if not finite(self.replica.tensors(), self.device):
            raise InvalidUpdate(
                "non_finite",
                "training ended with weights that are not finite; lower [algorithm] learning_rate "
                f"(now {self.job.algorithm.learning_rate}) or set max_gradient_norm",
            )

    def finish(self) -> None:
        """Ends a round's training: drops gradients, and averages buffers over the ranks."""
        assert self.optimizer is not None
        drop_gradients(self.optimizer, self.replica.parameters())
        if self.replica.clock is not None:
            group = self.meshes.one("dp").get_group()
            self.shares = next_shares(self.replica.clock, group, self.device, self.shares)
        self.replica.average_buffers()

    def _completed(self, report: StepReport) -> StepReport:
        """The report with what is known of memory, tokens, collectives and utilisation."""
        work = self.work or ExampleCost(0.0, 0, "counted")
        share = self.sampler.share
        replicas = 1 if self.peers is None else self.peers.count
        able = self.peak * replicas * self.strategy.mesh.world * max(report.seconds, 1e-9)
        return replace(
            report,
            memory=most_memory(self.device),
            tokens=work.tokens * report.examples,
            communicating=None if share is None else share * max(0.0, report.seconds - report.waiting),
            utilisation=work.flops * report.examples / able if able and work.flops else None,
        )

    def _outer(self) -> OuterOptimizer | None:
        strategy = self.strategy
        if not strategy.local_steps:
            return None
        group = self.meshes.one("dp").get_group()
        parameters = self.replica.parameters()
        return OuterOptimizer(parameters, group, strategy.outer_learning_rate, strategy.outer_momentum)

    def evaluate(self, data: Any, batch_size: int, beat: Callable[[], None] = lambda: None) -> Metrics:
        """Evaluates on the test data: named (sum, count), "loss" among them, the same on every rank.

        `beat` is called with each batch, so that somebody knows that it goes on; it may raise on all ranks.
        """
        self.replica.train(False)
        share = ReadingShare(self.meshes.data_rank, self.strategy.mesh.data)
        counts = not self.meshes.place("tp")
        place = self.replica
        ranks = RankEvaluation(self.task, share, self.device, counts, place.model_for, place.precision)
        buffers = [(each, each.clone()) for part in place.parts for each in part.buffers()]
        try:
            return ranks.over(data, batch_size, beat)
        finally:
            # As on one process: what a model keeps of an evaluation is not there in the next round.
            for buffer, before in buffers:
                buffer.copy_(before)

    def _gradients(
        self, share: Share, taking: AgreedStep, arriving: Prefetched, wishes: Wishes
    ) -> PendingFigures:
        """Computes a step's gradients, clipped, and what all ranks know of them."""
        taking.clear()
        # Ranks average their gradients, so each weighs its examples by how many ranks there are.
        mesh = self.strategy.mesh
        near = mesh.fsdp if self.strategy.local_steps else mesh.data
        scale = 1.0 if self.scale is None else self.scale.scale
        weights = [size * near * scale / max(share.together, 1) for size in share.sizes]
        losses = self.replica.backward(share.batches, weights, share.sizes)
        if self.peers is not None:
            return self._with_peers(self.peers, losses, share, taking, wishes)
        arriving.ahead()
        return taking.agree(losses, share.sizes, share.total, wishes.told(), self.replica.differs)

    def _with_peers(
        self,
        peers: FellowReplicas,
        losses: Tensor | None,
        share: Share,
        taking: AgreedStep,
        wishes: Wishes,
    ) -> PendingFigures:
        """The replica's own gradient first, then that of all: what corrects and clips works on the sum."""
        parameters = self.replica.parameters()
        align_gradients(parameters)
        own = torch.zeros(2, dtype=torch.float64, device=self.device)
        if losses is not None and self.meshes.place("tp") == 0:
            sizes = torch.tensor(share.sizes, dtype=torch.float64, device=self.device)
            own = torch.stack([sizes.sum(), (losses.double() * sizes).sum()])
        dist.all_reduce(own)
        met = peers.reduce(parameters, int(own[0]), float(own[1]))
        first = dist.get_rank() == 0
        mean = torch.tensor([met.loss / max(met.examples, 1)], device=self.device) if first else None
        told = [float(first and met.stop), wishes.told()[1]]
        return taking.agree(mean, [met.examples], max(met.examples, 1), told, self.replica.differs)

    def _randomness(self, round: int, purpose: str, step: int) -> Any:
        """Seeds a step: alike on ranks with the same examples, and when the step is done again."""
        first = 0 if self.peers is None else self.peers.place * self.strategy.mesh.data
        stream = self.job.seed, round, self.client
        seed = step_seed(stream, purpose, step, first + self.meshes.data_rank)
        return isolated_randomness(seed, self.device)
