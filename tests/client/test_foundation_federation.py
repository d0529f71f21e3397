"""A pretrained model fine-tuned over silos: it learns, and a federation gives the bits of its simulation."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import agents, federation_of, run_job, silo
from safetensors.torch import load_file
from tiny_bases import POSITIONS, sentences, write_base

from roundtable.cli.main import run
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core import JobConfig, Site, initial_state, load_task, open_model, save_model
from roundtable.core.algorithms.contract import ClientRound
from roundtable.core.algorithms.factors.factor_pairs import factor_pairs
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.identity.credentials import issue
from roundtable.core.initial_model import initial_model
from roundtable.operator import OperatorClient
from roundtable.simulation import simulate

TASK = """
from pathlib import Path
import roundtable as rt

class Toy(rt.HuggingFaceTask):
    def __init__(self, **settings):
        base = str(Path(__file__).with_name("base"))
        super().__init__(base, length={length}, targets="all-linear", **settings)

    def texts(self, site):
        texts = Path(__file__).with_name("texts.txt").read_text().split("\\n\\n")
        own = texts[site.options.get("seed", site.index)::2]
        return own[:-6], own[-6:]
"""
TABLE: dict[str, Any] = {
    "task": "toy",
    "rounds": 2,
    "cohort": {"size": 2},
    "algorithm": {"batch_size": 2, "learning_rate": 0.02},
    "simulation": {"clients": 2, "backend": "sequential"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", "gpt2")
    (tmp_path / "texts.txt").write_text("\n\n".join(sentences(48)))
    (tmp_path / "toy.py").write_text(TASK.format(length=POSITIONS))
    return tmp_path


def simulated(folder: Path, **tables: Any) -> Any:
    job = JobConfig.model_validate({**TABLE, **tables})
    task = load_task("toy.py", folder, parameters=job.task.parameters)
    return simulate(job, task, folder=folder, run_dir=folder / "run" if tables == {} else None)


PREFERENCES = f"""
    def __init__(self):
        base = str(Path(__file__).with_name("base"))
        super().__init__(base, length={POSITIONS}, targets="all-linear", objective="dpo")

    def texts(self, site):
        pairs = [
            {{"prompt": f"bed {{number}}?", "chosen": "stable", "rejected": "no idea at all"}}
            for number in range(site.options.get("seed", site.index), 16, 2)
        ]
        return pairs[:6], pairs[6:]
"""


PREFIX = """
    def __init__(self):
        base = str(Path(__file__).with_name("base"))
        super().__init__(base, length=40, method="prefix", virtual_tokens=4)
"""


@asynccontextmanager
async def two_silos(
    folder: Path, more: str = "", apart: Path | None = None
) -> AsyncIterator[tuple[str, Path]]:
    """A coordinator with the clients of the simulation as silos; `more` follows in the task's class. `apart`
    is the folder of the second one's task."""
    async with federation_of(folder, TASK.format(length=POSITIONS) + more) as (address, _):
        configs = []
        for number in range(2):
            name = f"client-{number}"
            issue(folder / "ca", name, "agent", folder / name)
            config = silo((address, folder), "alder")
            mine = {"credentials": folder / name, "state": folder / "state" / name}
            policy = PolicyTable(bases=["."] if number else [str(folder)], generations=2 * number)
            if number and apart is not None:
                mine |= {"folder": apart}
            configs.append(replace(config, **mine, data={"seed": number}, policy=policy))
        async with agents(*configs):
            yield address, folder


def partly_fetched(place: tuple[str, Path], job: str) -> Path:
    """What an export left that was interrupted, as its file's first bytes; they are wrong here."""
    with OperatorClient(place[0], place[1] / "operator") as operator:
        digest = operator.job(job).job.model.digest[:12]
    path = place[1] / f".adapter.{digest}.{digest}.partial"
    path.write_bytes(bytes(100))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("own", ["", PREFIX], ids=["lora", "prefix"])
async def test_a_federation_gives_the_bits_of_its_simulation(
    folder: Path, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "toy.py").write_text(TASK.format(length=POSITIONS) + own)
    job = JobConfig.model_validate(TABLE)
    result = simulated(folder)
    # Before there is a coordinator, whose loop the import of transformers would hold.
    model = initial_model(job, load_task("toy.py", folder))
    async with two_silos(folder, own) as (address, _):
        status, _, final = await asyncio.to_thread(run_job, (address, folder), job, model)
        words = ["--coordinator", address, "--credentials", str(folder / "operator")]
        words = ["job", "export", job.title, *words, "--task", str(folder), "-o", str(folder / "adapter")]
        waiting = await asyncio.to_thread(partly_fetched, (address, folder), job.title)
        assert await asyncio.to_thread(run, words) == 1  # It went on with bytes of another file, and says so.
        assert not waiting.exists()
        weights = folder / "base" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # Another base than the job's.
        capsys.readouterr()
        assert await asyncio.to_thread(run, words) == 2
        assert f"kept for another try with the same -o: {waiting}" in capsys.readouterr().err
        weights.write_bytes(whole)
        assert await asyncio.to_thread(run, words) == 0
    assert not list((folder / "adapter").parent.glob(".adapter*"))
    assert status == "finished"
    assert torch.equal(final.vector, result.model.vector)
    (written,) = (folder / "state").glob("*/generations/*.jsonl")
    assert written.parent.parent.name == "client-1"
    texts = [json.loads(line) for line in written.read_text().splitlines()]
    assert [text["round"] for text in texts] == [2, 2]
    assert "ward" in texts[0]["prompt"] + texts[0]["said"]
    words = ["--task", str(folder), "-o", str(folder / "simulated")]
    assert run(["job", "export", str(folder / "run"), *words]) == 0
    one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "simulated"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    card = (folder / "adapter" / "README.md").read_text()
    assert "| rounds | 2, fedavg |" in card
    assert re.search(r"\| silos \| [0-9a-f]{16}, [0-9a-f]{16} \|", card)
    assert "signed by coordinator: provenance.json" in card
    statement = json.loads((folder / "adapter" / "provenance.json").read_text())["statement"]
    assert statement["model"] in card
    assert "silo 1, silo 2 |" in (folder / "simulated" / "README.md").read_text()
    perplexities = [record["token_perplexity"] for record in result.history]
    assert perplexities[-1] < perplexities[0] < 259  # Of chance.


@pytest.mark.slow
async def test_a_silo_with_another_tokenizer_is_named_at_once_and_the_job_goes_on_once_it_is_mended(
    folder: Path,
) -> None:
    """Before anybody has trained; the next attempt comes after `job resume`, in the silo's same process."""
    job = JobConfig.model_validate({**TABLE, "cohort": {"size": 2, "minimum": 2}})
    result = simulated(folder, cohort={"size": 2, "minimum": 2})
    task = load_task("toy.py", folder)
    model = initial_model(job, task)
    apart = folder / "apart"
    shutil.copytree(folder / "base", apart / "base")
    for name in ("toy.py", "texts.txt"):
        shutil.copy(folder / name, apart / name)
    config = apart / "base" / "tokenizer.json"
    right, wrong = config.read_text(), re.sub('("add_prefix_space": )false', r"\1true", config.read_text())
    assert wrong != right
    config.write_text(wrong)

    def until(operator: OperatorClient, job: str, status: str) -> Any:
        for _ in operator.watch(job):
            if operator.job(job).job.status == status:
                break
        return operator.job(job)

    async with two_silos(folder, apart=apart) as (address, _):
        save_model(folder / "initial.safetensors", model)
        with OperatorClient(address, folder / "operator") as operator:
            submitted = await asyncio.to_thread(operator.submit, job, folder / "initial.safetensors")
            paused = await asyncio.to_thread(until, operator, submitted.id, "paused")
            assert not paused.history
            assert re.search(
                r"round 1 does not begin before a silo has the job's model: client-1: the base 'base' here "
                r"is not .*: the digest of its tokenizer is \w{12} here and \w{12} in the job; take "
                r"tokenizer\.json, ",
                paused.job.reason,
            )
            assert "round_started" not in [event.kind for event in paused.events]
            config.write_text(right)
            await asyncio.to_thread(operator.resume, submitted.id)
            done = await asyncio.to_thread(until, operator, submitted.id, "finished")
            assert [json.loads(record)["attempt"] for record in done.history] == [2, 1]
            path = folder / "final.safetensors"
            await asyncio.to_thread(operator.get_artifact, done.job.model.digest, done.job.model.size, path)
    assert torch.equal(open_model(path).vector, result.model.vector)


@pytest.mark.slow
async def test_silos_of_different_ranks_at_a_coordinator(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bits of the simulation for each algorithm, and the error of each merge where operators look."""

    def job_of(name: str, ranks: dict[str, int]) -> JobConfig:
        algorithm = {**TABLE["algorithm"], "name": name, "ranks": ranks}
        return JobConfig.model_validate({**TABLE, "algorithm": algorithm})

    jobs = [job_of(name, {"client-0": 1, "client-1": 4}) for name in ("flora", "flexlora", "hetlora")]
    results = [simulate(job, folder=folder) for job in jobs]
    model = initial_model(jobs[0], load_task("toy.py", folder))
    async with two_silos(folder) as (address, _):
        words = ["--coordinator", address, "--credentials", str(folder / "operator")]
        for job, result in zip(jobs, results, strict=True):
            status, history, final = await asyncio.to_thread(run_job, (address, folder), job, model)
            assert status == "finished"
            assert torch.equal(final.vector, result.model.vector)
            errors = [record["training"]["merge_error"] for record in history]  # type: ignore[index]
            assert errors == [[record["train_merge_error"], 1] for record in result.history]
        capsys.readouterr()
        assert await asyncio.to_thread(run, ["job", "show", *words, jobs[-1].title]) == 0
        assert "merge error" in capsys.readouterr().out
        unknown = job_of("flora", {"client-1": 4, "clinet-0": 1})
        with pytest.raises(
            ConfigError, match=r"'clinet-0' is not a client of this job; the first are client-0, c"
        ):
            await asyncio.to_thread(run_job, (address, folder), unknown, model)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{}, {"name": "flora", "ranks": {"client-0": 1, "client-1": 4}}])
async def test_silos_learn_what_is_preferred_at_a_coordinator(
    folder: Path, algorithm: dict[str, Any]
) -> None:
    """The bits of the simulation, and what silos measure of preferences."""
    (folder / "toy.py").write_text(TASK.format(length=POSITIONS) + PREFERENCES)
    job = JobConfig.model_validate(
        {**TABLE, "algorithm": {**TABLE["algorithm"], "learning_rate": 0.01, **algorithm}}
    )
    result = simulate(job, folder=folder)
    model = initial_model(job, load_task("toy.py", folder))
    async with two_silos(folder, PREFERENCES) as (address, _):
        status, history, final = await asyncio.to_thread(run_job, (address, folder), job, model)
    assert status == "finished"
    assert torch.equal(final.vector, result.model.vector)
    sums = [record["evaluation"] for record in history]
    margins = [each["reward_margin"][0] / each["reward_margin"][1] for each in sums]  # type: ignore[index]
    assert margins == result.history["reward_margin"]
    assert 0 < margins[0] < margins[1]


@pytest.mark.parametrize("backend", ["vectorised", "stacked"])
def test_other_backends_give_the_same_model(folder: Path, backend: str) -> None:
    one, other = (
        simulated(folder, rounds=1, simulation={"clients": 2, "backend": name})
        for name in ("sequential", backend)
    )
    torch.testing.assert_close(one.model.vector, other.model.vector, rtol=1e-6, atol=1e-7)
    error = one.history[0]["train_merge_error"]
    assert 0 < error < 1
    assert other.history[0]["train_merge_error"] == pytest.approx(error, rel=1e-3)


def test_adapters_of_a_silos_own_are_trained_by_steps_of_sgd(folder: Path) -> None:
    ditto = {"algorithm": {"name": "ditto", "pull": 0.1, "learning_rate": 0.5, "batch_size": 2}, "rounds": 1}
    with pytest.raises(ConfigError, match=r"set `optimizer = rt\.Task\.optimizer` in one over it"):
        simulated(folder, **ditto)
    own = "\n    optimizer = rt.Task.optimizer\n"
    (folder / "own.py").write_text(TASK.format(length=POSITIONS) + own)
    result = simulate(JobConfig.model_validate({**TABLE, **ditto, "task": "own.py:Toy"}), folder=folder)
    start = initial_model(JobConfig.model_validate(TABLE), load_task("toy.py", folder))
    assert result.model.vector.isfinite().all()
    assert not torch.equal(result.model.vector, start.vector)


def test_example_level_privacy_trains_adapters(folder: Path) -> None:
    privacy = {"level": "example", "epsilon": 8, "delta": 1e-3, "clip_norm": 1.0, "batch_size": 4}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "rounds": 1}
    result = simulated(folder, privacy={**privacy, "local_steps": 1}, **tables)
    start = initial_model(JobConfig.model_validate(TABLE), load_task("toy.py", folder))
    assert result.model.vector.isfinite().all()
    assert not torch.equal(result.model.vector, start.vector)


@pytest.mark.parametrize("setting", [{"method": "dora"}, {"method": "ia3"}, {"objective": "dpo"}], ids=str)
def test_what_single_rows_have_no_gradient_of_is_refused(folder: Path, setting: dict[str, str]) -> None:
    privacy = {"level": "example", "epsilon": 8, "delta": 1e-3, "clip_norm": 1.0, "batch_size": 4}
    tables = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}, "rounds": 1}
    job = {**TABLE, **tables, "task": {"name": "toy", **setting}, "privacy": {**privacy, "local_steps": 1}}
    name, value = next(iter(setting.items()))
    with pytest.raises(PrivacyError, match=rf'had of Toy with {name} = "{value}".*set {name} = "'):
        simulate(JobConfig.model_validate(job), folder=folder)


def pairs_of(result: Any) -> Any:
    return factor_pairs(result.model.layout)


RANKS = {"client-0": 1, "client-1": 2, "client-2": 4}


def mixed(folder: Path, name: str, backend: str = "sequential", rank: int = 8, **own: Any) -> Any:
    tables = {"simulation": {"clients": 4, "backend": backend, "workers": 2}, "cohort": {"size": 4}}
    algorithm = {"name": name, "ranks": RANKS, "batch_size": 2, "learning_rate": 0.02, **own}
    task = {"name": "toy", "rank": rank, "alpha": 2.0 * rank}
    job = {**TABLE, **tables, "rounds": 2, "algorithm": algorithm, "task": task}
    return simulate(JobConfig.model_validate(job), folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flora", "flexlora", "hetlora"])
def test_silos_of_different_ranks_learn_one_model(folder: Path, name: str) -> None:
    result = mixed(folder, name)
    perplexities = [record["token_perplexity"] for record in result.history]
    assert perplexities[-1] < perplexities[0] < 259  # Of chance.
    assert all(0 <= record["train_merge_error"] < 1.5 for record in result.history)
    again = mixed(folder, name, "processes")
    assert torch.equal(again.model.vector, result.model.vector)
    recorded = mixed(folder, name, "vectorised")
    torch.testing.assert_close(recorded.model.vector, result.model.vector, rtol=1e-5, atol=1e-6)
    assert "while_training" in recorded.backend


def test_a_rank_that_holds_all_products_loses_nothing(folder: Path) -> None:
    """FLoRA in two rounds of 1 + 2 + 4 + 8 rows each, at a rank of 32, which is the matrices'."""
    ranks = {**RANKS, "client-3": 8}
    result = mixed(folder, "flora", rank=32, ranks=ranks)
    assert [record["train_merge_error"] for record in result.history] == pytest.approx([0, 0], abs=1e-6)
    pairs = pairs_of(result)
    one = mixed(folder, "flora", rank=32, ranks=dict.fromkeys(ranks, 1) | {"client-3": 1})
    for pair in pairs:
        for model, most in ((result.model, 2 * 15), (one.model, 2 * 4)):
            (down,), (up,) = pair.factors(model.vector[None], 0)
            values = torch.linalg.svdvals((up @ down).double())
            assert int((values > 1e-6 * values[0]).sum()) <= most


def test_flora_trains_over_the_whole_product(folder: Path) -> None:
    """With a step that is too small to matter, a round gives back the ΔW that it began with, and the loss of
    training is that of the model with it."""
    job = JobConfig.model_validate(TABLE)
    task: Any = load_task("toy.py", folder)
    start = initial_model(job, task)
    chance = torch.Generator().manual_seed(0)
    model = replace(start, vector=torch.randn(start.layout.size, generator=chance) * 0.3)
    module: Any = initial_state(task, 0)
    model.layout.load(module, model.vector)
    data = task.data(Site("client-0", options={"seed": 0}))[0]
    batch = tuple(part[:1] for part in data)
    expected = task.loss(module, batch)
    algorithm = make_algorithm(JobConfig.model_validate({**TABLE, "algorithm": {"name": "flora"}}).algorithm)
    context = Context("j", 1, "client-0")
    round = ClientRound(context, algorithm.step(), 0.1, model.vector, {}, {}, model.layout, ())
    with algorithm.while_training(round, module):
        torch.testing.assert_close(task.loss(module, batch), expected)
        assert all(not p.any() for name, p in module.named_parameters() if ".lora_B." in name)
        with module.disable_adapter():  # The base alone, which preferences are compared with.
            base = task.loss(module, batch)
    assert not torch.allclose(base, expected)
    plain = task.loss(module, batch)
    assert not torch.allclose(plain, expected)
    torch.testing.assert_close(base, plain)


def test_hetlora_prunes_what_shrinks_and_goes_on_with_the_rest(folder: Path) -> None:
    """A weight of pruning that outweighs the loss makes every tail shrink; ranks of 4 become 2, then 1."""
    ranks = dict.fromkeys([*RANKS, "client-3"], 4)
    result = mixed(folder, "hetlora", gamma=0.5, pruning_weight=1e3, ranks=ranks)
    kept = mixed(folder, "hetlora", gamma=0.5, ranks=ranks)
    for made, rank in ((result, 2), (kept, 4)):
        for pair in pairs_of(made):
            _, (up,) = pair.factors(made.model.vector[None], 0)
            assert not up[:, rank:].any()
    assert any(pair.factors(kept.model.vector[None], 0)[1][0][:, 2:].any() for pair in pairs_of(kept))


def test_a_job_that_names_no_learning_rate_for_adamw_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.learning_rate is not set: its default, 0\.01, is"):
        simulated(folder, algorithm={"batch_size": 2})


def test_a_rank_for_a_client_that_there_is_not_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'client-9' is not a client of this job; the first are client-0, "
    ):
        mixed(folder, "flora", ranks={"client-9": 2})
