"""Summarises a simulated run in numbers (pure)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from router.ab.statistics import Spread, imbalance, spread
from router.simulation.arrival import Sample


class Goal(NamedTuple):
    """The latencies, in seconds, that an answer must keep to for goodput."""

    ttft: float = 2.0
    tpot: float = 0.1


class Figures(msgspec.Struct, frozen=True):
    """Seconds and tokens; ratios are 0-1. Imbalance is the busiest worker over the mean, 1 being even."""

    requests: int
    refused: int
    failed: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    """Seconds between two tokens of a stream (inter-token latency), at the worker."""
    e2e: Spread
    """Seconds from a request's arrival to its last token (end-to-end latency)."""
    hit_ratio: float
    """The share of prompt tokens found in the workers' own caches; NaN, as the imbalance, when nothing was answered."""
    imbalance: float
    """The imbalance of uncached prompt tokens over the initial workers that prefill."""
    goodput: float
    """Answers within the goal per second of arrivals; NaN where all requests arrived at once."""
    seconds: float
    """Seconds from the first arrival to the last answer."""
    store_ratio: float | None = None
    """The share of prompt tokens loaded from the store; None without a store."""


def summarise(
    samples: Sequence[Sample],
    gaps: Mapping[float, int],
    prefilling: Collection[int],
    arriving: float,
    goal: Goal,
    store: bool = False,
) -> Figures:
    """Summarises a run. `gaps` counts tokens by the seconds since the token before; `prefilling` are the numbers of the
    workers that prefilled at the beginning, over which the imbalance is; requests arrived for `arriving` seconds;
    `store` says whether there was one."""
    fine = [sample for sample in samples if sample.fate == "answered"]
    uncached: Counter[str] = Counter()
    for sample in (sample for sample in fine if sample.worker in prefilling):
        uncached[str(sample.worker)] += sample.prompt_tokens - sample.cached_tokens - sample.stored_tokens
    prompt = sum(sample.prompt_tokens for sample in fine) or math.nan
    fates = Counter(sample.fate for sample in samples)
    return Figures(
        requests=len(samples),
        refused=fates["refused"],
        failed=fates["failed"],
        ttft=spread(sample.ttft for sample in fine),
        tpot=spread(sample.tpot for sample in fine),
        itl=counted_spread(gaps),
        e2e=spread(sample.e2e for sample in fine),
        hit_ratio=sum(sample.cached_tokens for sample in fine) / prompt,
        imbalance=imbalance(uncached, len(prefilling)),
        goodput=sum(_keeps(sample, goal) for sample in fine) / arriving if arriving else math.nan,
        seconds=max(sample.last for sample in samples) - min(sample.arrived for sample in samples) if samples else 0.0,
        store_ratio=sum(sample.stored_tokens for sample in fine) / prompt if store else None,
    )


def _keeps(sample: Sample, goal: Goal) -> bool:
    return (sample.ttft or 0.0) <= goal.ttft and (sample.tpot or 0.0) <= goal.tpot


def counted_spread(counts: Mapping[float, int]) -> Spread:
    """The spread of values, given how often each occurred."""
    total = sum(counts.values())
    if not total:
        return Spread(*[math.nan] * 5)
    values = sorted(counts)
    ends = list(accumulate(counts[value] for value in values))
    mean = math.fsum(value * count for value, count in counts.items()) / total
    return Spread(mean, *(values[bisect_left(ends, share * total)] for share in (0.5, 0.9, 0.99, 1.0)))
