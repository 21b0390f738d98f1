"""Policy `ttft`: Algorithm 1 of the Mooncake paper (Qin et al., FAST'25), the least predicted time to first token.

Its branch that moves KV from the best holder to another instance is open where there is a store that all ranks load
from; without one a rank's prefix is its own, and the transfer time 0. Engines load whatever the store has beyond their
own, so there is no threshold to tune.
"""

from __future__ import annotations

from router.scheduling.decision import Cost, Situation


class PredictedTTFT:
    def cost(self, situation: Situation) -> Cost:
        values = situation.queue_seconds + situation.prefill_seconds + situation.load_seconds + situation.step_seconds
        return Cost(values, situation.whole_prefill_seconds)
