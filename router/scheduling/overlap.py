"""The KV-aware cost: overlap weight × prefill still to compute + active decode, in tokens, and a softmax over it.

In the form of NVIDIA Dynamo's KV router (`overlap_score_weight * potential_prefill_blocks + decode_blocks`), counted in
tokens instead of blocks because workers of one fleet may differ in block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.scheduling.balance import least_cost
from router.scheduling.decision import Candidate, Choice, Uniform

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

    def choose(self, candidates: Sequence[Candidate], prompt_tokens: int, random: Uniform) -> Choice:
        costs = [self._cost(candidate, prompt_tokens) for candidate in candidates]
        choice = least_cost(candidates, costs, random)
        if self._temperature == 0:
            return choice
        index = sample_softmax(costs, self._temperature * max(1, prompt_tokens), random)
        return Choice(index, choice.costs, f"sampled at temperature {self._temperature:g}")

    def _cost(self, candidate: Candidate, prompt_tokens: int) -> float:
        load = candidate.load
        prefill = load.prefill_tokens + max(0.0, prompt_tokens - candidate.credit_tokens)
        return self._weight * prefill + load.active_tokens


def sample_softmax(costs: Sequence[float], scale: float, random: Uniform) -> int:
    """Index drawn with p ∝ exp(−(cost − least) / scale); `scale` > 0, in the costs' unit."""
    least = min(costs)
    weights = [math.exp(-(cost - least) / scale) for cost in costs]
    point = random.random() * sum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    return weights.index(max(weights))  # rounding left the point on the upper edge
