"""What the audit takes for drift and what it does not, one request at a time."""

from __future__ import annotations

from typing import Any

import pytest

from engines.disaggregation.answer import Prefilled
from indexer.cursor import View
from indexer.events import Cleared, Event, EventBatch, LoadReport, Removed, Stored, pack_hashes
from indexer.kv_indexer import KVIndexer, PromptHashes, hash_prompt
from indexer.types import PLAIN, Tier, WorkerRank
from router.events.drift import LEAST_REQUESTS, LEAST_SECONDS
from router.events.index_audit import EVERY, PATIENCE, Claim, IndexAudit
from router.metrics.registry import Metrics
from router.proxy.legs import Parted
from router.proxy.outcome import Outcome
from router.scheduling.candidates import Candidates
from router.scheduling.decision import Choice, Decision

RANK = WorkerRank("w", 0)
SIZE, BLOCKS = 16, 8
TOKENS = SIZE * BLOCKS + 5


class Audited:
    """A rank that holds `held` blocks of a prompt, as its events tell."""

    def __init__(
        self, held: int = 0, *, exact: bool = True, has_store: bool = False, max_bytes: int | None = None
    ) -> None:
        self.indexer = KVIndexer(max_bytes=max_bytes)
        self.indexer.watch(RANK)
        self.asked: list[WorkerRank] = []
        self.audit = IndexAudit(self.indexer, self.asked.append, has_store)
        self.now = 100.0
        self.prompt = prompt(1)
        self._events = 0
        self.tell(Stored(Tier.GPU, self.packed(0, held)))
        self.indexer.on_report(LoadReport(*RANK, 1, 0, exact))

    def packed(self, first: int, last: int) -> bytes:
        return pack_hashes(self.prompt.chains[SIZE][first:last])

    def tell(self, *events: Event) -> None:
        self.indexer.on_batch(EventBatch(*RANK, 1, self._events, list(events)))
        self._events += 1

    def claim(self, overlap: int | None = None) -> Claim | None:
        """When a request is sent there; `overlap` blocks, if other than are known."""
        matches = self.indexer.find_matches(self.prompt)
        found = matches[RANK].blocks if RANK in matches else 0
        tokens = SIZE * (found if overlap is None else overlap)
        decision = Decision(Candidates([(RANK, SIZE)]), Choice(0, None, ""), TOKENS, tokens, tokens)
        self.now += EVERY
        return self.audit.claim(decision, matches, self.prompt, self.now)

    def finish(self, claim: Claim | None, cached: int, **other: Any) -> None:
        """`cached` blocks."""
        assert claim is not None
        outcome = Outcome(None, 200, "complete", 0.1, 0.2, TOKENS, SIZE * cached)
        self.audit.finished(claim, outcome._replace(**other), self.now)

    @property
    def drift(self) -> float | None:
        """When all is judged, in blocks; None when nothing could be."""
        self.now += PATIENCE
        self.audit.tick(self.now)
        found = self.audit.status(RANK)
        return None if found is None else round(found.bias * TOKENS / SIZE, 2)


def prompt(first: int) -> PromptHashes:
    return hash_prompt(range(first, first + TOKENS), [SIZE], PLAIN)


@pytest.mark.parametrize(
    ("held", "cached", "drift"), [(4, 4, 0), (4, 3, 0), (4, 5, 0), (4, 2, 2), (4, 0, 4), (2, 6, -4), (0, 8, -8)]
)
def test_what_was_claimed_is_held_against_what_was_reported_but_for_a_block(held: int, cached: int, drift: int) -> None:
    audited = Audited(held)
    audited.finish(audited.claim(), cached)
    assert audited.drift == pytest.approx(drift, abs=0.01)


def test_more_than_the_prompt_is_of_several_answers_together() -> None:
    """As older SGLang adds it up; it says nothing of what was held when the request was sent."""
    audited = Audited(4)
    audited.finish(audited.claim(), 2 * BLOCKS)
    assert audited.drift is None


def test_how_far_the_index_is_off_is_told_of_each_rank_until_it_leaves() -> None:
    audited, metrics = Audited(4), Metrics()
    audited.audit.register(metrics)
    labels = {"worker": "w", "dp_rank": "0"}
    assert metrics.registry.get_sample_value("router_index_drift_ratio", labels) is None
    audited.finish(audited.claim(), 0)
    assert audited.drift == pytest.approx(4, abs=0.01)
    ratio = metrics.registry.get_sample_value("router_index_drift_ratio", labels)
    assert ratio == pytest.approx(4 * SIZE / TOKENS)
    audited.indexer.forget(RANK)
    assert audited.drift is None
    assert metrics.registry.get_sample_value("router_index_drift_ratio", labels) is None


@pytest.mark.parametrize(("first", "last", "drift"), [(2, 6, 0), (6, 8, 4)], ids=["those missed", "others"])
def test_blocks_evicted_after_the_request_was_sent_are_no_drift(first: int, last: int, drift: int) -> None:
    audited = Audited(6)
    claim = audited.claim()
    audited.tell(Removed(Tier.GPU, audited.packed(first, last)))
    audited.finish(claim, 2)
    assert audited.drift == pytest.approx(drift, abs=0.01)


def test_blocks_evicted_before_are_no_excuse() -> None:
    audited = Audited(6)
    audited.tell(Removed(Tier.GPU, audited.packed(2, 6)))
    audited.tell(Stored(Tier.GPU, audited.packed(2, 6)))
    audited.finish(audited.claim(), 2)
    assert audited.drift == pytest.approx(4, abs=0.01)


def test_blocks_whose_events_were_under_way_are_no_drift_even_if_gone_again() -> None:
    audited = Audited(2)
    claim = audited.claim()
    audited.tell(Stored(Tier.GPU, audited.packed(2, 7)))
    audited.finish(claim, 7)
    assert audited.drift == 0
    audited.tell(Removed(Tier.GPU, audited.packed(2, 7)))
    audited.finish(claim, 7)
    assert audited.drift == 0


def test_what_was_only_predicted_need_not_come_true() -> None:
    audited = Audited(2)
    audited.indexer.predict(RANK, audited.prompt.chain(SIZE), audited.now)
    for cached in (2, 5, 8):
        audited.finish(audited.claim(), cached)
    assert audited.drift == 0


@pytest.mark.parametrize("forgotten", ["_refused", "_evicted"])
def test_more_than_known_says_nothing_where_a_store_may_have_given_it_or_the_index_forgets(forgotten: str) -> None:
    audited = Audited(2, has_store=True)
    audited.finish(audited.claim(), 7)
    assert audited.drift is None
    audited.finish(audited.claim(), 0)
    assert audited.drift == pytest.approx(2, abs=0.01)
    forgetful = Audited(2)
    setattr(forgetful.indexer.index, forgotten, 1)
    forgetful.finish(forgetful.claim(), 7)
    assert forgetful.drift is None


def test_a_rank_known_in_part_may_hold_more_but_not_less() -> None:
    audited = Audited(2, exact=False)
    audited.finish(audited.claim(), 7)
    assert audited.drift is None
    audited.finish(audited.claim(), 0)
    assert audited.drift == pytest.approx(2, abs=0.01)


def test_a_rank_that_is_not_known_is_not_judged() -> None:
    audited = Audited(4)
    audited.indexer.on_tick(connected=False)
    assert audited.indexer.view(RANK) is View.RECOVERING
    assert audited.claim() is None
    audited.indexer.on_report(LoadReport(*RANK, 1, 0, True))
    claim = audited.claim()
    audited.finish(claim, 0)
    audited.indexer.on_tick(connected=False)
    assert audited.drift is None


def test_a_cache_that_was_cleared_meanwhile_is_not_judged() -> None:
    audited = Audited(4)
    claim = audited.claim()
    audited.tell(Cleared())
    audited.finish(claim, 0)
    assert audited.drift is None


@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(TOKENS, None), (None, 0), (TOKENS + 1, 0)])
def test_an_engine_that_counted_another_prompt_or_nothing_is_not_judged(
    prompt_tokens: int | None, cached_tokens: int | None
) -> None:
    audited = Audited(4)
    audited.finish(audited.claim(), 0, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    assert audited.drift is None


@pytest.mark.parametrize(("reported", "drift"), [(4 * SIZE, 0), (None, None)])
def test_of_a_request_in_two_parts_only_what_its_prefill_worker_reported_counts(
    reported: int | None, drift: float | None
) -> None:
    audited = Audited(4)
    parted = Parted("w", 0.1, 0.1, Prefilled(cached_tokens=reported))
    audited.finish(audited.claim(), 8, parted=parted)
    assert audited.drift == drift


def drifting(audited: Audited) -> None:
    for _ in range(LEAST_REQUESTS + 5):
        audited.now += LEAST_SECONDS / LEAST_REQUESTS
        audited.finish(audited.claim(), 0)
        audited.audit.tick(audited.now + PATIENCE)


def test_who_drifts_is_asked_for_everything_and_a_worker_that_left_is_forgotten() -> None:
    audited = Audited(4)
    drifting(audited)
    assert audited.asked == [RANK]
    assert audited.audit.alarms == 1
    status = audited.audit.status(RANK)
    assert status is not None
    assert status.alarm
    audited.indexer.forget(RANK)
    assert audited.drift is None


def test_who_comes_at_once_under_the_name_of_one_that_left_is_not_judged_by_it() -> None:
    audited = Audited(4)
    drifting(audited)
    audited.finish(audited.claim(), 0)
    audited.indexer.forget(RANK)
    audited.audit.forget("w")
    audited.indexer.watch(RANK)
    audited.indexer.on_report(LoadReport(*RANK, 1, 0, exact=True))
    assert audited.audit.status(RANK) is None
    assert audited.drift is None, "nor by what is judged later"


def test_of_many_requests_at_once_one_is_looked_at() -> None:
    audited = Audited(4)
    assert audited.claim()
    audited.now -= EVERY
    assert audited.claim() is None


def test_requests_that_differ_are_not_kept_without_end() -> None:
    audited = Audited(4)
    for _ in range(5000):
        audited.finish(audited.claim(), 0)
    assert len(audited.audit._different) == 4096
