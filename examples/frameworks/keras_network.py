"""Keras 3 on any of its backends (TensorFlow, JAX, PyTorch): `get_weights()` and `set_weights()` travel."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

import roundtable as rt


class KerasNetwork(rt.ArrayTask):
    """`model.fit` for the job's epochs."""

    def weights(self):
        keras.utils.set_random_seed(0)
        return named(network(0.1))

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        mine = site.shard(labels)
        pixels, labels = pixels[mine].astype(np.float32) / 16, labels[mine]
        test = np.arange(len(labels)) % 5 == 0
        return (pixels[~test], labels[~test]), (pixels[test], labels[test])

    def fit(self, weights, data, options):
        rows, labels = data[0]
        keras.utils.set_random_seed(options["seed"] % 2**32)
        model = filled(weights, options["learning_rate"])
        epochs, size = options["epochs"] or 1, options["batch_size"]
        told = model.fit(rows, labels, epochs=epochs, batch_size=size, verbose=0).history
        return named(model), len(labels), {"loss": told["loss"][-1]}

    def evaluate(self, weights, data):
        rows, labels = data[1]
        loss, accuracy = filled(weights, 0.1).evaluate(rows, labels, verbose=0)
        count = len(labels)
        return {"loss": (loss * count, count), "accuracy": (accuracy * count, count)}


def network(rate):
    """64 pixels in, 10 digits out."""
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model


def named(model):
    return {str(place): array for place, array in enumerate(model.get_weights())}


def filled(weights, rate):
    model = network(rate)
    model.set_weights([weights[str(place)] for place in range(len(weights))])
    return model
