"""The Helm charts: what they render is valid, hardened, whole in itself, and read by our own readers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundtable.client.policy.config import load_agent_config
from roundtable.core.evidence.release import NEXT
from roundtable.server import load_server_config

ROOT = Path(__file__).resolve().parents[2]
HELM, KEPT = ROOT / "deploy" / "helm", ROOT / "deploy" / "kubernetes"
CHARTS = ("roundtable-agent", "roundtable-coordinator")
RANKS = ROOT / "deploy" / "cluster" / "kubernetes.yaml"
VERSIONS = ("1.27", "1.34")
FOREIGN = {"ServiceMonitor"}

Manifest = dict[str, Any]


def kept(chart: str) -> list[Manifest]:
    return list(yaml.safe_load_all((KEPT / f"{chart}.yaml").read_text()))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Pod templates."""
    for manifest in manifests:
        if manifest["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield manifest["spec"]["template"]


def check_schemas(manifests: list[Manifest], versions: tuple[str, ...] = VERSIONS) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for manifest in manifests:
        if manifest["kind"] in FOREIGN:
            continue
        for version in versions:
            validator.validate(manifest, version, strict=True)


def charts(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Helm, if `make deploy` has fetched it: tests of the fast suite download nothing."""
    if not list((ROOT / "build" / "wheels").glob("helm-sdkpy*/*.so")):
        pytest.skip("Helm's library is not here: python tools/charts.py --check fetches it")
    words = (sys.executable, ROOT / "tools" / "charts.py", *words)
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)


def rendered(chart: str, values: Manifest, tmp_path: Path) -> list[Manifest]:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    done = charts(HELM / chart, file)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def check_whole(manifests: list[Manifest]) -> None:
    """What one object names of another is there, and no container may do more than it must."""
    (template,) = pods(manifests)
    pod, labels = template["spec"], template["metadata"]["labels"]
    claims = {claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")}
    maps = {name["metadata"]["name"] for name in of_kind(manifests, "ConfigMap")}
    names = {port["name"] for container in pod["containers"] for port in container.get("ports", ())}
    numbers = {
        port["containerPort"] for container in pod["containers"] for port in container.get("ports", ())
    }
    (stateful,) = of_kind(manifests, "StatefulSet")
    own = {claim["metadata"]["name"] for claim in stateful["spec"].get("volumeClaimTemplates", ())}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, *own}
    for volume in volumes.values():
        if "configMap" in volume:
            assert volume["configMap"]["name"] in maps
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", "")
        assert not claim.endswith("-artifacts") or claim in claims
    services = {service["metadata"]["name"]: service for service in of_kind(manifests, "Service")}
    assert stateful["spec"]["serviceName"] in services
    for service in services.values():
        selector = dict(service["spec"]["selector"])
        place = selector.pop("statefulset.kubernetes.io/pod-name", None)
        assert place is None or int(place.rpartition("-")[2]) < stateful["spec"]["replicas"]
        assert selector.items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} <= names
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            (path,) = rule["http"]["paths"]
            backend = path["backend"]["service"]
            ports = services[backend["name"]]["spec"]["ports"]
            assert backend["port"]["name"] in {port["name"] for port in ports}
    for monitor in of_kind(manifests, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        found = [service for service in services.values() if wanted <= service["metadata"]["labels"].items()]
        assert len(found) == 1, "each process is scraped once"
        assert monitor["spec"]["endpoints"][0]["port"] in {p["name"] for p in found[0]["spec"]["ports"]}
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        allowed = {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule["ports"]}
        assert allowed <= numbers


def check_restricted(template: Manifest) -> None:
    """The restricted profile of the Pod Security Standards, and a root file system that nobody writes."""
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("file", [*(KEPT / f"{chart}.yaml" for chart in CHARTS), RANKS], ids=lambda f: f.stem)
def test_kept_manifests_are_what_kubernetes_takes(file: Path) -> None:
    check_schemas(list(yaml.safe_load_all(file.read_text())))


def test_kept_manifests_are_what_the_charts_render() -> None:
    done = charts("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("chart", CHARTS)
def test_charts_say_the_release_that_they_lead_to(chart: str) -> None:
    about = yaml.safe_load((HELM / chart / "Chart.yaml").read_text())
    assert about["appVersion"] == about["version"] == NEXT
    assert about["name"] == chart


@pytest.mark.parametrize("chart", CHARTS)
def test_kept_manifests_are_whole_and_restricted(chart: str) -> None:
    manifests = kept(chart)
    check_whole(manifests)
    for template in (*pods(manifests), *pods(list(yaml.safe_load_all(RANKS.read_text())))):
        check_restricted(template)


def test_each_coordinator_reads_settings_of_its_own(tmp_path: Path) -> None:
    manifests = kept("roundtable-coordinator")
    (settings,), (stateful,) = of_kind(manifests, "ConfigMap"), of_kind(manifests, "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    announced = []
    for place in range(stateful["spec"]["replicas"]):
        name = container["args"][0].replace("$(POD_NAME)", f"{stateful['metadata']['name']}-{place}")
        file = tmp_path / Path(name).name
        file.write_text(settings["data"][file.name])
        config = load_server_config(file, {"database": "postgresql://roundtable@db/roundtable"})
        announced.append(config.announce)
        assert config.credentials in mounts
        assert Path(config.artifacts).parent == Path(config.state).parent == Path("/var/lib/roundtable")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.listen == f"0.0.0.0:{ports['grpc']}"
        assert config.metrics == "127.0.0.1:9464", "who asks from elsewhere has no certificate"
        assert "metrics" not in ports
    assert announced == ["hub1.example.org:443", "hub2.example.org:443"]
    variables = {entry["name"] for entry in container["env"]}
    assert "ROUNDTABLE_DATABASE" in variables, "the database's password stands in no file"
    for probe, path in (("livenessProbe", "healthz"), ("readinessProbe", "readyz")):
        assert f"'http://127.0.0.1:9464/{path}'" in container[probe]["exec"]["command"][-1]


def test_the_agents_file_is_one_that_the_agent_reads(tmp_path: Path) -> None:
    manifests = kept("roundtable-agent")
    (settings,), (stateful,) = of_kind(manifests, "ConfigMap"), of_kind(manifests, "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    file = tmp_path / "agent.toml"
    file.write_text(settings["data"]["agent.toml"])
    config = load_agent_config(file)
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(Path(config.data["path"]).parent)]["readOnly"] is True
    assert config.state.parent == config.credentials.parent == Path("/var/lib/roundtable")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert config.policy.approval is True


def test_credentials_are_copied_once_and_again_when_they_are_others(tmp_path: Path) -> None:
    (stateful,) = of_kind(kept("roundtable-agent"), "StatefulSet")
    (first,) = stateful["spec"]["template"]["spec"]["initContainers"]
    given, state = tmp_path / "given", tmp_path / "state"
    given.mkdir()
    state.mkdir()
    shell, options, script = first["command"]
    script = script.replace("/var/lib/roundtable", str(state)).replace("/run/roundtable", str(given))

    def start(key: str, certificate: str) -> str:
        for name, text in {"node.key": key, "node.crt": certificate}.items():
            (given / name).write_text(text)
        subprocess.run([shell, options, script], check=True)
        assert (state / "credentials" / "node.key").stat().st_mode & 0o777 == 0o600
        return (state / "credentials" / "node.crt").read_text()

    assert start("key", "first") == "first"
    (state / "credentials" / "node.crt").write_text("renewed")
    assert start("key", "first") == "renewed"
    assert start("another key", "second") == "second"


@pytest.mark.parametrize(
    ("chart", "values"),
    [
        (
            "roundtable-coordinator",
            {
                "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
                "ingress": {"enabled": False},
                "enrolment": {"enabled": True},
            },
        ),
        (
            "roundtable-coordinator",
            {
                "hosts": ["hub.example.org"],
                "enrolment": {"enabled": True, "hosts": ["join.example.org"]},
                "operators": {"enabled": True, "hosts": ["operators.example.org"]},
                "copies": ["s3://models/roundtable"],
                "bucketKeys": "bucket",
                "settings": "keep_models = 7\n[alerts]\nseverity = 'error'\n",
                "networkPolicy": {"clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "egress": [{}]},
            },
        ),
        (
            "roundtable-coordinator",
            {
                "networkPolicy": {"enabled": False},
                "serviceMonitor": {"enabled": True},
                "artifacts": {"claim": "shared"},
            },
        ),
        (
            "roundtable-coordinator",
            {
                "artifacts": {"bucket": "s3://artifacts/roundtable", "storageClass": "fast"},
                "bucketKeys": "bucket",
            },
        ),
        (
            "roundtable-agent",
            {
                "gpus": 0,
                "tasks": "",
                "runtimeClassName": "nvidia",
                "tolerations": [{"operator": "Exists"}],
                "resources": {"requests": {"cpu": 1}},
                "networkPolicy": {"monitoring": [], "coordinators": {"ports": [443, 7443]}},
            },
        ),
    ],
)
def test_other_values_give_whole_manifests_too(chart: str, values: Manifest, tmp_path: Path) -> None:
    manifests = rendered(chart, values, tmp_path)
    check_schemas(manifests, VERSIONS[-1:])
    check_whole(manifests)
    (template,) = pods(manifests)
    check_restricted(template)
    (settings,) = of_kind(manifests, "ConfigMap")
    watched = values.get("serviceMonitor", {}).get("enabled", False)
    assert bool(of_kind(manifests, "ServiceMonitor")) is watched
    for text in settings["data"].values():
        read = tomllib.loads(text)
        assert read["metrics"].startswith("0.0.0.0:" if watched else "127.0.0.1:")
        if "settings" in values:
            assert (read["keep_models"], read["copies"]) == (7, ["s3://models/roundtable"])
        apart = values.get("operators", {}).get("enabled", False)
        assert read.get("operators", "") == ("0.0.0.0:7445" if apart else "")
        if bucket := values.get("artifacts", {}).get("bucket"):
            assert read["bucket"] == bucket
            assert not of_kind(manifests, "PersistentVolumeClaim"), "nothing is shared but the bucket"
            (claim,) = of_kind(manifests, "StatefulSet")[0]["spec"]["volumeClaimTemplates"]
            assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    if chart == "roundtable-coordinator":
        several = len(read_hosts(values)) > 1
        assert bool(of_kind(manifests, "PodDisruptionBudget")) is several
        assert bool(of_kind(manifests, "Ingress")) is values.get("ingress", {}).get("enabled", True)


def test_the_alerts_are_those_that_are_tested(tmp_path: Path) -> None:
    values = {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    (rule,) = of_kind(rendered("roundtable-coordinator", values, tmp_path), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    kept_rules = ROOT / "deploy" / "prometheus" / "roundtable.rules.yml"
    assert rule["spec"] == yaml.safe_load(kept_rules.read_text())
    # By this label RoundtableDown knows our processes, whatever the release is called.
    for chart in ("roundtable-coordinator", "roundtable-agent"):
        shown = rendered(chart, {"serviceMonitor": {"enabled": True}}, tmp_path)
        check_whole(shown)
        (monitor,) = of_kind(shown, "ServiceMonitor")
        assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"
        for service in of_kind(kept(chart), "Service"):
            assert service["metadata"]["labels"]["app.kubernetes.io/name"] == chart


def read_hosts(values: Manifest) -> list[str]:
    own = yaml.safe_load((HELM / "roundtable-coordinator" / "values.yaml").read_text())
    return list(values.get("hosts", own["hosts"]))


@pytest.mark.parametrize(
    ("chart", "values", "said"),
    [
        ("roundtable-coordinator", {"replicas": 3}, r"replicas"),
        ("roundtable-coordinator", {"hosts": []}, r"/hosts"),
        ("roundtable-coordinator", {"artifacts": {"bucket": "/mnt"}}, r"/artifacts/bucket"),
        (
            "roundtable-coordinator",
            {"artifacts": {"bucket": "s3://a/b", "claim": "shared"}},
            r"a claim or a bucket, not both",
        ),
        ("roundtable-coordinator", {"enrolment": {"enabled": True}}, r"as many names as hosts has"),
        ("roundtable-coordinator", {"operators": {"enabled": True}}, r"operators.hosts: .* as many names"),
        ("roundtable-agent", {"agent": "[tasks]"}, r"/agent"),
        ("roundtable-agent", {"state": {"size": "fifty"}}, r"/state/size"),
    ],
)
def test_wrong_values_are_refused_by_name(chart: str, values: Manifest, said: str, tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    done = charts(HELM / chart, file)
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr
