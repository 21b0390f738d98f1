"""Requests that only decode are seldom looked at, and nothing that anybody sees is different for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim.decoding import Decoding
from engines.sim.request import Request, make_request
from engines.sim.scheduler import Scheduler
from engines.sim.timing import StepTiming

BLOCK, EVERY = 4, 3


def engine(every: int, blocks: int, budget: int, *, at_finish: bool) -> Scheduler:
    return Scheduler(
        cache_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        timing=StepTiming(),
        answers=range(100, 140),
        decode_blocks_at_finish=at_finish,
        emit_every=every,
    )


def told(engine: Scheduler, seed: int) -> list[Any]:
    """All that can be seen of a run of random requests, some of them dropped again."""
    seen: list[Any] = []
    rng, now = random.Random(seed), 0.0
    for number in range(40):
        if rng.random() < 0.6:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            engine.add(make_request(str(number), tokens, rng.randint(1, 25), BLOCK), now)
        if rng.random() < 0.1:
            seen.append(engine.abort(str(rng.randrange(number + 1))))
        for _ in range(rng.randrange(6) if number < 39 else 1000):
            if not engine.busy:
                break
            outcome = engine.step(now)
            now += outcome.duration
            heard = [one for one in outcome.emitted if heard_of(one.request, one.position)]
            seen.append((outcome.duration, [(one.request.request_id, one.position) for one in heard]))
            seen.append(([(one.request_id, one.tokens) for one in outcome.finished], outcome.events))
            seen.append((vars(engine.counters).copy(), engine.gaps.copy()))
            engine.cache.check_integrity()
    assert not engine.busy
    return seen


def heard_of(request: Request, position: int) -> bool:
    return position % EVERY == 0 or position + 1 == request.max_tokens


@given(seed=st.integers(0, 10_000), blocks=st.integers(14, 60), budget=st.integers(4, 40), at_finish=st.booleans())
def test_it_is_exactly_as_if_each_were_looked_at(seed: int, blocks: int, budget: int, at_finish: bool) -> None:
    apart = engine(EVERY, blocks, budget, at_finish=at_finish)
    assert told(apart, seed) == told(engine(1, blocks, budget, at_finish=at_finish), seed)


def test_most_steps_look_at_nobody() -> None:
    decoding = Decoding(16, 16, range(50))
    request = make_request("a", [1] * 20, 100, 16)
    request.computed = 20
    request.tokens.append(0)
    decoding.keep(request)
    looks = []
    for step in range(60):
        due = decoding.due()
        looks += [step] * len(due)
        decoding.advance()
        for one in due:
            one.computed += 1
            one.tokens.append(7)
            decoding.keep(one)
    # A block fills with its 16th token, the next begins with the one after, and somebody hears of every 16th.
    assert looks == [11, 12, 15, 27, 28, 31, 43, 44, 47, 59]
    assert decoding.context == 20 + 60 + 1


@pytest.mark.parametrize("dropped", [False, True])
def test_counts_are_right_when_they_leave(dropped: bool) -> None:
    decoding = Decoding(16, 16, range(50))
    request = make_request("a", [1] * 20, 100, 16)
    request.computed = 20
    request.tokens.append(0)
    decoding.keep(request)
    for _ in range(5):
        assert decoding.due() == []
        decoding.advance()
    if dropped:
        decoding.leave(request)
    else:
        decoding.dissolve()
        assert (request.computed, len(request.tokens)) == (25, 26)
    assert (len(decoding), decoding.context) == (0, 0)
    decoding.leave(request)
