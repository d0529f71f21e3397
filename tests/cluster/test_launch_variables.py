"""Ranks that somebody else starts: what they are told is checked, and what is wrong is named."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_silo import Silo, watched
from torch.distributed import HashStore

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.agent.failed_ranks import refused
from roundtable.cluster.agent.preflight import check_started, main
from roundtable.cluster.plan.launch_variables import LaunchVariables
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.orders import AgentConnection, leave_report, take_reports
from roundtable.cluster.train.rank import introduce
from roundtable.core.errors import ConfigError

TOLD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
}


def test_what_torchrun_tells_is_read() -> None:
    assert LaunchVariables.read(TOLD) == LaunchVariables(5, 8, 1, "node01", 29400)
    alone = {name: value for name, value in TOLD.items() if name != "LOCAL_WORLD_SIZE"}
    assert LaunchVariables.read(alone) == LaunchVariables.read(TOLD)


@pytest.mark.parametrize("name", [name for name in TOLD if name != "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_variable_that_is_missing_is_named(name: str, value: str | None) -> None:
    told = {**TOLD, name: value or ""}
    if value is None:
        del told[name]
    with pytest.raises(ConfigError, match=f"^{name} is not set; torchrun gives it to each rank"):
        LaunchVariables.read(told)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "-8"),
        ("WORLD_SIZE", "eight"),
        ("WORLD_SIZE", "8.0"),
        ("WORLD_SIZE", "9" * 5000),
        ("WORLD_SIZE", "٣"),
        ("RANK", "8"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "4"),
        ("LOCAL_RANK", "$SLURM_LOCALID"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "9"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_variable_that_is_nonsense_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = ") as refused:
        LaunchVariables.read({**TOLD, name: value})
    assert value[:40] in str(refused.value)
    assert len(str(refused.value)) < 300


def test_more_ranks_than_a_node_shows_devices_are_refused() -> None:
    place = LaunchVariables.read(TOLD)
    assert place.device_of(2) == 1
    with pytest.raises(ConfigError, match="LOCAL_RANK = 1: this node shows 1 CUDA devices"):
        place.device_of(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE = '0' is no whole number at least 1"),
    ],
)
def test_a_rank_without_them_ends_with_one_line(told: dict[str, str], said: str, tmp_path: Path) -> None:
    module = "import sys, os; from roundtable.cluster.train.rank import main; from pathlib import Path; "
    command = [sys.executable, "-c", f"{module}main(Path(sys.argv[1]))", str(tmp_path)]
    ended = subprocess.run(command, env={"PATH": "", **told}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert said in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NODES", "0"),
        ("NODES", "2:1"),
        ("NODES", "two"),
        ("DEVICES", "0"),
        ("DEVICES", "gpus"),
        ("RESTARTS", "-1"),
    ],
)
def test_the_launch_files_refuse_what_torchrun_would_stumble_over(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_started({"NODES": "1:4", "DEVICES": "gpu", "RESTARTS": "0"})
    check_started({"NODES": "2", "DEVICES": "8"})
    check_started({})
    with pytest.raises(ConfigError, match=f"^{name} = '{value}' is no"):
        check_started({name: value})
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["preflight", "127.0.0.1:29400"])
    assert main() == 1
    assert f"Error: {name} = '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("table", [{"devices": 0}, {"devices": -1}, {"nodes": 0, "launch": "external"}])
def test_no_devices_and_no_nodes_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"greater than or equal to 1"):
        ClusterTable.model_validate(table)


def test_any_world_is_whole_nodes_or_refused() -> None:
    """Never a ZeroDivisionError."""
    here = Resources(2, 8, 1 << 30, "cpu")
    for world in (*range(1, 9), 16, 64):
        found = here.with_world(world)
        assert found.nodes * found.devices == world
    for world in (9, 15, 17):
        with pytest.raises(ConfigError, match=f"a world of {world} is not a whole number of nodes"):
            here.with_world(world)


def test_ranks_that_cannot_be_of_one_group_are_told_so() -> None:
    store, place = HashStore(), LaunchVariables(0, 2, 0, "node01", 29400)
    introduce(store, place)
    with pytest.raises(ConfigError, match="WORLD_SIZE = 3 on rank 1, and 2 on another"):
        introduce(store, replace(place, rank=1, world=3))
    introduce(store, replace(place, rank=1))
    with pytest.raises(ConfigError, match="RANK = 1 on two ranks"):
        introduce(store, replace(place, rank=1))


def test_a_rank_that_calls_where_no_agent_answers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundtable.cluster.train.orders.CALL_SECONDS", -1.0)
    with socket.socket(socket.AF_UNIX) as left:
        # An agent that was killed leaves its socket behind.
        left.bind(str(tmp_path / "agent.sock"))
    with pytest.raises(ConfigError, match=r"does not reach the agent.*Connection refused.*the agent first"):
        AgentConnection(tmp_path)


async def test_what_no_other_start_would_mend_is_not_waited_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_report(tmp_path, 1, WorkFailed("node_failure", "rank 1 did not meet all 2 ranks"))
    waiting = asyncio.create_task(refused(tmp_path))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done, "a scheduler starts it again"
    assert "did not meet" in caplog.text
    leave_report(tmp_path, 0, ConfigError("RANK = 0 on two ranks"))
    await asyncio.wait_for(waiting, 30)
    assert len(take_reports(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([(0, 2), (1, 2), (1, 2)], "RANK = 1 on two ranks"),
        ([(0, 2), (1, 3)], "WORLD_SIZE = .* on another"),
        ([(0, 2), (1, 2)], ""),
    ],
)
async def test_ranks_that_somebody_else_starts_wrongly_are_named_at_once(
    ranks: list[tuple[int, int]], said: str, tmp_path: Path
) -> None:
    silo = Silo(tmp_path, table={"launch": "external", "restarts": 0, "timeout": 20.0})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "roundtable.cluster.train.rank"]
    async with silo.trainer() as trainer:
        started = [
            subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                [*command, str(silo.config.state / "cluster")],
                env={**shared, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
            )
            for rank, world in ranks
        ]
        try:
            if said:
                with pytest.raises(WorkFailed, match=said) as failed:
                    await trainer.train(silo.work(), watched([]))
                assert failed.value.kind == "protocol_violation"
            else:
                assert (await trainer.train(silo.work(), watched([]))).examples == 64
        finally:
            for process in started:
                process.kill()
                process.wait()
