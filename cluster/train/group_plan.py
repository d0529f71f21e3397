"""Plans a job on the ranks themselves: rank 0 plans for those that are there, as failures advise."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roundtable.client.durable_files import replace_synced
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.worker.executor import Settings
from roundtable.cluster.choice.planner import ClusterPlan, make_plan
from roundtable.cluster.choice.search import HEADROOM
from roundtable.cluster.parallel.meshes import broadcast_text
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.cluster.plan.candidates import refuse_loss, refuse_pieces
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe, estimate, with_momentum
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.precision_choice import settled
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.orders import Advice
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ResourceError, RoundtableError
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.task import Task, hash_of_task


@dataclass(frozen=True)
class Group:
    """The settings, devices and process groups of the ranks, for all their life."""

    settings: Settings
    table: ClusterTable
    resources: Resources
    folder: Path
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    links: Links


class LoadedCode:
    """What a rank has imported of tasks; it imports a file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, str] = {}

    def check(self, task: str) -> None:
        """Raises WorkFailed, after which the ranks start again, where a task's files have changed."""
        try:
            code = hash_of_task(task, self._folder)
        except RoundtableError:
            return  # Loading it says what is wrong.
        if self._known.setdefault(task, code) != code:
            raise WorkFailed("node_failure", f"the code of task {task} has changed: it is loaded anew")


def plan_together(
    task: Task, job: JobConfig, data: Any, group: Group
) -> tuple[Strategy, TensorParallel | None]:
    """(strategy, layers that are split), the same on all ranks of the group. Collective."""
    table, resources = group.table, group.resources
    half = settled(table, resources, job)[0].precision in ("bfloat16", "float16")
    probe = probe_model(task, data, device=resources.device, bfloat16=half, devices=resources.devices)
    text = ""
    if dist.get_rank() == 0:
        halvings = Advice.read(group.folder).halvings
        plan, strategy = lightened(probe, resources, job, table, group.links, halvings)
        text = json.dumps(strategy.to_plain())
        leave_plan(group.folder, setup_of(resources, strategy))
        print(f"plan: {strategy} ({'; '.join(plan.reasons[-1:])})", flush=True)
    strategy = Strategy.from_plain(json.loads(broadcast_text(text, group.control)))
    return strategy, probe.tensor_parallel if strategy.mesh.tp > 1 else None


PLANNED = "planned.json"


def setup_of(resources: Resources, strategy: Strategy) -> TrainingSetup:
    """What the job's record keeps of ranks and plan."""
    return TrainingSetup(
        machines=resources.nodes,
        ranks=resources.world,
        device=resources.gpu_name or resources.device,
        memory=resources.memory,
        plan=str(strategy),
        degrees={name: degree for name, degree in asdict(strategy.mesh).items() if degree > 1},
    )


def leave_plan(folder: Path, setup: TrainingSetup) -> None:
    """Leaves the plan where the agent looks for it."""
    replace_synced(folder / PLANNED, [json.dumps(setup.plain()).encode()], many=True)


def left_plan(folder: Path) -> TrainingSetup | None:
    """What the ranks have planned; None where nobody has, or another version wrote it."""
    try:
        return TrainingSetup(**json.loads((folder / PLANNED).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def lightened(
    probe: ModelProbe, resources: Resources, job: JobConfig, table: ClusterTable, links: Links, failures: int
) -> tuple[ClusterPlan, Strategy]:
    """(the plan, its strategy) after so many times out of memory: half the micro-batch each time.

    From a micro-batch of 1 on, or of what the model must run at once, the next plan is taken, which needs
    less memory than the one that failed was thought to. Raises ResourceError where no plan needs less.
    """
    plan = make_plan(probe, resources, job, table, links)
    strategy = plan.strategy
    for _ in range(failures):
        halved = strategy.halved()
        refusal = refuse_loss(probe, job, halved) or refuse_pieces(probe, halved, job.algorithm.batch_size)
        if strategy.micro_batch > 1 and not refusal:
            strategy = halved
            continue
        accumulated = probe.share(job.algorithm.batch_size, strategy.mesh.data)
        found = with_momentum(probe, make_algorithm(job.algorithm).step().momentum)
        needed = min(plan.estimate.peak, estimate(found, strategy, accumulated).peak)
        less = replace(resources, memory=int((needed - 1) / HEADROOM))
        try:
            plan = make_plan(probe, less, job, table, links)
        except ResourceError as error:
            raise ResourceError(
                f"the devices ran out of memory with {strategy}, and no other plan needs less: {error}"
            ) from error
        strategy = plan.strategy
    return plan, strategy
