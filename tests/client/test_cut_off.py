"""A script that was cut off as its job ended learns of it when the line is back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import free_port
from service import Operator, running

from roundtable.client.join import join
from roundtable.client.policy.config import AgentConfig
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.proto import operator_pb2
from roundtable.server import ServerConfig


def in_a_thread(body: Callable[[], None]) -> asyncio.Future[None]:
    """Done with the body. A script that waits for ever keeps nobody else from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def work() -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=work, daemon=True).start()
    return done


async def test_a_job_that_ends_while_the_line_is_cut_ends_the_script_and_not_the_next_one(
    tmp_path: Path,
) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", hosts=("127.0.0.1", "localhost"))
    issue(tmp_path / "ca", "elm", "agent", tmp_path / "elm")
    issue(tmp_path / "ca", "olga", "operator", tmp_path / "olga")

    def server(port: int) -> ServerConfig:
        return ServerConfig(
            listen=f"127.0.0.1:{port}",
            state=str(tmp_path / "server"),
            database=f"sqlite:///{tmp_path / 'hub.db'}",
            artifacts=str(tmp_path / "artifacts"),
            credentials=str(tmp_path / "hub"),
        )

    here, elsewhere = server(free_port()), server(free_port())
    silo = AgentConfig(
        coordinator=here.listen,
        credentials=tmp_path / "elm",
        state=tmp_path / "state",
        folder=tmp_path,
    )
    rounds: asyncio.Queue[Any] = asyncio.Queue()
    loop, go_on = asyncio.get_running_loop(), threading.Event()

    def script() -> None:
        for round in join(silo, task="t"):
            loop.call_soon_threadsafe(rounds.put_nowait, round.job)
            go_on.wait()
            round.submit(round.weights, examples=1)

    async with asyncio.timeout(100):
        first = in_a_thread(script)
        async with running(here) as hub, Operator(hub.port, tmp_path / "olga") as olga:
            job = await olga.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1)
            assert await rounds.get() == job.id
        async with running(elsewhere) as hub, Operator(hub.port, tmp_path / "olga") as olga:
            await olga.stub.CancelJob(operator_pb2.JobRequest(job=job.id))
            await olga.watch_until(job.id, "cancelled")
        go_on.set()
        async with running(here) as hub, Operator(hub.port, tmp_path / "olga") as olga:
            await first
            # Told of the same job as it comes; but that one is over since before.
            second = in_a_thread(script)
            while not (await olga.stub.ListClients(operator_pb2.ListClientsRequest())).clients[0].online:
                pass
            other = await olga.submit("[cohort]\nsize = 1\n[evaluation]\nevery = 0", rounds=1, request="r2")
            assert await rounds.get() == other.id
            await olga.watch_until(other.id, "finished")
            await second
