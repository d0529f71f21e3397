"""Anybody may call a job anything: no command by name reaches a job that its caller does not mean."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from service import Operator

from roundtable.core.identity.credentials import issue
from roundtable.proto import administration_pb2, administration_pb2_grpc, operator_pb2
from roundtable.server import Coordinator

PEOPLE = {"bob": "data-scientist", "eve": "data-scientist", "olga": "operator", "vera": "viewer"}


@pytest.fixture(scope="session")
def people(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("people")
    shutil.copytree(certificates / "ca", folder / "ca")
    for name, role in PEOPLE.items():
        issue(folder / "ca", name, role, folder / name)  # type: ignore[arg-type]
    return folder


@pytest.fixture
async def calls(coordinator: Coordinator, people: Path) -> AsyncIterator[dict[str, Operator]]:
    """An operator client of each of them."""
    made = {name: Operator(coordinator.port, people / name) for name in PEOPLE}
    yield made
    for each in made.values():
        await each.channel.close()


async def submit(who: Operator, name: str, request: str) -> str:
    return str((await who.submit(f'name = "{name}"', request=request)).id)


async def seen(who: Operator, job: str) -> str:
    return str((await who.job(job)).job.id)


def changes(who: Operator, job: str) -> list[Any]:
    request = operator_pb2.JobRequest(job=job)
    return [method(request) for method in (who.stub.PauseJob, who.stub.ResumeJob, who.stub.CancelJob)]


async def problem(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    return str(caught.value.details())


async def test_a_job_of_the_same_name_takes_nothing_over(calls: dict[str, Operator]) -> None:
    bob, eve, olga, vera = calls.values()
    first = await submit(bob, "trial", "r1")
    assert {await seen(who, "trial") for who in calls.values()} == {first}
    second = await submit(eve, "trial", "r2")
    # Each one's own, and for everybody else neither, instead of the newest.
    assert (await seen(bob, "trial"), await seen(eve, "trial")) == (first, second)
    provenance = administration_pb2_grpc.AdministrationStub(vera.channel)
    request = administration_pb2.ProvenanceRequest(job="trial")
    for said in (
        await problem(vera.job("trial")),
        await problem(olga.job("trial")),
        await problem(provenance.GetProvenance(request)),
    ):
        assert f"{second} of eve" in said
        assert f"{first} of bob" in said
    paused = await bob.stub.PauseJob(operator_pb2.JobRequest(job="trial"))
    assert (paused.id, paused.status) == (first, "paused")
    assert (await eve.job(second)).job.status != "paused"


async def test_nobody_changes_the_job_of_another_by_its_name(calls: dict[str, Operator]) -> None:
    bob, eve, olga, _ = calls.values()
    job = await submit(bob, "trial", "r1")
    for who in (olga, eve):
        for call in changes(who, "trial"):
            said = await problem(call)
            assert f"another's is changed by its identifier alone: {job} of bob" in said
    assert (await olga.stub.PauseJob(operator_pb2.JobRequest(job=job))).status == "paused"
    # Once it is over the name is still bob's for him, and a new one of his comes before it.
    await olga.stub.CancelJob(operator_pb2.JobRequest(job=job))
    assert await seen(bob, "trial") == job
    again = await submit(bob, "trial", "r3")
    assert await seen(bob, "trial") == again


async def test_a_job_called_like_the_identifier_of_another(calls: dict[str, Operator]) -> None:
    bob, eve, olga, _ = calls.values()
    job = await submit(bob, "trial", "r1")
    false = await submit(eve, job, "r2")
    short = await submit(eve, job[:6], "r3")
    assert {await seen(who, job) for who in calls.values()} == {job}
    said = await problem(eve.job(job[:6]))
    assert job in said
    assert short in said
    cancelled = await olga.stub.CancelJob(operator_pb2.JobRequest(job=job))
    assert cancelled.id == job
    assert (await eve.job(false)).job.status != "cancelled"
    # An operator means the identifier: what changes a job takes nobody else's name.
    assert (await olga.stub.CancelJob(operator_pb2.JobRequest(job=short))).id == short


async def test_a_beginning_that_two_jobs_share(coordinator: Coordinator, calls: dict[str, Operator]) -> None:
    olga, count, known = calls["olga"], 0, {}
    while True:
        job = await submit(olga, f"n{count}", f"r{count}")
        if job[0] in known:
            break
        known[job[0]] = job
        count += 1
    said = await problem(olga.stub.CancelJob(operator_pb2.JobRequest(job=job[0])))
    assert job in said
    assert known[job[0]] in said
    assert "no job is named" in await problem(olga.stub.CancelJob(operator_pb2.JobRequest(job="")))


async def test_another_role_of_the_same_name_is_another_party(
    coordinator: Coordinator, calls: dict[str, Operator], people: Path
) -> None:
    bob = calls["bob"]
    issue(people / "ca", "bob", "admin", people / "the other bob")
    async with Operator(coordinator.port, people / "the other bob") as admin:
        job = await submit(admin, "trial", "r1")
        assert "another's is changed by its identifier alone" in await problem(changes(bob, "trial")[0])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bob.stub.CancelJob(operator_pb2.JobRequest(job=job))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError, match="taken by another operator's job"):
            await submit(bob, "trial", "r1")
        mine = await submit(bob, "trial", "r2")
        assert (await seen(bob, "trial"), await seen(admin, "trial")) == (mine, job)
