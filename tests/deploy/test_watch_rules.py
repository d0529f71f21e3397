"""Alerts fire when they should, and every figure that alerts and the dashboard name is one that we tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "roundtable.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "roundtable.json"
SOURCES = ("core/observability/monitoring.py", "server/metrics_page.py", "client/agent/agent_observer.py")
PROCESS = {"process_resident_memory_bytes"}


def told() -> set[str]:
    """The families that our code makes, by name, with the suffixes that Prometheus gives them."""
    text = "".join((ROOT / source).read_text() for source in SOURCES)
    names = set(re.findall(r'"(roundtable_[a-z_]+)"', text)) | PROCESS
    stems = {
        "roundtable_": ("rounds", "updates", "updates_refused", "incidents"),
        "roundtable_agent_": ("steps", "updates", "connections"),
        "roundtable_privacy_epsilon_": ("spent", "budget", "left"),
        "roundtable_gpu_": (
            "utilization_ratio",
            "memory_used_bytes",
            "memory_size_bytes",
            "temperature_celsius",
        ),
    }
    for stem, ends in stems.items():
        assert f'f"{stem}{{' in text, f"no family is made with f'{stem}{{…}}' any more"
        for end in ends:
            assert f'"{end.removeprefix("updates_")}"' in text, end
            names.add(f"{stem}{end}")
    return names | {f"{name}{end}" for name in names for end in ("_total", "_bucket", "_count", "_sum")}


def named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:roundtable|process)_[a-z_]+\b", text))


def test_alerts_name_figures_that_exist() -> None:
    assert named(RULES.read_text()) - told() == set()


def test_the_dashboard_names_figures_that_exist() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 20
    assert named(" ".join(expressions)) - told() == set()
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_has_a_test_and_a_remedy() -> None:
    rules, tests = RULES.read_text(), RULES.with_name("roundtable.rules.test.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) == rules.count("remedy:") == rules.count("severity:")
    for alert in alerts:
        assert re.search(rf"alertname: {alert}\n +exp_alerts:\n", tests), f"{alert} is never seen to fire"


@pytest.mark.parametrize("words", [("check",), ("test",)])
def test_prometheus_agrees(words: tuple[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with the package prometheus")
    file = RULES.name if words == ("check",) else "roundtable.rules.test.yml"
    done = subprocess.run(
        [promtool, *words, "rules", file], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
