"""Policy `lmetric`: (pending + new prefill tokens) × batch size. There is no weight to tune."""

from __future__ import annotations

import numpy as np

from router.scheduling.candidates import Costs
from router.scheduling.decision import Cost, Situation


class LMetric:
    def cost(self, situation: Situation) -> Cost:
        prompt = situation.prompt_tokens
        batch = situation.requests + 1
        new = np.maximum(1.0, prompt - situation.credit_tokens)  # else an idle rank and a full one would cost 0 alike
        values: Costs = (situation.prefill_tokens + new).astype(np.float64) * batch
        return Cost(values, max(1, prompt) * float(batch.mean()))
