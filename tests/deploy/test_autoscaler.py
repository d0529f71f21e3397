"""The autoscaler for Kubernetes, run by the pools' own code, with a kubectl that only remembers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from roundtable.core.hooks.node_pool import PoolKeeper, PoolLoad, PoolTable

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "autoscaler"
KUBECTL = """#!{python}
import json, pathlib, sys
file, words = pathlib.Path({file!r}), sys.argv[1:]
if "absent" in words[3]:
    sys.exit('Error from server (NotFound): statefulsets.apps "absent" not found')
state = json.loads(file.read_text()) if file.exists() else {{"calls": [], "nodes": 3}}
state["calls"].append(words)
if words[2] == "scale":
    state["nodes"] = int(words[4].removeprefix("--replicas="))
elif words[2] == "patch":
    spec = json.loads(words[-1])["spec"]
    state["nodes"] = 0 if spec["suspend"] else spec["parallelism"]
else:
    print(json.dumps({{"status": {{"readyReplicas": state["nodes"], "ready": state["nodes"]}}}}))
file.write_text(json.dumps(state))
"""


@pytest.mark.parametrize("target", ["statefulset/roundtable-agent", "job/roundtable-ranks"])
async def test_it_sets_what_is_wanted_and_says_what_is_there(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl, state = tmp_path / "kubectl", tmp_path / "state"
    kubectl.write_text(KUBECTL.format(python=sys.executable, file=str(state)))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    now, load = [0.0], [PoolLoad(0)]

    def keeper(of: str) -> PoolKeeper:
        command = [sys.executable, str(FOLDER / "kubernetes.py"), of, "roundtable"]
        table = PoolTable.model_validate({"command": command, "most": 9, "up_after": 0.0})
        return PoolKeeper("cloud", table, lambda: load[0], clock=lambda: now[0])

    pool = keeper(target)
    await pool.ask()
    assert (pool.trouble, pool.there) == ("", 3), "the first question changes nothing"
    load[0] = PoolLoad(2, 5, 1.0)
    await pool.ask()
    assert (pool.trouble, pool.there) == ("", 7)
    now[0], load[0] = 10_000.0, PoolLoad(0)
    await pool.ask()
    assert (pool.trouble, pool.there) == ("", 0)
    calls = [words[2:4] for words in json.loads(state.read_text())["calls"]]
    verb = "patch" if target.startswith("job") else "scale"
    assert calls == [["get", target], [verb, target], ["get", target], [verb, target], ["get", target]]
    missing = keeper("statefulset/absent")
    await missing.ask()
    assert "not found" in missing.trouble


def test_its_role_names_what_it_sizes_and_nothing_else() -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "role.yaml").read_text())}
    assert set(documents) == {"ServiceAccount", "Role", "RoleBinding"}
    for rule in documents["Role"]["rules"]:
        assert rule["resourceNames"]
        assert set(rule["verbs"]) <= {"get", "update", "patch"}
