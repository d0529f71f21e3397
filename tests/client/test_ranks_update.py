"""What is made of an update that ranks wrote plainly: the bytes and the memory of one process that does all.

A process that trains the plain job stands for the ranks, whose files have the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cluster_silo import ALGORITHM, TASK, Silo
from file_limit import files_of_at_most
from torch import Tensor

from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.ranks_update import RanksUpdate
from roundtable.client.worker.silo_state import Counted, SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.client.worker.worker_trainer import order_of_work
from roundtable.cluster.agent.shaped_updates import goes_on, known_to_ranks
from roundtable.core import Layout, Model, open_model, save_model
from roundtable.core.errors import ResourceError
from roundtable.core.machine.process_facts import held_memory

PRETRAINING = {"optimizer_state": "keep", "momentum": 0.5, "learning_rate": 0.1, "batch_size": 8, "steps": 5}
TOPK = "topk(ratio=0.2) | int8(block=64)"
ALL = {"cohort": {"size": 2, "minimum": 2}, "aggregation": {"weighting": "uniform"}}
STREAMING: dict[str, Any] = {
    "algorithm": {**PRETRAINING, "name": "streaming", "fragments": 2, "overlap": True, "mixing": 0.5},
    "transfer": {"up": "int4(block=64)", "feedback": "on"},
}
EAGER = {
    "algorithm": {**PRETRAINING, "name": "eager"},
    "cohort": {"size": 2},
    "aggregation": {"weighting": "uniform", "server_optimizer": {"name": "diloco"}},
}
HALF = TASK.replace("nn.Linear(16, 3))", "nn.Linear(16, 3)).bfloat16()").replace(
    "F.cross_entropy(model(batch[0])", "F.cross_entropy(model(batch[0].bfloat16()).float()"
)


class Beside:
    """A silo whose ranks write plainly, and one process that does the same job whole."""

    def __init__(self, folder: Path, job: Mapping[str, Any], code: str = TASK) -> None:
        self.silo = Silo(folder, {"algorithm": ALGORITHM, **job}, code)
        self._folder = folder
        self.alone, self._ranks = (Executor(self._settings(name)) for name in ("alone", "ranks"))

    def _settings(self, jobs: str) -> Settings:
        empty = {"mark": "", "empty": str(self._folder / "empty.safetensors")}
        return Settings("alder", str(self._folder), str(self._folder / jobs), "cpu", 1, empty)

    def orders(self, round: int, attempt: int, counted: Counted | None) -> tuple[Order, Order]:
        """For one process, and for what is beside ranks."""
        work = self.silo.work(round)
        chosen = ("int8", "topk(ratio=0.05) | int8")[round % 2] if self.silo.job.transfer.automatic else ""
        order = replace(order_of_work(work), attempt=attempt, counted=counted, encoding=chosen)
        places = {name: str(self._folder / name) for name in ("plain", "begins")}
        return replace(order, output=str(self._folder / "alone-update")), replace(order, **places)

    def step(self, round: int, attempt: int = 1, counted: Counted | None = None) -> None:
        """One step of both."""
        alone, beside = self.orders(round, attempt, counted)
        self.alone.train(alone, lambda *seen: None)
        settings = self._settings("beside")
        RanksUpdate(settings, beside).begin(lambda *said: None)
        work = known_to_ranks(self.silo.work(round))
        model = beside.begins if goes_on(self.silo.job) else beside.model
        plain = replace(beside, config=work.config, model=model, output=beside.plain, encoding="")
        self._ranks.train(plain, lambda *seen: None)
        # One process may be killed at any place, and another one begins anew.
        for _ in range(2):
            RanksUpdate(settings, beside).shape()

    def left(self, round: int, attempt: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What both keep of a step, but for the ranks' own."""
        name = f"job-1/round-{round}.{attempt}.safetensors"
        paths = [self._folder / jobs / name for jobs in ("alone", "beside")]
        both = [safetensors.torch.load_file(path) if path.exists() else {} for path in paths]
        alone, beside = (
            {key: value for key, value in each.items() if not key.startswith("optimizer")} for each in both
        )
        return alone, beside

    def sent(self) -> tuple[bytes, bytes]:
        return tuple((self._folder / name).read_bytes() for name in ("alone-update", "update"))  # type: ignore[return-value]

    def move(self, round: int) -> None:
        """Another model for the next round."""
        model = open_model(self.silo.path)
        self.silo.path = self._folder / f"model-{round}.safetensors"
        chance = torch.Generator().manual_seed(round)
        vector = model.vector + 0.01 * torch.randn(model.layout.size, generator=chance)
        save_model(self.silo.path, Model(model.layout, vector, dict(model.local)))


@pytest.mark.parametrize(
    "job",
    [
        {"transfer": {"up": TOPK}},
        {"transfer": {"up": TOPK, "momentum": 0.9}},
        {"transfer": {"up": TOPK, "feedback": "ef21"}, **ALL},
        {"transfer": {"up": "lowrank(rank=2)"}},
        {"transfer": {"up": "int8(rounding=stochastic) | zstd"}},
        {"transfer": {"up": "auto"}},
    ],
    ids=["topk", "momentum", "ef21", "lowrank", "stochastic", "auto"],
)
def test_bytes_and_memory_are_those_of_one_process(tmp_path: Path, job: dict[str, Any]) -> None:
    """Also where round 2 is asked for twice: of its first try nothing is gone on from."""
    both = Beside(tmp_path, job)
    for round, attempt, counted in ((1, 1, None), (2, 1, (1, 1)), (2, 2, (1, 1)), (3, 1, (2, 2))):
        both.step(round, attempt, counted)
        alone, beside = both.sent()
        assert alone == beside
        if both.silo.job.transfer.remembers:
            alone_left, beside_left = both.left(round, attempt)
            assert alone_left.keys() == beside_left.keys()
            assert all(torch.equal(beside_left[key], value) for key, value in alone_left.items())
        if attempt == 1:
            both.move(round)


@pytest.mark.parametrize("code", [TASK, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("job", [STREAMING, EAGER], ids=["streaming", "eager"])
def test_weights_of_the_silos_own_are_those_of_one_process(
    tmp_path: Path, job: dict[str, Any], code: str
) -> None:
    both = Beside(tmp_path, job, code)
    for round in (1, 2, 3):
        both.step(round, 1, (round - 1, 1) if round > 1 else None)
        alone, beside = both.left(round)
        assert alone.keys() == beside.keys()
        for key, value in alone.items():
            torch.testing.assert_close(beside[key], value, rtol=1e-6, atol=1e-7)
        both.move(round)


EIGHT = {**STREAMING, "algorithm": {**STREAMING["algorithm"], "fragments": 8}}


@pytest.mark.parametrize("job", [{"transfer": {"up": TOPK}}, EIGHT], ids=["topk", "streaming"])
def test_the_model_is_never_held_whole(
    tmp_path: Path, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after what is remembered is written, of a model of 32 MiB."""
    both, held = Beside(tmp_path, {**job, "task": "large"}), []
    layout = Layout.of({f"blocks.{number}.weight": torch.zeros(1 << 20) for number in range(8)})
    both.silo.path = tmp_path / "large.safetensors"
    save_model(both.silo.path, Model(layout, torch.randn(layout.size)))
    monkeypatch.setattr(
        "roundtable.client.worker.leaving_update.failpoint", lambda *place: held.append(held_memory())
    )
    for round in (1, 2):
        _, beside = both.orders(round, 1, (round - 1, 1) if round > 1 else None)
        torch.randn(layout.size).numpy().tofile(beside.plain)
        # The first time loads code, too.
        held[:] = [held_memory()]
        RanksUpdate(both._settings("beside"), beside).begin(lambda *said: None)
        RanksUpdate(both._settings("beside"), beside).shape()
    assert max(held) - held[0] < 16 << 20


def test_a_full_disk_is_the_silos_and_not_the_tasks(tmp_path: Path) -> None:
    both = Beside(tmp_path, STREAMING)
    both.step(1)
    _, beside = both.orders(2, 1, (1, 1))
    with files_of_at_most(64), pytest.raises(ResourceError, match=r"disk is full .*: begins could not be"):
        RanksUpdate(both._settings("beside"), beside).begin(lambda *said: None)
    RanksUpdate(both._settings("beside"), beside).begin(lambda *said: None)
    torch.zeros(both.silo.model.layout.size).numpy().tofile(beside.plain)
    with (
        files_of_at_most(64),
        pytest.raises(ResourceError, match=r"disk is full .*: plain\.row could not be"),
    ):
        RanksUpdate(both._settings("beside"), beside).shape()


def test_what_was_never_whole_goes_with_its_job(tmp_path: Path) -> None:
    state = SiloState(tmp_path)
    for name in (".round-1.1.safetensors.partial", "round-2.1.partial"):
        state.save("job-1", (1, 1), {"weight": torch.ones(2)}, None)
        (tmp_path / "job-1" / name).write_bytes(b"half")
        state.forget("job-1")
        assert not (tmp_path / "job-1").exists()
