"""A comparison with everything that a page can show."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from router.page.results import HITS, IN_TIME, TPOT_MEAN, TTFT_MEAN, TTFT_P99, Comparison, Figure, Result

FIGURES = (
    Figure("requests", "{:,.0f}", compared=False),
    Figure(TTFT_MEAN),
    Figure(TTFT_P99),
    Figure(TPOT_MEAN, "{:.1f}"),
    Figure(HITS, "{:.1f}"),
    Figure(IN_TIME, "{:.1f}"),
)


def result(policy: str, rate: float, seed: int, slower: float = 1.0) -> Result:
    rng = random.Random(seed)
    times = sorted(rng.lognormvariate(-1, 1) * slower * (1 + rate**2) for _ in range(200))
    values = {
        "requests": 200,
        TTFT_MEAN: sum(times) / 200,
        TTFT_P99: times[198],
        TPOT_MEAN: 9 * slower,
        HITS: 70 / slower,
    }
    values[IN_TIME] = sum(time < 1 for time in times) / 2
    balance = [(10.0 * window, 1 + rng.random() * slower) for window in range(20)]
    warnings = ["beware of <i>markup</i>"] if policy == "random" else []
    return Result(policy, rate, seed, values, times, balance, (0.6, 0.5), warnings)


def comparison(
    policies: Sequence[str] = ("kv", "random"), rates: Sequence[float] = (1.0,), seeds: Sequence[int] = (0,)
) -> Comparison:
    results = [
        result(policy, rate, seed, 1.0 + number)
        for rate in rates
        for seed in seeds
        for number, policy in enumerate(policies)
    ]
    facts = [("command", "kv-router ab --modes 'kv,random'"), ("python", "3.11")]
    return Comparison(
        "Two policies", "200 requests", results, policies[-1], FIGURES, "× the trace's rate", "Seconds.", facts
    )


def unknown(policy: str = "kv") -> Result:
    """A run in which nothing was answered."""
    return Result(policy, 1.0, 0, dict.fromkeys((TTFT_MEAN, TTFT_P99, TPOT_MEAN), math.nan) | {"requests": 200.0})
