"""Alerts fire when they should, and every figure that alerts and the dashboard name is one that is shown."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from federation import NAMES, federation_of, silo
from processes import free_port
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from roundtable.client.agent.agent import Agent
from roundtable.core import load_task, parse_job, save_model
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient
from roundtable.server import metrics_page

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
RULES = FOLDER / "prometheus" / "roundtable.rules.yml"
TESTS = RULES.with_name("roundtable.rules.test.yml")
SCRAPING = RULES.with_name("prometheus.yml")
DASHBOARD = FOLDER / "grafana" / "roundtable.json"
OF_PROMETHEUS = {"instance", "job", "federation"}
TASK = """
from torch import nn
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(2, 1)
    def data(self, site):
        raise NotImplementedError
    def loss(self, model, batch):
        raise NotImplementedError
"""
JOB = 'task = "toy"\nrounds = 1\n[cohort]\nsize = 3'


async def shown(folder: Path) -> list[Metric]:
    """The pages of a coordinator with a job that waits for silos, and of one silo's agent."""
    port = free_port()
    async with federation_of(folder, TASK, metrics=f"127.0.0.1:{port}") as federation:
        agent = Agent(replace(silo(federation, NAMES[0]), metrics="127.0.0.1:0"))
        running = asyncio.create_task(agent.run())
        try:
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(submitted, federation):
                    assert not running.done()
            text = [await asyncio.to_thread(page, each) for each in (port, agent.metrics_port)]
        finally:
            agent.stop()
            await running
    return [family for each in text for family in text_string_to_metric_families(each)]


def submitted(federation: Any) -> bool:
    """Sets a budget and submits the job, if it is not there; whether the silo is."""
    address, folder = federation
    job = parse_job(JOB)
    save_model(folder / "initial.safetensors", initial_model(job, load_task("toy.py:Toy", folder)))
    with OperatorClient(address, folder / "operator") as operator:
        operator.set_privacy_budget("ward", 8.0, 1e-5)
        operator.submit(job, folder / "initial.safetensors", request_id="once")
        return bool(operator.clients())


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    # The page gives the database three seconds, which a busy machine may need for more than that.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics_page, "ANSWER_SECONDS", 60.0)
        return asyncio.run(shown(tmp_path_factory.mktemp("watched")))


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(name of the series, labels that must have a value) of all that an expression reads."""
    for name, text in re.findall(r"\b((?:roundtable|process)_[a-z_]+|up)\b(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)="([^"]*)"', text))


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def test_every_series_of_an_alert_is_on_a_page_before_anything_has_happened(families: list[Metric]) -> None:
    # Also counters at zero: Prometheus sees no increase in a series that appears.
    samples = [sample for family in families for sample in family.samples]
    for alert in alerts():
        own: set[str] = set()
        for name, labels in selectors(alert["expr"]):
            if name == "up":
                continue
            found = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
            assert found, f"{alert['alert']}: no page shows {name}{labels or ''}"
            own |= set(found[0].labels)
        words = json.dumps(alert["annotations"])
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= own | OF_PROMETHEUS, alert["alert"]


def test_the_dashboard_names_figures_that_are_shown(families: list[Metric]) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 20
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    names = {f"{family.name}{end}" for family in families for end in ends.get(family.type, ("",))}
    assert {name for each in expressions for name, _ in selectors(each)} <= names
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_is_seen_to_fire_in_the_federation_that_is_ill_alone() -> None:
    (test,) = yaml.safe_load(TESTS.read_text())["tests"]
    series = [each["series"] for each in test["input_series"]]
    ill = {each for each in series if 'federation="ill"' in each}
    assert {each.replace('federation="ill"', 'federation="well"') for each in ill} <= set(series)
    fired = {case["alertname"] for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts()}
    told = [
        alert["exp_labels"]["federation"] for case in test["alert_rule_test"] for alert in case["exp_alerts"]
    ]
    assert set(told) == {"ill", "lost"}
    for alert in alerts():
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert all(alert["annotations"][word] for word in ("summary", "remedy"))


def test_what_is_scraped_says_of_which_federation_it_is() -> None:
    config = yaml.safe_load(SCRAPING.read_text())
    assert config["rule_files"] == [RULES.name]
    (down,) = (alert["expr"] for alert in alerts() if alert["alert"] == "RoundtableDown")
    pattern = re.search(r'job=~"(.*)"', down)
    assert pattern
    for job in config["scrape_configs"]:
        assert re.fullmatch(pattern[1], job["job_name"])
        assert all(group["labels"]["federation"] for group in job["static_configs"])


@pytest.mark.parametrize(
    "words",
    [("check", "rules", RULES.name), ("test", "rules", TESTS.name), ("check", "config", SCRAPING.name)],
    ids=" ".join,
)
def test_prometheus_agrees(words: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with the package prometheus")
    done = subprocess.run([promtool, *words], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
