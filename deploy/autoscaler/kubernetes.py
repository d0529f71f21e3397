"""Sizes a StatefulSet, a Deployment or an indexed Job of Kubernetes as a pool asks: JSON in, JSON out.

    command = ["python3", "/etc/roundtable/kubernetes.py", "statefulset/roundtable-agent", "NAMESPACE"]

in [pools.NAME] of coordinator.toml, for silos, or with "job/roundtable-ranks" in [cluster.pool] of
agent.toml, for the nodes of a silo's cluster. For pods that find no room the cluster's own autoscaler adds
machines.
It needs kubectl, and the rights of role.yaml. It uses Python's standard library alone.
"""

from __future__ import annotations

import json
import subprocess
import sys

SECONDS = 20


def kubectl(namespace: str, *words: str) -> str:
    """What kubectl prints; CalledProcessError where it fails."""
    command = ["kubectl", "--namespace", namespace, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


def resize(namespace: str, target: str, nodes: int) -> None:
    """Sets the number of pods. A Job of none is suspended: it may have no fewer completions than one."""
    if not target.startswith("job/"):
        kubectl(namespace, "scale", target, f"--replicas={nodes}")
        return
    # Both go up and down together in an indexed Job, from Kubernetes 1.27 on.
    spec = {"suspend": False, "parallelism": nodes, "completions": nodes} if nodes else {"suspend": True}
    kubectl(namespace, "patch", target, "--type=merge", "--patch", json.dumps({"spec": spec}))


def there(namespace: str, target: str) -> int:
    """How many pods are ready."""
    status = json.loads(kubectl(namespace, "get", target, "--output=json")).get("status", {})
    return int(status.get("ready" if target.startswith("job/") else "readyReplicas") or 0)


def main() -> int:
    """Answers one question from standard input."""
    if len(sys.argv) != 3 or sys.argv[1].partition("/")[0] not in ("statefulset", "deployment", "job"):
        print("usage: kubernetes.py statefulset/NAME|deployment/NAME|job/NAME NAMESPACE", file=sys.stderr)
        return 2
    target, namespace = sys.argv[1:]
    asked = json.load(sys.stdin)
    try:
        if asked["nodes"] is not None:
            resize(namespace, target, int(asked["nodes"]))
        json.dump({"nodes": there(namespace, target)}, sys.stdout)
    except subprocess.CalledProcessError as error:
        print(f"kubectl: {error.stderr.strip()}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired:
        print(f"kubectl did not answer within {SECONDS} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
