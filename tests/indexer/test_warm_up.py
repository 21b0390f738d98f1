from __future__ import annotations

import indexer.hashing
import indexer.kernels
from indexer.events import Event, EventBatch, Removed, Stored, pack_hashes
from indexer.hashing import chain_hashes, pack_tokens
from indexer.kv_indexer import KVIndexer, hash_prompt
from indexer.types import PLAIN, Tier, WorkerRank
from indexer.warm_up import warm_up
from router.tokens.stand_ins import stand_ins


def _compiled() -> dict[str, list[object]]:
    """Argument types that there is code for, by kernel."""
    things = {**vars(indexer.hashing), **vars(indexer.kernels)}
    found = {name: getattr(thing, "signatures", None) for name, thing in things.items()}
    return {name: list(signatures) for name, signatures in found.items() if signatures is not None}


def test_nothing_is_left_to_compile_when_requests_come() -> None:
    warm_up()
    before = _compiled()
    subject = KVIndexer()
    told, silent, gone = (WorkerRank("w", number) for number in range(3))
    hashes = chain_hashes(pack_tokens(range(32_000)), 16, 0)
    for rank in (told, gone):
        subject.watch(rank)
        for number, tier in enumerate(Tier):
            events: list[Event] = [Stored(tier, pack_hashes(hashes)), Removed(tier, pack_hashes(hashes[:9]))]
            subject.on_batch(EventBatch(rank.worker_id, rank.dp_rank, 1, number, events))
    subject.watch(silent)
    subject.predict(silent, hash_prompt(range(100), {16}, PLAIN).chain(16), 1.0)
    subject.find_matches(hash_prompt(range(100), {16}, PLAIN))
    subject.find_assumed(hash_prompt(stand_ins(["stands for tokens"]), {2}, PLAIN))
    subject.expire(1e9)
    subject.forget(gone)
    both: list[Event] = [Stored(Tier.GPU, pack_hashes(hashes)), Stored(Tier.GPU, pack_hashes(hashes), window=2)]
    subject.on_batch(EventBatch("w", 0, 1, 3, both))
    subject.find_matches(hash_prompt(range(100), {16}, PLAIN))
    assert _compiled() == before


def test_nor_for_layers_with_a_window() -> None:
    warm_up()
    before = _compiled()
    subject, rank, prompt = KVIndexer(), WorkerRank("w", 0), hash_prompt(range(100), {16}, PLAIN)
    hashes = pack_hashes(prompt.chain(16))
    subject.watch(rank)
    events: list[Event] = [
        Stored(Tier.GPU, hashes),
        Stored(Tier.GPU, hashes, window=2),
        Removed(Tier.GPU, hashes[:8], window=2),
    ]
    subject.on_batch(EventBatch("w", 0, 1, 0, events))
    subject.find_matches(prompt)
    assert _compiled() == before
