"""A plan for a job from the silo's files, as the command line asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundtable.client.policy.cluster_table import ClusterTable, parse_bytes
from roundtable.client.policy.config import load_agent_config
from roundtable.client.policy.rules import PolicyTable
from roundtable.client.training.local_training import split_data
from roundtable.cluster.plan.links import Links, read_links
from roundtable.cluster.plan.model_probe import example_batch, probe_model
from roundtable.cluster.plan.planner import ClusterPlan, make_plan
from roundtable.cluster.plan.resources import Resources, allowed_resources
from roundtable.core.config import JobConfig, load_job
from roundtable.core.errors import ConfigError
from roundtable.core.task import ArrayTask, Site, Task, load_task


def plan_job(
    agent: Path,
    job_file: Path,
    overrides: Mapping[str, Any],
    world: int | None = None,
    memory: str | None = None,
    reference: str | None = None,
) -> ClusterPlan:
    """The plan for a job file; `agent` is the silo's agent.toml, which may be absent.

    Raises ConfigError, ResourceError or PrivacyError as `make_plan` does.
    """
    job = load_job(job_file, dict(overrides))
    links: Links | None = None
    table, folder, options = ClusterTable(), job_file.resolve().parent, dict(job.simulation.data)
    policy = PolicyTable()
    name = reference or job.task
    if agent.exists():
        config = load_agent_config(agent)
        table, folder, options = config.cluster or ClusterTable(), config.folder, dict(config.data)
        name, policy = reference or config.reference_of(job.task) or job.task, config.policy
        # What was measured counts for the silo's own devices.
        links = read_links(config.state / "cluster") if world is None else None
    task = load_task(name, folder)
    if isinstance(task, ArrayTask):
        raise ConfigError(
            f"task {name!r} is an ArrayTask: only a Task with a PyTorch module is spread over ranks"
        )
    resources = resources_of(table, world, memory, policy)
    return plan_task(task, job, table, resources, options, links)


def resources_of(
    table: ClusterTable, world: int | None, memory: str | None, policy: PolicyTable | None = None
) -> Resources:
    """What the table says and the policy allows, with the command line's values in place of its own."""
    wanted: dict[str, Any] = {}
    if memory is not None:
        wanted["memory"] = parse_bytes(memory)
    if world is not None and table.devices == "auto":
        per_node = next(count for count in range(min(8, world), 0, -1) if world % count == 0)
        wanted.update(devices=per_node, nodes=world // per_node, launch="external")
    found = allowed_resources(table.model_copy(update=wanted), policy or PolicyTable())
    if memory is not None or world is not None:
        # A plan for other hardware than this machine's is one for GPUs.
        found = replace(found, device="cpu" if table.backend == "gloo" else "cuda")
    return found.with_world(world) if world is not None else found


def plan_task(
    task: Task,
    job: JobConfig,
    table: ClusterTable,
    resources: Resources,
    options: Mapping[str, Any],
    links: Links | None = None,
) -> ClusterPlan:
    """The plan for a task with the silo's data, and with links as they were measured."""
    data, _ = split_data(task, Site("plan", options=options))
    half = table.precision == "bfloat16"
    found = probe_model(task, example_batch(data), device=resources.device, bfloat16=half)
    return replace(make_plan(found, resources, job, table, links), links=links)
