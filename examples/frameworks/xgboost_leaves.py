"""XGBoost: splits are drawn without data, the same everywhere; `refresh` fits the leaves at each silo.

Trees of different silos cannot be averaged; the values of the same leaves can. One round is enough.
"""

import json
from functools import cache

import numpy as np
import xgboost as xgb
from sklearn.datasets import load_digits

import roundtable as rt

SETTINGS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 5, "eta": 0.3, "nthread": 1}
TREES = 12


class Leaves(rt.ArrayTask):
    def weights(self):
        return {"leaves": np.zeros(sum(len(t["left_children"]) for t in trees_of(drawn())[1]), np.float32)}

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        pixels, labels = pixels[mine := site.shard(labels)] / 16, labels[mine]
        test = np.arange(len(labels)) % 5 == 0
        return xgb.DMatrix(pixels[~test], labels[~test]), xgb.DMatrix(pixels[test], labels[test])

    def fit(self, weights, data, options):
        update = {**SETTINGS, "process_type": "update", "updater": "refresh", "refresh_leaf": True}
        fitted = xgb.train(update, data[0], TREES, xgb_model=forest_with(weights["leaves"]))
        found = [(np.array(t["left_children"]) < 0) * t["split_conditions"] for t in trees_of(fitted)[1]]
        return {"leaves": np.concatenate(found).astype(np.float32)}, data[0].num_row(), {}

    def evaluate(self, weights, data):
        right = forest_with(weights["leaves"]).predict(data[1]).argmax(1) == data[1].get_label()
        return {"accuracy": (int(right.sum()), len(right))}


@cache
def drawn():
    chance = np.random.default_rng(1)
    noise = xgb.DMatrix(chance.random((3000, 64), np.float32), chance.integers(0, 10, 3000))
    return xgb.train({**SETTINGS, "seed": 1, "base_score": 0.5}, noise, TREES)


def forest_with(leaves):
    forest, trees = trees_of(drawn())
    values = iter(leaves.tolist())
    for tree in trees:
        own = np.array([next(values) for _ in tree["left_children"]])
        leaf = np.array(tree["left_children"]) < 0
        tree["split_conditions"] = np.where(leaf, own, tree["split_conditions"]).tolist()
    return xgb.Booster(model_file=bytearray(json.dumps(forest).encode()))


def trees_of(booster):
    forest = json.loads(booster.save_raw("json"))
    return forest, forest["learner"]["gradient_booster"]["model"]["trees"]
