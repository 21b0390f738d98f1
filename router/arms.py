"""Live A/B tests: which arm, and so which policy, a request belongs to, and the results of each arm.

Arms share everything but the policy: index, load, latency model, queue, workers. So requests of one arm meet the caches
and queues that those of the other have left, and the test compares policies within one fleet.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.arm_spec import ArmSpec, read_arms
from router.http.messages import ARM, RequestHead, first, header_lines
from router.metrics.tallies import Histogram, counter_family, histogram_family
from router.policies import make_policy
from router.proxy.outcome import End, Outcome
from router.scheduling.decision import Decision, Policy, Uniform
from router.settings import Settings, SettingsError

SECONDS = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 1.5, 2.2, 3.3, 4.7, 6.8))[:-5]
"""Bounds of the histograms, 1 ms to 1000 s: narrower than the workers', since deviations are read from them. Beyond the
last a quantile is a guess, and answers of thousands of tokens take minutes."""


class ArmTally:
    """The results of one arm."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter(dict.fromkeys(get_args(End), 0))
        self.prompt_tokens = 0
        self.predicted_tokens = 0
        self.reported_prompt_tokens = 0
        self.reported_tokens = 0
        self.first_byte = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)

    def routed(self, decision: Decision) -> None:
        self.prompt_tokens += decision.prompt_tokens
        self.predicted_tokens += decision.overlap_tokens or 0

    def finished(self, outcome: Outcome) -> None:
        """Times are those of complete, successful answers: the time until a failure says little about a policy."""
        self.ends[outcome.end] += 1
        if outcome.end != "complete" or outcome.status >= 400 or outcome.first_byte is None:
            return
        self.first_byte.observe(outcome.first_byte)
        self.duration.observe(outcome.duration)
        if outcome.prompt_tokens is not None and outcome.cached_tokens is not None:
            self.reported_prompt_tokens += outcome.prompt_tokens
            self.reported_tokens += outcome.cached_tokens


class Arm:
    __slots__ = ("answer_lines", "name", "policy", "tally")

    def __init__(self, name: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.tally = ArmTally()
        self.answer_lines = header_lines([(ARM, name.encode())])


class Arms(Collector):
    """Assigns requests to arms; shows their tallies to Prometheus."""

    def __init__(self, arms: Sequence[Arm], weights: Sequence[float], sticky: bytes | None, random: Uniform) -> None:
        """`sticky`: requests with the same value of this header go to the same arm."""
        self._arms = arms
        self._sums = list(accumulate(weights))
        self._sticky = sticky
        self._random = random

    def assign(self, head: RequestHead) -> Arm:
        value = first(head.headers, self._sticky) if self._sticky else None
        point = _point(value) if value else self._random.random()  # an empty one names no session
        place = bisect_right(self._sums, point * self._sums[-1])
        return self._arms[min(place, len(self._arms) - 1)]  # rounding may leave the point on the upper edge

    def collect(self) -> Iterator[Metric]:
        ends = (((arm.name, end), count) for arm in self._arms for end, count in arm.tally.ends.items())
        yield counter_family("router_ab_requests", "Requests by arm and how they ended.", ("arm", "end"), ends)
        for name, text, figure in _COUNTERS:
            counts = (((arm.name,), getattr(arm.tally, figure)) for arm in self._arms)
            yield counter_family(name, text, ("arm",), counts)
        for name, text, figure in _HISTOGRAMS:
            histograms = (((arm.name,), getattr(arm.tally, figure)) for arm in self._arms)
            yield histogram_family(name, text, ("arm",), histograms)


_COUNTERS = (
    ("router_ab_prompt_tokens", "Prompt tokens routed by the arm, where they were counted.", "prompt_tokens"),
    (
        "router_ab_predicted_cached_tokens",
        "Prompt tokens expected to be cached where the arm sent them.",
        "predicted_tokens",
    ),
    (
        "router_ab_reported_prompt_tokens",
        "Prompt tokens of answers whose engine reported cached ones.",
        "reported_prompt_tokens",
    ),
    ("router_ab_reported_cached_tokens", "Of these, tokens reported as cached.", "reported_tokens"),
)
_HISTOGRAMS = (
    ("router_ab_first_byte_seconds", "From a request read to its answer's first byte, by arm.", "first_byte"),
    ("router_ab_request_seconds", "From a request read to its answer's end, by arm.", "duration"),
)


def _point(value: bytes) -> float:
    """A number from 0 to 1, the same in every process, which Python's own hash is not."""
    return int.from_bytes(hashlib.blake2b(value, digest_size=6).digest()) / 2**48


def make_arms(settings: Settings) -> Arms | None:
    """None if there is no test. Raises SettingsError for one that cannot be run."""
    if settings.ab is None:
        if settings.ab_sticky is not None:
            raise SettingsError("--ab-sticky belongs to --ab, which names the arms; add it, or leave both out.")
        return None
    if settings.router_mode == "direct":
        raise SettingsError("--ab says how workers are chosen, but with --router-mode direct requests name theirs.")
    specs = read_arms(settings.ab)
    arms = [Arm(spec.name, _policy(settings, spec)) for spec in specs]
    sticky = settings.ab_sticky.lower().encode() if settings.ab_sticky else None
    # Not the draw of the scheduler: with a seed, who gets an arm would decide on the worker too.
    draw = random.Random(None if settings.seed is None else f"arms {settings.seed}")  # noqa: S311 -- not for secrets
    return Arms(arms, [spec.weight for spec in specs], sticky, draw)


def reads_prompts(settings: Settings) -> bool:
    """Whether any policy reads prompts. If so, the prompts of all arms are read, so that all cost the same."""
    if settings.ab is None:
        return settings.router_mode == "kv"
    return any(spec.mode == "kv" for spec in read_arms(settings.ab))


def follows_events(settings: Settings) -> bool:
    """Whether KV events are of use: only to know where a prompt's prefix is. With short answers, reading them costs
    more than all else that is done for a request that is routed in turn."""
    return settings.kv_events and reads_prompts(settings)


def reads_engine_events(settings: Settings) -> bool:
    """Whether the router itself reads them from the engines' sockets, and not what publishers make of them."""
    return follows_events(settings) and settings.event_plane == "local"


def check_mode(settings: Settings) -> None:
    """Raises SettingsError for a flag that only mode kv heeds, if no prompt is routed by it."""
    if reads_prompts(settings):
        return
    stated = {
        "--store": settings.store is not None,
        "--send-token-ids": settings.send_token_ids,
        "--ttft-slo": settings.ttft_slo is not None,
        "--tbt-slo": settings.tbt_slo is not None,
        "--slo-action": settings.slo_action != "reject",
    }
    instead = "an --ab without an arm of it" if settings.router_mode == "kv" else settings.router_mode
    for flag in (flag for flag, is_stated in stated.items() if is_stated):
        raise SettingsError(f"{flag} belongs to --router-mode kv, not to {instead}; take kv, or leave {flag} out.")


def _policy(settings: Settings, spec: ArmSpec) -> Policy:
    weight = settings.kv_overlap_score_weight if spec.policy in {None, "overlap"} else None
    policy = spec.policy or settings.kv_policy
    told = replace(settings, router_mode=spec.mode, kv_policy=policy, kv_overlap_score_weight=weight)
    try:
        return make_policy(told)
    except SettingsError as error:
        raise SettingsError(f"--ab: the arm {spec.name}: {error}") from None
