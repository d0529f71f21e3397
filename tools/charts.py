"""Renders deploy/helm with Helm's own engine and keeps what comes out in deploy/kubernetes.

    python tools/charts.py                        # write deploy/kubernetes
    python tools/charts.py --check                # lint the charts; fail where deploy/kubernetes is not fresh
    python tools/charts.py CHART [VALUES.json]    # print one chart's manifests with other values

Helm is no Python package, but its library is inside one (helm-sdkpy, Linux on x86-64), fetched once to
build/. That library installs and cannot only print, so it is given a stand-in for a cluster, which
refuses the release and keeps what it was made of.
"""

from __future__ import annotations

import base64
import ctypes
import gzip
import json
import platform
import re
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from environments import ROOT, from_wheel

PIN = "helm-sdkpy==0.1.32"
HELM, KEPT = ROOT / "deploy" / "helm", ROOT / "deploy" / "kubernetes"
ALERTS = ROOT / "deploy" / "prometheus" / "roundtable.rules.yml"
WITH_ALERTS = HELM / "roundtable-coordinator", '{"prometheusRule": {"enabled": true}}'
KUBERNETES = "v1.31.0"
NAMESPACE = "roundtable"
KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Secret", "Service"),
    "apps/v1": ("StatefulSet",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
    "monitoring.coreos.com/v1": ("PrometheusRule", "ServiceMonitor"),
}


def library() -> Path | None:
    """Helm's library, fetched if need be; None on a machine that there is none for."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    # Its bindings want Python 3.12; the library, called here without them, does not.
    return from_wheel(PIN, "helm_sdkpy/_lib/linux-amd64/libhelm_sdkpy.so", "--python-version", "3.12")


def discovery(path: str) -> dict[str, Any] | None:
    """What a cluster answers that knows KINDS and holds nothing."""
    groups = [
        {"name": name, "versions": [known], "preferredVersion": known}
        for name, known in (
            (version.partition("/")[0], {"groupVersion": version, "version": version.partition("/")[2]})
            for version in KINDS
            if "/" in version
        )
    ]
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if path == "/version":
        return {"major": "1", "minor": KUBERNETES.split(".")[1], "gitVersion": KUBERNETES}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if version in KINDS:
        resources = [{"name": k.lower(), "kind": k, "namespaced": True, "verbs": []} for k in KINDS[version]]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    if path.endswith("/secrets"):
        return {"kind": "SecretList", "apiVersion": "v1", "items": []}
    return None


class Cluster(ThreadingHTTPServer):
    """The stand-in; `releases` holds what Helm wanted to store."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.releases: list[dict[str, Any]] = []


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Cluster

    def do_GET(self) -> None:
        self._answer(discovery(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        """A release is a secret, in protobuf: the part that matters is gzip in base64."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.search(rb"H4sI[A-Za-z0-9+/=]+", body)
        if found:
            self.server.releases.append(json.loads(gzip.decompress(base64.b64decode(found[0]))))
        self._answer(None)

    def _answer(self, answer: dict[str, Any] | None) -> None:
        refused = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
        }
        body = json.dumps(answer or refused).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing of it is of interest."""


class Helm:
    """Helm's library, talking to a stand-in."""

    def __init__(self, path: Path) -> None:
        self._cluster = Cluster()
        threading.Thread(target=self._cluster.serve_forever, daemon=True).start()
        self._library = ctypes.CDLL(str(path))
        self._library.helm_sdkpy_last_error.restype = ctypes.c_char_p
        self._handle = ctypes.c_ulonglong()
        server = {"server": f"http://127.0.0.1:{self._cluster.server_port}"}
        place = path.with_name("kubeconfig.json")
        place.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "stand-in", "cluster": server}],
                    "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "nobody"}}],
                    "users": [{"name": "nobody", "user": {}}],
                    "current-context": "stand-in",
                }
            )
        )
        made = self._library.helm_sdkpy_config_create(
            NAMESPACE.encode(), str(place).encode(), None, b"{}", ctypes.byref(self._handle)
        )
        if made:
            raise SystemExit(self._said())

    def lint(self, chart: Path) -> None:
        """Ends with Helm's words where `helm lint` would fail."""
        out = ctypes.c_char_p()
        failed = self._library.helm_sdkpy_lint(self._handle, str(chart).encode(), ctypes.byref(out))
        # Severities: 1 says, 2 warns, 3 fails.
        worst = max((m["Severity"] for m in json.loads(out.value or b"{}").get("Messages") or ()), default=0)
        if failed or worst >= 2:
            raise SystemExit(f"helm lint {chart}: {self._said() or (out.value or b'').decode()}")

    def template(self, chart: Path, values: str = "") -> str:
        """The manifests of a release named like the chart; ends with Helm's words where it makes none."""
        options = json.dumps({"timeout_seconds": 30, "server_side_apply": "false"})
        out = ctypes.c_char_p()
        words = (chart.name, str(chart), values, "", options)
        self._library.helm_sdkpy_install(self._handle, *(word.encode() for word in words), ctypes.byref(out))
        if not self._cluster.releases:
            raise SystemExit(f"helm template {chart}: {self._said()}")
        return str(self._cluster.releases.pop()["manifest"])

    def _said(self) -> str:
        said: bytes | None = self._library.helm_sdkpy_last_error()
        return (said or b"").decode()


def rendered(helm: Helm, chart: Path) -> str:
    """What is kept of a chart: its manifests with the values as they are."""
    told = f"# Rendered from deploy/helm/{chart.name} by tools/charts.py; change the chart, not this.\n"
    return told + helm.template(chart).lstrip("\n").rstrip() + "\n"


def main(words: list[str]) -> int:
    path = library()
    if path is None:
        print("skipped: there is no library of Helm for this machine")
        return 0
    helm = Helm(path)
    if words and words[0] != "--check":
        print(helm.template(Path(words[0]).resolve(), Path(words[1]).read_text() if words[1:] else ""))
        return 0
    stale = []
    for chart in sorted(file.parent for file in HELM.glob("*/Chart.yaml")):
        helm.lint(chart)
        kept, fresh = KEPT / f"{chart.name}.yaml", rendered(helm, chart)
        if not words:
            kept.write_text(fresh)
        elif not kept.exists() or kept.read_text() != fresh:
            stale.append(kept.relative_to(ROOT))
    if words and textwrap.indent(ALERTS.read_text().strip(), "  ", bool) not in helm.template(*WITH_ALERTS):
        print(f"{WITH_ALERTS[0].relative_to(ROOT)} does not give the alerts of {ALERTS.relative_to(ROOT)}")
        return 1
    for file in stale:
        print(f"{file} is not what the chart gives: run python tools/charts.py")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
