"""Whole or in two parts, who decodes, and that what is booked for both parts is given back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.events import LoadReport
from indexer.types import WorkerRank
from router.scheduling.balance import LeastLoaded
from router.scheduling.booking import Booking, DecodeBooking
from router.scheduling.candidates import Candidates, Split
from router.scheduling.decision import Choice, Decision, Prediction
from router.scheduling.latency import Prefill
from router.scheduling.load import Load, LoadBook
from router.scheduling.others import ALONE, Others
from router.scheduling.scheduler import Scheduler
from tests.router.scheduling.candidates import Scripted, holding_on_gpu, named, rank

P, D1, D2, B = rank("p"), rank("d1"), rank("d2"), rank("b")
BLOCK = 16


def fleet(whole: Sequence[str] = ("b",), near: Sequence[bool] = (False, False), pushes: bool = False) -> Candidates:
    """p prefills for d1 and d2."""
    split = Split(named(["p"]), (named(["d1", "d2"]),), (np.array(near),), (pushes,))
    return Candidates([(rank(name), BLOCK) for name in whole], split)


def scheduler() -> Scheduler:
    made = Scheduler(LeastLoaded(), LoadBook(), Scripted([0.5] * 1000))
    for each in (P, D1, D2, B):
        made.watch(each, BLOCK)
    return made


def occupy(choosing: Scheduler, where: str, tokens: int, requests: int = 1) -> list[Booking]:
    """Streams that decode there."""
    bookings = []
    for _ in range(requests):
        booking = choosing.reserve(Decision(named([where]), Choice(0, None, ""), tokens, None, None), 0.0)
        booking.assume_first_token(0.0)
        bookings.append(booking)
    return bookings


def chosen(
    choosing: Scheduler, candidates: Candidates, tokens: int, held: Mapping[WorkerRank, int] | None = None
) -> str:
    return choosing.select(candidates, tokens, holding_on_gpu(held or {}), 0.0).rank.worker_id


def decodes(
    choosing: Scheduler, candidates: Candidates, tokens: int, held: Mapping[WorkerRank, int] | None = None
) -> str:
    matches = holding_on_gpu(held or {})
    decision = choosing.select(candidates, tokens, matches, 0.0)
    assert decision.split
    return choosing.select_decode(decision, matches, 0.0, prefilled=False).rank.worker_id


def slower(choosing: Scheduler, factor: float) -> None:
    """Transfers between hosts take so many times what is assumed."""
    for _ in range(400):
        choosing.disaggregation.transfers.observe(near=False, work=1.0, seconds=factor, now=0.0)


def test_an_idle_fleet_serves_requests_whole() -> None:
    for tokens in (1, 1000, 64_000):
        assert chosen(scheduler(), fleet(), tokens) == "b"


def test_the_longer_the_prompt_the_rather_it_is_parted() -> None:
    """It would stop the streams of a worker that does it all."""
    choosing = scheduler()
    slower(choosing, 7)
    for name in ("b", "d1", "d2"):
        occupy(choosing, name, 500, requests=3)
    fates = [chosen(choosing, fleet(), tokens) for tokens in (16, 64, 256, 1024, 4096, 16_384, 65_536)]
    assert fates == sorted(fates), "from b to p once, never back"
    assert (fates[0], fates[-1]) == ("b", "p")


def test_what_is_held_counts_as_short() -> None:
    choosing = scheduler()
    slower(choosing, 7)
    occupy(choosing, "b", 500, requests=3)
    assert chosen(choosing, fleet(), 65_536) == "p"
    assert chosen(choosing, fleet(), 65_536, {B: 4095, P: 4095}) == "b"


def test_a_transfer_that_takes_long_is_avoided() -> None:
    choosing = scheduler()
    occupy(choosing, "b", 500, requests=2)
    assert chosen(choosing, fleet(), 65_536) == "p"
    slower(choosing, 1e4)
    assert chosen(choosing, fleet(), 65_536) == "b"
    assert chosen(choosing, fleet(near=(True, False)), 65_536) == "p", "on the same host it does not"


def test_where_the_prefix_lies_nothing_is_moved() -> None:
    choosing = scheduler()
    occupy(choosing, "b", 500, requests=2)
    assert chosen(choosing, fleet(), 65_536) == "p"
    assert chosen(choosing, fleet(), 65_536, {B: 4095}) == "b"


def test_where_prompts_are_not_read_pairs_take_what_streams_would_slow_down() -> None:
    choosing = scheduler()

    def goes_to() -> str:
        return choosing.select(fleet(), 0, None, 0.0).rank.worker_id

    assert goes_to() == "b"
    occupy(choosing, "b", 500, requests=30)
    assert goes_to() == "p"


def test_without_a_worker_for_it_all_every_request_is_parted() -> None:
    for tokens in (0, 1, 65_536):
        assert chosen(scheduler(), fleet(whole=()), tokens) == "p"


def test_who_decodes_by_load() -> None:
    choosing = scheduler()
    occupy(choosing, "d1", 3000, requests=10)
    assert decodes(choosing, fleet(whole=()), 1000) == "d2"
    occupy(choosing, "d2", 30_000, requests=20)
    assert decodes(choosing, fleet(whole=()), 1000) == "d1"


def test_who_decodes_by_host() -> None:
    for near, name in (((True, False), "d1"), ((False, True), "d2")):
        choosing = scheduler()
        for _ in range(200):
            choosing.disaggregation.transfers.observe(near=True, work=1.0, seconds=0.1, now=0.0)
        assert decodes(choosing, fleet(whole=(), near=near), 20_000) == name


def test_who_decodes_of_idle_workers_is_who_received_least_lately() -> None:
    """The others' caches would stay empty."""
    choosing, apart = scheduler(), fleet(whole=())
    decision = choosing.select(apart, 4096, holding_on_gpu({}), 0.0)

    def next_one(now: float) -> str:
        onward = choosing.select_decode(decision, holding_on_gpu({}), now, prefilled=True)
        choosing.reserve_decode(P, onward, 4096, now, streamed=True).release(now)
        return onward.rank.worker_id

    assert [next_one(now) for now in (0.0, 1.0, 2.0, 3.0)] == ["d1", "d2", "d1", "d2"]
    choosing.forget(D2)
    choosing.watch(D2, BLOCK)
    assert [next_one(now) for now in (4.0, 5.0)] == ["d2", "d2"], "it may be another worker by now"


def test_who_decodes_by_what_it_holds() -> None:
    assert decodes(scheduler(), fleet(whole=()), 50_000, {D2: 3000}) == "d2"
    assert decodes(scheduler(), fleet(whole=()), 50_000, {D1: 3000}) == "d1"


@pytest.mark.parametrize("at_once", [False, True])
def test_an_adapter_takes_a_slot_of_both_workers_and_goes_where_it_runs(at_once: bool) -> None:
    choosing, apart, nothing = scheduler(), fleet(whole=(), pushes=at_once), holding_on_gpu({})
    for name in ("p", "d1", "d2"):
        report = LoadReport(name, 0, 1, -1, True, lora_total_slots=1)
        choosing.book.on_report(report, 0.0)

    def asked_for(adapter: str) -> tuple[str, list[Booking]]:
        decision = choosing.select(apart, 100, nothing, 0.0, adapter=adapter)
        assert decision.split
        prefill = choosing.reserve(decision, 0.0)
        if not at_once:
            prefill.release(0.0)
        now = decision.at(decision.split, decision.position)
        onward = choosing.select_decode(now, nothing, 0.0, prefilled=True)
        return onward.rank.worker_id, [prefill, choosing.reserve_decode(P, onward, 100, 0.0, streamed=True)]

    def waits(adapter: str) -> list[bool]:
        return [wait > 0 for wait in choosing.book.adapters.waits(named(["d1", "d2", "p"]), adapter, 1.0)]

    first, bookings = asked_for("x")
    other, more = asked_for("y")
    assert {first, other} == {"d1", "d2"}
    assert [asked_for("x")[0] for _ in range(3)] == [first] * 3, "whatever it has to do"
    assert waits("z") == [True, True, at_once]
    assert (waits("x")[2], waits("y")[2]) == (False, at_once)
    for booking in (*bookings, *more):
        booking.release(1.0)


def full(choosing: Scheduler, *names: str) -> None:
    for name in names:
        report = LoadReport(name, 0, 1, -1, True, request_active_slots=0, kv_active_blocks=980, kv_total_blocks=1000)
        choosing.book.on_report(report, 0.0)


def test_who_decodes_by_memory() -> None:
    choosing = scheduler()
    full(choosing, "d1")
    assert decodes(choosing, fleet(whole=()), 8000) == "d2"


@pytest.mark.parametrize(("names", "held"), [(("d1",), False), (("d1", "d2"), True)])
def test_a_request_that_nobody_has_room_to_decode_waits(names: tuple[str, ...], held: bool) -> None:
    choosing = scheduler()
    for name in ("d1", "d2"):
        occupy(choosing, name, 100)
    full(choosing, *names)
    assert choosing.select(fleet(whole=()), 8000, holding_on_gpu({}), 0.0).hold is held


def test_it_does_not_wait_for_what_is_not_ours() -> None:
    choosing = scheduler()
    full(choosing, "d1", "d2")
    assert not choosing.select(fleet(whole=()), 8000, holding_on_gpu({}), 0.0).hold


def test_a_push_counts_only_the_tail() -> None:
    pulled = scheduler().select(fleet(whole=()), 50_000, holding_on_gpu({}), 0.0).predicted
    pushed = scheduler().select(fleet(whole=(), pushes=True), 50_000, holding_on_gpu({}), 0.0).predicted
    assert pulled
    assert pushed
    assert pushed.prefill == pulled.prefill
    assert 0 < pushed.transfer < pulled.transfer / 5


def predicted(choosing: Scheduler, tokens: int) -> Prediction:
    found = choosing.select(fleet(whole=()), tokens, holding_on_gpu({}), 0.0).predicted
    assert found
    return found


def test_who_decodes_is_to_be_idle_too_for_a_request_to_be_taken_whatever_is_predicted() -> None:
    choosing = scheduler()
    assert predicted(choosing, 1000).idle
    occupy(choosing, "d1", 3000)
    assert predicted(choosing, 1000).idle, "d2 is"
    occupy(choosing, "d2", 3000)
    assert not predicted(choosing, 1000).idle


def test_what_is_predicted_counts_the_prompts_that_the_decode_worker_computes_before() -> None:
    choosing = scheduler()
    before = predicted(choosing, 100).ttft
    for name in ("d1", "d2"):
        choosing.reserve(Decision(named([name]), Choice(0, None, ""), 50_000, None, None), 0.0)
    queued = float(choosing.backlog.seconds(named(["d1"]), np.ones(1), 0.0)[0])
    assert queued > before
    assert predicted(choosing, 100).ttft > 0.9 * queued
    free = predicted(scheduler(), 500_000).transfer
    assert predicted(choosing, 500_000).transfer == free, "these are done long before this one's own prefill is"


STEPS = ("first token", "generated", "prefilled", "released")


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(STEPS)), max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(0, 50_000),
)
def test_whatever_happens_both_bookings_are_given_back(
    steps: list[tuple[bool, str]], streamed: bool, pushes: bool, tokens: int
) -> None:
    choosing, matches = scheduler(), holding_on_gpu({D1: 10})
    decision = choosing.select(fleet(whole=(), pushes=pushes), tokens, matches, 0.0)
    first = choosing.reserve(decision, 0.0, streamed)
    onward = choosing.select_decode(decision, matches, 0.0, prefilled=not pushes)
    second = choosing.reserve_decode(decision.rank, onward, tokens, 0.0, streamed)
    now = itertools.count(1)
    for decode, step in steps:
        booking = second if decode else first
        match step:
            case "first token":
                booking.first_token(float(next(now)))
            case "generated":
                booking.generated(3, float(next(now)))
            case "prefilled":
                second.prefilled(float(next(now)))
            case _:
                booking.release(float(next(now)))
    first.release(float(next(now)))
    second.release(float(next(now)))
    for each in (P, D1, D2):
        assert choosing.book.load(each, 100.0) == Load()
        assert choosing.in_flight(each) == 0
    assert not choosing.handing_over
    seconds = choosing.backlog.seconds(named(["p", "d1", "d2"]), np.ones(3), 100.0)
    assert seconds.tolist() == [0.0, 0.0, 0.0]


def test_each_answer_of_several_counts_on_both_workers() -> None:
    choosing, several = scheduler(), Others(3)
    decision = choosing.select(fleet(whole=()), 5000, holding_on_gpu({}), 0.0)
    first = choosing.reserve(decision, 0.0, others=several)
    onward = choosing.select_decode(decision, holding_on_gpu({}), 0.0, prefilled=True)
    second = choosing.reserve_decode(decision.rank, onward, 5000, 0.0, True, several)
    first.release(1.0)
    assert choosing.book.load(onward.rank, 1.0).requests == 4
    again = choosing.reserve(decision, 1.0, others=several)
    assert choosing.book.load(P, 1.0).requests == 4
    again.release(2.0)
    second.release(2.0)
    assert [choosing.book.load(each, 2.0) for each in (P, D1, D2)] == [Load()] * 3


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prefill_lasts_until_its_worker_says_that_it_is_done(streamed: bool) -> None:
    """It does, whether the answer comes in pieces or not; and that is what is learned from."""
    choosing, prefill = scheduler(), Prefill(50_000, 50_000)
    expected = choosing.latency.prefill_seconds_on(P, prefill)
    booking = choosing.reserve(choosing.select(fleet(whole=()), 50_000, holding_on_gpu({}), 0.0), 0.0, streamed)
    late = 3 * expected
    choosing.select(fleet(whole=()), 16, holding_on_gpu({}), late)
    assert choosing.book.load(P, late).prefill_tokens == 50_000
    booking.first_token(late)
    booking.release(late)
    assert choosing.latency.prefill_seconds_on(P, prefill) > expected


@pytest.mark.parametrize("pushes", [False, True])
def test_who_prefilled_is_needed_until_the_other_begins_to_answer(pushes: bool) -> None:
    choosing = scheduler()
    decision = choosing.select(fleet(whole=(), pushes=pushes), 5000, holding_on_gpu({}), 0.0)
    first = choosing.reserve(decision, 0.0)
    onward = choosing.select_decode(decision, holding_on_gpu({}), 0.0, prefilled=not pushes)
    assert choosing.in_flight(P) == 1
    second = choosing.reserve_decode(decision.rank, onward, 5000, 0.0, True)
    first.release(1.0)
    second.prefilled(1.0)
    second.prefilled(1.0)
    assert (choosing.in_flight(P), choosing.in_flight(onward.rank)) == (1, 1)
    second.first_token(2.0)
    assert (choosing.in_flight(P), choosing.in_flight(onward.rank)) == (0, 1)
    second.prefilled(3.0)
    assert choosing.in_flight(P) == 0, "it answers: nothing is waited for any more"
    second.release(4.0)
    assert choosing.in_flight(onward.rank) == 0


def decoding(choosing: Scheduler, streamed: bool, others: Others = ALONE) -> DecodeBooking:
    """The second part of a request, whose prompt is computed at 1 s."""
    decision = choosing.select(fleet(whole=()), 5000, holding_on_gpu({}), 0.0)
    onward = choosing.select_decode(decision, holding_on_gpu({}), 0.0, prefilled=True)
    booking = choosing.reserve_decode(decision.rank, onward, 5000, 0.0, streamed, others)
    booking.prefilled(1.0)
    return booking


def test_a_transfer_is_learned_from_streams_alone() -> None:
    for streamed, learned in ((True, True), (False, False)):
        choosing = scheduler()
        booking = decoding(choosing, streamed)
        booking.first_token(9.0)
        booking.release(10.0)
        factor = float(choosing.disaggregation.transfers.factors(np.array([False]), 10.0)[0])
        assert (factor > 1) == learned


def test_nothing_is_learned_of_a_transfer_whose_request_has_ended() -> None:
    choosing = scheduler()
    booking = decoding(choosing, streamed=True)
    booking.release(2.0)
    booking.first_token(9.0)
    assert choosing.disaggregation.transfers.factors(np.array([False]), 10.0).tolist() == [1.0]


@pytest.mark.parametrize(("others", "learned"), [(ALONE, 50.0), (Others(1), 0.0)])
def test_how_long_answers_are_is_learned_once_from_who_decodes_a_single_one(others: Others, learned: float) -> None:
    choosing = scheduler()
    booking = decoding(choosing, streamed=True, others=others)
    booking.first_token(2.0)
    booking.generated(100, 3.0)
    for now in (4.0, 5.0):
        booking.release(now)
    assert choosing.latency.answer_tokens == learned


def test_a_decision_for_a_changed_fleet_keeps_no_costs_of_the_former() -> None:
    """They would be told of the wrong ranks."""
    before, after = named(["a", "b", "c"]), named(["b", "c"])
    decision = Decision(before, Choice(2, np.array([3.0, 2.0, 1.0]), "least"), 100, 0, 0)
    decision.stored_tokens, decision.lower_tokens, decision.disk_tokens = 20, 30, 10
    split = Split(after, (named(["d1"]),) * 2, (np.array([False]),) * 2, (False,) * 2)
    twin = decision.at(split, 1)
    assert (twin.rank, twin.reason, dict(twin.costs)) == (rank("c"), "least", {})
    assert twin.loaded_tokens == (20, 10, 20)


def test_who_decodes_cannot_be_asked_of_a_request_that_is_whole() -> None:
    choosing = scheduler()
    decision = choosing.select(named(["b"]), 10, holding_on_gpu({}), 0.0)
    with pytest.raises(LookupError):
        choosing.select_decode(decision, None, 0.0, prefilled=True)
