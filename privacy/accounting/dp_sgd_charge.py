"""What a step of DP-SGD costs a silo (Abadi et al. 2016), and the noise that its budget asks for."""

from __future__ import annotations

from functools import lru_cache

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy.accounting.calibration import solve_noise
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.delta import check_delta


def step_charge(privacy: ExampleLevel, examples: int, total_steps: int | None = None) -> Charge:
    """What one step over `examples` examples costs: by the noise that is given, or solved for the budget.

    Raises `PrivacyError` for a batch or a δ that does not fit so many examples.
    """
    if privacy.batch_size is None:
        raise PrivacyError("privacy.batch_size is missing: the expected number of examples in a step")
    if not 0 < privacy.batch_size <= examples:
        raise PrivacyError(f"privacy.batch_size is {privacy.batch_size}, and the data has fewer examples")
    check_delta(privacy.delta, None)
    if privacy.delta * examples >= 1.0:
        raise PrivacyError(
            f"privacy.delta is {privacy.delta:g}, not below 1 over the number of the examples (which is "
            "private): publishing one of them in the clear would satisfy it; lower it"
        )
    parts = (("gradient", privacy.noise_multiplier or 1.0),)
    charge = Charge("gaussian", "example", "poisson", parts, rate=privacy.batch_size / examples)
    if privacy.noise_multiplier is not None:
        return charge
    steps = total_steps or privacy.local_steps
    if privacy.epsilon is None or steps is None:
        raise PrivacyError(
            "privacy.noise_multiplier is missing, and without total_steps epsilon cannot give it"
        )
    return _solved(charge.repeated(steps), privacy.epsilon, privacy.delta, privacy.accountant).repeated(1)


@lru_cache(maxsize=256)
def _solved(charge: Charge, epsilon: float, delta: float, accountant: str) -> Charge:
    """Every round of a job asks the same again."""
    return solve_noise(charge, epsilon, delta, accountant)
