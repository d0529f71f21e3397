"""XGBoost: each silo boosts trees of its own on the common forest, and a round adds those of all (bagging).

A silo's trees lie as bytes at a place of their own, so that the mean of vectors is the forest. Masked or not,
whoever has the forest sees the trees that each silo's rows have grown.
"""

import json
import zlib

import numpy as np
import xgboost as xgb
from sklearn.datasets import load_digits

import roundtable as rt

SETTINGS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 3, "base_score": 0.5, "nthread": 1}
SILOS, ROUNDS, BYTES = 3, 5, 1 << 14


class Bagging(rt.ArrayTask):
    def weights(self):
        return {"trees": np.zeros((ROUNDS, SILOS, BYTES), np.float32)}

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        pixels, labels = pixels[mine := site.shard(labels)], labels[mine]
        test = np.arange(len(labels)) % 5 == 0
        rows = xgb.DMatrix(pixels[~test], labels[~test]), xgb.DMatrix(pixels[test], labels[test])
        return *rows, site.options.get("place", site.index)  # At a silo its [data] says place = 0, 1 or 2.

    def fit(self, weights, data, options):
        places = weights["trees"].copy()
        _, grown = parts_of(xgb.train(SETTINGS, data[0], 1, xgb_model=forest_of(places)))
        for tree in (new := grown["trees"][-10:]):  # A leaf counts as one of so many silos'.
            by = np.where(np.array(tree["left_children"]) < 0, SILOS, 1)
            tree["split_conditions"] = (tree["split_conditions"] / by).tolist()
        packed = np.frombuffer(zlib.compress(json.dumps(new).encode()), np.uint8).astype(int)
        places[places.any(axis=(1, 2)).sum(), data[2], : len(packed)] = SILOS * packed
        return {"trees": places}, 1, {}  # Silos weigh alike: the mean at a place is its silo's bytes.

    def evaluate(self, weights, data):
        right = forest_of(weights["trees"]).predict(data[1]).argmax(1) == data[1].get_label()
        return {"accuracy": (int(right.sum()), len(right))}


def forest_of(places):
    forest, model = parts_of(xgb.train(SETTINGS, xgb.DMatrix(np.zeros((10, 64)), np.arange(10)), 1))
    for packed in filter(np.any, np.rint(places.reshape(-1, BYTES)).astype(np.uint8)):
        model["trees"] += json.loads(zlib.decompressobj().decompress(packed.tobytes()))
    model["trees"] = [{**tree, "id": number} for number, tree in enumerate(model["trees"])]
    model["tree_info"] = [number % 10 for number in range(len(model["trees"]))]
    model["iteration_indptr"] = [*range(0, len(model["trees"]) + 1, 10)]
    model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
    return xgb.Booster(SETTINGS, model_file=bytearray(json.dumps(forest).encode()))


def parts_of(booster):
    forest = json.loads(booster.save_raw("json"))
    return forest, forest["learner"]["gradient_booster"]["model"]
