"""Summaries of a mode's requests (pure). Times here are simulated seconds: measured ones times the fleet's speed-up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from router.ab.client import Outcome


class Record(msgspec.Struct, frozen=True):
    """One request of a run. Simulated seconds and tokens; `at` counts from the run's start. Times are None on error."""

    index: int
    at: float
    lag: float
    status: int
    error: str
    worker: str
    ttft: float | None
    tpot: float | None
    e2e: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    chunks: int
    prefill_worker: str = ""
    """The worker that computed the prompt, if not `worker`."""


class Spread(msgspec.Struct, frozen=True):
    """A distribution in five numbers; all NaN when there was nothing to describe."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """A mode in numbers. Ratios are 0–1; imbalance is the busiest worker against the mean, 1 being even."""

    requests: int
    errors: int
    ttft: Spread
    tpot: Spread
    e2e: Spread
    hit_ratio: float
    """NaN when nothing was answered, as are the imbalances."""
    imbalance_prefill: float
    """The imbalance of uncached prompt tokens over the workers that compute prompts."""
    imbalance_requests: float
    """The imbalance of requests over the workers that answer."""
    duration: float
    """Simulated seconds from the first arrival to the last answer, or to the last arrival if that failed later."""
    output_tokens_per_second: float
    requests_per_second: float
    lag_p99: float
    """Simulated seconds by which the generator itself was late."""
    in_time: float = math.nan
    """The share of requests, failed ones too, whose TTFT kept to the objective; NaN where none is stated."""
    goodput: float = math.nan
    """Requests within the objective per second."""


def record(index: int, due: float, outcome: Outcome, start: float, speedup: float) -> Record:
    """Converts an outcome from perf_counter to simulated seconds. `due` is when the request should have been sent."""
    fine = not outcome.error
    steps = outcome.output_tokens - 1
    return Record(
        index=index,
        at=(due - start) * speedup,
        lag=max(0.0, outcome.sent - due) * speedup,
        status=outcome.status,
        error=outcome.error,
        worker=outcome.worker,
        ttft=(outcome.first - outcome.sent) * speedup if fine else None,
        tpot=(outcome.last - outcome.first) * speedup / steps if fine and steps > 0 else None,
        e2e=(outcome.last - outcome.sent) * speedup if fine else None,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        chunks=outcome.chunks,
        prefill_worker=outcome.prefill_worker,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0–1) of an ascending sequence lies, interpolated linearly. NaN when empty."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Spread:
    """The distribution of the values that are not None."""
    ordered = sorted(value for value in values if value is not None)
    mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
    return Spread(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)))


def imbalance(per_worker: Mapping[str, float], workers: int) -> float:
    """The largest value over the mean of `workers` workers, idle ones included. NaN without workers, or when none of
    them answered."""
    if not workers or not per_worker:
        return math.nan
    total = sum(per_worker.values())
    return max(per_worker.values()) * max(workers, len(per_worker)) / total if total else 1.0


class _Parts(NamedTuple):
    """How many workers prefill, and how many answer, as far as answers show: some may do only one of the two."""

    prefilling: int
    answering: int


def _parts(fine: Sequence[Record], workers: int) -> _Parts:
    whole = {one.worker for one in fine if not one.prefill_worker}
    decoding = {one.worker for one in fine if one.prefill_worker} - whole
    prefilling = {one.prefill_worker for one in fine if one.prefill_worker} - whole
    return _Parts(workers - len(decoding - prefilling), workers - len(prefilling - decoding))


def _computed(fine: Iterable[Record]) -> Counter[str]:
    """Uncached prompt tokens, by the worker that computed them."""
    tokens: Counter[str] = Counter()
    for one in fine:
        tokens[one.prefill_worker or one.worker] += one.prompt_tokens - one.cached_tokens
    return tokens


WINDOWS = 24
"""The most windows of a run; fewer where a window would have less than two requests for each worker."""


def balance(records: Sequence[Record], workers: int) -> list[tuple[float, float]]:
    """The windows of a run: the start of each, and the imbalance of uncached prompt tokens arriving in it. There are
    no windows where `workers` is 0: it is not known which served a request."""
    if not workers:
        return []
    fine = [one for one in records if not one.error]
    windows = max(1, min(WINDOWS, len(fine) // (2 * workers)))
    width = max((one.at for one in fine), default=0.0) / windows or 1.0
    within: list[list[Record]] = [[] for _ in range(windows)]
    for one in fine:
        within[min(windows - 1, int(one.at / width))].append(one)
    prefilling, computed = _parts(fine, workers).prefilling, map(_computed, within)
    return [(index * width, imbalance(tokens, prefilling)) for index, tokens in enumerate(computed) if tokens.total()]


def summarise(records: Sequence[Record], workers: int, ttft_slo: float | None = None) -> Summary:
    """The records of one mode, run against `workers` workers (0: it is not known which served a request)."""
    fine = [one for one in records if not one.error]
    prefilling, answering = _parts(fine, workers)
    prompt = sum(one.prompt_tokens for one in fine)
    # Failed ones count: else a fleet that breaks down half-way would have answered as many a second as one that lasts.
    duration = max((one.at + one.lag + (one.e2e or 0.0) for one in records), default=math.nan)
    in_time = math.nan if ttft_slo is None else sum(one.ttft is not None and one.ttft <= ttft_slo for one in fine)
    return Summary(
        requests=len(records),
        errors=len(records) - len(fine),
        ttft=spread(one.ttft for one in fine),
        tpot=spread(one.tpot for one in fine),
        e2e=spread(one.e2e for one in fine),
        hit_ratio=sum(one.cached_tokens for one in fine) / prompt if prompt else math.nan,
        imbalance_prefill=imbalance(_computed(fine), prefilling),
        imbalance_requests=imbalance(Counter(one.worker for one in fine), answering),
        duration=duration,
        output_tokens_per_second=sum(one.output_tokens for one in fine) / duration if duration > 0 else 0.0,
        requests_per_second=len(fine) / duration if duration > 0 else 0.0,
        lag_p99=percentile(sorted(one.lag for one in records), 0.99),
        in_time=in_time / len(records) if records else math.nan,
        goodput=in_time / duration if duration > 0 else 0.0 * in_time,  # NaN without an objective
    )


NOTHING = summarise((), 1)
"""The summary of a run that was not made."""
