"""What a rank says of an error that only shows that it is cut off: not that the task's code is wrong."""

from __future__ import annotations

from threading import Event

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from roundtable.client.failures import WorkFailed
from roundtable.cluster.train.rank import explained


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError(
            "The client socket has failed to connect to any network address of (hub, 29400)."
        ),
        dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:4711"),
    ],
)
def test_a_rank_that_is_cut_off_lost_its_node(error: Exception) -> None:
    found = explained(error)
    assert isinstance(found, WorkFailed)
    assert found.kind == "node_failure"
    assert found.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        dist.DistBackendError("NCCL error: CUDA error: device-side assert triggered"),
        ValueError("connection closed by peer"),
    ],
)
def test_what_the_task_or_the_device_did_stays_what_it_is(error: Exception) -> None:
    assert explained(error) is error


@pytest.mark.parametrize("said", ["Connection refused by archive.example:5432", "the read timed out"])
def test_a_tasks_own_connections_are_not_those_of_ranks(said: str) -> None:
    def reads() -> None:
        raise RuntimeError(said)

    with pytest.raises(RuntimeError) as raised:
        reads()
    assert explained(raised.value) is raised.value


def never(examples: object) -> object:
    return Event().wait()


def test_data_that_come_late_are_no_lost_rank() -> None:
    late = DataLoader(range(4), num_workers=1, timeout=0.01, collate_fn=never)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="timed out") as raised:
        next(iter(late))
    assert explained(raised.value) is raised.value
