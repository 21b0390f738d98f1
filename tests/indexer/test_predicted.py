"""A prediction holds until events have had time to come, and no longer than twice that."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indexer.cursor import View
from indexer.events import Cleared, EventBatch, Stored, pack_hashes
from indexer.hashing import chain_hashes, pack_tokens
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.matches import MostOfMatches, Overlap
from indexer.predicted import LIFE, PredictedPrefixes
from indexer.prefix_index import PrefixIndex
from indexer.types import PLAIN, RankSet, Tier, WorkerRank
from tests.examples import examples

A, B = WorkerRank("a", 0), WorkerRank("b", 0)
BOTH = RankSet([A, B])
TEN = chain_hashes(pack_tokens(range(160)), 16, 0)
PROMPT = hash_prompt(list(range(64)), [16], PLAIN)


def found(predicted: PredictedPrefixes) -> list[int]:
    """Leading blocks of `TEN` that each rank is predicted to hold."""
    most = [0, 0]
    for matches in predicted.find_matches(TEN):
        most = [max(pair) for pair in zip(most, matches.blocks_of(BOTH).tolist(), strict=True)]
    return most


class Predicting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.predicted = PredictedPrefixes(10.0)
        self.now = 1000.0
        self.stored: list[tuple[float, WorkerRank, int]] = []

    @rule(of=st.sampled_from([A, B]), blocks=st.integers(0, 10))
    def store(self, of: WorkerRank, blocks: int) -> None:
        self.predicted.store(of, TEN[:blocks], self.now)
        self.stored.append((self.now, of, blocks))

    @rule(seconds=st.sampled_from([0.0, 3.0, 9.9, 10.0, 19.9, 25.0]))
    def wait(self, seconds: float) -> None:
        """Nothing is asked meanwhile."""
        self.now += seconds

    @rule(of=st.sampled_from([A, B]))
    def forget(self, of: WorkerRank) -> None:
        self.predicted.forget(of)
        self.stored = [each for each in self.stored if each[1] != of]

    @rule()
    def look(self) -> None:
        self.predicted.expire(self.now)
        for each, blocks in zip((A, B), found(self.predicted), strict=True):
            young = [count for at, of, count in self.stored if of == each and self.now - at < 10.0]
            living = [count for at, of, count in self.stored if of == each and self.now - at < 20.0]
            assert max(young, default=0) <= blocks <= max(living, default=0)

    @invariant()
    def only_two_generations_answer(self) -> None:
        assert len(self.predicted.find_matches(TEN)) <= 2


TestPredictingAgainstModel = Predicting.TestCase
TestPredictingAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None, derandomize=True
)


def test_where_nothing_was_predicted_nothing_is_asked() -> None:
    predicted = PredictedPrefixes()
    predicted.expire(5.0)
    assert predicted.find_matches(TEN) == []
    predicted.store(A, TEN[:5], 5.0)
    assert predicted.find_matches(TEN[5:]) == []
    predicted.expire(5.0 + 3 * LIFE)
    assert predicted.find_matches(TEN) == []


def test_known_or_predicted_whichever_is_more() -> None:
    index, predicted = PrefixIndex(), PredictedPrefixes()
    index.store(A, Tier.GPU, TEN[:4])
    index.store(B, Tier.GPU, TEN[:2])
    index.store(B, Tier.CPU, TEN[2:8])
    predicted.store(A, TEN[:6], 0.0)
    predicted.store(B, TEN[:5], 0.0)
    most = MostOfMatches(index.find_matches(TEN), predicted.find_matches(TEN))
    assert most.blocks_of(BOTH).tolist() == [6, 8]
    assert most.gpu_blocks_of(BOTH).tolist() == [6, 5]
    assert dict(most) == {A: Overlap(6, 6), B: Overlap(8, 5)}
    assert len(most) == 2
    assert WorkerRank("c", 0) not in most
    assert [most.prefix_of(rank) for rank in (A, B, WorkerRank("c", 0))] == [(6, TEN[5]), (8, TEN[7]), None]


def watching() -> KVIndexer:
    """An index to which rank a has sent its first event, so that it is not blind."""
    indexer = KVIndexer(assumed_ttl=100.0)
    indexer.watch(A)
    indexer.on_batch(EventBatch("a", 0, 1, 0, []))
    assert indexer.view(A) is not View.BLIND
    return indexer


def test_what_was_just_sent_counts_as_held_before_its_events_and_not_for_long_without() -> None:
    indexer = watching()
    indexer.predict(A, PROMPT.chain(16), 50.0)
    assert indexer.find_matches(PROMPT) == {A: Overlap(4, 4)}
    indexer.expire(50.0 + 2 * LIFE)
    assert indexer.find_matches(PROMPT) == {}
    assert indexer.index.entries() == 0


def test_events_take_over_from_a_prediction() -> None:
    indexer = watching()
    indexer.predict(A, PROMPT.chain(16), 50.0)
    indexer.on_batch(EventBatch("a", 0, 1, 1, [Stored(Tier.GPU, pack_hashes(PROMPT.chains[16]))]))
    assert indexer.find_matches(PROMPT) == {A: Overlap(4, 4)}
    indexer.expire(50.0 + 2 * LIFE)
    assert indexer.find_matches(PROMPT) == {A: Overlap(4, 4)}


def test_who_sends_no_events_is_believed_for_the_time_to_live() -> None:
    indexer = KVIndexer(assumed_ttl=100.0)
    indexer.predict(B, PROMPT.chain(16), 50.0)
    indexer.expire(149.0)
    assert indexer.find_matches(PROMPT) == {B: Overlap(4, 4)}
    indexer.expire(151.0)
    assert indexer.find_matches(PROMPT) == {}


def test_a_cleared_cache_and_a_forgotten_rank_hold_nothing_that_was_predicted() -> None:
    indexer = watching()
    indexer.predict(A, PROMPT.chain(16), 50.0)
    indexer.on_batch(EventBatch("a", 0, 1, 1, [Cleared()]))
    assert indexer.find_matches(PROMPT) == {}
    indexer.predict(A, PROMPT.chain(16), 50.0)
    indexer.on_batch(EventBatch("a", 0, 2, 0, []))  # it was started again
    assert indexer.find_matches(PROMPT) == {}
    indexer.predict(A, PROMPT.chain(16), 50.0)
    indexer.forget(A)
    assert indexer.find_matches(PROMPT) == {}


def test_a_prompt_without_a_chain_of_the_workers_block_size_is_no_prediction() -> None:
    indexer = watching()
    indexer.predict(A, PROMPT.chain(32), 50.0)
    assert indexer.find_matches(PROMPT) == {}
