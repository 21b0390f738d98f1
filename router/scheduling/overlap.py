"""The KV-aware cost: overlap weight × prefill still to compute + active decode, in tokens, and a softmax over it.

In the form of NVIDIA Dynamo's KV router (`overlap_score_weight * potential_prefill_blocks + decode_blocks`), counted in
tokens instead of blocks because workers of one fleet may differ in block size.
"""

from __future__ import annotations

import numpy as np

from router.scheduling.balance import least_cost
from router.scheduling.decision import Choice, Costs, Situation, Uniform

LOWER_TIER_CREDIT = 0.75
"""Of a token's prefill saved when its block must first be loaded from a tier below the GPU: Dynamo's default weight for
host memory."""


class OverlapCost:
    """`weight` ≥ 0: how much a token to prefill counts against a token being decoded; 0 is pure load balancing.

    `temperature` ≥ 0: p ∝ exp(−(cost − least) / (temperature · prompt tokens)); 0 takes the least, ties at random. At
    temperature 1 a candidate that costs one whole prompt more is e times less likely.
    """

    def __init__(self, weight: float, temperature: float) -> None:
        self._weight = weight
        self._temperature = temperature

    def choose(self, situation: Situation, random: Uniform) -> Choice:
        prompt = situation.prompt_tokens
        prefill = situation.prefill_tokens + np.maximum(0.0, prompt - situation.credit_tokens)
        costs = self._weight * prefill + situation.active_tokens
        if self._temperature == 0:
            return least_cost(costs, random)
        position = sample_softmax(costs, self._temperature * max(1, prompt), random)
        return Choice(position, costs, f"sampled at temperature {self._temperature:g}")


def sample_softmax(costs: Costs, scale: float, random: Uniform) -> int:
    """Position drawn with p ∝ exp(−(cost − least) / scale); `scale` > 0, in the costs' unit."""
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp(-(costs - costs.min()) / scale)
    sums = weights.cumsum()
    position = int(sums.searchsorted(random.random() * sums[-1], side="right"))
    return min(position, int(weights.nonzero()[0][-1]))  # rounding may leave the point on the upper edge
