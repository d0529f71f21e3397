"""`roundtable client doctor`: would this silo's agent start, and would the coordinator have it?"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

import grpc

from roundtable.client.agent.connection import ControlStream, explain, open_channel
from roundtable.client.agent.installation import CLONE_REMEDY, CloneMemory, said_of
from roundtable.client.agent.state_lock import locked
from roundtable.client.door.outgoing import hello
from roundtable.client.policy.config import AgentConfig, load_agent_config
from roundtable.client.policy.guarantees import guarantees
from roundtable.client.worker.own_budgets import STATED, OwnBudgets
from roundtable.client.worker.torch_devices import choose_device
from roundtable.core.encodings.foreign.approval import not_approved
from roundtable.core.errors import ResourceError, RoundtableError
from roundtable.core.identity.handshake import check_connection
from roundtable.core.machine.process_facts import user_id
from roundtable.core.task import hash_of_task
from roundtable.doctor.inquiries import Check, Inquiry, known
from roundtable.doctor.machine_checks import (
    clock,
    disk,
    folder_writable,
    machine,
    remedy_for,
    shown_credentials,
    taken,
)
from roundtable.doctor.reach import traces, trying
from roundtable.doctor.task_checks import trials
from roundtable.proto.pieces import agents_stub


def examine_agent(file: Path, *, skip_tasks: bool = False) -> Iterator[Inquiry]:
    """All probes of an agent.toml. The clock is compared over a short connection that offers no task."""
    try:
        config = load_agent_config(file)
    except RoundtableError as error:
        yield known(Check("settings", "fail", str(error), f"mend {file}"))
        return
    yield known(Check("settings", "ok", str(file)))
    yield from machine()
    yield Inquiry("device", lambda: _device(config), remedy='install the driver, or [limits] device = "auto"')
    yield Inquiry("tasks", lambda: _tasks(config), about="reading the tasks' code")
    yield Inquiry("policy", lambda: _policy(config))
    yield Inquiry("budget", lambda: _budgets(config), remedy="restore the state folder from a backup")
    yield Inquiry("user", lambda: _user(config, file))
    yield Inquiry("state", lambda: [folder_writable("state", config.state, "state in agent.toml")])
    yield Inquiry("disk", lambda: [disk(config.state)])
    yield Inquiry("metrics", lambda: _metrics(config))
    if config.traces:
        remedy = trying(config.traces)
        yield Inquiry("traces", partial(traces, config.traces), f"asking {config.traces}", remedy)
    certificates = Inquiry(
        "certificates", lambda: shown_credentials(config.credentials, "agent"), remedy=remedy_for("agent")
    ).answer()
    yield from map(known, certificates)
    yield Inquiry("clone", lambda: _clones(config))
    if any(check.state == "fail" for check in certificates):
        yield known(
            Check("rehearsal", "warn", "not tried: a task is told the silo's name", "see certificates")
        )
        yield known(Check("coordinator", "warn", "not checked: that needs credentials", remedy_for("agent")))
        return
    yield from trials(config, skip_tasks)
    for address in (config.coordinator, *config.standbys):
        yield Inquiry("coordinator", partial(_reaches, config, address), f"reaching {address}", _way(address))
    yield Inquiry(
        "clock", lambda: _compares_clocks(config), "comparing clocks", "ask the coordinator's operator"
    )


def _device(config: AgentConfig) -> Iterator[Check]:
    yield Check("device", "ok", f"training runs on {choose_device(config.device)}")


def _user(config: AgentConfig, file: Path) -> Iterator[Check]:
    """What another user may read says nothing of the agent."""
    if (user := user_id()) is None or not config.state.exists():
        return
    owner = config.state.stat().st_uid
    if owner != user:
        message = f"the state folder is user {owner}'s, and this runs as user {user}"
        remedy = f"`sudo -u '#{owner}' roundtable client --config {quote(str(file.absolute()))} doctor`"
        yield Check("user", "warn", message, remedy)


def _tasks(config: AgentConfig) -> Iterator[Check]:
    """Reads their code and runs none of it."""
    if not config.tasks:
        yield Check("tasks", "fail", "this silo offers no task", "name one in [tasks] of agent.toml")
    for name, reference in config.tasks.items():
        try:
            digest = hash_of_task(reference, config.folder)
        except RoundtableError as error:
            yield Check("tasks", "fail", f"{name}: {error}", f"mend [tasks] {name} in agent.toml")
            continue
        table = config.task_tables.get(name)
        if table is not None and table.blake3 not in (None, digest):
            message = f"{name}: the code of {reference} is not what blake3 allows; it would not run"
            yield Check("tasks", "fail", message, f"read it, then `roundtable client hash {name}`")
        else:
            yield Check("tasks", "ok", f"{name}: {reference}")
    for reason in not_approved(config.encodings, config.encodings, "this silo", "agent.toml"):
        yield Check("encodings", "fail", reason, "read it, then `roundtable client hash --encoding NAME`")


def _policy(config: AgentConfig) -> Iterator[Check]:
    """What each rule guarantees, and against whom."""
    for rule in guarantees(config.policy):
        if rule.gap:
            yield Check("policy", "warn", f"{rule.key}: {rule.sentence}", rule.gap)
        else:
            yield Check("policy", "ok", f"{rule.key}: {rule.sentence}")


def _budgets(config: AgentConfig) -> Iterator[Check]:
    """What is left of the epsilon that the silo's policy sets over all jobs."""
    for budget in OwnBudgets(config).now():
        if not math.isfinite(budget.epsilon):
            continue
        whose = "of what jobs state" if budget.account == STATED else f"of the account by {budget.account}"
        message = f"{budget.left:.4g} of epsilon = {budget.epsilon:g} {whose} is left ([policy] {budget.key})"
        if budget.is_nearly_spent:
            remedy = f"jobs that need more are refused; [policy] {budget.key} is the data's owner's to raise"
            yield Check("budget", "warn", message, remedy)
        else:
            yield Check("budget", "ok", message)


def _metrics(config: AgentConfig) -> Iterator[Check]:
    if not config.metrics:
        return
    if reason := taken(config.metrics):
        yield Check(
            "metrics",
            "warn",
            f"{config.metrics} cannot be taken: {reason}",
            "fine if the agent runs already; otherwise set metrics in agent.toml to another port",
        )
    else:
        yield Check("metrics", "ok", f"{config.metrics} is free")


def _clones(config: AgentConfig) -> Iterator[Check]:
    """What the coordinator has told the agent that runs here."""
    news = CloneMemory(config.state, config.credentials).newest()
    if news is None:
        yield Check("clone", "ok", "nobody else is known to have come with this silo's keys")
    else:
        yield Check("clone", "warn", said_of(news), CLONE_REMEDY)


def _reaches(config: AgentConfig, address: str) -> Iterator[Check]:
    check_connection(address, config.credentials)
    yield Check("coordinator", "ok", f"{address} accepts this silo's certificate")


def _compares_clocks(config: AgentConfig) -> Iterator[Check]:
    """With the first of the coordinators that answers."""
    for address in (config.coordinator, *config.standbys):
        try:
            check_connection(address, config.credentials)
        except RoundtableError:
            continue
        if folder_writable("state", config.state, "state").state != "ok":
            yield Check("clock", "warn", "not compared: that needs the state folder", "see state")
            return
        try:
            with locked(config.state):
                yield asyncio.run(_clock(replace(config, coordinator=address)))
        except ResourceError:
            yield Check("clock", "ok", "the agent runs here now; it compares clocks at each connection")
        return
    yield Check("clock", "warn", "not compared: no coordinator is reached", "see coordinator")


def _way(address: str) -> str:
    """Name and port are the commonest mistakes, a firewall the next."""
    port = address.rpartition(":")[2]
    nc = f"`nc -vz {address.rpartition(':')[0]} {port}` must connect"
    return f"{nc}: compare the address with what its operator gave you; allow TCP to port {port} outwards"


async def _clock(config: AgentConfig) -> Check:
    """Says hello under the silo's name, offering nothing, and goodbye: no job can choose it meanwhile."""
    try:
        async with open_channel(config.coordinator, config.credentials) as channel:
            session = ControlStream(agents_stub(channel))
            before = time.time()
            welcome = await session.greet(hello((), {}, (), ()))
            apart = welcome.clock - (before + time.time()) / 2
            await session.leave("that was the doctor")
    except grpc.aio.AioRpcError as error:
        raise await explain(error, config.coordinator, config.credentials) from error
    return clock(apart, "the coordinator")
