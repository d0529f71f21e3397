"""Models whose passes do more than compute are trained as one process does, or refused with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from architectures import CLASSES
from cluster_plans import plan
from odd_models import (
    ByHand,
    Clamped,
    Counting,
    Furnished,
    Lamb,
    Late,
    LeftOut,
    Odd,
    Recurrent,
    Rows,
    RunningMean,
    Speaker,
    Spread,
    Stepped,
    Words,
    active,
    by_length,
    by_torch,
    drawn_by_host,
    instance_norm,
    job,
    matrices_alone,
    measured_twice,
    normed_weight,
    repeated,
    resting,
    spectral,
    trained,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.parallel.forward_trace import ModuleCall, Trace, fake_model, trace
from roundtable.cluster.parallel.settled_trace import is_whole_loss
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.arithmetic import optimizer_cost
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.group_plan import lightened
from roundtable.core.errors import ConfigError, ResourceError, TaskError
from roundtable.core.task import Site


def looked_over(task: Odd) -> ModelProbe:
    data, _ = task.data(Site("silo"))
    return probe_model(task, data, device="cpu")


def planned(task: Odd, **strategy: Any) -> Strategy:
    table = ClusterTable.model_validate({"strategy": strategy})
    return make_plan(looked_over(task), Resources(1, 2, 1 << 40, "cpu"), job(), table).strategy


def padded(model: nn.Module, batch: Any) -> Tensor:
    """The mean over words that are there: of each example another number."""
    words, lengths = batch
    labels = torch.where(torch.arange(words.shape[1]) <= lengths[:, None], words, -100)
    return F.cross_entropy(model(words).mT, labels)


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def by_class(model: nn.Module, batch: Any) -> Tensor:
    """Divided by the weights of the classes that are in the batch."""
    return F.cross_entropy(model(batch[0]), batch[1], torch.arange(1.0, CLASSES + 1, dtype=torch.float64))


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0])["logits"], batch[1])


def compared(model: nn.Module, batch: Any) -> Tensor:
    rows = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def decayed(model: nn.Module, batch: Any) -> Tensor:
    penalty = sum(each.square().sum() for each in model.parameters())
    return F.cross_entropy(model(batch[0]).mT, batch[0]) + penalty


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 4))


def normalised_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 8, max_norm=1.0), nn.Flatten(), nn.Linear(40, 4))


WHOLE = "the loss of a batch is not the mean of its examples' losses"
OWN = "takes statistics over a batch in a way of its own"
REFUSED: list[tuple[str, Odd, dict[str, Any], str]] = [
    (
        "accumulated",
        Odd(spectral),
        {"micro_batch": 2},
        r"changes 0\.param.*4 examples of a batch must run at once",
    ),
    ("own statistics", Odd(RunningMean), {"data_parallel": "ddp"}, "the model " + OWN),
    ("sharded", Odd(RunningMean), {"data_parallel": "zero3"}, "the model " + OWN),
    ("instances", Odd(instance_norm), {"data_parallel": "ddp"}, "1 " + OWN),
    ("carried", Odd(lambda: Recurrent("state")), {"data_parallel": "ddp"}, "the model " + OWN),
    ("counted", Odd(lambda: Recurrent("examples")), {"data_parallel": "ddp"}, "the model " + OWN),
    ("buffered", Odd(lambda: Recurrent("buffer")), {"data_parallel": "zero2"}, "the model " + OWN),
    ("passes", Odd(lambda: Recurrent("passes")), {"micro_batch": 2}, r"changes count.*4 examples"),
    ("padded", Words(Speaker, padded), {"data_parallel": "ddp"}, WHOLE),
    ("sum", Odd(perceptron, summed), {"data_parallel": "zero2"}, WHOLE),
    ("compared", Odd(perceptron, compared), {"data_parallel": "ddp", "micro_batch": 4}, WHOLE),
    ("decayed", Words(Speaker, decayed), {"data_parallel": "zero3"}, r"the loss reads table\.weight while"),
    ("classes", Odd(perceptron, by_class), {"data_parallel": "ddp"}, WHOLE),
    ("spread", Odd(Spread, of_logits), {"data_parallel": "zero2"}, WHOLE),
    ("backward", Odd(ByHand), {"data_parallel": "ddp", "micro_batch": 2}, WHOLE),
    ("evaluation", Odd(Counting), {"data_parallel": "ddp"}, "an evaluation changes seen and depends on it"),
    ("norms", Words(normalised_embedding), {"data_parallel": "ddp"}, r"writes to 0\.weight"),
    ("clamped copies", Odd(Clamped), {"data_parallel": "zero3"}, r"writes to head\.weight"),
    ("clamped parts", Odd(Clamped), {"micro_batch": 2}, r"changes head\.weight"),
    ("by chance", Odd(by_torch), {"data_parallel": "zero3"}, "whether layers.* is called depends on"),
    (
        "Python's",
        Odd(lambda: LeftOut(random.random)),
        {"data_parallel": "zero2"},
        "whether layers.* is called",
    ),
]


@pytest.mark.parametrize(
    ("task", "strategy", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_ranks_would_do_otherwise_is_refused(task: Odd, strategy: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(task, **strategy)


def test_what_is_exact_or_chosen_is_allowed() -> None:
    assert planned(Odd(spectral), data_parallel="zero2").micro_batch == 4
    assert planned(Odd(Clamped), data_parallel="ddp").micro_batch == 4
    assert planned(Odd(RunningMean), data_parallel="ddp", micro_batch=2, batch_norm="local").micro_batch == 2
    # A table that one pass makes and the others read is no change.
    assert planned(Odd(Late), data_parallel="zero3", micro_batch=2).micro_batch == 2
    assert planned(Odd(by_torch), data_parallel="ddp").unused


def test_ranks_have_one_process_s_weights_and_each_other_s() -> None:
    whole = plan("zero2", 4, fsdp=2)
    chance = plan("ddp", 2, dp=2)
    ddp, shards = plan("ddp", 4, dp=2), plan("zero3", 2, fsdp=2)
    exact = [
        (spectral, whole),
        (Clamped, ddp),
        (active, ddp),
        (Furnished, ddp),
        (partial(Recurrent, "passes"), ddp),
        (resting, shards),
        (repeated, replace(shards, checkpointing="sqrt")),
        (normed_weight, replace(shards, checkpointing="selective")),
        (Stepped(repeated, matrices_alone), plan("zero1", 4, dp=2)),
        (Stepped(repeated, by_length), shards),
        (Stepped(repeated, by_length), plan("zero1", 4, dp=2)),
    ]
    kinds = ("none", "every", "sqrt", "selective")
    drawn = [(drawn_by_host, replace(ddp, checkpointing=kind)) for kind in kinds]
    first, second = run_ranks(trained, 2, [*exact, (by_torch, replace(chance, unused=True)), *drawn])
    assert [gap < 1e-12 for _, gap in first[: len(exact)]] == [True] * len(exact)
    # Each rank leaves out other layers: only their mean can be compared.
    weights, others = first[len(exact)][0], second[len(exact)][0]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    # What Python and NumPy draw is the same in a block that is computed again.
    kept, *again = (weights for weights, _ in first[len(exact) + 1 :])
    assert [all(torch.equal(each[name], kept[name]) for name in kept) for each in again] == [True] * 3


def test_what_a_model_counts_in_an_evaluation_is_gone_after_it() -> None:
    [(losses, left)] = run_ranks(measured_twice, 1)
    assert losses[0] == losses[1]
    assert left == 0


def test_a_loss_of_the_whole_batch_is_a_micro_batch_s_where_that_is_chosen() -> None:
    task = Words(Speaker, padded)
    assert planned(task, data_parallel="ddp", batch_norm="local").mesh.dp == 2
    assert planned(task, tp=2).micro_batch == 8, "all examples run at once"
    assert planned(Words(Speaker, decayed), data_parallel="ddp").mesh.dp == 2
    # Of a model that computes its own loss the labels tell.
    labelled = (torch.ones(4, 5, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64))
    odd = labelled[1].clone()
    odd[0, 1:] = -100
    inside = Words(Speaker, lambda model, batch: model(*batch))
    traced = trace(inside, *fake_model(inside), labelled)
    assert is_whole_loss(inside, traced, [(labelled[0], odd)])
    odd[:, 1:] = -100
    assert not is_whole_loss(inside, traced, [(labelled[0], odd)])


def test_a_loss_over_a_long_sequence_is_tried_at_places_that_tell() -> None:
    """Of 50 million made-up logits some thousands are made; two examples differ in their last label alone."""
    seen: list[int] = []

    def following(model: nn.Module, batch: Any) -> Tensor:
        words, mask = batch
        logits = model(words[:, :-1])
        seen.append(logits.numel())
        losses = F.cross_entropy(logits.mT, words[:, 1:], reduction="none")
        return (losses * mask).sum() / mask.sum()

    words, mask = torch.ones(3, 4097, dtype=torch.int64), torch.ones(3, 4096)
    traced = Trace(3, calls=[ModuleCall("", (), (3, 4096, 4096))])
    task = Words(Speaker, following)
    assert not is_whole_loss(task, traced, [(words, mask)])
    mask[0, 4000] = 0
    assert is_whole_loss(task, traced, [(words, mask)])
    assert max(seen) < 1 << 20


def test_blocks_left_out_by_chance_are_not_checkpointed_in_runs() -> None:
    def made() -> nn.Module:
        model = LeftOut(random.random)
        model.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12)) for _ in range(4))
        return model

    with pytest.raises(ConfigError, match=r"'sqrt': whether layers.* is called depends on chance"):
        planned(Odd(made), data_parallel="ddp", checkpointing="sqrt")


def test_a_table_that_other_code_reads_is_not_split() -> None:
    styles = looked_over(Words(Speaker, padded)).tensor_parallel.styles
    assert set(styles.values()) == {"column", "row"}


def attention() -> nn.Module:
    layer = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, dropout=0.0)
    return nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.Linear(4, 8), layer(), layer(), nn.Flatten(), nn.Linear(24, 4)
    )


def in_two(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])


STEPS: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
    (in_two, {"data_parallel": "zero1"}, "one group of parameters, and the task's has 2"),
    (
        partial(Lamb, lr=0.1, hidden=2.0),
        {"data_parallel": "zero1"},
        r"not all that it was made with \(hidden\)",
    ),
    (by_length, {"tp": 2}, "holds several parts, each of which would be a parameter"),
    (torch.optim.Adafactor, {"data_parallel": "zero3"}, "Adafactor takes no step on sharded weights"),
]


@pytest.mark.parametrize(("optimizer", "strategy", "said"), STEPS)
def test_an_optimizer_that_would_step_otherwise_is_refused(
    optimizer: Callable[[Any], Any], strategy: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(Stepped(attention, optimizer), **strategy)


def test_an_optimizer_that_cannot_be_tried_is_a_sentence() -> None:
    with pytest.raises(TaskError, match=r"LBFGS takes no step by the gradients that are there.*closure"):
        optimizer_cost(Stepped(perceptron, torch.optim.LBFGS))
    with pytest.raises(TaskError, match=r"Stepped.optimizer\(\) does not take parameters: TypeError"):
        optimizer_cost(Stepped(perceptron, lambda parameters: torch.optim.SGD(parameters, rate=1.0)))
    assert optimizer_cost(Stepped(perceptron, torch.optim.Muon)).factor == 1.0
    assert optimizer_cost(Stepped(perceptron, matrices_alone)).factor == 2.0


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._chance = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(12, generator=self._chance, dtype=x.dtype)


class MadeAnew(nn.Linear):
    """Draws the same numbers in each pass: they are a constant."""

    def forward(self, x: Tensor) -> Tensor:
        chance = torch.Generator().manual_seed(1)
        return super().forward(x * torch.rand(12, generator=chance, dtype=x.dtype))


def test_whose_random_numbers_nobody_can_draw_again_are_refused() -> None:
    with pytest.raises(TaskError, match="between draws random numbers from a generator of its own"):
        looked_over(Odd(lambda: Rows(OwnGenerator())))
    assert planned(Odd(lambda: MadeAnew(12, 4)), data_parallel="ddp").mesh.dp == 2


def orthogonal(size: int, **options: Any) -> Callable[[], nn.Module]:
    made = nn.utils.parametrizations.orthogonal
    return lambda: nn.Sequential(made(nn.Linear(12, size), **options), nn.Linear(size, 4))


def test_what_has_no_shape_or_needs_values_to_be_made_is_told_with_its_remedy() -> None:
    with pytest.raises(TaskError, match=r"makes 0\.parametrizations\.weight\.0\.base not where weights"):
        looked_over(Odd(orthogonal(4)))
    with pytest.raises(TaskError, match=r"model\(\) computes with values of weights.*householder"):
        looked_over(Odd(orthogonal(12)))
    told = {"orthogonal_map": "householder", "use_trivialization": False}
    assert planned(Odd(orthogonal(12, **told)), data_parallel="zero3").mesh.fsdp == 2
    with pytest.raises(TaskError, match=r"makes a LazyLinear, whose shape follows.*its input size"):
        looked_over(Odd(lambda: nn.LazyLinear(4)))
    with pytest.raises(TaskError, match="makes a LazyBatchNorm1d, whose"):
        looked_over(Odd(lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(12, 4))))


def test_layers_whose_weights_are_computed_are_planned_and_stay_whole() -> None:
    probe = looked_over(Odd(normed_weight))
    assert "0.0" not in probe.tensor_parallel.styles
    assert probe.tensor_parallel.styles["1.0"] == "column"


def test_what_must_run_at_once_is_not_halved_when_memory_ran_out() -> None:
    probe = looked_over(Odd(spectral))
    resources, links = Resources(1, 1, 1 << 40, "cpu"), Links("", 1, 0.0, {}, {})
    table = ClusterTable.model_validate({"strategy": {"data_parallel": "none"}})
    with pytest.raises(ResourceError, match="ran out of memory with one device, micro-batch 8"):
        lightened(probe, resources, job(), table, links, 1)


class InTwoBytes(Odd):
    """Whose weights, and outputs, have eight bits each."""

    def model(self) -> nn.Module:
        layers = nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
        return nn.Sequential(*layers).bfloat16()


def test_what_a_model_rounds_is_not_taken_for_a_loss_over_the_batch() -> None:
    def rounded(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].bfloat16()), batch[1])

    assert not looked_over(InTwoBytes(nn.Linear, rounded)).whole_loss


def hooked() -> nn.Module:
    model = nn.Linear(12, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


class Stale(nn.Linear):
    def __init__(self, view: Callable[[Any], Any]) -> None:
        super().__init__(12, 4, dtype=torch.float64)
        self.others = {"first": [view(self.weight)]}


NOT_MODELS: list[tuple[Callable[[], Odd], str]] = [
    (lambda: Odd(hooked), r"weight has a hook on its gradient"),
    (lambda: Odd(lambda: Stale(lambda weight: weight)), "others holds weight beside"),
    (lambda: Odd(lambda: Stale(lambda weight: weight.data[:2])), "others holds weight beside"),
    (lambda: Odd(lambda: Stale(lambda weight: nn.Parameter(weight * 2))), "others holds a parameter beside"),
    (lambda: Words(lambda: nn.Embedding(64, 4, sparse=True)), "sparse gradients"),
    (lambda: Odd(lambda: nn.Linear(12, 4).requires_grad_(False)), "no parameters to train"),
    (lambda: Odd(dict), r"model\(\) returned a dict"),
    (lambda: Odd(perceptron, lambda model, batch: None), "must return a scalar tensor, not NoneType"),
    (
        lambda: Odd(perceptron, lambda model, batch: model(batch[0])[:, 0]),
        r"must return a scalar tensor, not \[3\]",
    ),
]


@pytest.mark.parametrize(("make", "said"), NOT_MODELS)
def test_what_no_cluster_trains_is_a_sentence(make: Callable[[], Odd], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        looked_over(make())


def test_what_has_no_dimension_is_not_sharded_and_two_calls_go_through_no_pipeline() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 4)
            self.scale = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(ConfigError, match="scale has no dimension to share out"):
        planned(Odd(Scaled), data_parallel="zero3")
    twice = Odd(
        lambda: nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 4)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) + model(-batch[0]).square().mean(),
    )
    assert "calls the model 2 times" in looked_over(twice).cannot_pipeline
