"""Policy `ttft`: Algorithm 1 of the Mooncake paper (Qin et al., FAST'25), the least predicted time to first token.

The algorithm's branch that moves KV from the best holder to another instance applies where ranks share a store; without
one a rank's prefix is its own and the transfer time is 0. Engines load whatever the store has beyond their own blocks,
so there is no balancing threshold to tune.
"""

from __future__ import annotations

from router.scheduling.decision import Cost, Situation


class PredictedTTFT:
    def cost(self, situation: Situation) -> Cost:
        values = situation.queue_seconds + situation.prefill_seconds + situation.load_seconds + situation.step_seconds
        return Cost(values, situation.whole_prefill_seconds)
