"""From a budget to the noise that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.accounting.charge import Charge

_HIGHEST = 1e6
_TOLERANCE = 1e-3


def solve_noise(
    charge: Charge, epsilon: float, delta: float, accountant: str = "pld", spent: Sequence[Charge] = ()
) -> Charge:
    """`charge` with the least noise on its first part that keeps all, `spent` included, within `epsilon`.

    The ε of the answer lies within 0.1 % below the budget. Rényi finds the neighbourhood, since a loss
    distribution takes up to seconds to compute; then a few exact evaluations settle it.
    Raises `PrivacyError` where `spent`, or the parts that stay fixed, already use the budget up.
    """
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise PrivacyError(f"the privacy budget is epsilon = {epsilon}: it must be finite and above 0")

    def cost(noise_multiplier: float, by: str) -> float:
        return compose([*spent, charge.scaled(noise_multiplier)], delta, by)

    by_renyi = cost(_HIGHEST, "rdp") < epsilon
    if not by_renyi and cost(_HIGHEST, accountant) >= epsilon:
        raise PrivacyError(
            f"no noise keeps this within epsilon = {epsilon:g} at delta = {delta:g}: what is already "
            "spent, or the other queries of a round, use it up; raise the budget or make fewer rounds"
        )
    start = _descend(lambda z: cost(z, "rdp"), epsilon, 1.0) if by_renyi else 1.0
    found = start if accountant == "rdp" else _descend(lambda z: cost(z, accountant), epsilon, start)
    return charge.scaled(found)


def solve_steps(charge: Charge, epsilon: float, delta: float, accountant: str = "pld") -> int:
    """How many repetitions of `charge` the budget holds; 0 where not even one."""
    if compose([charge.repeated(1)], delta, accountant) > epsilon:
        return 0
    low, high = 1, 2
    while compose([charge.repeated(high)], delta, accountant) <= epsilon:
        low, high = high, 2 * high
        if high > 1 << 40:
            raise PrivacyError("the noise is so large that the budget never ends")
    while high - low > 1:
        middle = (low + high) // 2
        if compose([charge.repeated(middle)], delta, accountant) <= epsilon:
            low = middle
        else:
            high = middle
    return low


def _descend(cost: Callable[[float], float], epsilon: float, start: float) -> float:
    """Secant steps on log ε against log z, aimed a little below the budget; the safe end is returned."""
    goal = math.log(epsilon * (1.0 - _TOLERANCE / 2.0))
    points: list[tuple[float, float]] = []
    guess = math.log(start)
    for _ in range(40):
        value = _log_cost(cost, math.exp(guess))
        points.append((guess, value))
        if math.log(epsilon * (1.0 - _TOLERANCE)) <= value <= math.log(epsilon):
            return math.exp(guess)
        guess = _next_guess(points, goal)
    safe = [z for z, value in points if value <= math.log(epsilon)]
    if not safe:
        raise PrivacyError(f"no noise was found that keeps epsilon = {epsilon:g}; is the budget tiny?")
    return math.exp(min(safe))


def _log_cost(cost: Callable[[float], float], noise_multiplier: float) -> float:
    return math.log(max(cost(noise_multiplier), 1e-300))


def _next_guess(points: list[tuple[float, float]], goal: float) -> float:
    below = [point for point in points if point[1] <= goal]
    above = [point for point in points if point[1] > goal]
    if below and above:
        right, left = min(below), max(above)
        if right[1] > -600.0:
            share = (left[1] - goal) / (left[1] - right[1])
            return left[0] + min(max(share, 0.02), 0.98) * (right[0] - left[0])
        return 0.5 * (left[0] + right[0])
    z1, c1 = points[-1]
    slope = -1.0
    if len(points) > 1 and points[-2][0] != z1:
        slope = (c1 - points[-2][1]) / (z1 - points[-2][0])
    step = (goal - c1) / min(slope, -0.3)
    return z1 + min(max(step, -1.0), 1.0)
