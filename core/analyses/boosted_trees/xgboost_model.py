"""Trees as xgboost's own JSON, and what features are worth in them.

The form is what xgboost 1.7 to 3.2 load alike. `base_score` is a plain string of nine digits: with more, or
in brackets, versions up to 3.0 read 0.5 without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roundtable.core.analyses.boosted_trees.bin_cuts import TOP
from roundtable.core.analyses.boosted_trees.boosting_objectives import Boosting
from roundtable.core.analyses.boosted_trees.tree_growing import split_parts
from roundtable.core.analyses.exact_sums import Arrays, Doubles

_NO_PARENT = 2147483647


def xgboost_model(
    features: Sequence[str], objective: Boosting, rate: float, public: Arrays, times: int
) -> dict[str, Any]:
    """The model of the first `times` boosting rounds, whose trees count `rate`, as values that JSON has."""
    outputs = objective.outputs
    trees = [_tree(len(features), rate, public, tree) for tree in range(times * outputs)]
    booster = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(len(trees))},
        "iteration_indptr": [outputs * time for time in range(times + 1)],
        "tree_info": [tree % outputs for tree in range(len(trees))],
        "trees": trees,
    }
    learner = {
        "attributes": {},
        "feature_names": list(features),
        "feature_types": ["float"] * len(features),
        "gradient_booster": {"model": booster, "name": "gbtree"},
        "learner_model_param": {
            "base_score": f"{np.float32(public['base'][0]):.8E}",
            "boost_from_average": "0",
            "num_class": str(objective.num_class),
            "num_feature": str(len(features)),
            "num_target": "1",
        },
        "objective": {"name": objective.name, **objective.parameters},
    }
    return {"learner": learner, "version": [2, 1, 0]}


def importance_of(features: Sequence[str], public: Arrays, trees: int) -> dict[str, dict[str, float]]:
    """Of each feature that splits: how often (weight), the mean gain and mean sum of Hessians (cover) of its
    splits, and their totals, as xgboost's `get_score` has them."""
    feature = split_parts(public["split"][:trees])[0].ravel()
    gain, cover = public["gain"][:trees].ravel(), public["hessian"][:trees].ravel()
    found = {}
    for place, name in enumerate(features):
        own = feature == place
        if own.any():
            found[name] = {
                "weight": int(own.sum()),
                "gain": float(gain[own].mean()),
                "cover": float(cover[own].mean()),
                "total_gain": float(gain[own].sum()),
                "total_cover": float(cover[own].sum()),
            }
    return found


IMPORTANCE_HEADER = ["feature", "splits", "gain", "cover", "total gain"]


def importance_rows(importance: Mapping[str, Mapping[str, float]]) -> list[list[Any]]:
    """What `importance_of` gives as rows below that header, the highest total gain first."""
    return [
        [name, own["weight"], own["gain"], own["cover"], own["total_gain"]]
        for name, own in sorted(importance.items(), key=lambda item: -item[1]["total_gain"])
    ]


def _tree(features: int, rate: float, public: Arrays, tree: int) -> dict[str, Any]:
    feature, cut, missing_left = split_parts(public["split"][tree])
    # By level, as xgboost numbers them; a heap's order is that already.
    order, at = [0], 0
    while at < len(order):
        if feature[order[at]] >= 0:
            order += [2 * order[at] + 1, 2 * order[at] + 2]
        at += 1
    number = {node: place for place, node in enumerate(order)}
    made: dict[str, list[Any]] = {
        name: []
        for name in (
            "base_weights",
            "default_left",
            "left_children",
            "loss_changes",
            "parents",
            "right_children",
            "split_conditions",
            "split_indices",
            "split_type",
            "sum_hessian",
        )
    }
    for node in order:
        splits = feature[node] >= 0
        weight = np.float32(public["weight"][tree, node])
        value = weight if splits else weight * np.float32(rate)
        made["base_weights"].append(float(value))
        made["default_left"].append(int(missing_left[node]) if splits else 0)
        made["left_children"].append(number[2 * node + 1] if splits else -1)
        made["right_children"].append(number[2 * node + 2] if splits else -1)
        made["loss_changes"].append(float(public["gain"][tree, node]) if splits else 0.0)
        made["parents"].append(number[(node - 1) // 2] if node else _NO_PARENT)
        condition = _condition(public["cuts"], int(feature[node]), int(cut[node])) if splits else value
        made["split_conditions"].append(float(condition))
        made["split_indices"].append(int(feature[node]) if splits else 0)
        made["split_type"].append(0)
        made["sum_hessian"].append(float(np.float32(public["hessian"][tree, node])))
    parameters = {
        "num_deleted": "0",
        "num_feature": str(features),
        "num_nodes": str(len(order)),
        "size_leaf_vector": "1",
    }
    empty: dict[str, list[int]] = {
        name: [] for name in ("categories", "categories_nodes", "categories_segments", "categories_sizes")
    }
    return {**made, **empty, "id": tree, "tree_param": parameters}


def _condition(cuts: Doubles, feature: int, cut: int) -> float:
    """Values below it go left."""
    return -TOP if cut < 0 else float(cuts[feature, cut])


def nine_digits(value: float) -> float:
    """A float32 that nine digits tell, as versions of xgboost read no more."""
    return float(np.float32(f"{np.float32(value):.8e}"))
