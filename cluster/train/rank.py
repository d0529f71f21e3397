"""One rank, as a fork of the launcher or by a scheduler: `-m roundtable.cluster.train.rank FOLDER`.

FOLDER is where the agent listens; it holds the settings that every rank reads.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from roundtable.client.device_faults import device_fault
from roundtable.client.failures import WorkFailed, diagnose
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.gpus import bound_gpu_memory
from roundtable.client.training.local_work import Stopped
from roundtable.client.worker.executor import Settings
from roundtable.cluster.parallel.meshes import broadcast_text, gather_text
from roundtable.cluster.plan.launch_variables import LaunchVariables
from roundtable.cluster.plan.links import known_links
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.fellow_replicas import FIRST_RANK, REPLICA, FellowReplicas
from roundtable.cluster.train.group import GroupExecutor
from roundtable.cluster.train.group_plan import Group
from roundtable.cluster.train.orders import SOCKET, AgentConnection, leave_report, order_of
from roundtable.cluster.train.round_reports import StepReport, Wishes
from roundtable.core.allocator import tune_for_transfers
from roundtable.core.errors import ConfigError
from roundtable.core.evidence.release import release
from roundtable.core.machine.stop_signals import leave_signals_to_owner

SETTINGS = "settings.json"
STORE = "ROUNDTABLE_STORE"
"""The variable that holds the descriptor at which a group's first rank listens for the others."""
_AGENT_SECONDS = 300.0
_IDLE = timedelta(days=30)
# Whose code talks to other ranks; this module itself is the main one where a scheduler starts it.
_GROUPS = ("torch", "roundtable", "__main__")
_PEERS = re.compile(
    r"[Cc]onnection (closed|reset|refused|was)|[Tt]imed out|[Gg]loo|NCCL|nccl|ProcessGroup|TCPStore|"
    r"Broken pipe"
)


def main(folder: Path) -> None:
    """Joins the group, and does the agent's orders until the agent is gone."""
    leave_signals_to_owner()
    faulthandler.enable()
    # Layers come and go with every step: blocks of a layer's size must not split the heap.
    tune_for_transfers()
    rank = -1
    try:
        place = LaunchVariables.read(os.environ)
        rank = place.rank + int(os.environ.get(FIRST_RANK, "0"))
        _serve(folder, place)
    except Exception as error:  # noqa: BLE001 - a task may raise anything, and the agent must hear of it
        if isinstance(error, ConfigError):
            # Where no agent is, whoever started the rank is the one to know.
            print(f"Error: {error}", file=sys.stderr, flush=True)
        elif STORE not in os.environ:
            print(f"Error: {diagnose(explained(error)).detail}", file=sys.stderr, flush=True)
        leave_report(folder, rank, explained(error))
        # Peers wait in collectives that will never end; the launcher ends them once one rank is gone.
        os._exit(1)


def _serve(folder: Path, place: LaunchVariables) -> None:
    _await_agent(folder)
    text = (folder / SETTINGS).read_text()
    values = json.loads(text)
    table = ClusterTable.model_validate_json(json.dumps(values["cluster"]))
    settings = Settings(**values["settings"])
    device = _device(values["device"], place)
    bound_gpu_memory(settings.gpu_memory, device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    _meet(place, device, table.timeout)
    control = dist.new_group(backend="gloo", timeout=_IDLE)
    saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=table.timeout))
    assert isinstance(control, dist.ProcessGroup)
    assert isinstance(saving, dist.ProcessGroup)
    check_versions(control)
    if STORE not in os.environ:
        check_settings(control, text)
    resources = Resources(**values["resources"]).with_world(dist.get_world_size())
    links = known_links(folder, device, min(resources.devices, resources.world), control)
    group = Group(
        settings=settings,
        table=table,
        resources=resources,
        folder=folder,
        device=device,
        control=control,
        saving=saving,
        links=links,
    )
    index = os.environ.get(REPLICA)
    agent = None
    if dist.get_rank() == 0:
        agent = AgentConnection(folder, None if index is None else int(index))
        if (folder / SETTINGS).read_text() != text and STORE not in os.environ:
            raise WorkFailed(
                "node_failure", "the agent was started anew, with other settings than the ranks'"
            )
    peers = (
        None
        if index is None
        else FellowReplicas(int(index), agent, control, folder, table.timeout, partial(print, flush=True))
    )
    executor = GroupExecutor(group, peers)
    while True:
        command = json.loads(broadcast_text(json.dumps(agent.next()) if agent else None, control))
        _do(executor, command, agent, device)


def _meet(place: LaunchVariables, device: torch.device, timeout: float) -> None:
    """Makes the process group of all ranks; `timeout` in seconds.

    Raises ConfigError for ranks that were told what cannot be together, and WorkFailed where not all come.
    """
    seconds = timedelta(seconds=timeout)
    try:
        store = _store(place, seconds)
        introduce(store, place)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=seconds,
            # With the device known, NCCL connects at once; a rank on a wrong one is an error, not a hang.
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        if STORE in os.environ or explained(error) is error:
            raise
        raise WorkFailed(
            "node_failure",
            f"rank {place.rank} did not meet all {place.world} ranks at {place.address}:{place.port} within "
            f"{timeout:g} s: fewer were started than WORLD_SIZE says, one ended, two have RANK = 0, the port "
            f"is taken, or a node cannot be reached ({str(error).splitlines()[0][:200]})",
        ) from error


def introduce(store: Any, place: LaunchVariables) -> None:
    """Says at the store which rank this is; ConfigError for a number that another has, and another world."""
    world = store.compare_set("world", "", str(place.world)).decode()
    if world != str(place.world):
        raise ConfigError(
            f"WORLD_SIZE = {place.world} on rank {place.rank}, and {world} on another: start all ranks for "
            "one world"
        )
    if store.add(f"rank {place.rank}", 1) > 1:
        raise ConfigError(
            f"RANK = {place.rank} on two ranks: give each a number of its own, from 0 to WORLD_SIZE - 1"
        )


def _store(place: LaunchVariables, timeout: timedelta) -> Any:
    """Where ranks meet: the launcher's forks at a port that it has bound, others where a scheduler says."""
    listening = os.environ.get(STORE)
    first = place.rank == 0
    if listening is not None and not first:
        os.close(int(listening))
    if listening is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun listens there itself, and tells the ranks of one start from those of the next.
        return next(rendezvous("env://", place.rank, place.world, timeout=timeout))[0]
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.address,
        place.port,
        place.world,
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(listening) if first and listening is not None else None,
    )


def _await_agent(folder: Path) -> None:
    """Waits for the agent to listen: ranks that a scheduler starts may be there first."""
    patience = time.monotonic() + _AGENT_SECONDS
    while not ((folder / SETTINGS).exists() and (folder / SOCKET).exists()):
        if time.monotonic() > patience:
            raise ConfigError(
                f"no agent has listened in {folder} for {_AGENT_SECONDS:.0f} s; start it first, with "
                '[cluster] launch = "external" and its state in a folder that all nodes share'
            )
        time.sleep(0.2)


def _do(
    executor: GroupExecutor,
    command: dict[str, Any],
    agent: AgentConnection | None,
    device: torch.device,
) -> None:
    order = order_of(command)

    def watch(report: StepReport) -> None:
        if agent is not None:
            agent.send({"step": asdict(report)})

    told = time.monotonic()

    def beat() -> None:
        nonlocal told
        if agent is not None and time.monotonic() - told >= 1.0:
            told = time.monotonic()
            agent.send({"number": 0})

    def withdrawn() -> bool:
        return agent is not None and agent.withdrawn == command["number"]

    def before_batch() -> None:
        beat()
        Wishes(withdrawn).obey(device)

    if executor.peers is not None:
        executor.peers.begin(command["number"])
    try:
        if command["do"] == "train":
            result: dict[str, Any] = {"trained": asdict(executor.train(order, watch, withdrawn))}
        elif command["do"] == "check":
            executor.check(order)
            result = {"checked": True}
        else:
            result = {"evaluated": executor.evaluate(order, before_batch)}
    except Stopped:
        result = {"stopped": True}
    if agent is not None:
        agent.send({**result, "number": command["number"]})


def _device(kind: str, place: LaunchVariables) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", place.device_of(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def check_versions(control: dist.ProcessGroup) -> None:
    """Raises ConfigError for ranks of different versions: they would train different models, or hang."""
    versions = gather_text(f"roundtable {release().version}, torch {torch.__version__}", control)
    odd = [f"rank {rank} has {text}" for rank, text in enumerate(versions) if text != versions[0]]
    if odd:
        raise ConfigError(
            f"the ranks run different versions: rank 0 has {versions[0]}, {'; '.join(odd[:3])}; install the "
            "same everywhere"
        )


def check_settings(control: dist.ProcessGroup, text: str) -> None:
    """Raises ConfigError for ranks that have read the settings of different agents."""
    digests = gather_text(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), control)
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ConfigError(
            f"rank {', '.join(odd[:8])} read other settings than rank 0: STATE has to be the state folder of "
            "the one agent on each node, on a file system that all share; then start all ranks again"
        )


def explained(error: Exception) -> Exception:
    """The error, or WorkFailed in its place where it only shows that another rank is gone."""
    if not isinstance(error, (RuntimeError, dist.DistError)):
        return error
    fault = device_fault(str(error))
    # The store and the network speak in sentences of many libraries; no task raises their classes.
    apart = isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) or (
        _PEERS.search(str(error)) and not _of_others(error)
    )
    if (fault is None or fault.kind == "node_failure") and apart:
        first = str(error).splitlines()[0][:200]
        lost = WorkFailed("node_failure", f"a rank lost contact with the others: {first}")
        lost.__cause__ = error
        return lost
    return error


def _of_others(error: Exception) -> bool:
    """Whether a task or one of its libraries raised it: their connections are to data, and not to ranks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else __name__
    return module.startswith("torch.utils.data") or module.partition(".")[0] not in _GROUPS


if __name__ == "__main__":
    main(Path(sys.argv[1]))
