"""The way of a round's updates through validation, weighting and rules, on good input and bad."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.aggregation import (
    RULES,
    AggregationConfig,
    ClientRow,
    Diagnosis,
    RuleContext,
    StreamingMean,
    TensorMatrix,
    aggregate,
    check_update,
)
from roundtable.aggregation.rows.matrix import BLOCK_BYTES, Block
from roundtable.aggregation.validation import ValidationPolicy
from roundtable.core.errors import AggregationError, ConfigError, InvalidUpdate, RoundtableError

NEEDS = {
    "centred_clipping": {"tau": 10.0},
    "monna": {"pivot": "a"},
}


def config(rule: str, f: int = 0, **options: Any) -> AggregationConfig:
    parameters = {**({"f": f} if RULES[rule].takes("f") else {}), **NEEDS.get(rule, {})}
    return AggregationConfig(rule, parameters, **options)


def rows(*names: str, **options: Any) -> list[ClientRow]:
    return [ClientRow(name, **options) for name in names]


def vectors(count: int, columns: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_no_updates_are_an_error(rule: str) -> None:
    with pytest.raises(AggregationError, match="no silo of the cohort has answered"):
        aggregate(TensorMatrix(torch.empty(0, 4)), [], config(rule))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_one_update_is_the_result_or_an_error(rule: str) -> None:
    values = vectors(1)
    context = RuleContext(root_update=values[0] * 2)
    if rule in ("krum", "multi_krum", "bulyan"):
        with pytest.raises(AggregationError, match="n = 1"):
            aggregate(TensorMatrix(values), rows("a"), config(rule), context=context)
        return
    result = aggregate(TensorMatrix(values), rows("a"), config(rule), context=context).vector
    expected = values[0] * (2 if rule == "fltrust" else 1)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_identical_updates_give_that_update(rule: str) -> None:
    values = vectors(1).repeat(9, 1)
    clients = rows(*"abcdefghi")
    context = RuleContext(root_update=values[0])
    if rule == "foolsgold":
        with pytest.raises(AggregationError, match="copies"):
            aggregate(TensorMatrix(values), clients, config(rule))
        return
    result = aggregate(TensorMatrix(values), clients, config(rule, 1), context=context).vector
    torch.testing.assert_close(result, values[0])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_zeros_and_denormals_do_no_harm(rule: str) -> None:
    clients, denormal = rows(*"abcdefghi"), torch.tensor(1e-42)
    values = vectors(9).sign() * denormal
    context = RuleContext(root_update=torch.ones(40))
    if rule != "fltrust":
        result = aggregate(TensorMatrix(values), clients, config(rule, 1), context=context).vector
        assert float(result.abs().max()) <= float(denormal)
        zero = aggregate(TensorMatrix(values * 0), clients, config(rule, 1), context=context).vector
        assert not zero.any()
    else:
        with pytest.raises(AggregationError):
            aggregate(TensorMatrix(values * 0), clients, config(rule), context=context)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_called_directly_refuses_what_is_not_finite(rule: str, bad: float) -> None:
    """Nobody is to get an answer out of NaN, not even past the pipeline."""
    values = vectors(9)
    values[4, 7] = bad
    given: dict[str, Any] = {**config(rule, 1).parameters}
    given |= {"pivot": 0} if rule == "monna" else {}
    given |= {"seed": 1} if rule == "dnc" else {}
    given |= {"root_update": torch.ones(40)} if rule == "fltrust" else {}
    if rule == "mean":
        result = RULES[rule].function(TensorMatrix(values), np.ones(9), **given)
        assert not torch.isfinite(result.vector[7])
        return
    with pytest.raises(AggregationError, match="not finite"):
        RULES[rule].function(TensorMatrix(values), np.ones(9), **given).vector  # noqa: B018


@pytest.mark.parametrize(("dropped", "f"), [(1, 1), (2, 2), (1, 2)])
def test_broken_updates_are_dropped_and_lower_f(dropped: int, f: int) -> None:
    values = vectors(9)
    values[:dropped, 3] = math.nan
    clients = rows(*"abcdefghi")
    found = aggregate(TensorMatrix(values), clients, config("trimmed_mean", f))
    expected = aggregate(
        TensorMatrix(values[dropped:]), clients[dropped:], config("trimmed_mean", f - dropped)
    )
    assert torch.equal(found.vector, expected.vector)
    assert [exclusion.client for exclusion in found.excluded] == list("ab"[:dropped])
    assert {exclusion.reason for exclusion in found.excluded} == {"non_finite"}


def test_more_broken_updates_than_f_are_an_error() -> None:
    values = vectors(9)
    values[:2] = math.inf
    clients = rows(*"abcdefghi")
    with pytest.raises(
        AggregationError, match=r"2 updates were broken, more than the f = 1 .*\(non_finite\)"
    ):
        aggregate(TensorMatrix(values), clients, config("trimmed_mean", 1))
    steps = (("nnm", {"f": 1}),)
    with pytest.raises(AggregationError, match="f = 1 that nnm"):
        aggregate(TensorMatrix(values), clients, AggregationConfig("median", pre=steps))
    assert len(aggregate(TensorMatrix(values), clients, config("median")).excluded) == 2
    values[:] = math.nan
    with pytest.raises(AggregationError, match=r"no usable update is left.*a: the update holds values"):
        aggregate(TensorMatrix(values), clients, config("median"))


@pytest.mark.parametrize(
    ("rule", "n", "f", "condition"),
    [
        ("trimmed_mean", 8, 4, "n > 2f"),
        ("mean_around_median", 8, 4, "n > 2f"),
        ("krum", 8, 3, r"n > 2f \+ 2"),
        ("multi_krum", 8, 3, r"n > 2f \+ 2"),
        ("bulyan", 10, 2, r"n ≥ 4f \+ 3"),
        ("minimum_diameter_averaging", 8, 4, "n > 2f"),
        ("caf", 8, 4, "n > 2f"),
        ("smea", 8, 4, "n > 2f"),
        ("monna", 8, 4, "n > 2f"),
        ("dnc", 8, 4, "n > 2f"),
        ("group_robust", 8, 4, "more than 2f groups"),
    ],
)
def test_too_many_byzantine_silos_are_refused_with_the_condition(
    rule: str, n: int, f: int, condition: str
) -> None:
    clients = rows(*"abcdefghij"[:n])
    with pytest.raises(AggregationError, match=condition):
        aggregate(TensorMatrix(vectors(n)), clients, config(rule, f))
    with pytest.raises(AggregationError, match="cannot be -1"):
        config(rule, -1)
    for step in ("arc", "nnm"):
        with pytest.raises(AggregationError, match=f"{step} needs n > 2f"):
            aggregate(TensorMatrix(vectors(n)), clients, AggregationConfig("median", pre=((step, {"f": 5}),)))


@pytest.mark.parametrize("count", [0, -1, 2**53 + 1, 2**80, 1.5, True, "7", math.nan])
def test_example_counts_that_cannot_be_are_refused(count: Any) -> None:
    clients = [*rows(*"abcd"), ClientRow("e", examples=count)]
    found = aggregate(TensorMatrix(vectors(5)), clients, config("mean"))
    assert [exclusion.reason for exclusion in found.excluded] == ["examples"]
    assert set(found.weights) == set("abcd")
    with pytest.raises(InvalidUpdate, match="example count") as caught:
        aggregate(TensorMatrix(vectors(5)), clients, config("mean", validation="fail"))
    assert caught.value.reason == "examples"


def test_the_largest_counts_are_weighed_exactly() -> None:
    clients = [ClientRow("a", 2**53), ClientRow("b", 2**53), ClientRow("c", 2**52)]
    found = aggregate(TensorMatrix(vectors(3)), clients, config("mean"))
    assert found.weights == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.2}, rel=1e-15)


def test_robust_rules_ignore_what_clients_claim() -> None:
    honest = aggregate(TensorMatrix(vectors(9)), rows(*"abcdefghi"), config("multi_krum", 1))
    clients = [ClientRow(name, examples=10**9 if name == "a" else 1) for name in "abcdefghi"]
    assert torch.equal(
        aggregate(TensorMatrix(vectors(9)), clients, config("multi_krum", 1)).vector, honest.vector
    )


def test_weightings() -> None:
    values = vectors(3)
    clients = [ClientRow("a", 1, loss=1.0), ClientRow("b", 2, loss=0.5), ClientRow("c", 5, loss=0.25)]

    def weights(**options: Any) -> dict[str, float]:
        return dict(aggregate(TensorMatrix(values), clients, config("mean", **options)).weights)

    assert weights() == pytest.approx({"a": 1 / 8, "b": 2 / 8, "c": 5 / 8})
    assert weights(weighting="uniform") == pytest.approx(dict.fromkeys("abc", 1 / 3))
    custom = {"a": 0.0, "b": 3.0, "c": 1.0}
    assert weights(weighting="custom", weights=custom) == pytest.approx({"a": 0, "b": 0.75, "c": 0.25})
    with pytest.raises(AggregationError, match="not all zero"):
        weights(weighting="custom", weights=dict.fromkeys("abc", 0.0))
    with pytest.raises(AggregationError, match="not negative"):
        weights(weighting="custom", weights={"a": -1.0, "b": 3.0, "c": 1.0})
    with pytest.raises(AggregationError, match="no custom weight for c"):
        weights(weighting="custom", weights={"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_inverse_loss_weights_are_bounded_and_do_not_depend_on_the_scale_of_losses(scale: float) -> None:
    clients = [ClientRow(name, loss=loss * scale) for name, loss in zip("abc", (0.0, 1.0, 3.0), strict=True)]
    found = aggregate(TensorMatrix(vectors(3)), clients, config("mean", weighting="inverse_loss"))
    wanted = {"a": 1 / 0.1, "b": 1 / 1.1, "c": 1 / 3.1}
    assert found.weights == pytest.approx({name: wanted[name] / sum(wanted.values()) for name in wanted})
    assert not found.excluded


@pytest.mark.parametrize("loss", [None, -1.0, math.nan, math.inf])
def test_a_silo_without_a_usable_loss_is_left_out_where_losses_weigh(loss: float | None) -> None:
    values = vectors(3)
    clients = [ClientRow("a", loss=1.0), ClientRow("b", loss=loss), ClientRow("c", loss=1.0)]
    found = aggregate(TensorMatrix(values), clients, config("mean", weighting="inverse_loss"))
    assert dict(found.weights) == pytest.approx({"a": 0.5, "c": 0.5})
    assert [(e.client, e.reason) for e in found.excluded] == [("b", "loss")]
    assert "needs a finite loss of at least 0; b sent" in found.excluded[0].message
    with pytest.raises(InvalidUpdate, match="update of b"):
        aggregate(TensorMatrix(values), clients, config("mean", weighting="inverse_loss", validation="fail"))
    robust = aggregate(TensorMatrix(values), clients, config("median", weighting="inverse_loss"))
    assert not robust.excluded


def test_losses_that_are_all_zero_weigh_alike() -> None:
    clients = rows(*"abc", loss=0.0)
    found = aggregate(TensorMatrix(vectors(3)), clients, config("mean", weighting="inverse_loss"))
    assert dict(found.weights) == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_norm_policies() -> None:
    values = torch.eye(3) * torch.tensor([1.0, 2.0, 10.0])[:, None]
    clients = rows("a", "b", "c")
    excluded = aggregate(TensorMatrix(values), clients, config("mean", max_norm=5.0))
    assert excluded.vector.tolist() == [0.5, 1.0, 0.0]
    assert [(e.client, e.reason) for e in excluded.excluded] == [("c", "norm")]
    assert "norm 10 exceeds the bound 5" in excluded.excluded[0].message
    clipped = aggregate(TensorMatrix(values), clients, config("mean", max_norm=5.0, validation="clip"))
    torch.testing.assert_close(clipped.vector, torch.tensor([1.0, 2.0, 5.0]) / 3)
    assert not clipped.excluded
    assert [exclusion.client for exclusion in clipped.diagnosis.clipped] == ["c"]
    with pytest.raises(InvalidUpdate, match="update of c: norm 10") as caught:
        aggregate(TensorMatrix(values), clients, config("mean", max_norm=5.0, validation="fail"))
    assert caught.value.reason == "norm"


def test_an_honest_update_of_large_norm_does_not_lower_f() -> None:
    values = vectors(9)
    values[0] *= 100
    values[1] = 1.0
    found = aggregate(TensorMatrix(values), rows(*"abcdefghi"), config("trimmed_mean", 2, max_norm=50.0))
    expected = aggregate(TensorMatrix(values[1:]), rows(*"bcdefghi"), config("trimmed_mean", 2))
    assert torch.equal(found.vector, expected.vector)


class Passes(TensorMatrix):
    """Counts the passes over its rows."""

    passes = 0

    def blocks(self, budget_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        self.passes += 1
        return super().blocks(budget_bytes)


@pytest.mark.parametrize("validation", ["exclude", "clip"])
@pytest.mark.parametrize("factor", [1.0, 2.999, 3.0, 3.001, 40.0])
def test_norms_measured_on_arrival_save_a_pass_unless_one_is_near_the_bound(
    factor: float, validation: ValidationPolicy
) -> None:
    values = vectors(3)
    values /= values.norm(dim=1, keepdim=True)
    values[2] *= factor
    norms = [check_update(row, 40) for row in values]
    assert norms == pytest.approx(values.double().norm(dim=1).tolist(), rel=1e-12)
    settings = config("mean", norm_ratio=3.0, validation=validation)
    without = aggregate(passed := Passes(values), rows(*"abc"), settings)
    for off in (1 - 1e-3, 1.0, 1 + 1e-3):
        clients = [ClientRow(name, norm=norm * off) for name, norm in zip("abc", norms, strict=True)]
        found = aggregate(counted := Passes(values), clients, settings)
        assert counted.passes == passed.passes - (factor == 1.0)
        assert torch.equal(found.vector, without.vector)
        assert found.excluded == without.excluded
        assert found.diagnosis.to_dict() == without.diagnosis.to_dict()


def test_where_a_norm_is_missing_all_are_measured() -> None:
    values = vectors(3)
    clients = [ClientRow("a", norm=1.0), ClientRow("b"), ClientRow("c", norm=1.0)]
    values[0] = 100.0
    found = aggregate(TensorMatrix(values), clients, config("mean", norm_ratio=10.0))
    assert [exclusion.client for exclusion in found.excluded] == ["a"]


def test_check_update_refuses_layout_and_non_finite_values() -> None:
    for vector, reason in (
        (torch.zeros(3), "layout"),
        (torch.zeros(2, 2), "layout"),
        (torch.tensor([1.0, math.nan, 0, 0]), "non_finite"),
        (torch.tensor([1.0, math.inf, 0, 0]), "non_finite"),
    ):
        with pytest.raises(InvalidUpdate) as caught:
            check_update(vector, 4)
        assert caught.value.reason == reason
    assert check_update(torch.full((4,), 3e38), 4) == pytest.approx(6e38, rel=1e-6)


def test_two_updates_under_one_name_are_both_left_out() -> None:
    found = aggregate(TensorMatrix(vectors(4)), rows("a", "b", "b", "c"), config("mean"))
    assert set(found.weights) == {"a", "c"}
    assert [(e.client, e.reason) for e in found.excluded] == [("b", "duplicate")] * 2


def test_a_result_too_large_to_hold_is_rejected() -> None:
    values = torch.full((5, 3), 3e38)
    assert torch.isfinite(aggregate(TensorMatrix(values), rows(*"abcde"), config("mean")).vector).all()
    context = RuleContext(previous=torch.full((3,), -3e38))
    values = torch.full((5, 3), 3.4e38)
    options = {"tau": 1e39, "iterations": 1}
    found = aggregate(
        TensorMatrix(values), rows(*"abcde"), AggregationConfig("centred_clipping", options), context=context
    )
    assert torch.isfinite(found.vector).all()
    with pytest.raises(AggregationError, match="is not finite although every update is"):
        aggregate(
            TensorMatrix(values),
            rows(*"abcde"),
            AggregationConfig("fltrust"),
            context=RuleContext(
                root_update=torch.tensor([3.4e38, 3.4e38, 3.4e38], dtype=torch.float64) * 1.01
            ),
        )


def test_rows_and_clients_must_be_one_to_one() -> None:
    with pytest.raises(AggregationError, match="4 rows of updates and 3 clients"):
        aggregate(TensorMatrix(vectors(4)), rows(*"abc"), config("mean"))


def test_the_result_can_be_written_in_place() -> None:
    out = torch.full((40,), math.nan)
    found = aggregate(TensorMatrix(vectors(4)), rows(*"abcd"), config("median"), out=out)
    assert found.vector is out
    assert torch.equal(out, aggregate(TensorMatrix(vectors(4)), rows(*"abcd"), config("median")).vector)


def test_updates_are_never_written_to() -> None:
    for rule in sorted(RULES):
        for step in ((), (("clip", {"norm": 0.1}),), (("arc", {"f": 1}), ("nnm", {"f": 1}))):
            values = vectors(9)
            before = values.clone()
            context = RuleContext(root_update=values.mean(dim=0), previous=values[2])
            aggregate(TensorMatrix(values), rows(*"abcdefghi"), config(rule, 1, pre=step), 3, context=context)
            assert torch.equal(values, before), rule


def test_a_trusted_silo_is_found_by_name_and_missed_when_absent() -> None:
    values = vectors(6)
    settings = AggregationConfig("monna", {"f": 2, "pivot": "d"})
    found = aggregate(TensorMatrix(values), rows(*"fedcba"), settings)
    distances = (values - values[2]).norm(dim=1)
    nearest = distances.argsort()[:4]
    torch.testing.assert_close(found.vector, values[nearest].mean(dim=0))
    with pytest.raises(AggregationError, match="'d' sent no usable update"):
        aggregate(TensorMatrix(values[:3]), rows(*"abc"), settings)


def test_bucketing_depends_on_the_seed_alone() -> None:
    settings = AggregationConfig("median", pre=(("bucketing", {"size": 2}),))
    first, again, other = (
        aggregate(TensorMatrix(vectors(9)), rows(*"abcdefghi"), settings, seed).vector for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_rule_over_the_means_of_groups() -> None:
    groups = vectors(7)
    groups[2] = 1e6
    names = [f"group-{index}" for index in range(7)]
    for inner in ("median", "trimmed_mean", "geometric_median"):
        settings = AggregationConfig("group_robust", {"f": 1, "rule": inner})
        plain = aggregate(TensorMatrix(groups), rows(*names), config(inner, 1)).vector
        assert torch.equal(aggregate(TensorMatrix(groups), rows(*names), settings).vector, plain)
    with pytest.raises(ConfigError, match="robust rule over the groups, not 'mean'"):
        aggregate(
            TensorMatrix(groups), rows(*names), AggregationConfig("group_robust", {"f": 1, "rule": "mean"})
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "meen"}, "unknown aggregation rule 'meen'.* did you mean 'mean'"),
        ({"rule": "trimmed_mean"}, "needs the parameter 'f'"),
        ({"rule": "trimmed_mean", "parameters": {"f": 1.5}}, "f must be of type int"),
        ({"rule": "trimmed_mean", "parameters": {"f": True}}, "f must be of type int"),
        ({"rule": "median", "parameters": {"f": 1}}, "no parameter 'f'; it takes: none"),
        ({"rule": "dnc", "parameters": {"f": 1, "seed": 3}}, "no parameter 'seed'"),
        ({"rule": "centred_clipping", "parameters": {"tau": "1"}}, "tau must be of type float"),
        ({"pre": (("nmm", {}),)}, "unknown pre-aggregation 'nmm'"),
        ({"pre": (("nnm", {}),)}, "'nnm' needs f"),
        ({"pre": (("clip", {"f": 1}),)}, "no parameter 'f'"),
        ({"pre": (("bucketing", {}),)}, "needs the parameter 'size'"),
        ({"weighting": "size"}, "weighting must be one of"),
        ({"weighting": "custom"}, "custom needs them"),
        ({"weights": {"a": 1.0}}, "weights go with"),
        ({"validation": "warn"}, "validation must be one of"),
        ({"max_norm": 0.0}, "max_norm must be a positive number"),
        ({"max_norm": math.inf}, "max_norm must be a positive number"),
    ],
)
def test_configurations_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AggregationConfig(**options)


@pytest.mark.parametrize(
    ("rule", "parameters", "message"),
    [
        ("geometric_median", {"smoothing": 0.0}, "smoothing must be a positive"),
        ("geometric_median", {"start": "median"}, "start must be"),
        ("geometric_median", {"max_iterations": 0}, "max_iterations"),
        ("centred_clipping", {"tau": -1.0}, "tau must be a positive"),
        ("centred_clipping", {"tau": 1.0, "iterations": 0}, "iterations must be at least 1"),
        ("multi_krum", {"f": 1, "m": 10}, "m must be from 1 to n = 9"),
        ("dnc", {"f": 2, "filtering": 5.0}, r"filtering · f < n"),
        ("dnc", {"f": 2, "iterations": 0}, "at least 1"),
        ("monna", {"f": 1, "pivot": 9}, "pivot must name a silo"),
        ("fltrust", {}, "root data set"),
    ],
)
def test_parameters_out_of_range_are_refused(rule: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RoundtableError, match=message):
        aggregate(TensorMatrix(vectors(9)), rows(*"abcdefghi"), AggregationConfig(rule, parameters))


def test_fltrust_without_anybody_to_trust() -> None:
    values = vectors(5).abs()
    context = RuleContext(root_update=-torch.ones(40))
    with pytest.raises(AggregationError, match="trust nobody"):
        aggregate(TensorMatrix(values), rows(*"abcde"), AggregationConfig("fltrust"), context=context)
    with pytest.raises(AggregationError, match="cannot be compared"):
        aggregate(
            TensorMatrix(values),
            rows(*"abcde"),
            AggregationConfig("fltrust"),
            context=RuleContext(root_update=torch.ones(3)),
        )


def test_streaming_mean_is_the_mean() -> None:
    values = vectors(20, 1000)
    weights = [float(10 + index) for index in range(20)]
    mean = StreamingMean(1000)
    for row, weight in zip(values, weights, strict=True):
        mean.add(row, weight)
    mean.add(torch.full((1000,), 5.0), 0.0)
    assert mean.count == 21
    assert mean.total_weight == sum(weights)
    expected = (values.double() * torch.tensor(weights)[:, None]).sum(dim=0) / sum(weights)
    torch.testing.assert_close(mean.result(), expected.float(), rtol=1e-5, atol=1e-6)


def test_streaming_mean_with_a_fixed_denominator_and_huge_counts() -> None:
    mean = StreamingMean(2)
    mean.add(torch.tensor([1e25, 1.0]), 2.0**53)
    mean.add(torch.tensor([3e25, 3.0]), 2.0**53)
    assert mean.result(denominator=2.0**55).tolist() == pytest.approx([1e25, 1.0])


def test_streaming_mean_refuses_what_it_cannot_add() -> None:
    mean = StreamingMean(3)
    with pytest.raises(InvalidUpdate, match="4 values does not fit a mean of 3"):
        mean.add(torch.zeros(4))
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(AggregationError, match="weight of an update"):
            mean.add(torch.zeros(3), weight)
    mean.add(torch.ones(3), 0.0)
    with pytest.raises(AggregationError, match="no update of positive weight among the 1"):
        mean.result()
    mean.add(torch.tensor([1.0, math.nan, 0.0]))
    with pytest.raises(AggregationError, match="the mean is not finite"):
        mean.result()


def test_diagnosis_says_who_was_rejected_and_by_how_much(tmp_path: Path) -> None:
    values = vectors(8) * 0.1 + 1
    values[0] = -5.0
    values[3, 3] = math.nan
    clients = rows(*"abcdefgh")
    settings = AggregationConfig("multi_krum", {"f": 2}, max_norm=1000.0)
    diagnosis = aggregate(TensorMatrix(values), clients, settings).diagnosis
    verdicts = dict(diagnosis.verdicts())
    assert verdicts["a"] == "rejected by multi_krum"
    assert verdicts["d"].startswith("left out: the update holds values")
    assert verdicts["b"] == "used"
    assert diagnosis.influence is not None
    assert diagnosis.contribution is not None
    assert diagnosis.influence.sum() == pytest.approx(1)
    assert diagnosis.contribution.sum() == pytest.approx(1)
    assert diagnosis.cosine is not None
    assert diagnosis.cosine[0, 1] < -0.9
    plain = json.loads(json.dumps(diagnosis.to_dict()))
    assert plain["clients"] == list("abcefgh")
    assert plain["excluded"][0]["reason"] == "non_finite"
    header, lines = diagnosis.table()
    assert header[0] == "silo"
    assert len(lines) == 8
    assert all(len(line) == len(header) for line in lines)
    again = Diagnosis.from_dict(plain)
    assert again.to_dict() == diagnosis.to_dict()
    assert again.table() == (header, lines)
    median_cosine = np.median(np.delete(diagnosis.cosine[0], 0))
    assert lines[0][header.index("cosine")] == format(median_cosine, ".2f")
    diagnosis.plot(tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "mean_around_median", "bulyan"])
def test_coordinate_wise_rules_can_be_asked_who_counted(rule: str) -> None:
    values = vectors(12, 3000)
    values[5] = values[0] + 1e4
    settings = config(rule, 2, pre=(("nnm", {"f": 1}),) if rule == "median" else ())
    plain = aggregate(TensorMatrix(values), rows(*"abcdefghijkl"), settings)
    assert plain.weights == {} or rule == "median"
    asked = aggregate(TensorMatrix(values), rows(*"abcdefghijkl"), settings, diagnose=True)
    assert torch.equal(asked.vector, plain.vector)
    assert asked.weights["f"] < 0.01
    assert sum(asked.weights.values()) == pytest.approx(1)
    assert asked.diagnosis.contribution is not None
    assert asked.diagnosis.contribution.sum() == pytest.approx(1)
    shares = np.array([asked.weights[name] for name in "abcdefghijkl"])
    if rule in ("trimmed_mean", "mean_around_median"):
        assert shares[[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]].min() > 0.05


def test_diagnosis_measures_only_what_is_asked_for() -> None:
    found = aggregate(TensorMatrix(vectors(4)), rows(*"abcd"), config("mean")).diagnosis
    assert found.cosine is None
    assert found.distance is None
    with pytest.raises(ValueError, match="diagnose=True"):
        found.plot("nowhere.png")
    asked = aggregate(TensorMatrix(vectors(4)), rows(*"abcd"), config("mean"), diagnose=True).diagnosis
    exact = torch.cdist(vectors(4), vectors(4)).numpy()
    assert asked.distance == pytest.approx(exact, rel=1e-4, abs=1e-4)
    assert dict(asked.verdicts()) == dict.fromkeys("abcd", "used")
