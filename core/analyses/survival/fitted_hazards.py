"""What the public numbers of a fitted Cox model say, in the units of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roundtable.core.analyses.estimates import coefficients, inverted
from roundtable.core.analyses.exact_sums import Arrays
from roundtable.core.analyses.scipy_parts import stats


def fitted(terms: list[str], public: Arrays, robust: bool, weighted: bool) -> dict[str, Any]:
    """Estimates with errors, and the likelihood; `model_errors` are those that are not robust. A weighted
    likelihood has no ratio that is chi-square, and no AIC."""
    sd = public["sd"]
    estimates = public["slopes"] / sd
    inverse = inverted(public["hessian"])
    errors = model = np.sqrt(np.diag(inverse)) / sd
    if robust:
        errors = np.sqrt(np.diag(inverse @ public["sandwich"] @ inverse)) / sd
    loglik, null = float(public["likelihood"][0]), float(public["null"][0])
    found = {
        **coefficients(terms, estimates, errors, None),
        "hazard_ratios": np.exp(estimates).tolist(),
        "model_errors": model.tolist(),
        "log_likelihood": loglik,
        "log_likelihood_null": null,
    }
    if not weighted:
        ratio = 2 * (loglik - null)
        found |= {"lr_chi2": ratio, "lr_p": float(stats.chi2.sf(ratio, len(terms)))}
        found["aic"] = 2 * len(terms) - 2 * loglik
    return found


def likelihood_note(values: Mapping[str, Any]) -> str:
    """A few words about the likelihood of a fit."""
    told = f"log-likelihood {values['log_likelihood']:.6g}"
    if "lr_chi2" not in values:
        return told
    freedom = len(values["terms"])
    degrees = f"{freedom} degree{'s' * (freedom > 1)} of freedom"
    return f"{told}, likelihood ratio {values['lr_chi2']:.5g} on {degrees}, p {values['lr_p']:.4g}"


def baseline_hazards(labels: Sequence[str], public: Arrays) -> dict[str, Any]:
    """The cumulated hazard where all columns are 0, by stratum, at the ends of merged intervals."""
    away = float(np.exp(-(public["slopes"] / public["sd"]) @ public["mean"]))
    found = {}
    for number, label in enumerate(labels):
        used = int(public["used"][number])
        found[label] = {
            "times": public["ends"][number, :used].tolist(),
            "events": public["events"][number, :used].tolist(),
            "cumulative_hazard": (public["hazard"][number, :used] * away).tolist(),
        }
    return found
