"""The silo's page: a person reads what is asked, says yes or no, and counts what has left."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accessible import accessible
from federation import NAMES, Federation, agents, federation_of, silo
from playwright.async_api import Page, async_playwright, expect

from roundtable.client.agent.silo_log import NAME, SiloLog
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJob, KnownJobs
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core import JobConfig, Model, load_task, save_model
from roundtable.core.errors import ConfigError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient
from roundtable.silo_page.beside_agent import TOKEN_FILE, page_token, silo_page
from roundtable.silo_page.departures import Departures
from roundtable.silo_page.policy_sentences import sentences

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>"
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(4, 3)
    def data(self, site):
        x = torch.randn(48, 4, generator=torch.Generator().manual_seed(site.options["seed"]))
        y = x[:, :3].argmax(1)
        return (x[:32], y[:32]), (x[32:], y[32:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
pytestmark = pytest.mark.timeout(600)


@asynccontextmanager
async def opened(port: int, state: Path) -> AsyncIterator[Page]:
    """The page as its address with the token opens it; any error of the browser fails the test."""
    wrong: list[str] = []
    origin = f"http://127.0.0.1:{port}"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await (await browser.new_context()).new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: wrong.append(f"a script has run: {dialog.message}"))
        page.on("request", lambda sent: wrong.append(sent.url) if not sent.url.startswith(origin) else None)
        await page.goto(f"{origin}/#{page_token(state)}")
        await page.get_by_role("status").filter(has_text="live").wait_for()
        assert page.url == f"{origin}/"
        yield page
        await browser.close()
    assert wrong == []


@pytest.mark.skipif(BROWSER is None, reason="no browser here: install chromium")
async def test_a_job_is_read_approved_counted_and_refused(tmp_path: Path) -> None:
    job = JobConfig.model_validate(
        {
            "task": "toy",
            "name": "first",
            "rounds": 2,
            "cohort": {"size": 3, "minimum": 3},
            "algorithm": {"learning_rate": 0.3, "epochs": 1, "batch_size": 8},
        }
    )
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        alder = replace(silo(federation, "alder"), policy=PolicyTable(approval=True))
        others = [silo(federation, name) for name in NAMES[1:]]
        with silo_page(lambda: alder, "127.0.0.1:0") as port:
            async with agents(alder, *others), opened(port, alder.state) as page:
                await page.get_by_text("The coordinator has not asked for anything yet.").wait_for()
                KnownJobs(alder.state).ask(KnownJob("old", "", "{}", HOSTILE, HOSTILE, "", "", 1.0))
                await page.get_by_role("cell", name=HOSTILE).first.wait_for()
                first = await asyncio.to_thread(_until, federation, job, model, "paused")
                await page.get_by_role("link", name="Read and approve").click()
                await page.get_by_role("heading", level=1, name=job.name).wait_for()
                await page.get_by_text("nothing like this job was allowed here before").wait_for()
                await accessible(page)
                await page.get_by_role("button", name="Approve exactly this").click()
                await page.get_by_role("dialog").get_by_role("button", name="Approve it").click()
                await page.get_by_role("heading", name="first ✓ approved").wait_for()
                history = await asyncio.to_thread(_resumed, federation, first)
                assert [record["contributors"] for record in history] == [sorted(NAMES)] * 2
                await page.get_by_role("link", name="What left").click()
                updates = page.get_by_role("row").filter(has_text="accepted")
                await expect(updates).to_have_count(2)
                sent = [json.loads(line) for line in (alder.state / NAME).read_text().splitlines()]
                sizes = [each["entry"]["detail"]["size"] for each in sent if _is(each, "sent")]
                await expect(updates.first).to_contain_text(f"{sizes[-1]:,}")
                await expect(updates.first).to_contain_text("32 examples, loss")
                await page.get_by_text("The silo's log holds together").wait_for()
                await accessible(page)
                for name in ("Policy", "Try a job"):
                    await page.get_by_role("navigation").get_by_role("link", name=name).click()
                    await page.get_by_role("heading", level=1).wait_for()
                    await accessible(page)
                await page.get_by_label("or its text").fill('task = "scans"')
                await page.get_by_role("button", name="Would this silo take part?").click()
                await page.get_by_text("this silo does not offer the task 'scans'").wait_for()
                await page.get_by_role("button", name="Pause everything").click()
                await page.get_by_role("dialog").get_by_label("Reason").fill("new racks")
                await page.get_by_role("dialog").get_by_role("button", name="Pause everything").click()
                await page.get_by_text("Everything is paused by").wait_for()
                await page.get_by_role("button", name="Take part again").click()
                await page.get_by_role("dialog").get_by_role("button", name="Take part again").click()
                await page.get_by_text("Everything is paused by").wait_for(state="detached")
                # A job that differs is shown beside the one that was approved; a refusal names its reason.
                changed = job.model_copy(update={"name": "second", "rounds": 3})
                second = await asyncio.to_thread(_until, federation, changed, model, "paused")
                await page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
                await page.get_by_role("link", name="second").click()
                await page.get_by_role("row").filter(has_text="changed, was 2").wait_for()
                await page.get_by_role("button", name="Refuse").click()
                await page.get_by_role("dialog").get_by_label("Reason").fill("not this one")
                await page.get_by_role("dialog").get_by_role("button", name="Refuse it").click()
                await page.get_by_role("heading", name="second ✗ refused").wait_for()
                said = await asyncio.to_thread(_resumed_in_vain, federation, second)
                assert "a person at this silo has refused the job: not this one" in said


def _is(line: dict[str, dict[str, object]], action: str) -> bool:
    return line.get("entry", {}).get("action") == action


def _until(federation: Federation, job: JobConfig, model: Model, status: str) -> str:
    """Submits a job and waits until it is in this state: its identifier."""
    address, folder = federation
    save_model(folder / "initial.safetensors", model)
    with OperatorClient(address, folder / "operator") as operator:
        submitted = operator.submit(job, folder / "initial.safetensors")
        for update in operator.watch(submitted.id):
            if update.detail.job.status == status:
                break
        return str(submitted.id)


def _resumed(federation: Federation, job: str) -> list[dict[str, Any]]:
    """Resumes a job and waits for its end: its history."""
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        operator.resume(job)
        for _ in operator.watch(job):
            pass
        return [json.loads(record) for record in operator.job(job).history]


def _resumed_in_vain(federation: Federation, job: str) -> str:
    """Resumes a job that a silo has refused, and gives what is told of that."""
    address, folder = federation
    with OperatorClient(address, folder / "operator") as operator:
        operator.resume(job)
        for update in operator.watch(job):
            for event in update.events:
                if "has refused the job" in event.message + event.detail:
                    operator.cancel(job)
                    return f"{event.message} {event.detail}"
    return "it ended without a word"


@pytest.fixture
def quiet(tmp_path: Path) -> AgentConfig:
    """A silo whose agent does not run, with one job that waits."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "alder", "agent", tmp_path / "alder")
    config = AgentConfig(
        coordinator="127.0.0.1:1",
        credentials=tmp_path / "alder",
        state=tmp_path / "state",
        tasks={"toy": "toy.py:Toy"},
        policy=PolicyTable(approval=True),
        folder=tmp_path,
    )
    KnownJobs(config.state).ask(_job("a" * 64))
    return config


def _job(digest: str) -> KnownJob:
    text = JobConfig.model_validate({"task": "toy"}).to_json()
    return KnownJob("job-1", digest, text, "toy", "", "", "", 1.0)


@pytest.fixture
def port(quiet: AgentConfig) -> Iterator[int]:
    """The page of that silo."""
    with silo_page(lambda: quiet, "127.0.0.1:0") as found:
        yield found


def ask(port: int, path: str, body: object = None, **headers: str) -> tuple[int, str]:
    """One request as any program of the machine can send it."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    sent = {"Host": f"127.0.0.1:{port}"} | {key.replace("_", "-"): value for key, value in headers.items()}
    link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), sent)
    answer = link.getresponse()
    found = answer.status, answer.read().decode()
    link.close()
    return found


def test_strangers_see_and_change_nothing(quiet: AgentConfig, port: int) -> None:
    token = page_token(quiet.state)
    own = {"Authorization": f"Bearer {token}"}
    yes = {"job": "job-1", "digest": "a" * 64}
    assert stat.S_IMODE((quiet.state / TOKEN_FILE).stat().st_mode) == 0o600
    for path in ("/api/overview", "/api/left", "/api/jobs/job-1", "/api/reports/r", "/api/verified"):
        for wrong in ({}, {"Authorization": "Bearer " + "x" * 43}, {"Cookie": f"token={token}"}):
            assert ask(port, path, **wrong)[0] == 401
    assert ask(port, "/api/change/approve", yes)[0] == 401
    # Another site, and a name that somebody points at this machine, even with the token.
    assert ask(port, "/api/change/approve", yes, **own, Origin="http://evil.example")[0] == 403
    assert ask(port, "/api/overview", **own, Host="evil.example")[0] == 421
    for path in ("/static/../../agent.toml", "/static/%2e%2e%2fpage-token", "/api/jobs/..%2f..%2fpage-token"):
        status, text = ask(port, path, **own)
        assert status in (400, 404)
        assert token not in text
    assert KnownJobs(quiet.state).decision(_job("a" * 64)) is None
    status, text = ask(port, "/api/overview", **own)
    assert (status, json.loads(text)["jobs"][0]["state"]) == (200, "waits for you")


def test_an_approval_is_of_what_was_shown(quiet: AgentConfig, port: int) -> None:
    own, known = {"Authorization": f"Bearer {page_token(quiet.state)}"}, KnownJobs(quiet.state)
    known.ask(_job("b" * 64))
    status, text = ask(port, "/api/change/approve", {"job": "job-1", "digest": "a" * 64}, **own)
    assert (status, "look at it again" in text) == (400, True)
    assert known.decision(_job("b" * 64)) is None
    assert ask(port, "/api/change/approve", {"job": "job-1", "digest": "b" * 64}, **own)[0] == 200
    assert known.is_approved(_job("b" * 64))
    assert not known.is_approved(_job("a" * 64))
    refusal = {"job": "job-1", "digest": "b" * 64, "reason": "line\nbreak"}
    assert ask(port, "/api/change/refuse", refusal, **own)[0] == 400
    assert ask(port, "/api/change/refuse", {**refusal, "reason": "no"}, **own)[0] == 200
    # Whatever the job becomes: until somebody approves it.
    said = known.decision(_job("c" * 64))
    assert said is not None
    assert (said.approved, said.reason) == (False, "no")
    for body in ([], {"job": 1}, "text", {"job": "nobody", "digest": ""}):
        assert ask(port, "/api/change/approve", body, **own)[0] == 400


def test_it_listens_on_this_machine_alone(quiet: AgentConfig) -> None:
    with pytest.raises(ConfigError, match="this machine itself alone"), silo_page(lambda: quiet, "0.0.0.0:0"):
        pass


def test_what_left_is_the_same_however_often_it_is_read(tmp_path: Path) -> None:
    log, seen = SiloLog(tmp_path / NAME, tmp_path), Departures(tmp_path)
    sent = {
        "job": "j",
        "round": 1,
        "attempt": 1,
        "update": "u1",
        "size": 100,
        "metrics": {"loss": ["nan", 2]},
    }
    questions = [{"ask": "describe", "columns": ["age", "chol"], "by": "ill"}, {"ask": "count"}]
    asked = {"table": "heart", "questions": questions, "least_count": 5, "masked": True}
    answer = {"job": "a", "update": "u3"}
    steps = [
        ("alder", "sent", "j", {**sent, "examples": 3, "metrics": {"loss": ["nan", 2]}}),
        ("coordinator", "receipt", "j", {**sent, "status": "accepted", "signed": True}),
        ("alder", "metrics_sent", "j", {"round": 1, "attempt": 1, "metrics": {"acc": [3.0, 4]}}),
        ("alder", "metrics_sent", "j", {"round": 2, "attempt": 1, "metrics": {}}),
        ("alder", "log_shared", "j", {"lines": [{"text": "öh"}]}),
        ("alder", "sent", "k", {**sent, "job": "k", "update": "u2"}),
        ("maria", "report_sent", "r", {"report": "d", "bytes": 7}),
        ("alder", "answered", "a", {"round": 1, "sums": "u3", **asked}),
        ("alder", "sent", "a", {**sent, **answer}),
        (
            "coordinator",
            "receipt",
            "a",
            {**sent, "job": "a", "update": "u3", "status": "accepted", "signed": True},
        ),
    ]
    for actor, action, target, detail in steps:
        log.note(actor, action, target, **detail)
        seen.read()
        whole = (tmp_path / NAME).read_bytes()
        (tmp_path / NAME).write_bytes(whole + b'{"entry":{"half')
        seen.read()
        (tmp_path / NAME).write_bytes(whole)
        fresh = Departures(tmp_path)
        fresh.read()
        assert (fresh.all, fresh.totals()) == (seen.all, seen.totals())
    assert [(one.what, one.bytes, one.proof) for one in seen.all] == [
        ("update", 100, "accepted"),
        ("figures", None, ""),
        ("lines of the log", 3, ""),
        ("update", 100, ""),
        ("report", 7, ""),
        ("answers of an analysis", 100, "accepted"),
    ]
    (told,) = [row for row in seen.totals() if row["job"] == "a"]
    assert (told["answers"], told["updates"], told["unproven"]) == (1, 0, 0)
    assert seen.all[-1].figures == "masked sums over heart: describe: by ill, columns age chol; count"
    assert [one["sequence"] for one in seen.newest(7, 2)] == [6, 5]
    assert seen.all[0].figures == "3 examples, loss nan"


def test_every_rule_has_its_sentence(quiet: AgentConfig) -> None:
    strict = PolicyTable.model_validate(
        {
            "secure_aggregation": True, "epsilon": 1, "delta": 1e-5, "minimum_cohort": 5,
            "identities": "root",
            "stated_epsilon": 2, "client_level_epsilon": 3, "example_level_epsilon": 4, "approval": True,
            "submitters": ["olga"], "public_evaluation": True, "rounds": 9, "epochs": 2, "steps": 7,
            "batch_size": 32, "seconds": 60, "max_memory": "8GiB", "max_gpus": 0, "max_gpu_memory": "2GiB",
            "hours": "20:00-06:00", "relay_sums": "refuse", "bases": ["/srv/models"], "generations": 3,
            "regional_models": ["east"], "metrics": "none", "metrics_digits": 2,
            "analyses": {"least_count": 9, "allowed": ["counts"], "tables": ["heart"], "protected": ["age"],
                         "a_day": 3},
        }
    )  # fmt: skip
    found = sentences(replace(quiet, policy=strict))
    assert {row["key"] for row in found} >= set(PolicyTable.model_fields)
    assert "None" not in json.dumps(found)
    bare = {row["key"]: row["sentence"] for row in sentences(replace(quiet, policy=PolicyTable()))}
    assert bare["approval"].startswith("No person is asked")
