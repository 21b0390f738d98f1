from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engines.number_kernels
import engines.sglang.decode
import engines.vllm.decode
import indexer.handle_kernels
import indexer.hash_kernels
import publishers.rank
import publishers.relay
from engines.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    WindowStored,
)
from indexer.events import Cleared, EventBatch, Removed, ReplayRequest, Stored, encode, pack_hashes, unpack_hashes
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace, Tier, WorkerRank
from publishers.relay import RankRelay

RANK = WorkerRank("w", 1)
EPOCH = 100
SIZE = 4


def relay(ring_size: int = 100) -> RankRelay:
    return RankRelay(RANK, EPOCH, ring_size)


def batch(*events: EngineEvent, **skipped: int) -> EngineBatch:
    return EngineBatch(0.0, None, list(events), skipped)


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> BlockStored:
    size, tier = more.pop("block_size", SIZE), more.pop("tier", Tier.GPU)
    return BlockStored(list(hashes), parent, tokens, size, tier, **more)


def ours(tokens: list[int], root: int = 0) -> list[int]:
    hashes: list[int] = chain_hashes(pack_tokens(tokens), SIZE, root).tolist()
    return hashes


def ask(event_id: int, epoch: int = EPOCH) -> ReplayRequest:
    return ReplayRequest(RANK.worker_id, RANK.dp_rank, epoch, event_id)


TEN = [stored([i], [i] * SIZE) for i in range(10)]


def test_stores_are_hashed_in_their_namespace_and_chained_to_their_parent() -> None:
    subject = relay()
    namespace = Namespace("lora", "salt")
    first = subject.apply(batch(stored([11, 12], list(range(8)), namespace=namespace)))
    second = subject.apply(batch(stored([13], [8, 9, 10, 11], parent=12)))
    whole = ours(list(range(12)), root_hash(namespace))
    assert first == [EventBatch("w", 1, EPOCH, 0, [Stored(Tier.GPU, pack_hashes(whole[:2]))])]
    assert second == [EventBatch("w", 1, EPOCH, 1, [Stored(Tier.GPU, pack_hashes(whole[2:]))])]


def test_one_step_of_an_engine_becomes_few_events_in_their_order() -> None:
    subject = relay()
    (made,) = subject.apply(
        batch(
            *TEN[:3], stored([7], [7] * SIZE, tier=Tier.CPU), BlockRemoved([0], Tier.GPU), BlockRemoved([1], Tier.GPU)
        )
    )
    h = [ours([i] * SIZE)[0] for i in range(10)]
    assert made.events == [
        Stored(Tier.GPU, pack_hashes(h[:3])),
        Stored(Tier.CPU, pack_hashes(h[7:8])),
        Removed(Tier.GPU, pack_hashes(h[:2])),
    ]


def test_what_changes_nothing_makes_no_batch_and_takes_no_id() -> None:
    subject = relay()
    nothing = [
        batch(),
        batch(AllBlocksCleared()),
        batch(BlockRemoved([5], Tier.GPU)),
        batch(stored([2], [1, 2, 3, 4], parent=99)),
        batch(medium=3),
    ]
    assert [subject.apply(one) for one in nothing] == [[]] * 5
    assert subject.event_id == -1
    subject.apply(batch(TEN[0]))
    assert subject.apply(batch(TEN[0])) == []  # a second copy
    assert subject.apply(batch(BlockRemoved([0], Tier.GPU))) == []  # the first copy is still there
    (gone,) = subject.apply(batch(BlockRemoved([0], Tier.GPU)))
    assert gone.event_id == 1


def test_what_sglang_tells_again_of_its_host_memory_is_no_further_copy() -> None:
    """Of hybrid models, when a window or a state follows the page there: `finish_write_through` in its
    mem_cache/unified_cache/unified_tree_core.py."""
    subject = relay()

    def apply(*events: dict[str, Any]) -> list[list[Any]]:
        made = subject.apply(engines.sglang.decode.decode(encode([1.0, events])))
        return [one.events for one in made]

    page = {"block_hashes": [11], "parent_block_hash": None, "token_ids": [1] * SIZE, "block_size": SIZE}
    backed_up = {"type": "BlockStored", "medium": "CPU_PINNED", **page}
    next_page = {**backed_up, "block_hashes": [12], "parent_block_hash": 11, "token_ids": [2] * SIZE}
    whole = ours([1] * SIZE + [2] * SIZE)
    apply({**backed_up, "medium": "GPU"}, backed_up)
    assert apply(backed_up, next_page) == [[Stored(Tier.CPU, pack_hashes(whole[1:]))]]
    evicted = {"type": "BlockRemoved", "block_hashes": [12, 11], "medium": "CPU_PINNED"}
    assert apply(evicted) == [[Removed(Tier.CPU, pack_hashes(whole[::-1]))]]
    assert subject.snapshot()[0].events == [Stored(Tier.GPU, pack_hashes(whole[:1]))]
    # On the GPU two nodes may hold pages of the same hash.
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}
    assert apply({**backed_up, "medium": "GPU"}) == apply(removed) == []
    assert apply(removed) == [[Removed(Tier.GPU, pack_hashes(whole[:1]))]]


def test_clearing_says_so_and_ends_doubt() -> None:
    subject = relay()
    subject.apply(batch(TEN[0], stored([2], [1, 2, 3, 4], parent=99)))
    assert not subject.exact
    (made,) = subject.apply(batch(AllBlocksCleared(), TEN[1]))
    assert made.events == [Cleared(), Stored(Tier.GPU, pack_hashes(ours([1] * SIZE)))]
    assert subject.exact
    assert subject.snapshot()[0].events == [Stored(Tier.GPU, pack_hashes(ours([1] * SIZE)))]


@pytest.mark.parametrize(
    ("events", "count"),
    [
        (batch(stored([1], [1, 2, 3, 4], parent=99)), "orphans"),
        (batch(stored([1], [1, 2, 3])), "malformed"),
        (batch(stored([1], [1, 2, 3, -4])), "malformed"),
        (batch(stored([1], [1, 2, 3, 2**32])), "malformed"),
        (batch(malformed=1), "malformed"),
    ],
)
def test_what_cannot_be_placed_is_counted_and_makes_the_view_inexact(events: EngineBatch, count: str) -> None:
    subject = relay()
    assert subject.exact
    assert subject.apply(events) == []
    assert getattr(subject.counts, count) == 1
    assert not subject.exact
    assert subject.apply(batch(TEN[0]))


@pytest.mark.parametrize(("known", "exact"), [(16 * SIZE, True), (SIZE, False), (None, False)])
def test_a_prompts_end_within_a_block_need_not_follow_anything(known: int | None, exact: bool) -> None:
    """vLLM 0.28 and on, where a hybrid model's blocks are larger than what it hashes: BlockPool.cache_partial_block."""
    subject = RankRelay(RANK, EPOCH, block_size=known)
    assert subject.apply(batch(stored([2], [1, 2, 3, 4], parent=1))) == []
    assert subject.exact is exact
    assert (subject.counts.orphans, subject.counts.skipped["block_size"]) == ((0, 1) if exact else (1, 0))


def test_nor_where_only_what_was_stored_tells_how_large_blocks_are() -> None:
    """As inside vLLM."""
    subject = relay()
    assert subject.apply(batch(stored([1], list(range(2 * SIZE)), block_size=2 * SIZE)))
    assert subject.apply(batch(stored([3], [1, 2, 3, 4], parent=2))) == []
    assert (subject.exact, subject.counts.skipped["block_size"]) == (True, 1)
    assert subject.apply(batch(stored([5], list(range(2 * SIZE)), parent=4, block_size=2 * SIZE))) == []
    assert (subject.exact, subject.counts.orphans) == (False, 1)


def test_skipped_events_are_counted_by_reason_and_leave_the_view_exact() -> None:
    subject = relay()
    subject.apply(batch(medium=2, group=1))
    subject.apply(batch(medium=1))
    assert subject.counts.skipped == {"medium": 3, "group": 1}
    assert subject.exact


def test_a_copy_is_of_what_an_event_before_described() -> None:
    subject = relay()
    subject.apply(batch(stored([11, 12], list(range(8)))))
    (copied,) = subject.apply(batch(BlockCopied([11, 12], Tier.CPU)))
    whole = pack_hashes(ours(list(range(8))))
    assert copied.events == [Stored(Tier.CPU, whole)]
    assert subject.apply(batch(BlockCopied([12], Tier.CPU))) == []  # said twice
    (evicted,) = subject.apply(batch(BlockRemoved([11, 12], Tier.GPU)))
    assert evicted.events == [Removed(Tier.GPU, whole)]
    (kept,) = subject.snapshot()[0].events
    assert isinstance(kept, Stored)
    assert (kept.tier, sorted(unpack_hashes(kept.hashes))) == (Tier.CPU, sorted(unpack_hashes(whole)))
    # The prompt goes on from what is in the lower tier only.
    assert subject.apply(batch(stored([13], [8, 9, 10, 11], parent=12)))[0].events == [
        Stored(Tier.GPU, pack_hashes(ours(list(range(12)))[2:]))
    ]
    assert (subject.counts.stored, subject.counts.removed) == (5, 2)


def test_a_copy_of_what_is_not_known_is_counted_and_leaves_the_view_exact() -> None:
    subject = relay()
    subject.apply(batch(TEN[0]))
    (copied,) = subject.apply(batch(BlockCopied([0, 98, 99], Tier.CPU)))
    assert copied.events == [Stored(Tier.CPU, pack_hashes(ours([0] * SIZE)))]
    assert subject.counts.skipped == {"tokens": 2}
    assert subject.exact
    (gone,) = subject.apply(batch(BlockRemoved([0, 98, 99], Tier.CPU)))
    assert gone.events == [Removed(Tier.CPU, pack_hashes(ours([0] * SIZE)))]


@pytest.mark.parametrize("lose", [RankRelay.lose_track, RankRelay.malformed])
def test_a_restart_begins_a_new_epoch_with_nothing(lose: Any) -> None:
    subject = relay()
    subject.apply(batch(*TEN, WindowStored([0], SIZE, 0, 1)))
    subject.apply(batch(stored([20], [20] * 2 * SIZE, block_size=2 * SIZE)))
    lose(subject)
    assert not subject.exact
    subject.restart(EPOCH + 1)
    assert subject.exact
    assert (subject.epoch, subject.event_id, len(subject), subject.counts.epochs) == (EPOCH + 1, -1, 0, 1)
    assert subject.replay(ask(0, EPOCH)) == [EventBatch("w", 1, EPOCH + 1, -1, [], 0, 1)]
    (made,) = subject.apply(batch(TEN[0], WindowStored([0], SIZE, 0, 2)))
    first = pack_hashes(ours([0] * SIZE))
    assert made == EventBatch("w", 1, EPOCH + 1, 0, [Stored(Tier.GPU, first), Stored(Tier.GPU, first, 2)])
    assert subject.replay(ask(0, EPOCH + 1)) == [made]


@pytest.mark.parametrize("epoch", [EPOCH, EPOCH - 1])
def test_an_epoch_never_goes_back(epoch: int) -> None:
    with pytest.raises(ValueError, match="not greater"):
        relay().restart(epoch)


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (ask(5), [5, 6, 7, 8, 9]),
        (ask(6), [6, 7, 8, 9]),
        (ask(9), [9]),
        (ask(10), []),
    ],
)
def test_the_ring_answers_while_it_reaches_back(request_: ReplayRequest, ids: list[int]) -> None:
    subject = relay(ring_size=5)
    sent = [made for event in TEN for made in subject.apply(batch(event))]
    answer = subject.replay(request_)
    assert [one.event_id for one in answer] == ids
    assert answer == sent[10 - len(ids) :]
    assert subject.counts.snapshots == 0


@pytest.mark.parametrize(
    "request_", [ask(4), ask(0), ask(11), ask(-1), ask(5, EPOCH - 1), ask(5, EPOCH + 1), ask(0, 0)]
)
def test_everything_else_is_answered_with_a_snapshot(request_: ReplayRequest) -> None:
    subject = relay(ring_size=5)
    for event in TEN:
        subject.apply(batch(event))
    (part,) = subject.replay(request_)
    assert (part.epoch, part.event_id, part.part, part.parts) == (EPOCH, 9, 0, 1)
    assert [set(unpack_hashes(event.hashes)) for event in part.events if isinstance(event, Stored)] == [
        {ours([i] * SIZE)[0] for i in range(10)}
    ]
    assert subject.counts.snapshots == 1


def test_before_the_first_batch_nothing_can_be_missing() -> None:
    assert relay().replay(ask(0)) == []


def test_an_empty_snapshot_has_one_part() -> None:
    assert relay().replay(ask(0, 0)) == [EventBatch("w", 1, EPOCH, -1, [], 0, 1)]


def test_a_large_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers.relay, "SNAPSHOT_PART", 4)
    subject = relay()
    subject.apply(batch(*TEN))
    subject.apply(batch(stored([50], [50] * SIZE, tier=Tier.DISK)))
    parts = subject.snapshot()
    assert [(part.part, part.parts, part.event_id) for part in parts] == [(i, 3, 3) for i in range(3)]
    sizes = [len(unpack_hashes(event.hashes)) for part in parts for event in part.events if isinstance(event, Stored)]
    assert sizes == [4, 4, 2, 1]


def test_a_large_batch_becomes_several_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers.relay, "SNAPSHOT_PART", 4)
    subject = relay()
    gone = [BlockRemoved([0], Tier.GPU), BlockRemoved([1], Tier.GPU)]
    made = subject.apply(batch(*TEN, *gone, AllBlocksCleared(), TEN[2]))
    h = [ours([i] * SIZE)[0] for i in range(10)]
    assert [one.event_id for one in made] == [0, 1, 2, 3]
    assert [one.events for one in made] == [
        [Stored(Tier.GPU, pack_hashes(h[:4]))],
        [Stored(Tier.GPU, pack_hashes(h[4:8]))],
        [Stored(Tier.GPU, pack_hashes(h[8:])), Removed(Tier.GPU, pack_hashes(h[:2])), Cleared()],
        [Stored(Tier.GPU, pack_hashes(h[2:3]))],
    ]
    assert subject.counts.batches == 4
    assert subject.replay(ask(2)) == made[2:]


def one_prompt() -> list[EngineEvent]:
    return [stored(list(range(140_000)), list(range(140_000 * SIZE)))]


def cleared_after_each_block() -> list[EngineEvent]:
    return [event for i in range(70_000) for event in (stored([i], [i] * SIZE), AllBlocksCleared())]


@pytest.mark.parametrize("events", [one_prompt, cleared_after_each_block])
def test_whatever_an_engine_says_at_once_nats_takes(events: Callable[[], list[EngineEvent]]) -> None:
    made = relay().apply(batch(*events()))
    assert len(made) > 1
    assert max(len(encode(one)) for one in made) < 2**16


_events = st.one_of(
    st.integers(0, 5).map(lambda i: TEN[i]),
    st.integers(0, 5).map(lambda i: stored([10 + i], [10 + i] * SIZE, parent=i)),
    st.integers(0, 15).map(lambda i: BlockRemoved([i], Tier.GPU)),
    st.integers(0, 15).map(lambda i: stored([i], [i % 3] * SIZE, tier=Tier.CPU)),
    st.integers(0, 15).map(lambda i: BlockCopied([i], Tier.CPU)),
    st.integers(0, 15).map(lambda i: BlockRemoved([i], Tier.CPU)),
    st.just(AllBlocksCleared()),
)


def replica(batches: list[EventBatch], held: set[tuple[Tier, int]]) -> set[tuple[Tier, int]]:
    """What a receiver holds after `batches`: the plainest model there is."""
    for one in batches:
        for event in one.events:
            if isinstance(event, Cleared):
                held = set()
            elif isinstance(event, Stored):
                held = held | {(event.tier, h) for h in unpack_hashes(event.hashes)}
            else:
                held = held - {(event.tier, h) for h in unpack_hashes(event.hashes)}
    return held


@pytest.mark.parametrize("part", [1, 50_000])
@given(
    steps=st.lists(st.lists(_events, max_size=3), max_size=12),
    ring_size=st.integers(1, 6),
    missed_from=st.integers(-1, 13),
)
def test_live_batches_a_replay_and_a_snapshot_all_lead_to_the_same(
    part: int, steps: list[list[EngineEvent]], ring_size: int, missed_from: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishers.relay, "SNAPSHOT_PART", part)
        check_that_all_lead_to_the_same(steps, ring_size, missed_from)


def check_that_all_lead_to_the_same(steps: list[list[EngineEvent]], ring_size: int, missed_from: int) -> None:
    subject = relay(ring_size)
    live = [made for events in steps for made in subject.apply(batch(*events))]
    assert [one.event_id for one in live] == list(range(len(live)))
    everything = replica(live, set())
    assert replica(subject.snapshot(), set()) == everything
    answer = subject.replay(ask(missed_from))
    before = set() if answer and answer[0].parts else replica(live[:missed_from], set())
    assert replica(answer, before) == everything
    assert missed_from == len(live) or answer[-1].event_id == subject.event_id


def test_nothing_is_compiled_when_the_first_events_come() -> None:
    publishers.rank.warm_up()
    before = compiled()
    subject = relay()
    decode = engines.vllm.decode.Decoder()
    for size in (1, 2000):
        for event in (
            wire_stored(range(size)),
            wire_stored(range(2**63, 2**63 + size), size - 1),
            wire_stored([b"x" * 32] * size),
            wire_stored(range(size)) | {"token_ids": [], "block_size": 0, "medium": "CPU"},
            {"type": "BlockRemoved", "block_hashes": [2**63]},
            {"type": "BlockRemoved", "block_hashes": [0, b""]},
        ):
            subject.apply(decode(msgspec.msgpack.encode([1.0, [event], 0])))
    assert subject.counts.malformed == subject.counts.orphans == 0
    subject.snapshot()
    assert compiled() == before


def wire_stored(hashes: Any, parent: int | None = None) -> dict[str, Any]:
    tokens = [number % 7 for number in range(len(hashes) * SIZE)]
    fields = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE}
    return {"type": "BlockStored", **fields}


def compiled() -> dict[str, int]:
    """How many variants of each kernel there are."""
    modules = (engines.number_kernels, indexer.handle_kernels, indexer.hash_kernels)
    kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "signatures")]
    return {kernel.__name__: len(kernel.signatures) for kernel in kernels}
