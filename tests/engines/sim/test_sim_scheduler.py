"""Continuous batching, step by step, with a clock that is a number."""

from __future__ import annotations

import random

import pytest

from engines.sim.cache import Removed, Stored
from engines.sim.request import Request, make_request
from engines.sim.scheduler import Scheduler, StepOutcome
from engines.sim.timing import StepTiming
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import PLAIN, Namespace

BLOCK = 4
UNIT = StepTiming(
    base_s=1.0, prefill_tokens_per_s=1e9, attention_s_per_pair=0, decode_s_per_sequence=0, kv_read_s_per_token=0
)
ANSWERS = list(range(1000, 1100))


def scheduler(
    blocks: int = 100, *, budget: int = 16, seqs: int = 8, at_finish: bool = False, max_loras: int | None = None
) -> Scheduler:
    return Scheduler(
        cache_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        timing=UNIT,
        answers=ANSWERS,
        decode_blocks_at_finish=at_finish,
        max_loras=max_loras,
    )


def prompt(seed: int, length: int) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def request(name: str, tokens: list[int], max_tokens: int = 1, namespace: Namespace = PLAIN) -> Request:
    return make_request(name, list(tokens), max_tokens, BLOCK, namespace)


def run(engine: Scheduler, limit: int = 1000) -> list[StepOutcome]:
    outcomes, now = [], 0.0
    while engine.busy:
        outcomes.append(engine.step(now))
        now += outcomes[-1].duration
        engine.cache.check_integrity()
        assert len(outcomes) < limit
    return outcomes


def names(outcome: StepOutcome) -> list[str]:
    return [emitted.request.request_id for emitted in outcome.emitted]


def test_a_short_prompt_takes_one_step_for_its_first_token() -> None:
    engine = scheduler()
    engine.add(request("a", prompt(1, 6), max_tokens=3), 0.0)
    outcomes = run(engine)
    assert [names(outcome) for outcome in outcomes] == [["a"], ["a"], ["a"]]
    assert [outcome.emitted[0].position for outcome in outcomes] == [0, 1, 2]
    assert [len(outcome.finished) for outcome in outcomes] == [0, 0, 1]
    assert outcomes[0].duration == pytest.approx(1.0)
    assert engine.cache.free_blocks == 100


@pytest.mark.parametrize(("length", "steps"), [(16, 1), (17, 2), (32, 2), (40, 3)])
def test_a_prompt_is_prefilled_in_chunks_of_the_budget(length: int, steps: int) -> None:
    engine = scheduler(budget=16)
    engine.add(request("a", prompt(1, length)), 0.0)
    outcomes = run(engine)
    assert [len(outcome.emitted) for outcome in outcomes] == [0] * (steps - 1) + [1]


def test_decodes_come_before_prefill_chunks() -> None:
    engine = scheduler(budget=16)
    engine.add(request("a", prompt(1, 4), max_tokens=10), 0.0)
    engine.step(0.0)
    engine.add(request("b", prompt(2, 31)), 1.0)
    assert names(engine.step(1.0)) == ["a"]
    assert engine.running[1].computed == 15  # one token of the budget went to the decode
    assert names(engine.step(2.0)) == ["a"]
    assert names(engine.step(3.0)) == ["a", "b"]


def test_seats_limit_what_runs() -> None:
    engine = scheduler(seqs=2, budget=100)
    for name in "abc":
        engine.add(request(name, prompt(ord(name), 4), max_tokens=2), 0.0)
    assert names(engine.step(0.0)) == ["a", "b"]
    assert len(engine.waiting) == 1
    assert names(engine.step(1.0)) == ["a", "b"]
    assert names(engine.step(2.0)) == ["c"]


def test_adapters_limit_what_runs_and_who_needs_another_is_overtaken() -> None:
    """As in vLLM 0.32: v1/core/sched/scheduler.py."""
    engine, adapters = scheduler(max_loras=2), {name: Namespace(name) for name in "xyz"}
    for number, (name, tokens) in enumerate([("x", 2), ("y", 3), ("z", 1), ("x", 2), ("z", 1)]):
        engine.add(request(f"{name}{number}", prompt(number, 3), tokens, adapters[name]), 0.0)
    engine.add(request("base", prompt(9, 3), 1), 0.0)
    assert [names(outcome) for outcome in run(engine)] == [
        ["x0", "y1", "x3", "base"],
        ["x0", "y1", "x3"],
        ["y1", "z2", "z4"],
    ]


def test_who_was_overtaken_for_want_of_an_adapter_keeps_its_place() -> None:
    engine = scheduler(max_loras=2, seqs=3)
    for number, (name, tokens) in enumerate([("x", 2), ("y", 3), ("z", 1), ("x", 2), ("z", 1)]):
        engine.add(request(f"{name}{number}", prompt(number, 3), tokens, Namespace(name)), 0.0)
    engine.add(request("base", prompt(9, 3), 1), 0.0)
    assert [names(outcome) for outcome in run(engine)][2:] == [["y1", "z2", "z4"], ["base"]]


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = scheduler(blocks=10, budget=100)
    engine.add(request("a", prompt(1, 23), max_tokens=2), 0.0)
    engine.add(request("b", prompt(2, 20), max_tokens=1), 0.0)
    assert names(engine.step(0.0)) == ["a"]
    assert names(engine.step(1.0)) == ["a"]  # finished at this step's end
    assert names(engine.step(2.0)) == ["b"]


def test_cached_blocks_that_nobody_uses_do_not_count_as_room() -> None:
    engine = scheduler(blocks=10, budget=100)
    engine.add(request("a", prompt(1, 16)), 0.0)
    run(engine)
    engine.add(request("b", prompt(2, 15), max_tokens=8), 1.0)  # 4 blocks; 6 stay free, 4 of them with a's prompt
    engine.step(1.0)
    engine.add(request("c", prompt(1, 16) + prompt(3, 10)), 2.0)  # 7 blocks
    assert names(engine.step(2.0)) == ["b"]
    assert [each.request_id for each in engine.waiting] == ["c"]
    run(engine)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 101.0), (2, 201.0)])
def test_a_prompt_costs_prefill_however_short(tokens: int, seconds: float) -> None:
    engine = Scheduler(
        cache_blocks=10,
        timing=StepTiming(
            base_s=1.0,
            prefill_tokens_per_s=0.01,
            attention_s_per_pair=0,
            decode_s_per_sequence=10.0,
            kv_read_s_per_token=0,
        ),
    )
    engine.add(request("a", prompt(1, tokens), max_tokens=2), 0.0)
    assert [outcome.duration for outcome in run(engine)] == [pytest.approx(seconds), pytest.approx(11.0)]


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="more blocks"):
        scheduler(blocks=2).add(request("a", prompt(1, 8), max_tokens=1), 0.0)


@pytest.mark.parametrize(("tokens", "max_tokens"), [([], 1), ([1], 0)])
def test_nothing_to_do_is_refused(tokens: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match="empty"):
        make_request("a", tokens, max_tokens, BLOCK)


def test_an_id_is_used_once_at_a_time() -> None:
    engine = scheduler()
    engine.add(request("a", prompt(1, 4)), 0.0)
    with pytest.raises(ValueError, match="already"):
        engine.add(request("a", prompt(2, 4)), 0.0)
    run(engine)
    engine.add(request("a", prompt(3, 4)), 0.0)


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (prompt(1, 10), 8),
        (prompt(1, 9), 8),
        (prompt(1, 8), 4),  # the last token is computed again, and with it its block
        (prompt(1, 6) + prompt(2, 6), 4),
        (prompt(2, 10), 0),
    ],
)
def test_cached_tokens(second: list[int], cached: int) -> None:
    engine = scheduler()
    engine.add(request("a", prompt(1, 10)), 0.0)
    run(engine)
    again = request("b", second)
    engine.add(again, 1.0)
    run(engine)
    assert again.cached_tokens == cached
    assert engine.counters.prefix_hits == cached
    assert engine.counters.prefix_queries == 10 + len(second)


def test_requests_of_one_step_share_a_prefix() -> None:
    engine = scheduler(budget=100)
    first, second = request("a", prompt(1, 12)), request("b", prompt(1, 12))
    for each in (first, second):
        engine.add(each, 0.0)
    engine.step(0.0)
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


@pytest.mark.parametrize("other", [Namespace("adapter"), Namespace(None, "salt"), Namespace("adapter", "salt")])
def test_namespaces_share_nothing_but_the_answer(other: Namespace) -> None:
    engine = scheduler()
    plain, apart = request("a", prompt(1, 10), 5), request("b", prompt(1, 10), 5, other)
    for each in (plain, apart):
        engine.add(each, 0.0)
        run(engine)
    assert apart.cached_tokens == 0
    assert apart.tokens == plain.tokens
    assert apart.hashes[0] == chain_hashes(pack_tokens(apart.tokens), BLOCK, root_hash(other))[0]


def test_the_next_turn_finds_the_answer() -> None:
    engine = scheduler()
    turn = request("a", prompt(1, 6), max_tokens=8)
    engine.add(turn, 0.0)
    run(engine)
    assert turn.tokens[6:] == [ANSWERS[(turn.answer_start + i) % 100] for i in range(8)]
    follow_up = request("b", turn.tokens + prompt(2, 3))
    engine.add(follow_up, 1.0)
    run(engine)
    assert follow_up.cached_tokens == 12  # 13 of the 14 tokens were computed


@pytest.mark.parametrize(("at_finish", "stored_by_step"), [(False, [1, 0, 1, 0, 0, 0]), (True, [1, 0, 0, 0, 0, 1])])
def test_when_decode_blocks_are_stored(at_finish: bool, stored_by_step: list[int]) -> None:
    engine = scheduler(at_finish=at_finish)
    engine.add(request("a", prompt(1, 6), max_tokens=6), 0.0)
    assert [len(outcome.events) for outcome in run(engine)] == stored_by_step


def test_stored_events_chain() -> None:
    engine = scheduler(budget=8)
    asked = request("a", prompt(1, 14), max_tokens=4, namespace=Namespace("adapter"))
    engine.add(asked, 0.0)
    events = [event for outcome in run(engine) for event in outcome.events]
    parent: int | None = None
    tokens: list[int] = []
    for event in events:
        assert isinstance(event, Stored)
        assert (event.parent, event.namespace) == (parent, Namespace("adapter"))
        parent = event.hashes[-1]
        tokens += event.tokens
    assert tokens == asked.tokens[:16]
    assert parent == chain_hashes(pack_tokens(tokens), BLOCK, root_hash(Namespace("adapter")))[-1]


def test_running_out_of_blocks_preempts_the_last_admitted() -> None:
    engine = scheduler(blocks=4, budget=100)
    first, second = request("a", prompt(1, 7), max_tokens=6), request("b", prompt(2, 7), max_tokens=3)
    for each in (first, second, request("c", prompt(3, 2))):
        engine.add(each, 0.0)
    assert names(engine.step(0.0)) == ["a", "b"]
    assert names(engine.step(1.0)) == ["a", "b"]
    outcome = engine.step(2.0)  # both need a third block
    assert names(outcome) == ["a"]
    assert [waiting.request_id for waiting in engine.waiting] == ["b", "c"]
    assert engine.counters.preemptions == 1
    assert any(isinstance(event, Removed) for event in outcome.events)
    rest = run(engine)
    assert [each.request_id for outcome in rest for each in outcome.finished] == ["a", "b", "c"]
    assert second.generated == 3
    assert second.tokens[:7] == prompt(2, 7)
    assert second.cached_tokens == 0  # of its first admission: the hit on what it had computed itself does not count
    assert engine.counters.prefix_queries == 16


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_frees_everything(steps: int) -> None:
    engine = scheduler(budget=16)
    engine.add(request("a", prompt(1, 24), max_tokens=9), 0.0)
    engine.add(request("b", prompt(2, 4), max_tokens=9), 0.0)
    for now in range(steps):
        engine.step(float(now))
    for name in "ab":
        assert engine.abort(name)
        assert not engine.abort(name)
    assert not engine.busy
    assert engine.cache.free_blocks == 100
    assert engine.counters.aborted_requests == 2
    engine.cache.check_integrity()


def test_slowdown_multiplies_time() -> None:
    engine = scheduler()
    engine.slowdown = 3.0
    engine.add(request("a", prompt(1, 4)), 0.0)
    assert engine.step(0.0).duration == pytest.approx(3.0)


def test_time_to_first_token_runs_from_arrival_to_the_steps_end() -> None:
    engine = scheduler()
    engine.add(request("a", prompt(1, 4)), 5.0)
    engine.step(7.0)
    assert engine.counters.first_token_seconds == pytest.approx(3.0)


def test_waiting_uncached_tokens() -> None:
    engine = scheduler(seqs=1)
    engine.add(request("a", prompt(1, 8), max_tokens=5), 0.0)
    engine.step(0.0)
    engine.add(request("b", prompt(1, 10)), 1.0)
    assert engine.waiting_uncached_tokens() == 2


@pytest.mark.parametrize("seed", range(3))
def test_everybody_finishes_under_pressure(seed: int) -> None:
    """Random arrivals and aborts on a cache that holds a few of them: answers do not depend on what was preempted."""
    chance = random.Random(seed)
    engine, alone = scheduler(blocks=24, budget=20, seqs=6), scheduler(blocks=400)
    asked: list[Request] = []
    now = 0.0
    for number in range(60):
        tokens = prompt(chance.randrange(4), chance.randrange(1, 40))
        asked.append(request(str(number), tokens, chance.randrange(1, 20)))
        engine.add(asked[-1], now)
        if chance.random() < 0.2:
            engine.abort(str(chance.randrange(number + 1)))
        for _ in range(chance.randrange(8)):
            now += engine.step(now).duration if engine.busy else 1.0
            engine.cache.check_integrity()
    run(engine)
    assert engine.counters.preemptions > 0
    assert engine.counters.finished_requests + engine.counters.aborted_requests == 60
    assert engine.cache.free_blocks == 24
    finished = [each for each in asked if each.finished]
    for each in finished:
        same = request("x", each.tokens[: each.prompt_length], each.max_tokens)
        alone.add(same, 0.0)
        run(alone)
        assert same.tokens == each.tokens


def test_eviction_takes_no_more_than_is_needed() -> None:
    engine = scheduler(blocks=20, budget=100)
    removed = []
    for number in range(8):
        engine.add(request(str(number), prompt(number, 16)), 0.0)
        events = [event for outcome in run(engine) for event in outcome.events]
        removed.append(sum(len(event.hashes) for event in events if isinstance(event, Removed)))
    assert removed == [0, 0, 0, 0, 0, 4, 4, 4]
