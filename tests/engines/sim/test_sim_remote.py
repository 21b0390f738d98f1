"""Prompts whose KV comes from another worker, and blocks that outlast their request, step by step."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim.cache import CacheEvent, Cleared, Stored
from engines.sim.rank import Rank
from engines.sim.request import Request, make_request
from engines.sim.scheduler import Scheduler, StepOutcome
from engines.sim.timing import StepTiming
from router.simulation.timeline import Timeline

BLOCK = 4
UNIT = StepTiming(
    base_s=1.0, prefill_tokens_per_s=1e9, attention_s_per_pair=0, decode_s_per_sequence=0, kv_read_s_per_token=0
)


def scheduler(blocks: int = 100, *, budget: int = 16, seqs: int = 8, every: int = 1) -> Scheduler:
    return Scheduler(
        cache_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        timing=UNIT,
        answers=range(1000, 1100),
        emit_every=every,
    )


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def remote(name: str, tokens: list[int], max_tokens: int = 2) -> Request:
    return make_request(name, list(tokens), max_tokens, BLOCK, remote=True)


def plain(name: str, tokens: list[int], max_tokens: int = 1, keep: bool = False) -> Request:
    return make_request(name, list(tokens), max_tokens, BLOCK, keep=keep)


def run(engine: Scheduler) -> list[StepOutcome]:
    outcomes: list[StepOutcome] = []
    while engine.busy:
        outcomes.append(engine.step(float(len(outcomes))))
        engine.cache.check_integrity()
        assert len(outcomes) < 1000
    return outcomes


def loads(outcome: StepOutcome) -> list[tuple[str, int]]:
    return [(request.request_id, tokens) for request, tokens in outcome.loading]


def stored(outcome: StepOutcome) -> int:
    return sum(len(event.hashes) for event in outcome.events if isinstance(event, Stored))


def test_a_remote_prompt_is_loaded_and_only_its_last_token_computed() -> None:
    engine = scheduler()
    asked = remote("a", prompt(1, 33), max_tokens=3)
    engine.add(asked, 0.0)
    outcome = engine.step(0.0)
    assert (loads(outcome), outcome.duration, outcome.emitted, outcome.events) == ([("a", 33)], 0.0, [], [])
    assert not engine.busy
    assert engine.cache.free_blocks == 100 - 9
    assert engine.loaded("a")
    first, *rest = run(engine)
    assert stored(first) == 8
    assert [outcome.emitted[0].position for outcome in (first, *rest)] == [0, 1, 2]
    assert engine.counters.prefill_tokens == 1
    assert engine.counters.transferred_tokens == 33
    assert engine.cache.free_blocks == 100


def test_what_a_remote_request_answers_and_names_is_what_a_computed_one_does() -> None:
    here, there = scheduler(), scheduler()
    computed, fetched = plain("a", prompt(1, 33), 5), remote("a", prompt(1, 33), 5)
    here.add(computed, 0.0)
    run(here)
    there.add(fetched, 0.0)
    there.step(0.0)
    there.loaded("a")
    run(there)
    assert fetched.tokens == computed.tokens
    assert there.cache.find(computed.hashes) == fetched.blocks[: len(computed.hashes)]


@pytest.mark.parametrize(("known", "to_fetch"), [(0, 33), (4, 29), (16, 17), (31, 5), (32, 0), (33, 0)])
def test_only_what_the_own_cache_lacks_is_fetched(known: int, to_fetch: int) -> None:
    engine = scheduler(budget=100)
    if known:
        engine.add(plain("before", prompt(1, known)), 0.0)
        run(engine)
    asked = remote("a", prompt(1, 33))
    engine.add(asked, 0.0)
    outcome = engine.step(0.0)
    assert loads(outcome) == [("a", to_fetch)]
    assert len(outcome.emitted) == (not to_fetch)
    assert engine.loaded("a") == bool(to_fetch)
    run(engine)
    assert asked.generated == 2
    assert asked.cached_tokens == 33 - (to_fetch or 1)
    assert engine.counters.transferred_tokens == to_fetch


@pytest.mark.parametrize(("there", "computed"), [(0, 33), (16, 17), (32, 1), (33, 1)])
def test_the_rest_of_what_is_there_is_computed(there: int, computed: int) -> None:
    engine = scheduler()
    engine.add(remote("a", prompt(1, 33)), 0.0)
    engine.step(0.0)
    engine.loaded("a", there)
    outcomes = run(engine)
    assert engine.counters.prefill_tokens == computed
    assert engine.counters.transferred_tokens == there
    assert sum(stored(outcome) for outcome in outcomes) == 8


def test_loading_takes_a_seat_but_no_tokens_of_the_budget() -> None:
    engine = scheduler(seqs=2, budget=8)
    for name, request in {"a": remote("a", prompt(1, 30)), "b": plain("b", prompt(2, 8))}.items():
        assert request.request_id == name
        engine.add(request, 0.0)
    engine.add(plain("c", prompt(3, 4)), 0.0)
    outcome = engine.step(0.0)
    assert loads(outcome) == [("a", 30)]
    assert [each.request.request_id for each in outcome.emitted] == ["b"]
    outcome = engine.step(1.0)
    assert [each.request.request_id for each in outcome.emitted] == ["c"]
    assert not engine.busy


def test_a_loaded_request_goes_on_beside_a_long_prefill() -> None:
    engine = scheduler(budget=8)
    engine.add(remote("a", prompt(1, 30)), 0.0)
    engine.step(0.0)
    engine.add(plain("b", prompt(2, 40)), 0.0)
    engine.step(1.0)
    engine.loaded("a")
    assert [each.request.request_id for each in engine.step(2.0).emitted] == ["a"]


@pytest.mark.parametrize("holder", ["loading", "kept"])
def test_nothing_spins_while_blocks_are_held(holder: str) -> None:
    engine = scheduler(blocks=10)
    engine.add(remote("a", prompt(1, 30), 1) if holder == "loading" else plain("a", prompt(1, 30), keep=True), 0.0)
    run(engine)
    engine.add(plain("b", prompt(2, 20)), 1.0)
    assert not run(engine)[0].emitted
    assert (engine.busy, len(engine.waiting)) == (False, 1)
    assert engine.abort("a") if holder == "loading" else engine.let_go("a")
    assert [each.request_id for each in run(engine)[-1].finished] == ["b"]


def test_nothing_spins_while_all_seats_load() -> None:
    engine = scheduler(seqs=1)
    engine.add(remote("a", prompt(1, 30)), 0.0)
    engine.add(plain("b", prompt(2, 20)), 0.0)
    assert len(run(engine)) == 1
    engine.loaded("a")
    run(engine)
    assert engine.counters.finished_requests == 2


def test_preemption_takes_no_loading_request_and_recomputes_a_loaded_one() -> None:
    engine = scheduler(blocks=8, budget=100)
    engine.add(plain("a", prompt(1, 7), max_tokens=12), 0.0)
    engine.step(0.0)
    late = remote("b", prompt(2, 15), max_tokens=3)
    engine.add(late, 0.0)
    engine.add(remote("c", prompt(3, 7)), 0.0)
    outcomes = [engine.step(1.0)]
    engine.loaded("b")
    outcomes += run(engine)
    assert engine.counters.preemptions > 0
    assert [each.request_id for outcome in outcomes for each in outcome.finished] == ["a", "b"]
    assert list(engine.loading) == ["c"]
    assert [load for outcome in outcomes for load in loads(outcome)] == [("b", 15), ("c", 7)]


@pytest.mark.parametrize("stage", ["waiting", "loading", "running", "kept"])
def test_abort_in_every_state(stage: str) -> None:
    engine = scheduler()
    asked = make_request("a", prompt(1, 30), 2, BLOCK, remote=True, keep=True)
    engine.add(asked, 0.0)
    if stage != "waiting":
        engine.step(0.0)
    if stage in {"running", "kept"}:
        engine.loaded("a")
        engine.step(1.0)
    if stage == "kept":
        run(engine)
    assert engine.abort("a") == (stage != "kept")
    assert (engine.kept, len(engine.loading), engine.busy) == (stage == "kept", 0, False)
    assert engine.let_go("a") == (stage == "kept")
    assert not engine.let_go("a")
    assert engine.cache.free_blocks == 100


def test_kept_blocks_stay_and_their_seat_is_free() -> None:
    engine = scheduler(seqs=1)
    engine.add(plain("a", prompt(1, 14), keep=True), 0.0)
    run(engine)
    assert (engine.kept, engine.cache.free_blocks, engine.busy) == (1, 96, False)
    assert not engine.cache.clear()
    with pytest.raises(ValueError, match="already"):
        engine.add(plain("a", prompt(1, 4)), 0.0)
    engine.add(plain("b", prompt(1, 14)), 0.0)
    run(engine)
    engine.let_go("a")
    assert (engine.kept, engine.cache.free_blocks) == (0, 100)


@pytest.mark.parametrize("every", [1, 16])
def test_gaps_are_steps_of_those_that_had_a_token(every: int) -> None:
    engine = scheduler(every=every)
    engine.add(plain("a", prompt(1, 4), max_tokens=9), 0.0)
    engine.step(0.0)
    engine.add(remote("b", prompt(2, 9), max_tokens=3), 0.0)
    engine.step(0.0)
    engine.slowdown = 2.0
    engine.step(0.0)
    engine.loaded("b")
    run(engine)
    assert engine.gaps == Counter({1.0: 1, 2.0: 7 + 2})


@given(seed=st.integers(0, 10_000), blocks=st.integers(14, 30), budget=st.sampled_from([4, 16]))
def test_gaps_are_the_times_between_tokens_whoever_is_preempted(seed: int, blocks: int, budget: int) -> None:
    """Where a step's tokens are too few for all that decode, too."""
    rng, engine, now = random.Random(seed), scheduler(blocks, budget=budget), 0.0
    for number in range(20):
        engine.add(plain(str(number), prompt(number, rng.randint(1, 20)), max_tokens=rng.randint(1, 20)), now)
    last, gaps = dict[Request, float](), Counter[float]()
    while engine.busy:
        engine.slowdown = rng.choice([1.0, 2.0])
        outcome = engine.step(now)
        now += outcome.duration
        gaps += Counter(round(now - last[each.request], 4) for each in outcome.emitted if each.position)
        last |= {each.request: now for each in outcome.emitted}
    assert engine.gaps == gaps
    assert not engine._stalled


@given(seed=st.integers(0, 10_000), blocks=st.integers(14, 60), every=st.sampled_from([1, 3]))
def test_blocks_are_held_by_those_that_are_there(seed: int, blocks: int, every: int) -> None:
    rng, engine, everybody = random.Random(seed), scheduler(blocks, every=every), dict[str, Request]()
    for number in range(60):
        name, tokens = str(number), [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        request = make_request(
            name, tokens, rng.randint(1, 20), BLOCK, remote=rng.random() < 0.5, keep=rng.random() < 0.3
        )
        everybody[name] = request
        engine.add(request, 0.0)
        act(engine, rng, number)
        check_held(engine, everybody)
    settle(engine)
    assert (engine.kept, engine.cache.free_blocks) == (0, blocks)
    assert engine.counters.finished_requests + engine.counters.aborted_requests == 60
    had_a_token = engine.counters.generated_tokens - engine.counters.first_tokens
    assert sum(engine.gaps.values()) == had_a_token


def act(engine: Scheduler, rng: random.Random, newest: int) -> None:
    for _ in range(rng.randrange(5)):
        if engine.busy:
            engine.step(0.0)
    name = str(rng.randint(0, newest))
    chance = rng.random()
    if chance < 0.2:
        engine.abort(name)
    elif chance < 0.4:
        engine.let_go(name)
    elif engine.loading:
        loading = rng.choice(list(engine.loading.values()))
        engine.loaded(loading.request_id, rng.choice([None, rng.randint(0, loading.prompt_length)]))


def check_held(engine: Scheduler, everybody: dict[str, Request]) -> None:
    engine.cache.check_integrity()
    live = [*engine.running, *engine.loading.values(), *engine._kept.values()]
    held = {block for request in live for block in request.blocks}
    assert len(held) == engine.cache.capacity - engine.cache.free_blocks
    for request in engine.loading.values():
        assert len(request.blocks) == engine.blocks_for(request.prompt_length)


def settle(engine: Scheduler) -> None:
    """Until nobody is there: everything is loaded, and let go."""
    for _ in range(2000):
        if engine.busy:
            engine.step(0.0)
        for name in list(engine.loading):
            engine.loaded(name)
        for name in list(engine._kept):
            engine.let_go(name)
        if not (engine.running or engine.waiting or engine.loading):
            return
    raise AssertionError(f"{engine!r} does not come to an end")


class Heard:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.tokens: list[tuple[int, float]] = []

    def on_token(self, position: int, finished: bool) -> None:
        self.tokens.append((position, round(self.timeline.now(), 3)))


def ignore(events: list[CacheEvent]) -> None:
    pass


@pytest.mark.parametrize(
    ("delay", "times"), [(0.0, [(0, 1.0), (1, 2.0)]), (0.5, [(0, 1.5), (1, 2.5)]), (7.0, [(0, 8.0), (1, 9.0)])]
)
def test_a_rank_tells_what_to_fetch_and_goes_on_when_it_is_there(delay: float, times: list[tuple[int, float]]) -> None:
    timeline, told = Timeline(), list[tuple[str, int]]()

    def fetch(request: Request, tokens: int) -> None:
        told.append((request.request_id, tokens))
        if delay:
            timeline.call_at(timeline.now() + delay, rank.loaded, request.request_id)
        else:
            rank.loaded(request.request_id)  # while the step is still being told of

    rank = Rank(scheduler(), timeline, timeline, ignore, fetch)
    heard = Heard(timeline)
    rank.submit(remote("a", prompt(1, 33)), heard)
    timeline.run(math.inf)
    assert told == [("a", 33)]
    assert heard.tokens == times
    rank.submit(remote("b", prompt(1, 33)), Heard(timeline))
    timeline.run(math.inf)
    assert told == [("a", 33), ("b", 0)]


def test_a_rank_tells_nothing_of_a_dropped_request_and_resumes_when_blocks_come_free() -> None:
    timeline, told = Timeline(), list[str]()
    rank = Rank(scheduler(blocks=10), timeline, timeline, ignore, lambda request, _: told.append(request.request_id))
    rank.submit(remote("a", prompt(1, 30)), Heard(timeline))
    rank.abort("a")
    rank.submit(plain("b", prompt(2, 30), keep=True), Heard(timeline))
    timeline.run(math.inf)
    waits = Heard(timeline)
    rank.submit(plain("c", prompt(3, 30)), waits)
    timeline.run(math.inf)
    assert (told, waits.tokens) == ([], [])
    rank.let_go("b")
    timeline.run(math.inf)
    assert len(waits.tokens) == 1


def test_a_rank_keeps_nothing_of_what_is_dropped_in_its_last_step() -> None:
    timeline = Timeline()
    rank = Rank(scheduler(), timeline, timeline, ignore)
    rank.submit(plain("a", prompt(1, 14), keep=True), Heard(timeline))
    rank.abort("a")
    assert (rank.scheduler.kept, rank.scheduler.cache.free_blocks) == (0, 100)


def test_a_rank_is_not_cleared_in_the_last_step_of_what_it_computes() -> None:
    """The step's events are still to come, and would tell of blocks that are no more."""
    timeline, published = Timeline(), list[CacheEvent]()
    rank = Rank(scheduler(), timeline, timeline, published.extend)
    rank.submit(plain("a", prompt(1, 14)), Heard(timeline))
    assert (rank.reset_cache(publish_now=True), published) == (False, [])
    timeline.run(math.inf)
    assert rank.reset_cache(publish_now=True)
    assert [type(event) for event in published] == [Stored, Cleared]
    assert not rank.scheduler.cache.hashes


class Clock:
    """Ahead of the timers, as where a machine is busy."""

    moment = 0.0

    def now(self) -> float:
        return self.moment

    def loop_time(self, moment: float) -> float:
        return moment


def test_a_first_token_takes_its_step_at_least_however_late_timers_are() -> None:
    timeline, clock = Timeline(), Clock()
    rank = Rank(scheduler(), timeline, clock, ignore)
    rank.submit(plain("a", prompt(1, 4)), Heard(timeline))
    clock.moment = 5.0  # four seconds after the step's end
    rank.submit(plain("b", prompt(2, 4)), Heard(timeline))
    timeline.run(math.inf)
    assert rank.scheduler.counters.first_token_seconds == pytest.approx(1.0 + 1.0)
