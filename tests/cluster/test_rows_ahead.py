"""Processes that read a rank's examples ahead: the same batches, and they end with the round."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from itertools import chain, pairwise
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from roundtable.client.failures import diagnose
from roundtable.cluster.train.prefetch import Prefetched
from roundtable.cluster.train.shared_batches import Share, SharedBatches, Sharing, step_seed
from roundtable.core.errors import TaskError
from roundtable.core.seeds import isolated_randomness

STREAM = (5, 1, "silo")
CPU = torch.device("cpu")


class Drawing(Dataset[Any]):
    """Augments its examples, and says which process read them."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "drawn": torch.rand(3), "here": float(get_worker_info() is None)}


def loader(dataset: Dataset[Any], workers: int) -> DataLoader[Any]:
    # Tests may run where another way to start processes is the default.
    context = multiprocessing.get_context("fork") if workers else None
    return DataLoader(dataset, shuffle=True, num_workers=workers, multiprocessing_context=context)


def batches_of(
    dataset: Dataset[Any], workers: int, taken: int = 0, rank: int = 1, **more: Any
) -> SharedBatches:
    made = SharedBatches(
        loader(dataset, workers), Sharing(rank, 2, 2, **more), batch_size=8, stream=STREAM, steps=7
    )
    made.load_state_dict({"position": taken})
    return made


def arriving(batches: SharedBatches, steps: Iterator[Share]) -> Iterator[Share]:
    """As a rank takes them."""

    def randomness(step: int) -> Any:
        return isolated_randomness(step_seed(STREAM, "data", step, batches._sharing.rank), CPU)

    ahead = Prefetched(steps, CPU, randomness, batches.position)
    while (share := ahead.take()) is not None:
        yield share


def shown(share: Share) -> tuple[Any, ...]:
    parts: list[dict[str, Tensor]] = share.batches
    return (
        [part["row"].tolist() for part in parts],
        [part["drawn"].tolist() for part in parts],
        share.sizes,
        share.total,
        share.together,
    )


@pytest.mark.parametrize("more", [{}, {"pipeline": 2}, {"shares": (0.7, 0.3)}])
def test_processes_read_the_batches_of_none_bit_for_bit(more: dict[str, Any]) -> None:
    """Another world from the third step on, as where a replica comes; and a round that is gone on with."""

    def steps(workers: int, taken: int = 0) -> list[Share]:
        batches = batches_of(Drawing(), workers, taken, **more)
        made = []
        for share in arriving(batches, iter(batches)):
            made.append(share)
            assert batches.position == taken + len(made)
            if batches.position == 2 and not more:
                batches.share_among(1, 2)
        return made

    alone, ahead = steps(0), steps(2)
    assert len(alone) == 7
    assert [shown(share) for share in ahead] == [shown(share) for share in alone]
    assert all(part["here"].sum() == 0 for share in ahead for part in share.batches)
    if more:
        assert [shown(share) for share in steps(2, 4)] == [shown(share) for share in alone[4:]]
    else:
        assert any(one.together != other.together for one, other in pairwise(alone))
    assert active_children() == []


def test_processes_end_with_the_round() -> None:
    batches = batches_of(Drawing(), 2)
    steps = iter(batches)
    next(steps)
    assert len(active_children()) == 2
    steps.close()
    assert active_children() == []


class Jane(Dataset[Any]):
    """Cannot read one of its examples, and quotes it."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, row: int) -> int:
        if row == 13:
            raise ValueError("could not convert 'Jane Doe' to float")
        return row


@pytest.mark.parametrize("workers", [0, 1])
def test_an_example_that_cannot_be_read_is_told_to_the_silo_alone(workers: int) -> None:
    with pytest.raises((TaskError, ValueError)) as raised:
        list(chain.from_iterable(batches_of(Jane(), workers, rank=rank) for rank in (0, 1)))
    found = diagnose(raised.value)
    assert found.kind == "task_error"
    assert "ValueError" in found.detail
    assert "__getitem__" in found.detail
    assert "Jane" not in found.detail
    assert "13" not in found.detail
    assert "Example 13 of the training data was being read" in found.trace
    assert active_children() == []


class Never(Dataset[Any]):
    """Stands still in its first example once it has said who reads it."""

    def __init__(self, told: int) -> None:
        self._told = told

    def __len__(self) -> int:
        return 21

    def __getitem__(self, row: int) -> int:
        os.write(self._told, b"%d\n" % os.getpid())
        signal.pause()
        return row


def take_first(dataset: Dataset[Any]) -> None:
    next(iter(batches_of(dataset, 1)))


def test_processes_end_with_a_rank_that_is_killed() -> None:
    """Also those that stand still: the pipe ends once nobody has it any more."""
    hears, tells = os.pipe()
    rank = multiprocessing.get_context("fork").Process(target=take_first, args=(Never(tells),))
    rank.start()
    os.close(tells)
    reader = int(os.read(hears, 20))
    rank.kill()
    rank.join()
    ended = select.select([hears], [], [], 60)[0] == [hears] and os.read(hears, 20) == b""
    if not ended:
        os.kill(reader, signal.SIGKILL)
    os.close(hears)
    assert ended
