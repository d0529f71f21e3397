"""`roundtable privacy show`, `budget` and `export` against a real coordinator: one ledger over all jobs."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.cli.main import run
from roundtable.core.models import open_model
from roundtable.privacy import Budget, Charge, compose
from roundtable.privacy.accounting.accountants import _compose
from roundtable.proto import operator_pb2, operator_pb2_grpc
from roundtable.server import ServerConfig
from roundtable.server.jobs.privacy_budget import check_all, worst
from roundtable.server.store import Database
from roundtable.server.store.ledger import Total, entries

TABLE = """
[cohort]
size = {size}
strategy = "round_robin"
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "{level}"
clip_norm = 1.0
delta = 1e-3
population = 20
noise_multiplier = {noise}
{more}
"""


def table(level: str = "client", size: int = 1, noise: float = 2.0, more: str = "") -> str:
    return TABLE.format(level=level, size=size, noise=noise, more=more)


async def finish(operator: Operator, text: str, rounds: int, request: str) -> Any:
    """Runs a job to its end."""
    job = await operator.submit(text, rounds=rounds, request=request)
    await operator.watch_until(job.id, "finished")
    return (await operator.job(job.id)).job


async def test_the_ledger_is_shown_limited_and_exported(
    settings: Callable[..., ServerConfig],
    certificates: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch", tasks=("t", "u")) as birch,
    ):
        connection = ["--coordinator", f"localhost:{coordinator.port}"]
        connection += ["--credentials", str(certificates / "olga")]

        async def said(*words: object) -> tuple[int, str, str]:
            code = await asyncio.to_thread(run, ["privacy", *map(str, words), *connection])
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        assert (await said("show"))[1].startswith("Nothing has been charged")
        assert (await said("budget"))[1].startswith("No budget is set")
        work = [asyncio.create_task(agent.take_part(torch.ones(4))) for agent in (alder, birch)]
        central = await finish(operator, table(), 2, "r1")
        local = await finish(operator, table("client_local", 2, noise=8.0), 3, "r2")

        shown = json.loads((await said("show", "--json"))[1])
        found = {account["silo"]: account for account in shown["accounts"]}
        shared = Charge("gaussian", "client", "none", (("update", 2.0),), steps=2)
        own = Charge("gaussian", "client", "none", (("update", 4.0),), 3, "replace_one")
        assert list(found) == ["", "alder", "birch"]
        assert found[""]["epsilon"] == pytest.approx(compose([shared], 1e-3))
        assert found["alder"]["epsilon"] == pytest.approx(compose([shared, own], 1e-3))
        assert found["alder"]["releases"] == 5
        assert found["alder"]["jobs"] == sorted([central.id, local.id])
        (tmp_path / "model").write_bytes(await operator.fetch(local.model.digest))
        words = open_model(tmp_path / "model").metadata["privacy"]
        assert f"epsilon = {found['alder']['epsilon']:.3f}" in words, (
            "the model states the worst silo's account"
        )
        at = json.loads((await said("show", "--delta", "1e-5", "--json"))[1])["accounts"]
        assert at[0]["epsilon"] == pytest.approx(compose([shared], 1e-5))

        text = (await said("show", "t"))[1]
        assert "(every silo)" in text
        assert "had all data of the silo birch been replaced by any other data" in text

        assert (await said("budget", "t", "--epsilon", "9", "--delta", "1e-3"))[0] == 0
        assert "olga" in (await said("budget"))[1]
        stopped = await finish(operator, table(), 50, "r3")
        assert "above its budget of 9" in stopped.reason
        shown = json.loads((await said("show", "--json"))[1])
        assert shown["budgets"][0]["epsilon"] == 9.0
        most = max(account["epsilon"] for account in shown["accounts"])
        assert most <= 9.0 < compose([shared.repeated(2 + stopped.rounds_done + 1), own], 1e-3)
        assert all(account["reserved_epsilon"] == account["epsilon"] for account in shown["accounts"])

        assert (await said("budget", "t", "--remove", "--epsilon", "9", "--delta", "1e-3"))[0] == 2
        assert (await said("budget", "--remove"))[0] == 2
        assert "epsilon = 9 at 0.001 is removed" in (await said("budget", "t", "--remove"))[1]
        code, _, err = await said("budget", "t", "--remove")
        assert (code, err) == (2, "Error: no budget is set for 't'\n")
        after = json.loads((await said("show", "--json"))[1])
        assert after.get("budgets", []) == []
        assert after["accounts"] == shown["accounts"], "what was spent stays charged"
        going_on = await finish(operator, table(), 2, "r4")
        assert going_on.rounds_done == 2

        exported = json.loads((await said("export", "t"))[1])
        code, out, _ = await said("export", "--format", "csv", "-o", tmp_path / "ledger.csv")
        assert code == 0
        assert "accounts" in out
        for task in work:
            task.cancel()
    database = Database.open(config.database)
    rows = await database.read(entries)
    database.close()
    assert len(exported["charges"]) == len(rows) == 2 + 3 * 2 + stopped.rounds_done + 2
    assert exported["charges"][0]["charge"]["parts"] == {"update": 2.0}
    assert "What it does not cover" in exported["accounts"][0]["statement"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "ledger.csv").read_text())))
    assert [line["record"] for line in lines] == ["account"] * 3 + ["charge"] * len(rows)
    assert float(lines[1]["epsilon"]) == pytest.approx(exported["accounts"][1]["epsilon"])
    assert json.loads(lines[3]["charge"]) == exported["charges"][0]["charge"]


async def test_a_silos_budget_stops_local_noise_too(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """What silos spend by their own noise counts, silo by silo, against the limits of the population."""
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        work = asyncio.create_task(alder.take_part(torch.ones(4)))
        limit = operator_pb2.PrivacyBudget(population="t", epsilon=6.0, delta=1e-3)
        await operator.stub.SetPrivacyBudget(limit)
        stopped = await finish(operator, table("client_local", noise=4.0), 50, "r1")
        assert "silo 'alder'" in stopped.reason
        charge = Charge("gaussian", "client", "none", (("update", 2.0),), 1, "replace_one")
        done = stopped.rounds_done
        assert compose([charge.repeated(done)], 1e-3) <= 6.0 < compose([charge.repeated(done + 1)], 1e-3)
        with pytest.raises(grpc.aio.AioRpcError, match="above its budget of 5"):
            await operator.submit(table("client_local", noise=4.0, more="epsilon = 5.0"), request="r2")
        work.cancel()


async def test_an_update_of_a_failed_attempt_is_charged_to_its_silo(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """With its own noise a silo has spent once the coordinator has the update, come of it what may."""
    config = settings()
    async with (
        running(config) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
        ScriptedAgent(coordinator.port, certificates / "birch") as birch,
    ):
        job = await operator.submit(table("client_local", size=2), rounds=1)
        await alder.answer(await alder.expect("instruction"), torch.ones(4))
        await birch.expect("instruction")
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=job.id))
    database = Database.open(config.database)
    rows = await database.read(entries)
    database.close()
    assert [(row.silo, row.round, row.attempt, row.released) for row in rows] == [("alder", 1, 1, True)]


async def test_what_cannot_be_asked_or_set_is_refused(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "alder") as alder,
    ):
        for wish, complaint in (
            ({"population": "t", "epsilon": 0.0, "delta": 1e-5}, "it must be above 0"),
            ({"population": "t", "epsilon": 1.0, "delta": 0.0}, "delta is 0: "),
            ({"population": "t", "epsilon": 1.0, "delta": 1e-5, "accountant": "gdp"}, "unknown accountant"),
            ({"epsilon": 1.0, "delta": 1e-5}, "needs the name of its population"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=complaint) as refused:
                await operator.stub.SetPrivacyBudget(operator_pb2.PrivacyBudget(**wish))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="knows no population 'x'"):
            await operator.stub.ShowPrivacy(operator_pb2.PrivacyRequest(population="x"))
        stranger: Any = operator_pb2_grpc.OperatorsStub(alder.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="here as agent"):
            await stranger.SetPrivacyBudget(operator_pb2.PrivacyBudget(population="t", epsilon=9, delta=1e-5))
        with pytest.raises(grpc.aio.AioRpcError, match="here as agent"):
            await stranger.ShowPrivacy(operator_pb2.PrivacyRequest())


def test_what_was_checked_before_a_round_is_not_composed_again_for_its_statement() -> None:
    charge = Charge("gaussian", "client", "poisson", (("update", 1.1),), rate=0.013)
    known = [Total("", charge.to_json(), True, 400)]
    check_all([Budget("t", 50.0, 1e-5)], known, charge)
    composed = _compose.cache_info().misses
    spent = worst([*known, Total("", charge.to_json(), True, 1)], "t", 1e-5, "pld", ("j",))
    assert spent.releases == 401
    assert _compose.cache_info().misses == composed
