"""Jobs that the silos which a coordinator knows cannot do: refused when they are submitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from scripted_agent import ScriptedAgent
from service import Operator, running

from roundtable.server import ServerConfig

BY_SITE = '[cohort]\nsize = 1\nstrategy = "diversity"\nlabel = "site"\n'
KRUM = '[aggregation]\nrule = "krum"\nparameters = { f = 1 }\n[cohort]\n'


async def test_a_label_that_no_silo_declares_and_a_rule_that_wants_more_silos_are_refused(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """Of the silos that offer the task. While none is known, those to come may declare it, or be enough."""
    label = r"cohort.label = 'site': no silo declares it \(they declare 'region'\)"
    async with (
        running(settings()) as coordinator,
        Operator(coordinator.port, certificates / "olga") as operator,
        ScriptedAgent(coordinator.port, certificates / "birch", tasks=("other",), site="3"),
    ):
        early = await operator.submit(BY_SITE)
        async with ScriptedAgent(coordinator.port, certificates / "alder", region="a"):
            await operator.watch_until(early.id, "paused")
            assert "no silo declares it" in (await operator.job(early.id)).job.reason
            with pytest.raises(grpc.aio.AioRpcError, match=label):
                await operator.submit(BY_SITE, request="r3")
            with pytest.raises(grpc.aio.AioRpcError, match=r"in a round of 1: krum needs n > 2f"):
                await operator.submit(KRUM, request="r4")
            can_be = (BY_SITE.replace("site", "region"), KRUM + "minimum = 5", KRUM + "size = 5")
            for number, text in enumerate(can_be):
                assert (await operator.submit(text, request=f"can be {number}")).id
