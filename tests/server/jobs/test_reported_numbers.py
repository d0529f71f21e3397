"""Numbers that silos report: bounded before anything is computed with them, over real connections."""

from __future__ import annotations

import json
import math
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_agent import ScriptedAgent, header_for
from service import Operator

from roundtable.core.bounds import MOST_COUNT
from roundtable.core.errors import ProtocolError
from roundtable.engine import add_up
from roundtable.proto import agent_pb2, common_pb2
from roundtable.server import Coordinator
from roundtable.server.door.from_agents import metrics_of

ONE = torch.ones(4)
Status = agent_pb2.UploadReceipt
ABSURD = [
    ({"name": "loss", "sum": 1e308, "count": 1}, r"'loss' has the sum 1e\+308"),
    ({"name": "loss", "sum": -math.inf, "count": 1}, "'loss' has the sum -inf"),
    ({"name": "loss", "sum": 1.0, "count": 1 << 63}, "'loss' counts 9223372036854775808 examples"),
    ({"name": "", "sum": 1.0, "count": 1}, "a metric is called ''"),
    ({"name": "\x1b[2J", "sum": 1.0, "count": 1}, r"a metric is called '\\x1b"),
]


async def test_one_silo_with_absurd_numbers_is_left_out_and_the_job_goes_on(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    """A finite loss of 1e308 overflows as soon as records are summed: it must not get that far."""
    async with (
        ScriptedAgent(coordinator.port, certificates / "alder") as honest,
        ScriptedAgent(coordinator.port, certificates / "birch") as hostile,
    ):
        table = "[cohort]\nsize = 2\nminimum = 1\n[evaluation]\nevery = 1"
        job = await operator.submit(table, rounds=len(ABSURD))
        for number, (metric, _) in enumerate(ABSURD, start=1):
            asked = (await honest.expect("instruction"), await hostile.expect("instruction"))
            header = header_for(asked[1], ONE.numpy().tobytes(), loss=1.0)
            header.metrics.append(common_pb2.Metric(**metric))
            if metric["name"] == "loss":
                del header.metrics[0]
            receipt = await hostile.upload(header, ONE.numpy().tobytes())
            assert (receipt.status, "the update's metrics are refused" in receipt.reason) == (
                Status.REJECTED,
                True,
            )
            assert (await honest.answer(asked[0], ONE, loss=1.0)).status == Status.ACCEPTED
            for agent in (honest, hostile):
                while (message := await agent.next()).WhichOneof("message") != "instruction":
                    pass
                if agent is honest:
                    await agent.evaluate(message.instruction, loss=(10.0, 10))
                else:
                    evaluated = agent_pb2.Evaluated(step=message.instruction.step)
                    evaluated.metrics.append(common_pb2.Metric(**metric))
                    await agent.say(evaluated=evaluated)
                    withdrawn = await agent.expect("withdraw")
                    assert withdrawn.step.round == number
                    assert "its evaluation is refused" in withdrawn.reason
        events = await operator.watch_until(job.id, "finished")
        failed = [event for event in events if event.kind == "client_failed"]
        assert [(event.client, event.round) for event in failed] == [
            ("birch", number) for number in range(1, len(ABSURD) + 1) for _ in range(2)
        ]
        records = [json.loads(record) for record in (await operator.job(job.id)).history]
        assert all(record["contributors"] == ["alder"] for record in records)
        assert all(record["evaluation"] == {"loss": [10.0, 10]} for record in records)
        assert hostile.call.done() is False or await hostile.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(("metric", "reason"), ABSURD)
def test_the_refusal_names_metric_and_value(metric: dict[str, object], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        metrics_of([common_pb2.Metric(**metric)])  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=20))
def test_what_passes_never_overflows_a_sum(reported: list[tuple[float, int]]) -> None:
    passed = []
    for value, count in reported:
        try:
            passed.append(metrics_of([common_pb2.Metric(name="loss", sum=value, count=count)]))
        except ProtocolError:
            continue
    # As a loss is summed: its mean times the examples that the silo claims, over a million silos.
    worst = [{"loss": (sums["loss"][0] * MOST_COUNT * 1e6, 1)} for sums in passed if "loss" in sums]
    assert all(math.isfinite(total) for total, _ in add_up(worst).values())
