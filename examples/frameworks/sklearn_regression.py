"""scikit-learn: a logistic regression whose coefficients are averaged."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

import roundtable as rt


class Regression(rt.ArrayTask):
    """`SGDClassifier.partial_fit` from the round's coefficients on."""

    def weights(self):
        return {"coefficients": np.zeros((10, 64)), "intercepts": np.zeros(10)}

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        mine = site.shard(labels)
        pixels, labels = pixels[mine] / 16, labels[mine]
        test = np.arange(len(labels)) % 5 == 0
        return (pixels[~test], labels[~test]), (pixels[test], labels[test])

    def fit(self, weights, data, options):
        rows, labels = data[0]
        model = classifier(weights, options["learning_rate"], options["seed"])
        for _ in range(options["epochs"] or 1):
            model.partial_fit(rows, labels)
        loss = log_loss(labels, model.predict_proba(rows), labels=np.arange(10))
        return {"coefficients": model.coef_, "intercepts": model.intercept_}, len(labels), {"loss": loss}

    def evaluate(self, weights, data):
        rows, labels = data[1]
        model = classifier(weights, 0.1, 0)
        loss = log_loss(labels, model.predict_proba(rows), labels=np.arange(10))
        right = int((model.predict(rows) == labels).sum())
        return {"loss": (loss * len(labels), len(labels)), "accuracy": (right, len(labels))}


def classifier(weights, rate, seed):
    """A classifier with these coefficients; scikit-learn makes its arrays at the first fit."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=rate, random_state=seed % 2**31)
    model.partial_fit(np.zeros((1, 64)), [0], classes=np.arange(10))
    model.coef_, model.intercept_ = weights["coefficients"].copy(), weights["intercepts"].copy()
    return model
