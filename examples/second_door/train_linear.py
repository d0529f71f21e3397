"""A scikit-learn script that joins rounds: python train_linear.py agent.toml digits.npz

No PyTorch in sight: weights come and go as NumPy arrays. JAX and TensorFlow work the same way.
"""

import sys

import numpy as np
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

import roundtable as rt

with np.load(sys.argv[2]) as file:
    images, labels = file["images"] / 16, file["labels"]
held_out = np.arange(len(labels)) % 5 == 0


def classifier(arrays):
    """A logistic regression with these weights."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05)
    # scikit-learn makes its arrays at the first fit, with every class that there may be.
    model.partial_fit(images[:1], labels[:1], classes=np.arange(10))
    model.coef_, model.intercept_ = arrays["coefficients"].copy(), arrays["intercepts"].copy()
    return model


def evaluate(round):
    """How good the global model is on this silo's held-out images: (sum, count) for each metric."""
    correct = classifier(round.arrays).predict(images[held_out]) == labels[held_out]
    return {"accuracy": (int(correct.sum()), len(correct))}


inputs, targets = images[~held_out], labels[~held_out]
for round in rt.join(sys.argv[1], task="linear", evaluate=evaluate):
    model = classifier(round.arrays)
    for _ in range(3):
        model.partial_fit(inputs, targets)
    loss = log_loss(targets, model.predict_proba(inputs), labels=np.arange(10))
    weights = {"coefficients": model.coef_, "intercepts": model.intercept_}
    round.submit(weights, examples=len(targets), metrics={"loss": loss})
    print(f"round {round.number} of {round.rounds}: loss {loss:.3f}")
