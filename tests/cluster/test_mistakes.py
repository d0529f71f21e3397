"""What is wrong is said before training starts, or at the step where it shows, and in which words."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_cases import Case
from cluster_mistakes import Disturbed, disturbed_round, other_versions
from cluster_models import Language
from cluster_plans import plan
from cluster_silo import Silo
from pydantic import ValidationError
from ranks import run_ranks
from torch import Tensor

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.agent.preflight import check_endpoint, check_interface, main
from roundtable.cluster.plan.arithmetic import optimizer_cost
from roundtable.cluster.train.loss_guard import CheckpointTimes, LossGuard, Milestones, NormGuard
from roundtable.cluster.train.orders import Advice
from roundtable.core.errors import ConfigError


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    check_interface(None)
    check_interface("lo")
    with pytest.raises(ConfigError, match=r"this machine has no 'ib7'; it has .*lo"):
        check_interface("ib7")


def test_more_nodes_than_the_agent_can_start_ranks_on_are_refused() -> None:
    with pytest.raises(ValidationError, match=r'nodes = 2 needs launch = "external"'):
        ClusterTable.model_validate({"nodes": 2, "devices": 1})
    assert ClusterTable.model_validate({"nodes": 2, "devices": 1, "launch": "external"}).nodes == 2


def test_state_in_tensors_of_a_kind_of_its_own_is_refused_before_a_round() -> None:
    """As torchao's 8-bit optimizers have it: safetensors finds no storage under such a tensor."""

    class Packed(Tensor):
        pass

    class Adam8bit(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros(16).as_subclass(Packed)

    class Own(Language):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return Adam8bit(parameters)

    with pytest.raises(ConfigError, match=r"Adam8bit keeps its state.*\(Packed\).*AdamW"):
        optimizer_cost(Own())


async def test_an_agent_with_a_wrong_interface_does_not_start(tmp_path: Path) -> None:
    silo = Silo(tmp_path, table={"interface": "ib7"})
    with pytest.raises(ConfigError, match="has no 'ib7'"):
        async with silo.trainer():
            pass


def test_a_port_in_use_is_said_on_the_node_that_would_listen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            check_endpoint(f"127.0.0.1:{port}")
        monkeypatch.setattr("sys.argv", ["preflight", f"127.0.0.1:{port}"])
        assert main() == 1
        assert "is in use" in capsys.readouterr().err
    assert main() == 0


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [("node01", "write it as node01:29400"), ("no-such-node.invalid:29400", "no address is known")],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_endpoint(endpoint)


def test_ranks_of_different_versions_do_not_train() -> None:
    for said in run_ranks(other_versions, 2):
        assert "rank 1 has roundtable" in said
        assert "torch 2.12.0" in said


STEPS = {"steps": 14, "batch_size": 8, "learning_rate": 0.01}


@pytest.mark.parametrize(("factor", "call"), [(float("nan"), 3), (1e3, 12)], ids=["nan", "jump"])
def test_a_step_that_would_spoil_the_weights_is_noticed_before_it(
    factor: float, call: int, tmp_path: Path
) -> None:
    case = Case("disturbed", plan("ddp", dp=2, micro=4), Disturbed(1, call, factor), STEPS)
    for found in run_ranks(disturbed_round, 2, case, tmp_path):
        if factor == factor:
            assert found == {"said": "", "alarms": [call - 1], "same": True}
        else:
            assert "the training loss is inf at step 3 of round 1 (first on rank 1)" in found["said"]
            assert found["alarms"] == []
            assert found["same"], "the step was not taken"


def test_a_jump_is_told_once_and_slow_change_never() -> None:
    steady = LossGuard()
    falling = [2.0 * 0.97**i + 0.05 * (-1) ** i for i in range(60)]
    assert not any(steady.jumped(loss) for loss in falling)
    assert [steady.jumped(loss) for loss in (9.0, 30.0, 0.4, 0.4)] == [True, False, False, False]
    assert not any(LossGuard().jumped(loss) for loss in (1.0, 50.0, 1.0)), "too early to know"


def test_a_norm_is_told_when_it_begins_to_be_odd_and_a_milestone_when_it_is_reached() -> None:
    norms = NormGuard()
    assert not any(norms.jumped(1 + 0.3 * (-1) ** i) for i in range(40))
    assert [norms.jumped(norm) for norm in (3.5, 4.0, 1.0)] == [True, False, False]
    large = NormGuard()
    assert [large.jumped(150.0) for _ in range(30)] == [True, *[False] * 29], "it stays there: once"
    milestones = Milestones()
    losses = [1.0] * 20 + [0.96] * 20 + [0.94] * 20 + [0.9] * 20 + [0.8] * 20
    reached = [step for step, loss in enumerate(losses, 1) if milestones.reached(loss)]
    assert reached == [60, 100], "4 % are not enough, and each is held against the last one reached"


def test_checkpoints_are_made_by_steps_by_time_and_by_what_was_asked_for() -> None:
    clock = iter([0.0, 59.0, 61.0, 61.0, 100.0]).__next__
    times = CheckpointTimes(ClusterTable(checkpoint_minutes=1), clock)
    assert [times.due(), times.due()] == [False, True]
    times.saved()
    assert not times.due()
    assert times.after(3, 1.0, due=True)
    by_steps = CheckpointTimes(ClusterTable(checkpoint_steps=4, checkpoint_on=()))
    assert [step for step in range(1, 10) if by_steps.after(step, 1.0, due=False)] == [4, 8]
    assert not any(by_steps.before(1.0, 500.0) for _ in range(20)), "only what was asked for"
    never = CheckpointTimes(ClusterTable())
    assert not any(never.before(1.0, 500.0) or never.after(4, 1.0, due=False) for _ in range(20))


def test_a_device_that_fails_again_stays_out() -> None:
    advice = Advice(lost=(1, 3))
    assert (advice.usable(4), advice.to_probe()) == ([0, 2], [1, 3])
    advice.take_back([3])
    assert advice.usable(4) == [0, 2, 3]
    advice.lost = (*advice.lost, 3)
    assert advice.to_probe() == [1]
