"""Replicas that come and go in a round: what a step is the mean of, and that none is taken twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_silo import ALGORITHM, TASK, Silo, watched
from torch import nn
from torch.utils.data import IterableDataset

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.training.batches import training_orders
from roundtable.cluster.plan.replica_composition import no_peers
from roundtable.cluster.train.orders import Verdict
from roundtable.cluster.train.round_reports import kept_reports
from roundtable.core import JobConfig, Task, load_task, open_model
from roundtable.core.seeds import torch_generator
from roundtable.core.task import Site

LOSS = "return F.cross_entropy(model(batch[0]), batch[1])\n    def metrics"
TROUBLE = """
        at, mine = self.options.get("kills", {}), os.environ.get("ROUNDTABLE_REPLICA")
        # Plans run the loss too, on fake tensors.
        real = model.training and type(batch[0]) is torch.Tensor and batch[0].device.type == "cpu"
        self.calls += int(real)
        if real and self.calls == at.get(mine, 0):
            mark = pathlib.Path(self.options["mark"] + mine)
            if not mark.exists():
                mark.touch()
                whom = os.getppid() if "parent" in self.options else os.getpid()
                os.kill(whom, getattr(signal, self.options.get("signal", "SIGKILL")))
        if "mark" in self.options:
            marks = pathlib.Path(self.options["mark"]).parent
            if real and self.calls == 1 and (marks / f"mark{mine}").exists():
                (marks / "back").touch()
            if list(marks.glob("mark?")) and not (marks / "back").exists():
                time.sleep(self.options.get("sleep", 0.0))
        """
CODE = TASK.replace(LOSS, TROUBLE + LOSS)
# In float64 nothing but the mean that a step takes makes a difference.
CODE = CODE.replace("nn.Linear(16, 3))", "nn.Linear(16, 3)).double()").replace(
    "(80, 8, ", "(80, 8, dtype=torch.float64, "
)


def oracle(
    silo: Silo, verdicts: Sequence[Verdict], algorithm: dict[str, Any], ranks: int = 1
) -> torch.Tensor:
    """The update in float64 of one process that takes, at each step, the mean of whose gradients counted."""
    task = load_task("toy.py", silo.folder)
    (x, y), _ = task.data(Site("alder", options={}))
    generator = torch_generator(3, 1, "alder", "batches")
    size = algorithm["batch_size"]
    orders = training_orders((x, y), batch_size=size, generator=generator, epochs=algorithm["epochs"])
    rows = [part for order in orders for part in torch.split(order, size)]
    model: torch.nn.Module = task.model().double()
    start = open_model(silo.path).vector.double()
    torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=algorithm["learning_rate"], momentum=0.9)
    sharing = counted = verdicts[0].members
    taken = 0
    for verdict in verdicts[1:]:
        if not verdict.committed:
            counted = verdict.members
            continue
        shares = rows[taken].tensor_split(len(sharing) * ranks)
        parts = {one: torch.cat(shares[i * ranks : (i + 1) * ranks]) for i, one in enumerate(sharing)}
        mine = torch.cat([parts[one] for one in counted])
        taken += 1
        assert verdict.steps == taken, "each step once, in order"
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine].double()), y[mine]).backward()
        optimizer.step()
        sharing = counted = verdict.members
    assert taken == len(rows)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start


def elastic(folder: Path, devices: int, epochs: int = 2, **options: Any) -> Silo:
    job = {"algorithm": {**ALGORITHM, "epochs": epochs}}
    table = {"devices": devices, "elastic": "replica", **options.pop("table", {})}
    return Silo(folder, job, CODE, table=table, **options)


async def test_two_replicas_that_stay_equal_one_process(tmp_path: Path) -> None:
    silo = elastic(tmp_path, 2)
    async with silo.trainer() as trainer:
        seen: list[int] = []
        trained = await trainer.train(silo.work(), watched(seen))
        assert (trained.examples, seen[-1]) == (64, 128)
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-7)
        await trainer.train(silo.work(round=2, output="second"), watched([]))
        assert torch.allclose(silo.update("second"), silo.alone(round=2), atol=1e-7)
        metrics = await trainer.evaluate(silo.work(phase="evaluate"), watched([]))
        assert metrics["loss"][1] == 16
        assert trainer.groups is not None
        assert trainer.groups.launches == 2


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
async def test_a_lost_replica_costs_its_part_of_a_step_and_joins_again(devices: int, tmp_path: Path) -> None:
    table: dict[str, Any] = {"replica_devices": devices}
    if devices > 1:
        # A plan by measured rates may be another on a busy machine, where a step calls the loss more often.
        table["strategy"] = {"data_parallel": "ddp", "micro_batch": 8}
    silo = elastic(tmp_path, 3 * devices, 40, kills={"1": 5}, sleep=0.35, table=table)
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda *fault: told.append(fault))
        trained = await trainer.train(work, watched([]))
        assert trainer.groups is not None
        verdicts = trainer.groups.verdicts
        assert trainer.launcher.loads == 1, "what came back was forked from what had loaded everything before"
    lost = [one for one in verdicts[1:] if not one.committed]
    joined = [one for one in verdicts if one.joining]
    assert [(one.steps, one.members) for one in lost] == [(4, (0, 2))]
    assert [one.joining for one in joined] == [(1,)]
    expected = oracle(silo, verdicts, {**ALGORITHM, "epochs": 40}, devices)
    assert torch.allclose(silo.update().double(), expected, atol=5e-7)
    assert trained.metrics["loss"][1] < 40 * 64, "the lost part of the step is not counted"
    assert "went on with 2 replicas" in told[0][2]
    reports = kept_reports(silo.config.state / "cluster", "job-1")
    assert reports[0]["replicas"] == [
        {"step": 5, "lost": [1]},
        {"step": joined[0].steps + 1, "joined": [1]},
    ]


DYING = """
from roundtable.cluster.train.fellow_replicas import FellowReplicas
def _dying(self, *state):
    mark = pathlib.Path(__file__).parent / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return GIVE(self, *state)
GIVE, FellowReplicas._give = FellowReplicas._give, _dying

class Toy"""


@pytest.mark.slow
async def test_who_joins_while_its_donor_dies_begins_anew_from_another(tmp_path: Path) -> None:
    """Replica 1 comes back and gets no state from 0, which is killed as it gives it: 2 alone goes on."""
    code = CODE.replace("\nclass Toy", DYING)
    job = {"algorithm": {**ALGORITHM, "epochs": 40}}
    table = {"devices": 3, "elastic": "replica", "restarts": 5, "timeout": 8.0}
    silo = Silo(tmp_path, job, code, table=table, kills={"1": 5}, sleep=0.35)
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda *fault: told.append(fault))
        await trainer.train(work, watched([]))
        assert trainer.groups is not None
        verdicts = trainer.groups.verdicts
    assert [one.members for one in verdicts[1:] if not one.committed] == [(0, 2), (2,)]
    assert [action.split(";")[0] for _, _, action in told] == [
        f"went on with {left}" for left in ("2 replicas", "2 replicas", "1 replica")
    ]
    expected = oracle(silo, verdicts, {**ALGORITHM, "epochs": 40})
    assert torch.allclose(silo.update().double(), expected, atol=5e-7)


@pytest.mark.slow
async def test_a_replica_that_stands_still_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    silo = elastic(tmp_path, 2, kills={"0": 5}, signal="SIGSTOP", table={"timeout": 5.0, "restarts": 1})
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
        assert trainer.groups is not None
        verdicts = trainer.groups.verdicts
    assert (1,) in [one.members for one in verdicts]
    assert torch.allclose(silo.update().double(), oracle(silo, verdicts, ALGORITHM), atol=1e-7)


@pytest.mark.slow
async def test_when_all_replicas_are_lost_the_round_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    silo = elastic(tmp_path, 2, kills={"0": 9, "1": 9}, table={"checkpoint_steps": 4})
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
        assert trainer.groups is not None
        assert trainer.groups.verdicts[0].steps in (4, 8)
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-7)


@pytest.mark.slow
async def test_a_replica_on_a_device_that_comes_within_a_round_joins_in_it(tmp_path: Path) -> None:
    silo, devices = elastic(tmp_path, 2, 40, sleep=0.2), [1]
    # Steps take their time until the other's first.
    (tmp_path / "mark1").touch()
    async with silo.trainer(devices) as trainer:
        await trainer.train(silo.work(), lambda *seen: devices.append(2))
        assert trainer.groups is not None
        verdicts = trainer.groups.verdicts
    joined = [one for one in verdicts if one.joining]
    assert verdicts[0].members == (0,)
    assert [(one.joining, one.members) for one in joined] == [((1,), (0, 1))]
    assert 0 < joined[0].steps < 40 * 8
    expected = oracle(silo, verdicts, {**ALGORITHM, "epochs": 40})
    assert torch.allclose(silo.update().double(), expected, atol=5e-7)


@pytest.mark.parametrize(("phase", "table"), [("evaluate", {"elastic": "replica"}), ("train", {})])
async def test_ranks_that_cannot_load_fail_the_step_with_what_they_said(
    phase: str, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = Silo(tmp_path, table={**table, "devices": 1, "restarts": 1})
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('a torch that is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    async with silo.trainer() as trainer:
        work = silo.work(phase=phase)
        asked = trainer.train if phase == "train" else trainer.evaluate
        with pytest.raises(WorkFailed, match=r"failed 2 times, last: .*a torch that is broken"):
            await asked(work, watched([]))


@pytest.mark.slow
async def test_a_killed_launcher_takes_all_replicas_along_and_is_made_anew(tmp_path: Path) -> None:
    silo = elastic(tmp_path, 2, kills={"1": 9}, parent=True, table={"checkpoint_steps": 4})
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
        assert trainer.groups is not None
        assert trainer.groups.verdicts[0].steps in (4, 8)
        assert trainer.launcher.loads == 2
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-7)


class _Normed(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class _Plain(Task):
    def model(self) -> nn.Module:
        return nn.Linear(4, 4)


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(4)


def test_a_job_that_replicas_cannot_share_is_refused_with_the_reason() -> None:
    job = JobConfig.model_validate({"task": "toy", "algorithm": ALGORITHM})
    private = {"level": "example", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    noisy = JobConfig.model_validate({"task": "toy", "algorithm": ALGORITHM, "privacy": private})
    data = (torch.zeros(8, 4), torch.zeros(8))
    assert no_peers(_Plain(), job, data) == ""
    assert "buffer '1.running_mean' that training may change" in no_peers(_Normed(), job, data)
    assert "lanes for the whole of a round" in no_peers(_Plain(), job, _Stream())
    assert "takes its samples with it" in no_peers(_Plain(), noisy, data)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"launch": "external"}, 'needs launch = "torchrun"'),
        ({"devices": 3, "replica_devices": 2}, "devices = 3 is no multiple of replica_devices = 2"),
        ({"strategy": {"local_steps": 4}}, "have learnt since they met is lost"),
        ({"elastic": "restart", "replica_devices": 2}, 'goes with elastic = "replica"'),
    ],
)
def test_what_does_not_go_with_replicas_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterTable.model_validate({"elastic": "replica", **table})
