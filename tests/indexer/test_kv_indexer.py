"""Batches lost, repeated, reordered; publishers restarted: in the end the index is what the publishers hold."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from indexer.cursor import SILENCE, View
from indexer.events import (
    NO_EVENTS,
    Cleared,
    EventBatch,
    LoadReport,
    Removed,
    ReplayRequest,
    Stored,
    decode_batch,
    encode,
    pack_hashes,
    unpack_hashes,
)
from indexer.kv_indexer import KVIndexer, PromptHashes, hash_prompt
from indexer.matches import Overlap
from indexer.prefix_index import as_hashes
from indexer.types import PLAIN, Namespace, RankSet, Tier, WorkerRank
from tests.examples import examples

RANK = WorkerRank("w", 0)


def stored(*hashes: int, tier: Tier = Tier.GPU) -> Stored:
    return Stored(tier, pack_hashes(hashes))


def removed(*hashes: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed(tier, pack_hashes(hashes))


def batch(
    event_id: int, *events: Stored | Removed | Cleared, epoch: int = 1, part: int = 0, parts: int = 0
) -> EventBatch:
    return EventBatch("w", 0, epoch, event_id, list(events), part, parts)


def report(event_id: int, epoch: int = 1, exact: bool = True) -> LoadReport:
    return LoadReport("w", 0, epoch, event_id, exact)


def watching() -> KVIndexer:
    indexer = KVIndexer()
    indexer.watch(RANK)
    return indexer


def held(indexer: KVIndexer, tier: Tier = Tier.GPU) -> set[int]:
    return indexer.index.dump().get((RANK, tier), set())


class FakePublisher:
    """A publisher reduced to what replay needs: the batches of this epoch, a ring, and what it holds."""

    def __init__(self, ring: int) -> None:
        self.ring = ring
        self.epoch = 1000
        self.restart()

    def restart(self, step: int = 1) -> None:
        """`step` below 0: the clock was set back."""
        self.epoch += step
        self.batches: list[EventBatch] = []
        self.holds: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def emit(self, *events: Stored | Removed | Cleared) -> EventBatch:
        for event in events:
            if isinstance(event, Cleared):
                self.holds = {tier: set() for tier in Tier}
            elif isinstance(event, Stored):
                self.holds[event.tier] |= set(unpack_hashes(event.hashes))
            else:
                self.holds[event.tier] -= set(unpack_hashes(event.hashes))
        self.batches.append(batch(len(self.batches), *events, epoch=self.epoch))
        return self.batches[-1]

    def report(self) -> LoadReport:
        return report(len(self.batches) - 1, self.epoch)

    def replay(self, request: ReplayRequest) -> Iterator[EventBatch]:
        first = len(self.batches) - self.ring
        if request.epoch == self.epoch and request.event_id >= first:
            yield from self.batches[request.event_id :]
            return
        parts = [Stored(tier, pack_hashes(sorted(blocks))) for tier, blocks in self.holds.items()]
        for part, event in enumerate(parts):
            yield batch(len(self.batches) - 1, event, epoch=self.epoch, part=part, parts=len(parts))


some = st.lists(st.integers(0, 9), max_size=4)
tiers = st.sampled_from(list(Tier))
arrives = st.booleans()


class LossyPlaneMachine(RuleBasedStateMachine):
    """A publisher and an index with a plane between them that loses, repeats and reorders."""

    @initialize(ring=st.integers(1, 8))
    def begin(self, ring: int) -> None:
        self.publisher, self.indexer = FakePublisher(ring), watching()
        self.asks: list[ReplayRequest] = []
        self.sent: list[EventBatch] = []

    @rule(tier=tiers, hashes=some, arrives=arrives)
    def store(self, tier: Tier, hashes: list[int], arrives: bool) -> None:
        self.deliver(self.publisher.emit(stored(*hashes, tier=tier)), arrives)

    @rule(tier=tiers, hashes=some, arrives=arrives)
    def remove(self, tier: Tier, hashes: list[int], arrives: bool) -> None:
        self.deliver(self.publisher.emit(removed(*hashes, tier=tier)), arrives)

    @rule(arrives=arrives)
    def clear(self, arrives: bool) -> None:
        self.deliver(self.publisher.emit(Cleared()), arrives)

    @rule()
    def restart(self) -> None:
        self.publisher.restart()

    @rule()
    def restart_with_the_clock_set_back(self) -> None:
        self.publisher.restart(-10)
        self.sent.clear()  # of an epoch that might come again, as none does with nanoseconds

    @rule(looks=st.integers(1, 2 * SILENCE), connected=st.booleans())
    def look(self, looks: int, connected: bool) -> None:
        for _ in range(looks):
            self.indexer.on_tick(connected)

    @rule(hashes=some)
    def send(self, hashes: list[int]) -> None:
        self.indexer.predict(RANK, np.array(hashes, np.uint64), now=0.0)

    @rule()
    def come_up_again(self) -> None:
        self.indexer.worker_restarted(RANK)

    @rule()
    def ask_anew(self) -> None:
        self.asks += self.indexer.ask_anew(RANK)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def something_comes_again_or_late(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.sent)), arrives=True)

    @rule()
    def report(self) -> None:
        self.asks += self.indexer.on_report(self.publisher.report())

    @rule()
    def reconnect(self) -> None:
        self.asks += self.indexer.on_reconnect()

    @precondition(lambda self: self.asks)
    @rule(arriving=st.integers(0, 4))
    def answer(self, arriving: int = 1000) -> None:
        """The first replies of a replay arrive, perhaps none."""
        for reply in list(self.publisher.replay(self.asks.pop(0)))[:arriving]:
            self.asks += self.indexer.on_batch(reply)
        self.asks += self.indexer.on_replay_end(RANK)

    def answer_all(self) -> None:
        while self.asks:
            self.answer()

    def deliver(self, message: EventBatch, arrives: bool) -> None:
        self.sent.append(message)
        if arrives:
            self.asks += self.indexer.on_batch(decode_batch(encode(message)))

    def teardown(self) -> None:
        """When nothing is lost any more, two reports suffice: one may only have overtaken its batch. An epoch that
        is over must have fallen silent before."""
        self.answer_all()
        self.look(4 * SILENCE, connected=False)
        for _ in range(2):
            self.report()
            self.answer_all()
        known = {tier: held(self.indexer, tier) for tier in Tier}
        if self.indexer._cursors[RANK]._relearning:
            assert all(known[tier] <= self.publisher.holds[tier] for tier in Tier)
            assert self.indexer.view(RANK) is View.RECOVERING
        else:
            assert known == self.publisher.holds
            assert self.indexer.view(RANK) is View.EXACT


TestLossyPlane = LossyPlaneMachine.TestCase
TestLossyPlane.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


def test_batches_in_order_are_applied_once() -> None:
    indexer = watching()
    for message in (batch(0, stored(1, 2)), batch(0, stored(1, 2)), batch(1, removed(1)), batch(0, stored(1))):
        assert indexer.on_batch(message) == []
    assert held(indexer) == {2}
    assert indexer.counts == {"applied": 2, "stale": 2}


def test_a_gap_holds_back_what_follows_and_asks_once() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    assert indexer.on_batch(batch(2, stored(3))) == [ReplayRequest("w", 0, 1, 1)]
    assert indexer.on_batch(batch(3, removed(2))) == []
    assert held(indexer) == {1}
    assert indexer.view(RANK) is View.RECOVERING
    indexer.on_batch(batch(1, stored(2)))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {1, 3}
    assert indexer.view(RANK) is View.EXACT


def test_a_new_epoch_begins_empty_and_an_old_one_is_ignored() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    indexer.on_batch(batch(0, stored(2), epoch=5))
    indexer.on_batch(batch(1, stored(3), epoch=1))
    assert held(indexer) == {2}


def test_a_report_reveals_what_was_lost_without_a_trace() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    assert indexer.on_report(report(1)) == []  # it may only have overtaken its batch
    assert indexer.view(RANK) is View.EXACT
    assert indexer.on_report(report(1)) == [ReplayRequest("w", 0, 1, 1)]
    assert indexer.view(RANK) is View.RECOVERING


def test_a_router_that_joins_late_asks_for_everything() -> None:
    indexer = watching()
    assert indexer.view(RANK) is View.BLIND
    assert indexer.on_reconnect() == [], "nobody to ask was heard of"
    assert indexer.on_report(report(500)) == [ReplayRequest("w", 0, 1, 0)]
    indexer.on_batch(batch(500, stored(1), part=0, parts=2))
    assert indexer.view(RANK) is View.RECOVERING
    indexer.on_batch(batch(501, stored(3)))
    indexer.on_batch(batch(500, stored(2), part=1, parts=2))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {1, 2, 3}
    assert indexer.view(RANK) is View.EXACT


def looks(indexer: KVIndexer, count: int, connected: bool = True) -> None:
    for _ in range(count):
        indexer.on_tick(connected)


def heard() -> KVIndexer:
    """Of an epoch 5, with one batch and a report."""
    indexer = watching()
    indexer.on_batch(batch(0, stored(1), epoch=5))
    assert indexer.on_report(report(0, epoch=5)) == []
    return indexer


@pytest.mark.parametrize("reports", [True, False])
def test_a_publisher_that_falls_silent_is_doubted_until_it_speaks(reports: bool) -> None:
    indexer = heard()
    looks(indexer, SILENCE)
    assert indexer.view(RANK) is View.EXACT
    looks(indexer, 1)
    assert indexer.view(RANK) is View.RECOVERING
    assert held(indexer) == {1}
    speak = indexer.on_report(report(0, epoch=5)) if reports else indexer.on_batch(batch(1, epoch=5))
    assert speak == []
    assert indexer.view(RANK) is View.EXACT


def test_of_a_worker_that_comes_up_while_nobody_speaks_for_it_nothing_is_known() -> None:
    """It may be a new process, with an empty cache. One that is spoken for is told of."""
    indexer = heard()
    indexer.worker_restarted(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1}, View.EXACT)
    looks(indexer, 1, connected=False)
    indexer.worker_restarted(RANK)
    assert (held(indexer), indexer.view(RANK)) == (set(), View.BLIND)
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, 5, 0)]  # it was the same process after all
    indexer.on_batch(batch(0, stored(1), epoch=5))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1}, View.EXACT)


def test_after_a_reconnect_those_heard_last_are_asked_first() -> None:
    """They are there to answer. Of the hosts of the others the broker may not know yet that they are gone."""
    indexer, ranks = KVIndexer(), [WorkerRank(name, 0) for name in "abc"]
    for each in ranks:
        indexer.watch(each)
    for heard_last in (ranks[:1], ranks[2:], ranks[1:2]):
        indexer.on_tick(connected=True)
        for each in heard_last:
            indexer.on_report(LoadReport(*each, 1, -1, True))
    assert [request.worker_id for request in indexer.on_reconnect()] == ["b", "c", "a"]


def test_what_a_rank_is_sent_in_a_long_silence_is_assumed_until_its_publisher_tells() -> None:
    """Else a router would forget within seconds all that it sends while the broker is away."""
    indexer, sent, refused = heard(), np.array([1, 2], np.uint64), np.array([7], np.uint64)
    looks(indexer, 1, connected=False)
    indexer.predict(RANK, sent, now=0.0)
    assert held(indexer) == {1}
    looks(indexer, SILENCE, connected=False)
    indexer.predict(RANK, sent, now=10.0)
    indexer.predict(RANK, refused, now=10.0)
    indexer.retract(RANK, refused, guessed=False)
    assert (held(indexer), indexer.view(RANK)) == ({1, 2}, View.RECOVERING)
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, NO_EVENTS, 1)]
    assert held(indexer) == {1, 2}
    indexer.on_batch(batch(1, stored(3), epoch=5))
    indexer.on_batch(batch(0, stored(1), epoch=5, part=0, parts=1))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1, 3}, View.EXACT)


def test_what_a_rank_is_sent_while_its_snapshot_comes_after_a_silence_is_not_taken_for_told() -> None:
    """Else it would stay in an index that counts as exact, and what events tell of would expire with it."""
    indexer, sent = heard(), np.array([1, 2, 3], np.uint64)
    looks(indexer, SILENCE + 1, connected=False)
    indexer.predict(RANK, sent, now=0.0)
    assert indexer.on_reconnect() == [ReplayRequest("w", 0, NO_EVENTS, 1)]
    indexer.on_batch(batch(0, stored(1), epoch=5, part=0, parts=2))
    indexer.predict(RANK, sent, now=1.0)
    indexer.on_batch(batch(0, stored(2), epoch=5, part=1, parts=2))
    indexer.on_replay_end(RANK)
    indexer.on_report(report(0, epoch=5))
    assert (held(indexer), indexer.view(RANK)) == ({1, 2}, View.EXACT)
    indexer.expire(now=1000.0)
    assert held(indexer) == {1, 2}


def test_a_prompt_refused_late_in_a_silence_takes_back_nothing_that_events_told_of() -> None:
    """Another request with the same prompt was computed meanwhile."""
    indexer, sent = heard(), np.array([1, 2], np.uint64)
    indexer.predict(RANK, sent, now=0.0)
    indexer.on_batch(batch(1, stored(2), epoch=5))
    looks(indexer, SILENCE + 1)
    indexer.retract(RANK, sent[1:], guessed=False)
    indexer.on_report(report(1, epoch=5))
    assert (held(indexer), indexer.view(RANK)) == ({1, 2}, View.EXACT)


def test_what_was_missed_in_a_silence_is_asked_for_at_the_first_report() -> None:
    indexer = heard()
    looks(indexer, 1, connected=False)
    assert indexer.view(RANK) is View.RECOVERING
    assert indexer.on_report(report(3, epoch=5)) == [ReplayRequest("w", 0, 5, 1)]
    assert indexer.view(RANK) is View.RECOVERING


def test_one_that_reports_every_half_minute_is_not_silent_in_between() -> None:
    indexer = heard()
    for _ in range(3):
        looks(indexer, 30)
        indexer.on_report(report(0, epoch=5))
    looks(indexer, 30)
    assert indexer.view(RANK) is View.EXACT
    looks(indexer, 61)
    assert indexer.view(RANK) is View.RECOVERING


def test_a_publisher_that_dies_after_its_first_report_is_silent_as_soon_as_any() -> None:
    """As one does that keeps being restarted: the time without any was not its pace."""
    indexer = heard()
    for epoch in (6, 7):
        looks(indexer, 60)
        indexer.on_batch(batch(0, stored(1), epoch=epoch))
        indexer.on_report(report(0, epoch=epoch))
        looks(indexer, SILENCE)
        assert indexer.view(RANK) is View.EXACT
        looks(indexer, 1)
        assert indexer.view(RANK) is View.RECOVERING


def test_a_slow_publisher_that_starts_anew_is_expected_to_stay_slow() -> None:
    indexer = heard()
    looks(indexer, 30)
    indexer.on_report(report(0, epoch=5))
    looks(indexer, 2)
    indexer.on_report(report(-1, epoch=6))
    looks(indexer, 60)
    assert indexer.view(RANK) is View.EXACT


def test_one_that_never_reports_is_not_expected_to() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    looks(indexer, 10 * SILENCE)
    assert indexer.view(RANK) is View.EXACT


def test_a_smaller_epoch_counts_once_the_greater_is_silent_and_who_is_asked_has_it() -> None:
    """A publisher that began again after the wall clock had been set back."""
    indexer = heard()
    assert indexer.on_report(report(0, epoch=2)) == []
    assert indexer.view(RANK) is View.RECOVERING
    assert indexer.on_report(report(0, epoch=5)) == []
    assert indexer.view(RANK) is View.EXACT
    assert indexer.on_report(report(0, epoch=2)) == []
    looks(indexer, SILENCE + 1)
    assert indexer.view(RANK) is View.RECOVERING
    assert indexer.on_batch(batch(1, stored(9), epoch=2)) == []
    assert held(indexer) == {1}
    assert indexer.on_report(report(1, epoch=2)) == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_batch(batch(1, stored(7, 8), epoch=2, parts=1))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {7, 8}
    assert indexer.view(RANK) is View.EXACT
    assert indexer.on_batch(batch(2, stored(9), epoch=2)) == []
    assert indexer.on_batch(batch(7, stored(1), epoch=5)) == indexer.on_report(report(7, epoch=5)) == []
    assert held(indexer) == {7, 8, 9}


def test_an_epoch_that_was_thought_over_counts_again_if_who_is_asked_has_it() -> None:
    """Two publishers for one rank, of which the older was heard alone for a while."""
    indexer = heard()
    looks(indexer, SILENCE + 1)
    indexer.on_report(report(0, epoch=2))
    indexer.on_batch(batch(0, stored(7), epoch=2, parts=1))
    indexer.on_replay_end(RANK)
    for _ in range(2):
        indexer.on_report(report(0, epoch=2))
    assert held(indexer) == {7}
    looks(indexer, SILENCE + 1)
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, 2, 1)]
    indexer.on_batch(batch(0, stored(1), epoch=5, parts=1))
    indexer.on_replay_end(RANK)
    assert indexer.on_report(report(0, epoch=5)) == []
    assert held(indexer) == {1}
    assert indexer.view(RANK) is View.EXACT


@pytest.mark.parametrize("restarts", [True, False])
def test_where_nothing_is_known_any_more_no_epoch_is_over(restarts: bool) -> None:
    """Of the two publishers the one that was heard alone is gone for good, or has no events any more."""
    indexer = heard()
    looks(indexer, SILENCE + 1)
    indexer.on_report(report(0, epoch=2))
    indexer.on_batch(batch(0, stored(7), epoch=2, parts=1))
    indexer.on_replay_end(RANK)
    looks(indexer, 1, connected=False)
    if restarts:
        indexer.worker_restarted(RANK)
    else:
        indexer.on_report(report(-1, epoch=NO_EVENTS))
    assert indexer.view(RANK) is View.BLIND
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, 5, 0)]
    indexer.on_batch(batch(0, stored(1), epoch=5))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1}, View.EXACT)


def test_a_publisher_without_events_is_not_asked_for_those_of_the_engine_before() -> None:
    """The engine came back without KV events: its publisher still counts, and still has, what the one before held."""
    indexer = heard()
    looks(indexer, SILENCE + 1)
    assert indexer.on_report(report(0, epoch=NO_EVENTS, exact=False)) == []
    for _ in range(SILENCE):
        looks(indexer, 1)
        assert indexer.on_report(report(0, epoch=NO_EVENTS, exact=False)) == []
    assert indexer.on_reconnect() == []
    assert (held(indexer), indexer.view(RANK)) == (set(), View.BLIND)


def test_late_reports_are_no_sign_of_life() -> None:
    indexer = heard()
    indexer.on_batch(batch(1, stored(2), epoch=5))
    indexer.on_report(report(1, epoch=5))
    for _ in range(SILENCE + 1):
        looks(indexer, 1)
        indexer.on_report(report(0, epoch=5))
    assert indexer.view(RANK) is View.RECOVERING


def test_late_news_of_an_epoch_that_is_over_changes_nothing_even_in_a_silence() -> None:
    indexer = heard()
    looks(indexer, 1, connected=False)
    assert indexer.on_report(report(40, epoch=3)) == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_replay_end(RANK)  # answered by the publisher of epoch 5: nothing is missing
    assert held(indexer) == {1}
    indexer.on_report(report(0, epoch=5))
    assert indexer.view(RANK) is View.EXACT


def test_a_rank_that_has_no_events_any_more_is_blind() -> None:
    indexer = heard()
    looks(indexer, SILENCE + 1)
    indexer.on_report(report(-1, epoch=-1, exact=False))
    assert indexer.view(RANK) is View.BLIND
    assert held(indexer) == set()


def test_all_is_asked_for_anew_and_what_comes_meanwhile_waits() -> None:
    indexer = heard()
    assert indexer.ask_anew(RANK) == [ReplayRequest("w", 0, -1, 1)]
    assert indexer.ask_anew(RANK) == []
    assert indexer.on_batch(batch(1, stored(2), epoch=5)) == []
    assert held(indexer) == {1}
    assert indexer.view(RANK) is View.RECOVERING
    indexer.on_batch(batch(0, stored(6), epoch=5, parts=1))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {6, 2}
    assert indexer.view(RANK) is View.EXACT


def test_what_nobody_can_tell_anew_is_learned_again_from_what_comes() -> None:
    indexer = heard()
    indexer.ask_anew(RANK)
    indexer.on_batch(batch(1, stored(2), epoch=5))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {2}
    indexer.on_report(report(1, epoch=5))
    assert indexer.view(RANK) is View.RECOVERING
    indexer.relearned(RANK)
    assert indexer.view(RANK) is View.PARTIAL
    indexer.on_batch(batch(2, Cleared(), stored(3), epoch=5))
    assert indexer.view(RANK) is View.EXACT


def test_a_replay_that_is_given_up_does_not_end_one_that_began_after_it() -> None:
    indexer = heard()
    assert indexer.on_reconnect() == indexer.on_reconnect() == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_replay_end(RANK)
    indexer.on_batch(batch(3, stored(6), epoch=5, parts=1))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {6}
    assert indexer.view(RANK) is View.EXACT


def test_what_nobody_answers_is_asked_for_again_after_a_reconnect_and_not_with_each_batch() -> None:
    indexer = heard()
    assert indexer.on_batch(batch(2, stored(3), epoch=5)) == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_replay_end(RANK)
    assert indexer.on_batch(batch(3, stored(4), epoch=5)) == []
    assert indexer.on_reconnect() == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_batch(batch(1, stored(2), epoch=5))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1, 2, 3, 4}, View.EXACT)
    assert indexer.on_reconnect() == [ReplayRequest("w", 0, 5, 4)]
    indexer.on_replay_end(RANK)
    assert indexer.view(RANK) is View.RECOVERING, "more may have been lost"
    assert indexer.on_batch(batch(5, epoch=5)) == [ReplayRequest("w", 0, 5, 4)]


def test_a_replay_for_a_rank_that_was_forgotten_ends_none_of_the_rank_that_is_watched_anew() -> None:
    indexer = heard()
    indexer.on_reconnect()
    indexer.forget(RANK)
    indexer.watch(RANK)
    indexer.on_replay_end(RANK)
    indexer.on_batch(batch(0, stored(1), epoch=5))
    assert indexer.on_batch(batch(2, stored(3), epoch=5)) == [ReplayRequest("w", 0, 5, 1)]
    indexer.on_batch(batch(1, stored(2), epoch=5))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({1, 2, 3}, View.EXACT)


def test_a_snapshot_that_nobody_waits_for_or_of_less_than_is_known_changes_nothing() -> None:
    """As one of a replay that was given up."""
    indexer = heard()
    indexer.on_batch(batch(1, stored(2), epoch=5))
    indexer.on_batch(batch(1, stored(6), epoch=5, parts=1))
    indexer.on_reconnect()
    indexer.on_batch(batch(0, stored(6), epoch=5, parts=1))
    assert held(indexer) == {1, 2}


def test_half_a_snapshot_is_no_view_and_is_asked_for_whole() -> None:
    indexer = heard()
    indexer.ask_anew(RANK)
    indexer.on_batch(batch(0, stored(6), epoch=5, part=0, parts=2))
    indexer.on_batch(batch(1, stored(7), epoch=5, part=1, parts=2))  # of another
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == ({6}, View.RECOVERING)
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, -1, 0)]


def test_the_rest_of_a_snapshot_is_not_all_where_its_beginning_was_forgotten() -> None:
    indexer = heard()
    indexer.on_reconnect()
    indexer.on_batch(batch(0, stored(6), epoch=5, part=0, parts=2))
    indexer.relearn(RANK)
    indexer.on_batch(batch(0, stored(7), epoch=5, part=1, parts=2))
    indexer.on_replay_end(RANK)
    assert (held(indexer), indexer.view(RANK)) == (set(), View.RECOVERING)
    assert indexer.on_report(report(0, epoch=5)) == [ReplayRequest("w", 0, -1, 0)]
    indexer.on_batch(batch(0, stored(6, 7), epoch=5, parts=1))
    indexer.on_replay_end(RANK)
    indexer.relearned(RANK)  # all of it is known by now
    assert held(indexer) == {6, 7}
    assert indexer.view(RANK) is View.EXACT


def test_an_incomplete_publisher_is_not_called_exact() -> None:
    indexer = watching()
    indexer.on_report(report(-1, exact=False))
    assert indexer.view(RANK) is View.PARTIAL


def lacking(*, relearning: bool = False) -> KVIndexer:
    """Of a rank whose publisher came when its engine had forgotten what it stored first, or of which all was forgotten
    here. What follows such a block is never told of, or not found."""
    indexer = watching()
    indexer.resize(RANK, 6)
    indexer.on_batch(batch(0, stored(1)))
    indexer.on_report(report(0, exact=relearning))
    if relearning:
        indexer.relearn(RANK)
    return indexer


FIRST, SECOND = (hash_prompt(list(range(start, start + 64)), [16], PLAIN) for start in (0, 100))


@pytest.mark.parametrize("relearning", [False, True])
def test_what_a_rank_is_sent_is_assumed_while_events_of_it_are_missing(relearning: bool) -> None:
    indexer = lacking(relearning=relearning)
    indexer.predict(RANK, FIRST.chain(16), now=0)
    indexer.expire(now=1e6)
    found = indexer.find_matches(FIRST)
    assert found == {RANK: Overlap(4, 4)}
    assert found.known_blocks_of(RankSet((RANK,))).tolist() == [0], "what its events say"
    assert held(indexer) == (set() if relearning else {1})
    indexer.predict(RANK, SECOND.chain(16), now=1e6)
    assert indexer.find_matches(FIRST) == {RANK: Overlap(2, 2)}, "there is no room for more"
    indexer.retract(RANK, SECOND.chain(16)[1:], guessed=False)
    assert indexer.find_matches(SECOND) == {RANK: Overlap(1, 1)}
    indexer.on_batch(batch(1, removed(*FIRST.chain(16)[1:].tolist())))
    assert indexer.find_matches(FIRST) == {RANK: Overlap(1, 1)}


@pytest.mark.parametrize("cleared", [False, True])
def test_what_was_assumed_while_events_were_missing_is_forgotten_once_all_are_there(cleared: bool) -> None:
    indexer = lacking()
    indexer.predict(RANK, FIRST.chain(16), now=0)
    if cleared:
        indexer.on_batch(batch(1, Cleared()))
        indexer.assume(RANK, SECOND.chain(16), now=0)
    indexer.on_report(report(1 if cleared else 0))
    assert indexer.view(RANK) is View.EXACT
    assert bool(indexer.find_assumed(SECOND)) is cleared, "of what no events will tell"
    indexer.expire(now=1e6)
    indexer.predict(RANK, SECOND.chain(16), now=1e6)  # on which predictions expire
    assert indexer.find_matches(FIRST) == {}
    indexer.expire(now=2e6)
    assert indexer.find_matches(SECOND) == {}, "its events will tell"


def test_what_was_assumed_while_events_were_missing_goes_with_what_turned_out_to_be_wrong() -> None:
    indexer = lacking()
    indexer.predict(RANK, FIRST.chain(16), now=0)
    indexer.expire(now=1e6)
    assert indexer.find_matches(FIRST) == {RANK: Overlap(4, 4)}
    indexer.ask_anew(RANK)
    indexer.on_batch(batch(0, stored(1), parts=1))
    assert indexer.find_matches(FIRST) == {}


def test_what_a_rank_is_sent_is_assumed_while_its_publisher_is_of_another_version() -> None:
    """As in an upgrade. It is not asked again for what cannot be used."""
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    indexer.on_report(report(0))
    foreign = EventBatch("w", 0, 2, 0, [stored(7)], hash_version=99)
    indexer.on_batch(foreign)
    assert held(indexer) == {1}, "it is not known yet whether that is another publisher's"
    assert [ask.epoch for ask in indexer.on_report(report(0, epoch=2))] == [2]
    indexer.on_batch(foreign)
    indexer.on_replay_end(RANK)
    assert indexer.on_report(report(5, epoch=2)) == []
    assert (held(indexer), indexer.view(RANK)) == (set(), View.RECOVERING)
    indexer.predict(RANK, FIRST.chain(16), now=0)
    indexer.expire(now=100)
    assert indexer.find_matches(FIRST) == {RANK: Overlap(4, 4)}
    indexer.on_batch(batch(0, stored(*SECOND.chain(16).tolist()), epoch=3))
    indexer.on_report(report(0, epoch=3))
    assert indexer.view(RANK) is View.EXACT
    assert indexer.find_matches(FIRST) == {}
    assert indexer.find_matches(SECOND) == {RANK: Overlap(4, 4)}


def test_bad_batches_change_nothing() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    torn = EventBatch("w", 0, 1, 1, [stored(2), Stored(Tier.GPU, b"123")])
    other = EventBatch("w", 0, 1, 1, [stored(2)], hash_version=99)
    unknown = EventBatch("x", 0, 1, 0, [stored(2)])
    for bad in (torn, other, unknown, batch(-3, stored(2)), batch(1, stored(2), epoch=-1)):
        assert indexer.on_batch(bad) == []
    assert held(indexer) == {1}
    assert indexer.counts == {"applied": 1, "malformed": 3, "other_hash_version": 1, "unknown_worker": 1}


def test_prompts_are_matched_per_block_size_and_namespace() -> None:
    indexer = KVIndexer()
    small, large = WorkerRank("small", 0), WorkerRank("large", 0)
    ids = list(range(100))
    for rank, size in ((small, 16), (large, 32)):
        indexer.index.store(rank, Tier.GPU, hash_prompt(ids, [size], PLAIN).chains[size])
    assert indexer.find_matches(hash_prompt(ids[:70], [16, 32], PLAIN)) == {small: Overlap(4, 4), large: Overlap(2, 2)}
    assert indexer.find_matches(hash_prompt(ids[:70], [16, 32], Namespace("lora"))) == {}


def test_assumptions_hold_for_a_while_and_give_way_to_events() -> None:
    indexer = KVIndexer(assumed_ttl=10)
    indexer.watch(RANK)
    prompt = hash_prompt(list(range(64)), [16], PLAIN)
    indexer.predict(RANK, prompt.chain(16), now=0)
    indexer.expire(now=9)
    assert indexer.find_matches(prompt) == {RANK: Overlap(4, 4)}
    indexer.predict(RANK, hash_prompt(list(range(32)), [16], PLAIN).chain(16), now=9)
    indexer.expire(now=11)
    assert indexer.find_matches(prompt) == {RANK: Overlap(2, 2)}
    indexer.on_batch(batch(0, stored(*prompt.chains[16])))
    indexer.expire(now=99)
    assert indexer.find_matches(prompt) == {RANK: Overlap(4, 4)}
    indexer.predict(RANK, hash_prompt(list(range(100, 164)), [16], PLAIN).chain(16), now=99)
    assert indexer.index.entries() == 4


@pytest.mark.parametrize("guessed", [False, True])
def test_what_has_no_room_in_a_cache_of_known_size_is_not_assumed(guessed: bool) -> None:
    indexer = KVIndexer(assumed_ttl=10)
    note, find = (indexer.assume, indexer.find_assumed) if guessed else (indexer.predict, indexer.find_matches)
    indexer.resize(RANK, 6)
    first, second = (hash_prompt(list(range(start, start + 64)), [16], PLAIN) for start in (0, 100))
    for _ in range(2):
        note(RANK, first.chain(16), now=0)
        indexer.expire(now=1e6)
        assert find(first) == {RANK: Overlap(4, 4)}
        note(RANK, second.chain(16), now=1e6)
        assert find(first) == {RANK: Overlap(2, 2)}
        assert find(second) == {RANK: Overlap(4, 4)}
        indexer.clear(RANK)  # after which its size is the same
    indexer.forget(RANK)
    note(RANK, first.chain(16), now=0)
    indexer.expire(now=10)
    assert find(first) == {}


@pytest.mark.parametrize("guessed", [False, True])
@pytest.mark.parametrize("blind", [False, True])
def test_what_a_rank_never_began_on_is_not_held_by_it(blind: bool, guessed: bool) -> None:
    indexer = KVIndexer(assumed_ttl=10)
    indexer.watch(RANK)
    if not blind:
        indexer.on_batch(batch(0, stored(1)))
    prompt = hash_prompt(list(range(64)), [16], PLAIN)
    note, find = (indexer.assume, indexer.find_assumed) if guessed else (indexer.predict, indexer.find_matches)
    note(RANK, prompt.chain(16), now=0)
    assert find(prompt) == {RANK: Overlap(4, 4)}
    indexer.retract(RANK, prompt.chain(16)[2:], guessed)
    assert find(prompt) == {RANK: Overlap(2, 2)}


def test_what_no_events_will_tell_of_is_assumed_of_any_rank_until_it_drops_all() -> None:
    indexer = KVIndexer(assumed_ttl=10)
    indexer.watch(RANK)
    prompt = hash_prompt(list(range(64)), [16], PLAIN)
    indexer.on_batch(batch(0, stored(1)))
    assert indexer.view(RANK) is not View.BLIND
    indexer.assume(RANK, prompt.chain(16), now=0)
    indexer.expire(now=9)
    assert indexer.find_assumed(prompt) == {RANK: Overlap(4, 4)}
    assert held(indexer) == {1}, "what its events say"
    indexer.expire(now=11)
    assert indexer.find_assumed(prompt) == {}
    indexer.assume(RANK, prompt.chain(16), now=11)
    indexer.on_batch(batch(1, Cleared()))
    assert indexer.find_assumed(prompt) == {}
    indexer.assume(RANK, prompt.chain(16), now=12)
    indexer.expire(now=21)  # when the first would have ended
    assert indexer.find_assumed(prompt) == {RANK: Overlap(4, 4)}
    assert indexer.find_matches(prompt) == {}


def test_what_no_events_will_tell_of_outlasts_a_silence_and_the_snapshot_after_it() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1)))
    indexer.on_report(report(0))
    indexer.on_report(report(0))
    indexer.assume(RANK, FIRST.chain(16), now=0)
    for _ in range(SILENCE + 1):
        indexer.on_tick(connected=False)
    indexer.predict(RANK, SECOND.chain(16), now=SILENCE)
    [ask] = indexer.on_report(report(0))
    assert ask.epoch == NO_EVENTS, "a snapshot"
    indexer.on_batch(batch(0, stored(7), parts=1))
    indexer.on_replay_end(RANK)
    assert held(indexer) == {7}
    assert indexer.find_matches(SECOND) == {}
    assert indexer.find_assumed(FIRST) == {RANK: Overlap(4, 4)}, "it has not dropped anything"
    indexer.on_batch(batch(1, stored(8), epoch=2))
    assert indexer.find_assumed(FIRST) == {}, "its cache is another"


def test_what_a_rank_says_that_it_dropped_is_no_longer_predicted() -> None:
    indexer = watching()
    prompt = hash_prompt(list(range(64)), [16], PLAIN)
    indexer.on_batch(batch(0, stored(1)))
    indexer.predict(RANK, prompt.chain(16), now=0)
    assert indexer.find_matches(prompt) == {RANK: Overlap(4, 4)}
    hashes = prompt.chains[16].tolist()
    indexer.on_batch(batch(1, stored(*hashes), Removed(Tier.GPU, pack_hashes(hashes[2:]))))
    assert indexer.find_matches(prompt) == {RANK: Overlap(2, 2)}


def in_window(*hashes: int, window: int = 2) -> Stored:
    return Stored(Tier.GPU, pack_hashes(hashes), window)


def out_of_window(*hashes: int, window: int = 2) -> Removed:
    return Removed(Tier.GPU, pack_hashes(hashes), window)


def overlaps(indexer: KVIndexer, chain: list[int]) -> list[int]:
    """With each beginning of the chain."""
    found = (indexer.find_matches(PromptHashes(0, {1: as_hashes(chain[:end])})) for end in range(1, len(chain) + 1))
    return [overlap.blocks if (overlap := matches.get(RANK)) else 0 for matches in found]


def test_a_prompt_goes_on_where_each_window_is_whole() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, stored(1, 2, 3, 4, 5), in_window(1, 3, 4)))
    assert overlaps(indexer, [1, 2, 3, 4, 5]) == [1, 1, 1, 4, 4]
    assert held(indexer) == {1, 2, 3, 4, 5}
    indexer.on_batch(batch(1, in_window(1, 3, window=1)))
    assert overlaps(indexer, [1, 2, 3, 4, 5]) == [1, 1, 1, 1, 1]
    indexer.on_batch(batch(2, out_of_window(1, 3)))
    assert overlaps(indexer, [1, 2, 3, 4, 5]) == [0, 0, 0, 0, 0]
    indexer.on_batch(batch(3, Cleared(), stored(1, 2)))
    assert overlaps(indexer, [1, 2]) == [1, 2]


def test_what_was_sent_to_a_rank_with_windows_is_predicted_there_as_a_whole() -> None:
    indexer = watching()
    indexer.on_batch(batch(0, in_window()))
    indexer.predict(RANK, as_hashes([1, 2, 3, 4, 5]), 0.0)
    assert overlaps(indexer, [1, 2, 3, 4, 5, 6]) == [0, 0, 0, 0, 5, 5]
    indexer.on_batch(batch(1, stored(1, 2, 3, 4, 5), in_window(3, 4)))
    assert overlaps(indexer, [1, 2, 3, 4, 5, 6]) == [0, 0, 0, 4, 5, 5]
    indexer.on_batch(batch(2, out_of_window(4)))
    assert overlaps(indexer, [1, 2, 3, 4, 5, 6]) == [0, 0, 0, 0, 0, 0]


def test_a_rank_with_more_windows_than_are_kept_holds_nothing() -> None:
    indexer = watching()
    for window in range(1, 10):
        indexer.on_batch(batch(window - 1, stored(1), in_window(1, window=window)))
        assert overlaps(indexer, [1]) == [1 if window < 9 else 0]
    assert indexer.refused == 1
