"""What can be checked of a silo before it takes part: each check by itself, each answer one sentence."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass

import grpc

from roundtable.client.agent.connection import Session, explain, hello, open_channel
from roundtable.client.agent.state_lock import locked
from roundtable.client.policy.config import AgentConfig
from roundtable.client.training.batches import count_examples
from roundtable.client.training.local_training import split_data
from roundtable.client.worker.executor import choose_device
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.layout import Layout
from roundtable.core.task import ArrayTask, Site, initial_state, load_task
from roundtable.proto.pieces import agents_stub


@dataclass(frozen=True)
class Greeting:
    """What the coordinator says to this agent; `clock_offset` is its clock minus ours, in seconds."""

    version: str
    clock_offset: float


@dataclass(frozen=True)
class TaskReport:
    """A task as this silo has it; an example count is None where only iterating would tell."""

    parameters: int
    training_examples: int | None
    test_examples: int | None


def greet(config: AgentConfig) -> Greeting:
    """Connects as this silo's agent, and leaves again.

    Raises UnavailableError, IdentityError or ProtocolError with what to do, Refused with the
    coordinator's reason, and ResourceError while the agent itself is running.
    """
    with locked(config.state):
        return asyncio.run(_greet(config))


def check_task(config: AgentConfig, name: str) -> TaskReport:
    """Imports the task, makes its model and loads its data, as a round would.

    Raises TaskError, LayoutError, and whatever the task itself raises.
    """
    task = load_task(config.tasks[name], config.folder)
    layout = Layout.of(initial_state(task, 0))
    client = load_credentials(config.credentials).name
    train, test = split_data(task, Site(client, options=dict(config.data)))
    if isinstance(task, ArrayTask):
        return TaskReport(layout.size, None, None)
    return TaskReport(layout.size, count_examples(train), count_examples(test))


def check_device(config: AgentConfig) -> str:
    """The device that training will use; ResourceError for one that is not there."""
    return str(choose_device(config.device))


def free_bytes(config: AgentConfig) -> int:
    """What is free where models and updates are kept."""
    folder = config.state
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


async def _greet(config: AgentConfig) -> Greeting:
    try:
        async with open_channel(config.coordinator, config.credentials) as channel:
            session = Session(agents_stub(channel))
            # No task is offered, so that no round selects an agent that leaves at once.
            welcome = await session.greet(hello((), dict(config.metadata), (), ()))
            offset = welcome.clock - time.time()
            await session.leave("only a check")
    except grpc.aio.AioRpcError as error:
        raise await explain(error, config.coordinator, config.credentials) from error
    return Greeting(welcome.version, offset)
