"""Plans a job from the silo's files, for `roundtable client plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from roundtable.client.policy.cluster_table import ClusterTable, parse_bytes
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.cluster.choice.planner import ClusterPlan, make_plan
from roundtable.cluster.parallel.forward_trace import unheard
from roundtable.cluster.plan.device_peaks import known_names, published
from roundtable.cluster.plan.links import Links, read_links
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.precision_choice import settled
from roundtable.cluster.plan.replica_composition import check_replicas
from roundtable.cluster.plan.resources import Resources, allowed_resources
from roundtable.cluster.tools.silo_job import load_silo_job, open_data, tell_steps
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import Task

# Of a node that is not this machine, where nothing says how much it has: as in DGX H100.
HOST = 2 << 40


def plan_job(
    agent: Path,
    job_file: Path,
    overrides: Mapping[str, Any],
    world: int | None = None,
    memory: str | None = None,
    reference: str | None = None,
    other: Mapping[str, Any] | None = None,
    told: Callable[[str], None] = unheard,
) -> ClusterPlan:
    """The plan for a job file; `agent` is the silo's agent.toml, which may be absent.

    `other` has values of Resources for other hardware than this: `gpu_name`, `host_memory` in bytes. `told`
    hears how far it is.
    Raises ConfigError, ResourceError or PrivacyError as `make_plan` does.
    """
    loaded = load_silo_job(agent, job_file, overrides, reference)
    links: Links | None = None
    if loaded.state is not None and world is None:
        # The measured links are those of the silo's own devices.
        links = read_links(loaded.state / "cluster")
    resources = replace(resources_of(loaded.table, world, memory, loaded.policy), **(other or {}))
    return plan_task(loaded.task, loaded.job, loaded.table, resources, loaded.options, links, told)


def other_hardware(gpu: str | None, host_memory: str | None) -> dict[str, Any]:
    """What the command line says of hardware, as values of Resources; ConfigError for an unknown device."""
    other: dict[str, Any] = {}
    if gpu is not None:
        if published(gpu) is None:
            raise ConfigError(f"--gpu {gpu!r}: nothing is known of it; known are {known_names()}")
        other["gpu_name"] = gpu
    if host_memory is not None:
        other["host_memory"] = parse_bytes(host_memory)
    return other


def resources_of(
    table: ClusterTable, world: int | None, memory: str | None, policy: PolicyTable | None = None
) -> Resources:
    """The resources of the table that the policy allows, with the command line's values in their place."""
    wanted: dict[str, Any] = {}
    if memory is not None:
        wanted["memory"] = parse_bytes(memory)
    if world is not None and table.devices == "auto":
        per_node = next(count for count in range(min(8, world), 0, -1) if world % count == 0)
        wanted.update(devices=per_node, nodes=world // per_node, launch="external")
    resources = allowed_resources(table.model_copy(update=wanted), policy or PolicyTable())
    if memory is not None or world is not None:
        # A plan for other hardware than this machine's is one for GPUs.
        device: Literal["cpu", "cuda"] = "cpu" if table.backend == "gloo" else "cuda"
        host = resources.host_memory if table.host_memory != "auto" else HOST
        resources = replace(resources, device=device, host_memory=host)
    return resources.with_world(world) if world is not None else resources


def plan_task(
    task: Task,
    job: JobConfig,
    table: ClusterTable,
    resources: Resources,
    options: Mapping[str, Any],
    links: Links | None = None,
    told: Callable[[str], None] = unheard,
) -> ClusterPlan:
    """The plan for a task with the silo's data and the measured links; `told` hears how far it is."""
    told("reading the data")
    data, _ = open_data(task, "plan", options)
    tell_steps(task, job, data)
    if table.elastic == "replica":
        # Each replica plans for its own devices, and for the whole batch: it may be the only one left.
        resources = replace(resources, devices=table.replica_devices)
    precision = settled(table, resources, job)[0].precision
    if table.elastic == "replica":
        check_replicas(task, job, data, precision, table.strategy.optimizer_bits or 32)
    half = precision in ("bfloat16", "float16")
    probe = probe_model(
        task, data, device=resources.device, bfloat16=half, devices=resources.devices, told=told
    )
    told("comparing plans")
    return replace(make_plan(probe, resources, job, table, links), links=links)
