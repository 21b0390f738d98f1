"""Policy `overlap`: overlap weight × prefill still to compute + active decode, in tokens.

In the form of NVIDIA Dynamo's KV router (`overlap_score_weight * potential_prefill_blocks + decode_blocks`), counted in
tokens instead of blocks because workers of one fleet may differ in block size.
"""

from __future__ import annotations

import numpy as np

from router.scheduling.decision import Cost, Situation

LOWER_TIER_CREDIT = 0.75
"""Share of a token's prefill that is saved if its block is in a tier below the GPU: Dynamo's default weight for host
memory."""
STORE_CREDIT = 0.5
"""The same if the block is in a store over the network, which Dynamo gives half the weight of host memory by default.
Policies in seconds predict the load instead."""


class OverlapCost:
    """`weight` ≥ 0: how much a token to prefill counts against a token being decoded; 0 is pure load balancing."""

    def __init__(self, weight: float) -> None:
        self._weight = weight

    def cost(self, situation: Situation) -> Cost:
        prompt = situation.prompt_tokens
        prefill = situation.prefill_tokens + np.maximum(0.0, prompt - situation.credit_tokens)
        return Cost(self._weight * prefill + situation.active_tokens, max(1, prompt))
