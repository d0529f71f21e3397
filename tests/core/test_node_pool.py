"""A pool of nodes: how many are wanted, against a naive oracle, and what its command may do wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from roundtable.core.hooks.hook_command import ask_command
from roundtable.core.hooks.node_pool import NodePool, PoolKeeper, PoolLoad, PoolTable

COUNTS = st.integers(0, 9)
LOOKS = st.lists(st.tuples(st.floats(0.1, 40), COUNTS, COUNTS, st.floats(0, 90), COUNTS), max_size=30)


def table(**changes: object) -> PoolTable:
    return PoolTable.model_validate({"command": ["scale"], "most": 12, **changes})


@given(LOOKS, st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 60.0]))
def test_up_at_once_and_down_when_fewer_were_enough_for_long(
    looks: list[tuple[float, int, int, float, int]], least: int, spare: int, down_after: float
) -> None:
    rules = table(least=least, spare=spare, up_after=30.0, down_after=down_after)
    pool, now, seen = NodePool(rules, 0.0), 0.0, []
    for passed, busy, lacking, waited, there in looks:
        now += passed
        target = min(12, max(least, busy + spare + (lacking if waited >= 30.0 else 0)))
        seen.append((now, target))
        expected = max(each for at, each in seen if at >= now - down_after)
        if now < down_after:
            # What was there before this process stays for so long, too.
            assert pool.wanted(PoolLoad(busy, lacking, waited), now, there) == max(expected, there)
        else:
            assert pool.wanted(PoolLoad(busy, lacking, waited), now, None) == expected


def test_a_pool_costs_no_more_than_it_may() -> None:
    rules = table(node_cost=2.5, cost=10.0)
    assert rules.limit == 4
    assert NodePool(rules, -1e9).wanted(PoolLoad(1, 20, 1e9), 0.0, 1) == 4
    assert table(node_cost=1e-300, cost=1e300).limit == table().most, "a price that is hardly one"
    for wrong in ({"cost": 1.0}, {"cost": 1.0, "node_cost": 2.0}, {"least": 13}):
        with pytest.raises(ValidationError, match=r"go together|at most"):
            table(**wrong)


COUNTING = """
import json, pathlib, sys
file, asked = pathlib.Path(sys.argv[1]), json.load(sys.stdin)
with file.open("a") as log:
    log.write(json.dumps(asked) + "\\n")
json.dump({"nodes": 1 if asked["nodes"] is None else asked["nodes"]}, sys.stdout)
"""


async def test_the_command_is_first_asked_what_is_there_and_then_for_what_is_wanted(tmp_path: Path) -> None:
    now, load = [0.0], [PoolLoad(0)]
    rules = table(command=[sys.executable, "-c", COUNTING, str(tmp_path / "asked")], up_after=5.0)
    keeper = PoolKeeper("p", rules, lambda: load[0], clock=lambda: now[0])
    for at, seen in (
        (0.0, PoolLoad(0)),
        (0.0, PoolLoad(0)),
        (1.0, PoolLoad(0)),  # nothing new, and no time for it: not asked
        (2.0, PoolLoad(2, 3, 9.0, {"waiting": ["j"]})),
        (1000.0, PoolLoad(0)),
    ):
        now[0], load[0] = at, seen
        await keeper.ask()
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert [each["nodes"] for each in asked] == [None, 1, 5, 0]
    assert asked[2]["reason"] == "work waits for 3 more, 9 s so far"
    assert asked[2]["load"] == {"busy": 2, "lacking": 3, "waited": 9.0, "waiting": ["j"]}
    assert (asked[2]["pool"], asked[2]["least"], asked[2]["most"], asked[2]["spare"]) == ("p", 0, 12, 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('{}')", 'did not answer {"nodes": N}'),
        ("print('{\"nodes\": true}')", "did not answer"),
        ("print('{\"nodes\": -1}')", "did not answer"),
        ("import sys; sys.exit('no quota')", "ended with status 1: no quota"),
        ("import time; time.sleep(600)", "no answer within 0.5 s"),
    ],
)
async def test_a_command_that_fails_is_told_of_once_and_asked_again(code: str, said: str) -> None:
    told: list[str] = []
    rules = table(command=[sys.executable, "-c", code], timeout=0.5 if "sleep" in code else 20.0)
    keeper = PoolKeeper(
        "p", rules, lambda: PoolLoad(1), told.append, clock=iter(range(0, 9999, 999)).__next__
    )
    await keeper.ask()
    await keeper.ask()
    (reason,) = told
    assert said in reason
    assert (keeper.trouble, keeper.there) == (reason, None)


async def test_a_command_sees_none_of_the_services_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("DATABASE", "TOKEN", "PASSPHRASE", "PASSPHRASE_FILE", "BACKUP_PASSPHRASE")
    for name in secrets:
        monkeypatch.setenv(f"ROUNDTABLE_{name}", "postgresql://user:secret@host/name")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = await ask_command([sys.executable, "-c", script], {})
    assert not {f"ROUNDTABLE_{name}" for name in secrets} & seen.keys()
    assert seen["PATH"]
