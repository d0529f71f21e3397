"""Silos for jobs that are drawn at random, called as simulated clients are, with relays or without."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from any_job import TASK, Run
from any_job_config import NAMES_OF_TASKS, REGIONS, SILOS, config_of
from any_job_task import PARAMETERS
from federation import Federation, agents, federation_of, run_job

from roundtable.asked_silos import standardised_by_silos
from roundtable.core import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.credentials import issue
from roundtable.operator import OperatorClient
from roundtable.preparation import prepare_job
from roundtable.relay.config import RelayConfig
from roundtable.relay.regional_table import RegionalTable
from roundtable.relay.relay import Relay
from roundtable.server.config import RootTable
from roundtable.trusted import TrustedData


def write_files(folder: Path) -> None:
    """What the drawn jobs and their silos read: a trace of what clients declare, and a table of each."""
    rows = [f"client-{place},0,1e9,{'ab'[place % 2]}\n" for place in range(SILOS)]
    (folder / "trace.csv").write_text("client,start,end,metadata.region\n" + "".join(rows))
    for place in range(SILOS):
        chance = random.Random(place)
        lines = [",".join(f"{chance.gauss(n, 1 + n):.3f}" for n in range(6)) for _ in range(24 + 8 * place)]
        (folder / f"people-{place}.csv").write_text("\n".join(["x0,x1,x2,x3,x4,x5", *lines]) + "\n")


@asynccontextmanager
async def silos_of(folder: Path, *, relayed: bool) -> AsyncIterator[Federation]:
    """A coordinator, relays if they are `relayed`, and all silos, once they are there."""
    names = [f"toy{number}" for number in range(NAMES_OF_TASKS)]
    root = RootTable(task=f"{folder / 'toy.py'}:Toy", parameters=PARAMETERS)
    tables = dict.fromkeys(names, root)
    write_files(folder)
    async with AsyncExitStack() as stack:
        federation = await stack.enter_async_context(
            federation_of(folder, TASK, TrustedData(tables), root_data=tables)
        )
        ports = dict.fromkeys(REGIONS, "")
        for name in REGIONS if relayed else ():
            ports[name] = await stack.enter_async_context(relay_of(federation, name))
        configs, place = [], 0
        for name, size in REGIONS.items():
            for _ in range(size):
                issue(folder / "ca", f"client-{place}", "agent", folder / f"client-{place}")
                config = config_of(federation, place)
                if relayed:
                    config = replace(config, coordinator=ports[name], relay=name)
                configs.append(config)
                place += 1
        await stack.enter_async_context(agents(*configs))
        await asyncio.to_thread(_wait_for_silos, federation)
        yield federation


@asynccontextmanager
async def relay_of(federation: Federation, name: str) -> AsyncIterator[str]:
    """A relay of this name while the block lasts; its address."""
    address, folder = federation
    issue(folder / "ca", name, "relay", folder / name, hosts=("127.0.0.1", "localhost"))
    config = RelayConfig(
        address,
        folder / name,
        folder / "relays" / name,
        listen="127.0.0.1:0",
        regional=RegionalTable(least_silos=1),
    )
    relay = Relay(config)
    running = asyncio.create_task(relay.run())
    await relay.started.wait()
    try:
        yield f"127.0.0.1:{relay.port}"
    finally:
        relay.stop()
        await running


def at_silos(job: JobConfig, federation: Federation) -> Run | str:
    """How the job goes at the coordinator, as `job submit` sends it there; or why it is refused."""
    address, folder = federation
    forget_accounts(folder)
    try:
        with OperatorClient(address, folder / "operator") as operator:
            job = standardised_by_silos(operator, job)
        status, records, model = run_job(federation, job, prepare_job(job, folder).model)
    except RoundtableError as error:
        return str(error)
    with OperatorClient(address, folder / "operator") as operator:
        reason = operator.job(job.title).job.reason
    return Run(status, reason, records, model.vector)


def forget_accounts(folder: Path) -> None:
    """The rows of all jobs are the same here, and each job is to be the first on them."""
    for account in folder.glob("state/*/privacy/*"):
        account.unlink()


def _wait_for_silos(federation: Federation) -> None:
    with OperatorClient(federation[0], federation[1] / "operator") as operator:
        while sum(client.online for client in operator.clients()) < SILOS:
            time.sleep(0.01)
