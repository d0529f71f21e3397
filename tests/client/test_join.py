"""A script of one's own in rounds, against the scripted coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roundtable.client import Refused, Round
from roundtable.client.join import join
from roundtable.core import JobConfig, LayoutRules, load_task
from roundtable.core.encodings.feedback import MEMORY
from roundtable.core.errors import ConfigError, InvalidUpdate, LayoutError, TaskError
from roundtable.core.initial_model import initial_model
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.privacy_table import privacy_from
from roundtable.privacy.example_level import SiloAccount

KEY = ("job-1", 1, 1, "train")


async def scripted(silo: Any, body: Callable[[Any], None], **options: Any) -> asyncio.Task[None]:
    """A script in a thread, connected: `body` gets the iterator of rounds."""
    running = asyncio.create_task(asyncio.to_thread(lambda: body(join(silo.config, **options))))
    connected = asyncio.create_task(silo.coordinator.hear("heartbeat"))
    await asyncio.wait([running, connected], return_when=asyncio.FIRST_COMPLETED)
    connected.cancel()
    return running


async def test_a_module_is_submitted_and_leaving_the_loop_leaves_the_federation(silo) -> None:
    seen: list[Any] = []

    def body(rounds: Any) -> None:
        model = load_task("toy.py", silo.config.folder).model()
        for round in rounds:
            model.load_state_dict(round.weights)
            seen.append((round.job, round.number, round.rounds, round.options["batch_size"]))
            with torch.no_grad():
                model[0].bias += 1.0
            round.submit(model, examples=12, metrics={"loss": 0.5, "right": (3.0, 12)})
            if round.number == 2:
                break

    running = await scripted(silo, body, task="toy")
    assert list(silo.coordinator.hellos[0].tasks) == ["toy"]
    for number in (1, 2):
        silo.coordinator.say(instruction=silo.instruction(number))
        await silo.coordinator.until(
            lambda key=("job-1", number, 1, "train"): key in silo.coordinator.receipts
        )
    await running
    assert (await silo.coordinator.hear("goodbye")).reason
    assert seen == [("job-1", 1, 10, 8), ("job-1", 2, 10, 8)]
    change = silo.model.layout.unflatten(silo.delta().clone())
    torch.testing.assert_close(change["0.bias"], torch.ones(8))
    assert not change["0.weight"].any()
    metrics = silo.coordinator.uploads[KEY].header.metrics
    assert {m.name: (m.sum, m.count) for m in metrics} == {"loss": (6.0, 12), "right": (3.0, 12)}


async def test_a_round_that_is_passed_over_is_refused_and_evaluation_is_answered(silo) -> None:
    def body(rounds: Any) -> None:
        for round in rounds:
            if round.number == 2:
                round.submit(round.arrays, examples=1)

    def measure(round: Round) -> dict[str, tuple[float, int]]:
        return {"size": (float(sum(w.size for w in round.arrays.values())), 1)}

    running = await scripted(silo, body, evaluate=measure)
    coordinator = silo.coordinator
    coordinator.say(instruction=silo.instruction(1))
    failure = await coordinator.hear("failure")
    assert (failure.kind, failure.step.round) == ("refused", 1)
    coordinator.say(instruction=silo.instruction(2))
    await coordinator.until(lambda: coordinator.receipts)
    coordinator.say(instruction=silo.instruction(2, phase="evaluate"))
    evaluated = await coordinator.hear("evaluated")
    assert [(m.name, m.sum, m.count) for m in evaluated.metrics] == [("size", silo.model.layout.size, 1)]
    coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "the job has finished"})
    await running


async def test_tensors_that_never_travel_stay_with_the_script(silo) -> None:
    rules = LayoutRules(local=("2.*",))
    silo.job = JobConfig.model_validate({"task": "toy", "model": {"local": ["2.*"]}})
    silo.model = initial_model(silo.job, load_task("toy.py", silo.config.folder))
    biases: list[torch.Tensor] = []

    def body(rounds: Any) -> None:
        for round in rounds:
            state = round.weights
            biases.append(state["2.bias"].clone())
            state["2.bias"] += 1
            round.submit(state, examples=1)

    running = await scripted(silo, body)
    for number in (1, 2):
        silo.coordinator.say(instruction=silo.instruction(number))
        await silo.coordinator.until(
            lambda key=("job-1", number, 1, "train"): key in silo.coordinator.receipts
        )
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "the job has finished"})
    await running
    assert rules.local == silo.job.model.local
    torch.testing.assert_close(biases[1], biases[0] + 1)
    assert silo.delta().numel() == silo.model.layout.size == 4 * 8 + 8


async def test_what_cannot_be_submitted_is_said_to_the_script(silo) -> None:
    complaints: list[str] = []

    def body(rounds: Any) -> None:
        for round in rounds:
            arrays = round.arrays
            wrong: list[tuple[Any, dict[str, Any], type[Exception]]] = [
                (arrays, {"examples": 0}, InvalidUpdate),
                ({"0.weight": np.zeros(3)}, {"examples": 1}, LayoutError),
                ({**arrays, "0.bias": np.full(8, np.nan, np.float32)}, {"examples": 1}, InvalidUpdate),
                ([1, 2], {"examples": 1}, TaskError),
                (arrays, {"examples": 1, "metrics": {"loss": (1, 2, 3)}}, TaskError),
            ]
            for weights, options, kind in wrong:
                with pytest.raises(kind) as caught:
                    round.submit(weights, **options)
                complaints.append(str(caught.value))
            assert round.wanted
            round.submit(arrays, examples=5)

    running = await scripted(silo, body)
    silo.coordinator.say(instruction=silo.instruction())
    await silo.coordinator.until(lambda: silo.coordinator.receipts)
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "the job has finished"})
    await running
    assert len(set(complaints)) == 5
    assert silo.coordinator.uploads[KEY].header.examples == 5
    assert not silo.delta().any()


async def test_what_a_script_submits_leaves_with_the_silos_noise_and_nothing_exact(silo) -> None:
    table = {"level": "client_local", "clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 1e-3}
    silo.job = silo.job.model_copy(update={"privacy": privacy_from(table)})

    def body(rounds: Any) -> None:
        for round in rounds:
            round.submit(round.arrays, examples=12, metrics={"loss": 0.5})

    running = await scripted(silo, body)
    silo.coordinator.say(instruction=silo.instruction())
    await silo.coordinator.until(lambda: KEY in silo.coordinator.receipts)
    header = silo.coordinator.uploads[KEY].header
    assert (header.examples, list(header.metrics)) == (1, [])
    assert 3.0 < float(silo.delta().std()) < 7.0
    account = SiloAccount.from_json((silo.config.state / "privacy" / "client.json").read_text())
    assert [(entry.job, entry.round) for entry in account.entries] == [("job-1", 1)]
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "over"})
    await running


async def test_what_error_feedback_remembers_is_of_the_noised_update(silo) -> None:
    """Nothing was learnt: what was not sent is remembered with the silo's noise, and not without."""
    table = {"level": "client_local", "clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 1e-3}
    changes = {"privacy": privacy_from(table), "transfer": TransferTable(up="topk(ratio=0.25)")}
    silo.job = silo.job.model_copy(update=changes)

    def body(rounds: Any) -> None:
        for round in rounds:
            round.submit(round.arrays, examples=12)

    running = await scripted(silo, body)
    silo.coordinator.say(instruction=silo.instruction())
    await silo.coordinator.until(lambda: KEY in silo.coordinator.receipts)
    [state] = (silo.config.state / "jobs" / "job-1").glob("round-*.safetensors")
    memory = load_file(state)[MEMORY]
    held = memory[memory != 0]
    assert len(held) == len(memory) - round(0.25 * len(memory))
    assert 1.0 < float(held.std()) < 5.0, "what is smallest of noise with a spread of 5"
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "over"})
    await running
    assert not state.parent.exists()  # Nothing goes on from it.


async def test_a_privacy_that_no_script_can_keep_is_refused(silo) -> None:
    table = {"level": "example", "clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 1e-3}
    silo.job = silo.job.model_copy(update={"privacy": privacy_from(table)})
    seen: list[Any] = []
    running = await scripted(silo, seen.extend)
    silo.coordinator.say(instruction=silo.instruction())
    failure = await silo.coordinator.hear("failure")
    assert failure.kind == "refused"
    assert "bounds the gradient of every example, and a script submits weights" in failure.detail
    silo.coordinator.say(withdraw={"step": {"job": "job-1"}, "reason": "over"})
    await running
    assert seen == [], "the script is not even asked"


async def test_an_error_in_the_script_ends_the_agent(silo) -> None:
    def body(rounds: Any) -> None:
        with closing(rounds):
            for _ in rounds:
                raise KeyError("mine")

    running = await scripted(silo, body)
    silo.coordinator.say(instruction=silo.instruction())
    with pytest.raises(KeyError, match="mine"):
        await running
    await silo.coordinator.hear("goodbye")
    assert not [thread for thread in threading.enumerate() if thread.name == "roundtable-agent"]


async def test_a_refusal_reaches_the_script(silo) -> None:
    silo.coordinator.refuse = "not invited"
    running = await scripted(silo, lambda rounds: next(rounds))
    with pytest.raises((Refused, StopIteration, RuntimeError), match="not invited"):
        await running


def test_a_script_without_a_task_is_told(silo) -> None:
    with pytest.raises(ConfigError, match=r"\[tasks\]"):
        next(join(replace(silo.config, tasks={})))
