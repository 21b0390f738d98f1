"""From costs to a choice: the least cost, ties at random; or a sample from the softmax over all costs."""

from __future__ import annotations

import numpy as np

from router.scheduling.balance import least_cost
from router.scheduling.candidates import Costs
from router.scheduling.decision import Choice, CostPolicy, Situation, Uniform


class Cheapest:
    """The policy that takes the candidate with the least cost.

    `temperature` ≥ 0: p ∝ exp(−(cost − least) / (temperature · cost of a whole prompt)); 0 takes the least, ties at
    random. At temperature 1 a candidate that costs one whole prompt more is e times less likely, whatever the unit.
    Where a whole prompt costs nothing, as of a request that has none, the least is taken too.
    """

    def __init__(self, costs: CostPolicy, temperature: float = 0.0) -> None:
        self._costs = costs
        self._temperature = temperature

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        cost = self._costs.cost(situation)
        scale = self._temperature * cost.prompt
        if not scale > 0:
            choice = least_cost(cost.values, random)
        else:
            position = sample_softmax(cost.values, scale, random)
            choice = Choice(position, cost.values, f"sampled at temperature {self._temperature:g}")
        choice.hold = cost.open is not None and not cost.open[choice.position]
        return choice


def sample_softmax(costs: Costs, scale: float, random: Uniform) -> int:
    """Position drawn with p ∝ exp(−(cost − least) / scale); `scale` > 0, in the costs' unit. NaN is not drawn; if no
    cost is finite, each is as likely."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weights = np.nan_to_num(np.exp(-(costs - np.fmin.reduce(costs)) / scale))
    sums = weights.cumsum()
    if not sums[-1]:
        return int(random.random() * len(costs))
    position = int(sums.searchsorted(random.random() * sums[-1], side="right"))
    return min(position, int(weights.nonzero()[0][-1]))  # rounding may leave the point on the upper edge
