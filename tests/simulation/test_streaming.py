"""Streaming DiLoCo against the paper's algorithm written down plainly in float64, simulated and at silos."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import NAMES, agents, federation_of, run_job, silo
from torch import Tensor, nn

from roundtable.cli.main import run as cli
from roundtable.core import JobConfig, Layout, load_task, parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.composed.fragments import Fragmented
from roundtable.core.errors import ConfigError, EncodingError, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.engine import make_plan
from roundtable.simulation import Result, simulate

TASK = """
import torch
from torch import nn
from roundtable.core import Task

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for size in (5, 6, 5, 7))
        self.head = Block(4)
    def forward(self, rows):
        return rows @ torch.cat([block.weight for block in (*self.blocks, self.head)])

class Toy(Task):
    def model(self):
        return Chain()
    def data(self, site):
        generator = torch.Generator().manual_seed(int(site.options.get("seed", site.index)))
        return (torch.randn(8, 27, generator=generator), torch.randn(8, generator=generator)), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean() / 2
"""
EVALUATED = f"""{TASK}
class Toy(Toy):
    def data(self, site):
        rows, _ = super().data(site)
        return rows, rows
"""
FORGETFUL = f"""{TASK}
from pathlib import Path

class Toy(Toy):
    # The first silo's disk loses what round 4 left, while the model of round 4 is evaluated.
    def data(self, site):
        self.first = site.options["seed"] == 0
        rows, _ = super().data(site)
        return rows, rows
    def metrics(self, model, batch):
        if self.first:
            for file in Path("state/alder").glob("**/round-4.*.safetensors"):
                file.unlink()
        return {{}}
"""
STRIDED = [[0, 2, 4], [1, 3]]
THIRDS = [[0, 3], [1, 4], [2]]
SEQUENTIAL = [[0, 1, 2], [3, 4]]
SIZES = (5, 6, 5, 7, 4)
RATE, MOMENTUM, STEPS, ROUNDS = 0.05, 0.9, 3, 7


def job_of(**changes: Any) -> JobConfig:
    """A job of the task; `transfer`, `algorithm` and `cohort` add to these tables."""
    algorithm = {
        "name": "streaming",
        "fragments": 2,
        "steps": STEPS,
        "batch_size": 8,
        "learning_rate": RATE,
        "momentum": MOMENTUM,
        "optimizer_state": "keep",
        **changes.pop("algorithm", {}),
    }
    table = {
        "task": "toy",
        "rounds": ROUNDS,
        "algorithm": algorithm,
        "aggregation": {
            "weighting": "uniform",
            "server_optimizer": {"name": "diloco"},
            "validation": {"norm_ratio": "off"},
        },
        "evaluation": {"every": 0},
        "cohort": {"size": 3},
        "simulation": {"clients": 3},
    }
    return JobConfig.model_validate({**table, **changes})


def places_of(layers: list[int]) -> Tensor:
    starts = [sum(SIZES[:layer]) for layer in range(len(SIZES))]
    return torch.cat([torch.arange(starts[layer], starts[layer] + SIZES[layer]) for layer in layers])


def by_hand(
    start: Tensor,
    seeds: list[int],
    cohorts: list[list[int]],
    fragments: list[list[int]],
    mixing: float = 0.0,
    coded: Callable[[Tensor], Tensor] = lambda values: values,
    feedback: bool = False,
    lost: tuple[int, int] = (-1, -1),
    overlap: bool = False,
) -> Tensor:
    """R [27] as silos hold it after these rounds, in float64: algorithm 2 of the paper with τ = 0, or with
    `overlap` a round's steps. `lost` is (site, round) before which a site's state is lost."""
    places = [places_of(layers) for layers in fragments]
    data = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows, wanted = torch.randn(8, 27, generator=generator), torch.randn(8, generator=generator)
        data.append((rows.double(), wanted.double()))
    exact, held, velocity = start.double(), start.double(), torch.zeros(27, dtype=torch.float64)
    own, inner, gone = ([torch.zeros(27).double() for _ in seeds] for _ in range(3))
    last: dict[int, int] = {}
    for round, cohort in enumerate(cohorts, start=1):
        due, updates = places[(round - 1) % len(places)], []
        for site in cohort:
            if (site, round) == lost:
                del last[site]
                inner[site], gone[site] = torch.zeros(27).double(), torch.zeros(27).double()
            if site not in last:
                own[site] = held.clone()
            late = overlap and last.get(site) == round - 1
            for before in range(last.get(site, round), round - late):
                back = places[(before - 1) % len(places)]
                share = mixing if last[site] == round - 1 else 0.0
                own[site][back] = share * own[site][back] + (1 - share) * held[back]
            rows, wanted = data[site]
            for _ in range(STEPS):
                gradient = rows.T @ (rows @ own[site] - wanted) / 8
                inner[site] = MOMENTUM * inner[site] + gradient
                own[site] = own[site] - RATE * inner[site]
            change = own[site][due] - held[due]
            if feedback:
                change = change + gone[site][due]
            sent = coded(change)
            gone[site][due] = change - sent
            updates.append(sent)
            if late and round > 1:
                back = places[(round - 2) % len(places)]
                own[site][back] = mixing * own[site][back] + (1 - mixing) * held[back]
            last[site] = round
        mean = torch.stack(updates).mean(0)
        velocity[due] = 0.9 * velocity[due] + mean
        exact[due] += 0.7 * (mean + 0.9 * velocity[due])
        held[due] += coded(exact[due] - held[due])
    return held


def int4(values: Tensor) -> Tensor:
    encoding, decoded = get_encoding("int4(block=64)"), torch.empty(len(values))
    encoding.decode(b"".join(encoding.encode(values.float())), decoded)
    return decoded.double()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TASK)
    return tmp_path


def run(folder: Path, job: JobConfig, **options: Any) -> Result:
    return simulate(job, folder=folder, **options)


@pytest.mark.parametrize(
    ("changes", "fragments", "mixing", "coded"),
    [
        ({}, STRIDED, 0.0, False),
        ({"algorithm": {"overlap": True, "mixing": 0.5}}, STRIDED, 0.5, False),
        (
            {
                "algorithm": {"overlap": True, "fragments": 3},
                "cohort": {"size": 2},
                "transfer": {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"},
            },
            THIRDS,
            0.0,
            True,
        ),
        ({"algorithm": {"order": "sequential", "mixing": 0.5}}, SEQUENTIAL, 0.5, False),
        (
            {
                "algorithm": {"mixing": 0.25},
                "cohort": {"size": 2, "strategy": "round_robin"},
                "transfer": {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"},
            },
            STRIDED,
            0.25,
            True,
        ),
    ],
)
def test_it_is_the_algorithm_of_the_paper(
    folder: Path, changes: dict[str, Any], fragments: list[list[int]], mixing: float, coded: bool
) -> None:
    job = job_of(**changes)
    start = initial_model(job, load_task("toy.py", folder)).vector
    found = run(folder, job)
    cohorts = [[int(name.partition("-")[2]) for name in record.cohort] for record in found.history.records]
    assert {len(cohort) for cohort in cohorts} == {job.cohort.size}
    encode = int4 if coded else lambda values: values
    overlap = bool(changes.get("algorithm", {}).get("overlap"))
    wanted = by_hand(start, [0, 1, 2], cohorts, fragments, mixing, encode, coded, overlap=overlap)
    # A value that rounding puts on the other side of a half is a whole step of 4 bits off.
    torch.testing.assert_close(found.model.vector.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found.model.vector, start, atol=1e-2)


def test_a_round_sends_its_fragment_both_ways_and_nothing_else_moves(folder: Path) -> None:
    transfer = {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"}
    found = run(folder, job_of(transfer=transfer, keep={"every": 1}), run_dir=folder / "run")
    first, second = places_of(STRIDED[0]), places_of(STRIDED[1])
    size = {n: len(b"".join(get_encoding("int4(block=64)").encode(torch.ones(n)))) for n in (14, 13)}
    for number in range(1, ROUNDS):
        moved = found.models[number + 1].vector - found.models[number].vector
        still, due = (second, first) if number % 2 == 0 else (first, second)
        assert not moved[still].any()
        assert moved[due].any()
        ways = found.history.records[number].transfers["client-0"]
        assert ways["up"] == 4 + size[len(due)]
        assert ways["down"] == 4 + size[27 - len(due)]
        assert ways["up_plain"] == 4 * 27


def test_one_fragment_is_diloco(folder: Path) -> None:
    one = run(folder, job_of(algorithm={"fragments": 1}))
    plain = job_of().model_dump(mode="json", exclude_unset=True)
    algorithm = {name: value for name, value in plain["algorithm"].items() if name != "fragments"}
    diloco = JobConfig.model_validate(
        {**plain, "algorithm": {**algorithm, "name": "fedavg"}, "transfer": {"down": "float32"}}
    )
    torch.testing.assert_close(one.model.vector, run(folder, diloco).model.vector, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["processes", "vectorised", "stacked"])
def test_every_backend_makes_the_same_model(folder: Path, backend: str) -> None:
    wanted = run(folder, job_of(algorithm={"mixing": 0.5}))
    simulation = {"clients": 3, "backend": backend, "workers": 2 if backend == "processes" else 1}
    found = run(folder, job_of(algorithm={"mixing": 0.5}, simulation=simulation))
    torch.testing.assert_close(found.model.vector, wanted.model.vector, rtol=1e-6, atol=1e-7)
    assert ("weights of its own" in found.backend) == (backend != "processes")


def test_a_resumed_run_ends_with_the_same_bits(folder: Path) -> None:
    wanted = run(folder, job_of())
    run(folder, job_of(rounds=4), run_dir=folder / "run")
    found = run(folder, job_of(), run_dir=folder / "run", resume=True)
    assert torch.equal(found.model.vector, wanted.model.vector)


async def test_silos_and_a_coordinator_do_the_same_and_a_silo_says_what_it_has_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Alder loses its state before round 5: it begins with the global model, and no other bit changes."""
    transfer = {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"}
    job = job_of(transfer=transfer, evaluation={"every": 1})
    async with federation_of(tmp_path, FORGETFUL) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, found = await asyncio.to_thread(run_job, federation, job, model)
        address, folder = federation
        here = ["--coordinator", address, "--credentials", str(folder / "operator"), "--json"]
        capsys.readouterr()
        assert await asyncio.to_thread(cli, ["job", "show", "toy", *here]) == 0
        (event,) = json.loads(capsys.readouterr().out)["incidents"]
    assert status == "finished"
    said = (
        "what round 4 left at this silo is lost: its own weights of the model, its optimizer's state, what "
    )
    assert said in caplog.text
    assert (event["kind"], event["client"], event["round"]) == ("client_troubled", "alder", 5)
    assert said in event["message"]
    incident = json.loads(event["detail"])["incident"]
    assert (incident["kind"], incident["severity"]) == ("state_lost", "warning")
    assert incident["action"] == "begins with the global model"
    wanted = by_hand(model.vector, [0, 1, 2], [[0, 1, 2]] * ROUNDS, STRIDED, 0.0, int4, True, lost=(0, 5))
    whole = by_hand(model.vector, [0, 1, 2], [[0, 1, 2]] * ROUNDS, STRIDED, 0.0, int4, True)
    assert not torch.allclose(wanted, whole, atol=1e-4)
    torch.testing.assert_close(found.vector.double(), wanted, rtol=1e-5, atol=1e-5)
    ways = [record["transfers"]["alder"] for record in history]  # type: ignore[index]
    size = {n: 4 + len(b"".join(get_encoding("int4(block=64)").encode(torch.ones(n)))) for n in (14, 13)}
    assert [way["up"] for way in ways] == [size[14], size[13]] * 3 + [size[14]]
    # The first model comes whole; a delta has the new model's head before it.
    assert len({way["down"] - size[14 - number % 2] for number, way in enumerate(ways[1:], start=1)}) <= 2


@pytest.mark.slow
async def test_silos_that_train_ahead_make_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"}
    algorithm = {"overlap": True, "mixing": 0.5}
    job = job_of(transfer=transfer, algorithm=algorithm, evaluation={"every": 1})
    caplog.set_level("INFO")
    async with federation_of(tmp_path, EVALUATED) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, _, found = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    assert "batches ahead" in caplog.text
    whole = [[0, 1, 2]] * ROUNDS
    wanted = by_hand(model.vector, [0, 1, 2], whole, STRIDED, 0.5, int4, True, overlap=True)
    torch.testing.assert_close(found.vector.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
async def test_silos_that_begin_late_and_miss_rounds_do_the_same(tmp_path: Path, overlap: bool) -> None:
    """Fragments, momentum, feedback and optimizers are those of the algorithm written down plainly, over the
    rounds that each silo took part in: birch and cedar in every second one, of all three fragments."""
    transfer = {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"}
    cohort = {"size": 2, "strategy": "round_robin"}
    job = job_of(
        transfer=transfer, cohort=cohort, algorithm={"mixing": 0.25, "fragments": 3, "overlap": overlap}
    )
    async with federation_of(tmp_path, TASK) as federation:
        model = initial_model(job, load_task("toy.py", tmp_path))
        async with agents(*(silo(federation, name) for name in NAMES)):
            status, history, found = await asyncio.to_thread(run_job, federation, job, model)
    assert status == "finished"
    cohorts = [[NAMES.index(name) for name in record["cohort"]] for record in history]  # type: ignore[attr-defined]
    assert all(len({*cohort}) == 2 and cohort != after for cohort, after in pairwise(cohorts)), cohorts
    wanted = by_hand(model.vector, [0, 1, 2], cohorts, THIRDS, 0.25, int4, True, overlap=overlap)
    torch.testing.assert_close(found.vector.double(), wanted, rtol=1e-5, atol=1e-5)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.LayerNorm(2)


def test_bytes_that_are_not_of_the_fragment_that_is_due_are_refused() -> None:
    layout = Layout.of(Layers())
    encoding = get_encoding("fragments(count=2, order=strided) | int8").over(layout)
    assert isinstance(encoding, Fragmented)
    every = zip(layout.averaged, encoding.fragments.numbers, strict=True)
    first = ["embedding.weight", "blocks.1.weight", "blocks.1.bias", "norm.weight", "norm.bias"]
    assert [spec.name for spec, number in every if number == 0] == first
    vector, out = torch.ones(layout.size), torch.empty(layout.size)
    data = b"".join(encoding.encode(vector, StreamKey(round=1)))
    assert len(data) <= encoding.size_bound(layout.size)
    assert len(data) == encoding.in_round(3).encoded_size(layout.size)
    encoding.decode(data, out)
    assert int(out.count_nonzero()) == 6 + 6 + 4
    encoding.decode(data, out, StreamKey(round=5))
    with pytest.raises(EncodingError, match="fragment 0, and in round 2 fragment 1 is due"):
        encoding.decode(data, out, StreamKey(round=2))
    with pytest.raises(EncodingError, match="fragment 7, and there are 2"):
        encoding.decode(b"\x07" + data[1:], out)
    with pytest.raises(EncodingError, match="follow the last value"):
        encoding.decode(data + b"\x00", out)
    with pytest.raises(EncodingError, match="no round was given"):
        b"".join(encoding.encode(vector))
    with pytest.raises(EncodingError, match="has 5 layers"):
        get_encoding("fragments(count=6)").over(layout).size_bound(layout.size)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[algorithm]\nname = "streaming"\nsteps = 2', "missing; algorithm 'streaming' needs it"),
        ('[algorithm]\nname = "streaming"\nfragments = 2\ndelay = 3', "as many steps as a round has"),
        (
            '[algorithm]\nname = "streaming"\nfragments = 1\noverlap = true',
            "due again before it has come",
        ),
        ('[transfer]\nup = "fragments(count=2)"', "by the algorithm that sends a model in fragments"),
    ],
)
def test_mistakes_in_the_tables_are_named(table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job(f'task = "toy"\n{table}')


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (
            {"aggregation": {"rule": "centred_clipping", "parameters": {"tau": 1.0}}},
            ConfigError,
            "of other fragments",
        ),
        (
            {"transfer": {"up": "topk(ratio=0.1)", "momentum": 0.5}, "aggregation": {}},
            ConfigError,
            "has its turn in one of many",
        ),
        ({"transfer": {"up": "auto"}}, ConfigError, "no encoding is chosen"),
        (
            {"cohort": {"size": 2, "strategy": "diversity", "balance": "directions"}},
            ConfigError,
            "say nothing of each other",
        ),
        ({"transfer": {"up": "lowrank(rank=1)"}}, ConfigError, "set warm=false"),
        ({"round": {"mode": "buffered", "buffer": 2}}, ConfigError, "buffered"),
        (
            {"privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 1.0}},
            PrivacyError,
            "secure_aggregation",
        ),
        (
            {"privacy": {"level": "client", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}},
            PrivacyError,
            "gone on at a silo for many rounds",
        ),
    ],
)
def test_what_is_not_exact_is_refused_before_round_1(
    table: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_plan(job_of(**table), 3)


def test_a_model_of_few_layers_is_refused_before_round_1(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 layers \(blocks.0, blocks.1, .*do not make 6 fragments"):
        run(folder, job_of(algorithm={"fragments": 6}))
