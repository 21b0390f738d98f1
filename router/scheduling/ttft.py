"""Policy `ttft`: Algorithm 1 of the Mooncake paper (Qin et al., FAST'25), the least predicted time to first token.

Its branch that moves KV from the best holder to another instance is open only where KV can be moved; without a store a
rank's prefix is its own, and the transfer time 0.
"""

from __future__ import annotations

from router.scheduling.decision import Cost, Situation


class PredictedTTFT:
    def cost(self, situation: Situation) -> Cost:
        values = situation.queue_seconds + situation.prefill_seconds + situation.step_seconds
        return Cost(values, situation.whole_prefill_seconds)
