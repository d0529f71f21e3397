"""A DataLoader that data() returns: its collation, sampler, workers and drop_last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler, get_worker_info
from training_processes import ask

from roundtable.client.streams.shares import ReadingShare
from roundtable.client.streams.workers import Workers
from roundtable.client.training.batches import count_examples, ordered_batches, training_batches
from roundtable.client.training.local_work import steps_of
from roundtable.cluster.train.shared_batches import SharedBatches, Sharing
from roundtable.core import JobConfig
from roundtable.core.errors import NoExamples, TaskError
from roundtable.core.plugins.folder_imports import load_file
from roundtable.core.seeds import torch_generator


class Words(Dataset[dict[str, Any]]):
    """Dicts with texts of different lengths, and the process that made each."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.rand(()).item()
        return {"id": index, "text": [index] * (index % 3 + 1), "process": os.getpid(), "draw": draw}


def padded(examples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(each["text"]) for each in examples)
    rows = [each["text"] + [-1] * (longest - len(each["text"])) for each in examples]
    batch = {"text": torch.tensor(rows), "id": torch.tensor([each["id"] for each in examples])}
    return {**batch, **{key: [each[key] for each in examples] for key in ("process", "draw")}}


def batches_of(data: Any, **ordering: Any) -> list[Any]:
    generator = torch_generator(5, 1, "silo", "batches")
    made = training_batches(data, **{"batch_size": 4, "generator": generator, "epochs": 2, **ordering})
    return [batch.data for batch in made]


def ids(data: Any, **ordering: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches_of(data, **ordering)]


def loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Words(), collate_fn=padded, **arguments)


def test_a_shuffling_loader_is_the_jobs_order_with_its_own_collation() -> None:
    (first, *_) = batches_of(loader(shuffle=True))
    assert first["text"].shape == (4, 3)
    plain = ids(loader(shuffle=True))
    assert ids(loader(shuffle=True, batch_size=4)) == plain
    assert sorted(chain(*plain[:3])) == list(range(10))
    assert [len(batch) for batch in plain] == [4, 4, 2] * 2


def test_a_loader_that_does_not_shuffle_keeps_the_order() -> None:
    assert ids(loader()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2


def test_drop_last_leaves_out_what_is_not_full() -> None:
    made = ids(loader(shuffle=True, drop_last=True))
    assert [len(batch) for batch in made] == [4, 4] * 2
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 4, "epochs": 2}})
    assert steps_of(job, 10, drop_last=True) == 4
    assert [len(batch) for batch in ids(loader(drop_last=True), steps=3)] == [4, 4, 4]
    with pytest.raises(NoExamples, match="drop_last leaves out the only batch"):
        ids(loader(drop_last=True), batch_size=11)


def test_samplers_draw_the_same_again_and_on_every_rank() -> None:
    stateful = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler([0.0, 1.0] * 5, 7, generator=stateful)
    data = loader(sampler=sampler)
    first = ids(data)
    assert ids(data) == first
    assert count_examples(data) == 7
    assert all(number % 2 for batch in first for number in batch)
    assert first[:2] != first[2:]
    stream = (5, 1, "silo")
    sharings = [Sharing(rank, 2, 9) for rank in (0, 1)]
    shared = [SharedBatches(data, each, batch_size=4, stream=stream, epochs=2) for each in sharings]
    for step, shares in enumerate(zip(*map(list, shared), strict=True)):
        assert [i for share in shares for i in share.batches[0]["id"].tolist()] == first[step]
    assert shared[0].steps == len(first) == 4


def test_workers_load_and_their_number_changes_no_order() -> None:
    data = loader(shuffle=True, num_workers=2, prefetch_factor=3)
    made = batches_of(data)
    assert [batch["id"].tolist() for batch in made] == ids(loader(shuffle=True))
    processes = {process for batch in made for process in batch["process"]}
    assert len(processes - {os.getpid()}) == len(processes)
    draws = [draw for batch in made for draw in batch["draw"]]
    assert draws == [draw for batch in batches_of(data) for draw in batch["draw"]]
    assert len(set(draws)) == len(draws)  # Epochs differ.


class Odd(Sampler[int]):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


def test_loaders_that_do_not_fit_the_job_are_refused() -> None:
    for wrong in (DataLoader(Words(), batch_size=None), DataLoader(Words(), batch_sampler=[[1, 2]])):
        with pytest.raises(TaskError, match="makes its batches itself"):
            ids(wrong)
    with pytest.raises(TaskError, match=r"batch_size = 8, and \[algorithm\] batch_size of the job is 4"):
        ids(loader(batch_size=8))
    with pytest.raises(TaskError, match="Odd has no length"):
        ids(loader(sampler=Odd([1])))

    class Long(Odd):
        def __len__(self) -> int:
            return len(self.rows)

    with pytest.raises(TaskError, match="Long gave the row 12, and the data set has 10"):
        ids(loader(sampler=Long([3, 12])))
    with pytest.raises(NoExamples):
        ids(loader(sampler=Long([])))


def test_evaluation_takes_the_examples_of_the_sampler_once() -> None:
    data = loader(sampler=[3, 1, 4])
    assert [batch.data["id"].tolist() for batch in ordered_batches(data, 2)] == [[3, 1], [4]]
    shuffled = ordered_batches(loader(shuffle=True), 5)
    assert [batch.data["id"].tolist() for batch in shuffled] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}, {"sampler": [9, 3, 3, 1, 4, 2]}])
def test_those_who_share_an_evaluation_get_the_batches_and_draws_of_one(arguments: dict[str, Any]) -> None:
    data = loader(**arguments)
    alone = [
        (batch.place, batch.data["id"].tolist(), batch.data["draw"])
        for batch in ordered_batches(data, 2, seed=7)
    ]
    torch.rand(3)  # What others draw meanwhile does not count.
    shared = [
        (batch.place, batch.data["id"].tolist(), batch.data["draw"])
        for rank in range(3)
        for batch in ordered_batches(data, 2, share=ReadingShare(rank, 3), seed=7)
    ]
    assert sorted(shared) == alone
    assert len({draw for _, _, draws in alone for draw in draws}) == sum(len(draws) for _, _, draws in alone)


class Opened(Dataset[int]):
    """Whose workers open its file, as torch's documentation shows it."""

    opened = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + self.opened


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened = 10  # type: ignore[attr-defined]


def test_a_worker_prepares_the_data_set_that_the_loader_was_made_with() -> None:
    data = DataLoader(Opened(), batch_size=2, num_workers=1, worker_init_fn=_open)
    for batches in (ordered_batches(data, 2, seed=7), ordered_batches(data, 2)):
        assert [batch.data.tolist() for batch in batches] == [[10, 11], [12, 13]]


class Secret(Words):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise TaskError(f"bad row {index} of {os.getpid()}")


def test_workers_that_are_no_forks_know_the_tasks_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on macOS, on Windows, and on Linux from Python 3.14 on.
    file = tmp_path / "spawned.py"
    file.write_text(
        "import os\nfrom torch.utils.data import Dataset, IterableDataset\n"
        "class Rows(Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n        return index, os.getpid()\n"
        "class Stream(IterableDataset):\n    def __iter__(self):\n"
        "        yield from ((index, os.getpid()) for index in range(4))\n"
    )
    made = load_file(file)
    # An app of another framework, whose stand-in only this process has, is no worker's business.
    monkeypatch.setitem(sys.modules, "only_here", ModuleType("only_here"))
    (tmp_path / "app.py").write_text("import only_here\n")
    load_file(tmp_path / "app.py")
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    [(rows, processes)] = batches_of(DataLoader(made.Rows(), **spawned), epochs=1)
    streamed = list(Workers.of(DataLoader(made.Stream(), **spawned)).read(made.Stream(), 1))
    assert sorted(rows.tolist()) == [row for row, _ in streamed] == [0, 1, 2, 3]
    assert os.getpid() not in {*processes.tolist(), *(process for _, process in streamed)}


def test_a_workers_traceback_does_not_leave() -> None:
    with pytest.raises(
        TaskError, match="the data set raised TaskError in a process of its DataLoader"
    ) as caught:
        batches_of(DataLoader(Secret(), num_workers=1))
    assert "Traceback" not in str(caught.value)
    assert "bad row" in str(caught.value.__cause__)


LOADED = """
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import torch
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    def data(self, site):
        generator = torch.Generator().manual_seed(0)
        rows = TensorDataset(torch.randn(32, 4, generator=generator), torch.arange(32) % 3)
        return tuple(DataLoader(rows, batch_size=8, num_workers=2) for _ in range(2))
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""


async def test_workers_load_in_a_silos_training_process(silo: Any) -> None:
    """They close their standard input, which the process reads in a thread."""
    (silo.config.folder / "toy.py").write_text(LOADED)
    async with silo.agent():
        assert await ask(silo, 1) is None
        silo.coordinator.say(instruction=silo.instruction(1, phase="evaluate"))
        await silo.coordinator.hear("evaluated")
