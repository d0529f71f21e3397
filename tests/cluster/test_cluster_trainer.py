"""The agent's side of a cluster: ranks under torchrun, warm between rounds, back after failures."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cluster_silo import ALGORITHM, TASK, Silo, watched
from pydantic import ValidationError

from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.stepping.loss_scaling import NAME
from roundtable.cluster.train.orders import SOCKET, Advice, leave_report
from roundtable.cluster.train.round_reports import kept_reports
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError
from roundtable.core.initial_model import initial_model
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.task import initial_state


async def test_rounds_on_warm_ranks_equal_one_process(tmp_path: Path) -> None:
    silo = Silo(tmp_path, table={"tracking": {"tensorboard": "runs"}} if find_spec("tensorboard") else {})
    async with silo.trainer() as trainer:
        seen: list[int] = []
        told: list[TrainingSetup] = []
        trained = await trainer.train(replace(silo.work(), set_up=told.append), watched(seen))
        (setup,) = told
        assert (setup.machines, setup.ranks, setup.device) == (1, 2, "cpu")
        ((way, degree),) = setup.degrees.items()
        assert setup.plan.startswith(f"{way}{degree}")
        assert trained.examples == 64
        assert trained.size == 4 * silo.model.layout.size
        assert seen[-1] == 128
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
        ranks = trainer.launches
        metrics = await trainer.evaluate(silo.work(phase="evaluate"), watched([]))
        assert metrics["accuracy"][1] == metrics["loss"][1] == 16
        await trainer.train(silo.work(round=2, output="second"), watched([]))
        assert torch.allclose(silo.update("second"), silo.alone(round=2), atol=1e-6)
        assert trainer.launches == ranks == 1
    reports = kept_reports(silo.config.state / "cluster", silo.work().step.job)
    assert [(each["round"], each["examples"], len(each["ranks"])) for each in reports] == [
        (1, 128, 2),
        (2, 128, 2),
    ]
    assert reports[0]["seconds"]["least"] > 0
    if find_spec("tensorboard"):
        await check_tracked(silo)


async def check_tracked(silo: Silo) -> None:
    """The silo's own tracker has each step of both rounds, counted on, with what `job show` has of one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for thread in threading.enumerate():
        if thread.name.startswith("tracking-job-1"):
            await asyncio.to_thread(thread.join, 30)
    shown = EventAccumulator(str(silo.config.state / "tracking" / "runs" / "toy-job-1"))
    shown.Reload()
    steps = [event.step for event in shown.Scalars("loss")]
    assert steps == list(range(1, 33))
    assert {"seconds", "waiting_seconds", "memory_bytes", "examples_per_second"} <= {*shown.Tags()["scalars"]}


@pytest.mark.slow
async def test_ranks_tell_the_task_of_its_round_as_one_process_does(tmp_path: Path) -> None:
    """The loss depends on all that a context says; so does the metric, in an evaluation."""
    code = TASK.replace("def loss(self, model, batch):", "def loss(self, model, batch, context):")
    code = code.replace("def metrics(self, model, batch):", "def metrics(self, model, batch, context):")
    code = code.replace(
        "return F.cross_entropy(model(batch[0]), batch[1])",
        "assert context.device.type == 'cpu' and context.job == 'toy'\n"
        "        pull = context.seed('pull') % 101 / 101 + context.steps\n"
        "        return F.cross_entropy(model(batch[0]), batch[1]) * pull / 16",
    )
    code = code.replace(
        'return {"accuracy":',
        'return {"told": (context.seed("x") % 97, 1), "of_round": (context.round, 1),'
        ' "steps": (context.steps, 1), "accuracy":',
    )
    silo = Silo(tmp_path, code=code)
    async with silo.trainer() as trainer:
        for round in (1, 2):
            # As for a secure sum: the model that the round begins with, before it is trained.
            before = await trainer.evaluate(silo.work(round=round), watched([]))
            await trainer.train(silo.work(round=round, output=f"round-{round}"), watched([]))
            assert torch.allclose(silo.update(f"round-{round}"), silo.alone(round), atol=1e-6)
        metrics = await trainer.evaluate(silo.work(round=2, phase="evaluate"), watched([]))
    assert before == metrics
    batches, told = metrics["of_round"][1], Context("toy", 2, "alder", job_seed=3).seed("x") % 97
    assert [metrics[name][0] / batches for name in ("of_round", "steps", "told")] == [2, 0, told]


async def test_the_end_of_a_job_removes_its_checkpoints_and_no_others(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    silo = Silo(tmp_path, table={"checkpoints": [str(copies)]})
    places = (silo.config.state / "cluster" / "checkpoints", copies)
    for folder in (place / job / "round-000001-end" for place in places for job in ("job-1", "job-2")):
        folder.mkdir(parents=True)
    async with silo.trainer() as trainer:
        # Neither was the last that it worked on.
        trainer.release("job-1", met=True)
        trainer.release("job-3", met=True)
    assert [sorted(path.name for path in place.iterdir()) for place in places] == [["job-2"], ["job-2"]]


async def test_figures_of_steps_stay_below_the_agents_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mlflow = 'http://elsewhere': an agent writes only below"):
        async with Silo(tmp_path, table={"tracking": {"mlflow": "http://elsewhere"}}).trainer():
            pass


@pytest.mark.parametrize("place", ["s3:/bucket/checkpoints", "checkpoints"])
def test_a_place_that_would_become_a_folder_of_its_name_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=f"{place!r} is neither an absolute path nor an address"):
        ClusterTable.model_validate({"checkpoints": ["/mnt/a", place]})
    with pytest.raises(ValueError, match="two at most"):
        ClusterTable.model_validate({"checkpoints": ["/a", "/b", "/c"]})


async def test_ranks_have_time_to_plan_before_their_first_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing and planning take longer than steps do; a word of another order is one that they go on."""
    patience: list[float] = []

    async def waiting(coming: Any, seconds: float) -> Any:
        patience.append(seconds)
        return await coming

    silo = Silo(tmp_path, table={"timeout": 6.0})
    async with silo.trainer() as trainer:
        reader = asyncio.StreamReader()
        reader.feed_data(b'{"number": 0}\n{"number": 1, "evaluated": {}}\n')
        monkeypatch.setattr(asyncio, "wait_for", waiting)
        answer = await trainer._answer(reader, 1, lambda *seen: None)
        monkeypatch.undo()
    assert answer == {"number": 1, "evaluated": {}}
    assert patience == [300.0, 17.0]


# A process of each rank's reads its examples, and ends with it.
READ_AHEAD = TASK.replace(
    "import torch\n", "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n", 1
)
READ_AHEAD = READ_AHEAD.replace(
    "(x[:64], y[:64])", "DataLoader(TensorDataset(x[:64], y[:64]), shuffle=True, num_workers=1)"
)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["kill", "launcher", "hang", "freeze", "memory"])
async def test_the_update_comes_in_spite_of(trouble: str, tmp_path: Path) -> None:
    code = READ_AHEAD if trouble == "kill" else TASK
    silo = Silo(tmp_path, None, code, trouble=trouble, table={"timeout": 6.0, "checkpoint_steps": 2})
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda *fault: told.append(fault))
        trained = await trainer.train(work, watched([]))
        assert (tmp_path / "mark").exists()
        assert trainer.launcher.loads == (2 if trouble == "launcher" else 1)
        if trouble == "memory":
            assert [kind for kind, _, _ in told] == ["out_of_memory"]
            assert told[0][2].startswith("reduced the batch size: halved the micro-batch (or")
        else:
            assert told[0][2] == "started the ranks again"
        said = {
            "kill": "rank 1 was ended by SIGKILL, by somebody or by the kernel",
            "hang": "; nothing was heard of rank 1: a hang, or a step that takes longer",
            "memory": "the training process ran out of memory; a smaller batch_size needs less",
        }
        assert said.get(trouble, "") in told[0][1]
        assert told[0][1].endswith(("before the first step)", " of 16)"))
        assert trained.metrics["loss"][1] == 128
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_fedprox_pulls_towards_the_rounds_model_after_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint's weights are far from the round's model, and the pull towards either is strong."""
    # The wait lets the checkpoints before it be sealed.
    code = TASK.replace('if trouble == "kill":', 'if trouble == "kill":\n                    time.sleep(1)')
    job = {"algorithm": {**ALGORITHM, "name": "fedprox", "mu": 2.0}}
    table = {"timeout": 6.0, "checkpoint_steps": 2}
    silo = Silo(tmp_path, job, code, trouble="kill", call=14, table=table)
    told: list[tuple[str, str, str]] = []
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda *fault: told.append(fault))
        await trainer.train(work, watched([]))
        assert [action for _, _, action in told] == ["started the ranks again"]
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_a_broken_device_is_left_out_and_the_round_goes_on(tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble="device", table={"checkpoint_steps": 2})
    async with silo.trainer() as trainer:
        trained = await trainer.train(silo.work(), watched([]))
        assert trained.metrics["loss"][1] == 128
        assert Advice.read(silo.config.state / "cluster").lost == (1,)
        assert trainer.launches == 2
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
        # Before the next round it is asked again, and answers.
        await trainer.train(silo.work(round=2, output="second"), watched([]))
        assert Advice.read(silo.config.state / "cluster").lost == ()
        assert trainer.launches == 3
        assert torch.allclose(silo.update("second"), silo.alone(round=2), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["keep", "drop"])
async def test_devices_that_come_train_from_the_next_round_on(state: str, tmp_path: Path) -> None:
    silo = Silo(tmp_path, {"algorithm": {**ALGORITHM, "optimizer_state": state}})
    devices, left = [2], dict[str, torch.Tensor]()
    async with silo.trainer(devices) as trainer:
        for round, count in enumerate([2, 2, 3], 1):
            devices.append(count)
            work = silo.work(round=round, output=f"round-{round}", counted=round - 1 or None)
            await trainer.train(work, watched([]))
            expected = silo.alone(round, left)
            assert torch.allclose(silo.update(f"round-{round}"), expected, atol=2e-6), round
            silo.go_on(f"round-{round}")
        assert trainer.launches == 2
        # A round that is done again starts from what the one before it left, not from its own end.
        silo.path = tmp_path / "after-round-2.safetensors"
        await trainer.train(silo.work(round=3, output="again", counted=2), watched([]))
    assert torch.allclose(silo.update("again"), silo.update("round-3"), atol=2e-6)
    assert bool(left) == (state == "keep")


@pytest.mark.slow
async def test_an_optimizer_goes_on_from_the_newest_round_that_counts(tmp_path: Path) -> None:
    """Updates of rounds 2 to 4 are left out: each of these begins with what round 1 left, as at a silo with
    one process; and a silo of which no round counts begins afresh."""
    silo = Silo(tmp_path, {"algorithm": {**ALGORITHM, "optimizer_state": "keep"}})
    left = dict[str, torch.Tensor]()
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(output="round-1"), watched([]))
        assert torch.allclose(silo.update("round-1"), silo.alone(1, left), atol=2e-6)
        silo.go_on("round-1")
        assert left
        for round in (2, 3, 4):
            await trainer.train(silo.work(round=round, output=f"round-{round}", counted=1), watched([]))
            assert torch.allclose(silo.update(f"round-{round}"), silo.alone(round, dict(left)), atol=2e-6)
            assert not torch.allclose(silo.update(f"round-{round}"), silo.alone(round), atol=1e-4)
        await trainer.train(silo.work(round=5, output="afresh"), watched([]))
    assert torch.allclose(silo.update("afresh"), silo.alone(5), atol=2e-6)


@pytest.mark.slow
async def test_only_adapters_travel(tmp_path: Path) -> None:
    silo = Silo(tmp_path, base=str(tmp_path / "base.safetensors"))
    rules = {"drop": ["0.*", "2.*"]}
    silo.job = JobConfig.model_validate({"task": "toy", "seed": 3, "algorithm": ALGORITHM, "model": rules})
    whole = initial_state(load_task("toy.py", tmp_path), 3)
    assert isinstance(whole, torch.nn.Module)
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "base.safetensors")
    silo.model = initial_model(silo.job, load_task("toy.py", tmp_path))
    save_model(silo.path, silo.model)
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
    assert silo.model.layout.size == 16 * 3 + 3
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["file", "made"])
async def test_frozen_weights_are_read_or_made_and_checked(given: str, tmp_path: Path) -> None:
    made = "return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))"
    frozen = (
        made.replace("return", "model =") + "\n        model[2].requires_grad_(False)\n        return model"
    )
    base = {"base": str(tmp_path / "base.safetensors")} if given == "file" else {}
    safetensors.torch.save_file({}, tmp_path / "empty.safetensors")
    silo = Silo(tmp_path, code=TASK.replace(made, frozen), **base)
    whole = initial_state(load_task("toy.py", tmp_path), 3)
    assert isinstance(whole, torch.nn.Module)
    safetensors.torch.save_file(whole.state_dict(), tmp_path / "base.safetensors")
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
    assert silo.model.layout.size == 8 * 16 + 16 + 16 * 3 + 3
    assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
    if given == "file":
        whole.state_dict()["2.bias"].add_(0.1)
        safetensors.torch.save_file(whole.state_dict(), tmp_path / "base.safetensors")
        async with silo.trainer() as trainer:
            with pytest.raises(WorkFailed, match=r"'2\.bias' is frozen and has other values"):
                await trainer.train(silo.work(), watched([]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("mistake", r"ValueError in toy\.py"),
        ("assert", r"label or index.*RuntimeError in toy\.py"),
        ("watchdog", r"label or index.*cudaErrorAssert"),
    ],
)
async def test_a_mistake_in_the_task_is_reported_once(trouble: str, said: str, tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble=trouble)
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match=said) as failed:
            await trainer.train(silo.work(), watched([]))
        assert failed.value.kind == "task_error"
        assert Advice.read(silo.config.state / "cluster").lost == ()
        assert trainer.launches == 1


async def test_a_device_that_a_scheduler_gave_is_the_schedulers_to_take(tmp_path: Path) -> None:
    silo = Silo(tmp_path, table={"launch": "external", "restarts": 1})
    told: list[tuple[str, str, str]] = []
    folder = silo.config.state / "cluster"
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda *fault: told.append(fault))
        training = asyncio.create_task(trainer.train(work, watched([])))
        for _ in range(2):
            line, stream = await asyncio.open_unix_connection(folder / SOCKET)
            await line.readline()
            leave_report(folder, 5, RuntimeError("CUDA error: uncorrectable ECC error encountered"))
            stream.close()
        with pytest.raises(WorkFailed, match="failed 2 times") as failed:
            await training
    assert failed.value.kind == "gpu_error"
    assert "taken out there" in told[0][2]


@pytest.mark.slow
async def test_output_without_an_end_of_line_does_not_hold_up_training(tmp_path: Path) -> None:
    silo = Silo(tmp_path, trouble="chatter")
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)
        assert trainer.launches == 1


@pytest.mark.slow
async def test_a_withdrawn_order_leaves_the_ranks_ready(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    async with silo.trainer() as trainer:
        begun = asyncio.Event()
        order = asyncio.create_task(trainer.train(silo.work(), lambda *seen: begun.set()))
        await begun.wait()
        order.cancel()
        with pytest.raises(asyncio.CancelledError):
            await order
        await trainer.train(silo.work(), watched([]))
        assert torch.allclose(silo.update(), silo.alone(), atol=1e-6)


@pytest.mark.slow
async def test_the_loss_scale_outlives_a_killed_round_and_goes_on_in_the_next(tmp_path: Path) -> None:
    """2^16 × a loss of 2^8 overflows float16; what the scale came to is in the checkpoint, and kept."""
    code = TASK.replace(
        "return F.cross_entropy(model(batch[0]), batch[1])",
        "return F.cross_entropy(model(batch[0]), batch[1]) * 256",
    )
    job = {"algorithm": {**ALGORITHM, "learning_rate": 1e-4}}
    scales: dict[str, list[list[float]]] = {}
    updates: dict[str, list[torch.Tensor]] = {}
    for trouble in ("", "kill"):
        folder = tmp_path / (trouble or "none")
        folder.mkdir()
        table = {"precision": "float16", "timeout": 6.0, "checkpoint_steps": 2}
        silo = Silo(folder, job, code, trouble=trouble, table=table)
        scales[trouble], updates[trouble] = [], []
        async with silo.trainer() as trainer:
            for round in (1, 2):
                output = f"update-{round}"
                await trainer.train(silo.work(round, output=output, counted=round - 1 or None), watched([]))
                (kept,) = (silo.config.state / "jobs").rglob(f"round-{round}.*.safetensors")
                scales[trouble].append(safetensors.torch.load_file(kept)[NAME].tolist())
                updates[trouble].append(silo.update(output))
        assert (folder / "mark").exists() == (trouble == "kill")
        reports = kept_reports(silo.config.state / "cluster", "job-1")
        assert [each["skipped"] for each in reports][1] == 0
    (first, taken), (second, more) = scales[""]
    assert first == second < 2.0**16
    assert taken + 16 == more
    assert scales["kill"] == scales[""]
    assert all(torch.equal(a, b) for a, b in zip(updates["kill"], updates[""], strict=True))


POOL = """
import json, pathlib, sys
asked = json.load(sys.stdin)
with pathlib.Path(sys.argv[1]).open("a") as log:
    log.write(json.dumps(asked["nodes"]) + "\\n")
json.dump({"nodes": asked["nodes"] or 0}, sys.stdout)
"""


async def test_nodes_are_started_for_a_step_which_waits_for_them_in_line(tmp_path: Path) -> None:
    """Rank 0 is played: what ranks do is not the pool's."""
    asked = tmp_path / "asked"
    pool = {
        "command": [sys.executable, "-c", POOL, str(asked)],
        "most": 3,
        "up_after": 0.0,
        "down_after": 0.0,
    }
    silo = Silo(tmp_path, table={"launch": "external", "nodes": 2, "devices": 1, "pool": pool})
    lines: list[bool] = []

    async def until_asked(nodes: str) -> None:
        async with asyncio.timeout(20):
            while not asked.exists() or asked.read_text().split()[-1:] != [nodes]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async with silo.trainer() as trainer:
        await until_asked("0")
        for number in (1, 2):
            work = replace(silo.work(round=number, phase="evaluate"), in_line=lines.append)
            evaluating = asyncio.create_task(trainer.evaluate(work, watched([])))
            await until_asked("2")
            line, stream = await asyncio.open_unix_connection(silo.config.state / "cluster" / SOCKET)
            order = json.loads(await line.readline())
            stream.write(
                json.dumps({"number": order["number"], "evaluated": {"loss": [1.0, 1]}}).encode() + b"\n"
            )
            assert await evaluating == {"loss": (1.0, 1)}
            # The node goes as nobody needs it, and the next step waits for another.
            await until_asked("0")
            stream.close()
            await stream.wait_closed()
        assert lines == [True, False] * 2


async def test_nodes_that_do_not_come_fail_the_step_with_the_reason(tmp_path: Path) -> None:
    pool = {"command": [sys.executable, "-c", "raise SystemExit('no quota')"], "most": 3, "ready": 2.0}
    silo = Silo(tmp_path, table={"launch": "external", "nodes": 2, "devices": 1, "pool": pool})
    async with silo.trainer() as trainer:
        with pytest.raises(WorkFailed, match=r"no rank connected within 2 s: the pool.s command fails"):
            await trainer.evaluate(silo.work(phase="evaluate"), watched([]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"launch": "torchrun", "nodes": 1}, "needs launch = .external."), ({"nodes": 9}, "at most 3 nodes")],
)
def test_a_pool_that_cannot_hold_the_cluster_is_refused(changes: dict[str, Any], said: str) -> None:
    values = {"launch": "external", "nodes": 2, "pool": {"command": ["scale"], "most": 3}, **changes}
    with pytest.raises(ValidationError, match=said):
        ClusterTable.model_validate(values)
