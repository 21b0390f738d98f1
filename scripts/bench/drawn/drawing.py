"""Draws a workload and a fleet for it. Ranges span what people report, from chats to documents and from slow models to
quick ones; whatever is a size or a rate is drawn evenly on a logarithmic scale (pure)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, Literal

from engines.sim.timing import StepTiming
from router.ab.trace import Row
from router.simulation.fleet import FleetSettings
from router.simulation.traffic import NOTHING, Common, Drawn, Sessions, Shape, Source, bursts, poisson

_LONGEST = 90_000
"""Tokens of a conversation, which every cache below can hold."""

Serving = Literal["whole", "parts", "store"]
"""Requests go whole to a worker; or their prompts to some, and their answers to others; or all share a store."""


def draw(number: int, requests: int, serving: Serving = "whole") -> tuple[list[Row], FleetSettings]:
    """The same for the same number: traffic at less than the fleet's capacity, as far as that can be told, and the
    fleet. However it serves, the traffic is the same, and so are the workers but for their number."""
    rng = random.Random(number)
    fleet = _fleet(rng)
    kinds = rng.choice([1, 1, 2, 3])
    parts = [_kind(rng, fleet, kinds) for _ in range(kinds)]
    return _first(requests, number, parts), _FLEETS[serving](rng, fleet)


def _in_parts(rng: random.Random, fleet: FleetSettings) -> FleetSettings:
    workers = max(4, fleet.workers)
    prefill = round(workers * rng.uniform(0.25, 0.75))
    return fleet._replace(workers=workers, prefill=prefill, decode=workers - prefill, push=rng.random() < 0.5)


def _with_store(rng: random.Random, fleet: FleetSettings) -> FleetSettings:
    size = fleet.workers * fleet.cache_tokens * rng.choice([1, 4])
    return fleet._replace(store_tokens=size, store_gb_s=_even(rng, 2, 40))


_FLEETS: Final[dict[Serving, Callable[[random.Random, FleetSettings], FleetSettings]]] = {
    "whole": lambda _, fleet: fleet,
    "parts": _in_parts,
    "store": _with_store,
}


def _first(requests: int, seed: int, parts: list[Sessions]) -> list[Row]:
    seconds, rows = 60.0, list[Row]()
    while len(rows) < requests:
        source, seconds = Source(seed), 2 * seconds
        rows = sorted((row for part in parts for row in part(source, seconds)), key=lambda row: row.timestamp)
    return rows[:requests]


def _fleet(rng: random.Random) -> FleetSettings:
    workers = rng.choice([2, 3, 4, 6, 8, 8, 12, 16, 32])
    mixed = rng.random() < 0.25
    return FleetSettings(
        workers=workers,
        cache_tokens=rng.choice([131_072, 262_144, 524_288, 1_048_576]),
        block_size=rng.choice([16, 32, 64]),
        slow={worker: rng.choice([1.5, 2.0, 3.0]) for worker in range(workers) if mixed and rng.random() < 0.25},
        timing=StepTiming(
            base_s=_even(rng, 0.002, 0.03),
            prefill_tokens_per_s=_even(rng, 4_000, 80_000),
            attention_s_per_pair=_even(rng, 2e-10, 5e-9),
            decode_s_per_sequence=_even(rng, 2e-5, 5e-4),
            kv_read_s_per_token=_even(rng, 1e-8, 1e-7),
        ),
        max_num_batched_tokens=rng.choice([2_048, 8_192, 16_384]),
    )


def _kind(rng: random.Random, fleet: FleetSettings, kinds: int) -> Sessions:
    """One of so many kinds of traffic, each with its share of the fleet."""
    turns = rng.choice([1.0, 1.0, _even(rng, 1.5, 20)])
    shape = Shape(
        opening=Drawn(_even(rng, 60, 20_000), rng.uniform(0.2, 1.3), 10, 60_000),
        answer=Drawn(_even(rng, 10, 1_500), rng.uniform(0.2, 1.0), 4, 6_000),
        turns=Drawn(turns, 0.5 if turns > 1 else 0.0, 1, 60),
        turn=Drawn(_even(rng, 20, 2_000), rng.uniform(0.3, 1.2), 5, 8_000),
        pause=Drawn(_even(rng, 0.5, 20), 0.8, 0.1, 60),
        limit=_LONGEST,
    )
    seconds = turns * _seconds(shape, fleet.timing)
    return Sessions(0.3 * fleet.workers / kinds / seconds, shape, _common(rng), rng.choice([poisson, poisson, bursts]))


def _seconds(shape: Shape, timing: StepTiming) -> float:
    """Of a worker, roughly, for one request whose answer is decoded beside 15 others."""
    token = timing.base_s / 16 + timing.decode_s_per_sequence
    return timing.base_s + shape.opening.median / timing.prefill_tokens_per_s + shape.answer.median * token


def _common(rng: random.Random) -> Common:
    """What prompts open with, in blocks of 512 tokens: nothing, one text, some, or very many."""
    several = Common(rng.randint(3, 40), (rng.randint(1, 6), rng.randint(7, 30)), rng.uniform(0.0, 1.4))
    many = Common(rng.randint(100, 2_000), (1, rng.randint(3, 20)), rng.uniform(0.5, 1.2))
    length = rng.randint(1, 16)
    return rng.choice([NOTHING, Common(1, (length, length)), several, many])


def _even(rng: random.Random, low: float, high: float) -> float:
    """On a logarithmic scale."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))
