"""Policy `affinity`, a baseline for simulations: follow the longest prefix; among equals, the fewest requests."""

from __future__ import annotations

import numpy as np

from router.scheduling.decision import Cost, Situation

_DECIDES = 1e6
"""More requests than any rank has in flight: one token of overlap outweighs them."""


class Affinity:
    def cost(self, situation: Situation) -> Cost:
        missed = np.maximum(0, situation.prompt_tokens - situation.overlap_tokens)
        return Cost(missed * _DECIDES + situation.requests, max(1, situation.prompt_tokens) * _DECIDES)
