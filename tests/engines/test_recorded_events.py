"""Every recorded frame decodes, and what comes out builds the cache that the engine says it had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
import pytest

import engines.sglang.decode
from engines.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent
from indexer.handles import BlockHandles
from indexer.hashing import chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace, Tier
from tests.engines.plain import plain
from tests.engines.recordings import RECORDINGS, Recording, answer, exchanges, payloads

PLAIN = Namespace()
recordings = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)


def events(recording: Recording) -> list[EngineEvent]:
    return [event for payload in payloads(recording.name) for event in recording.decode(payload).events]


def apply(handles: BlockHandles, found: Iterable[EngineEvent]) -> None:
    for event in found:
        match event:
            case BlockStored(hashes, parent, tokens, block_size, tier, namespace, extras):
                handles.store(tier, hashes, parent, tokens, block_size, root_hash(namespace), extras)
            case BlockRemoved(hashes, tier):
                handles.remove(tier, hashes)
            case AllBlocksCleared():
                handles.clear()


def overlap(handles: BlockHandles, tokens: list[int], block_size: int, namespace: Namespace = PLAIN) -> int:
    """Leading tokens of the prompt that are held."""
    held = set(handles.held().get(Tier.GPU, ()))
    prompt = chain_hashes(pack_tokens(tokens), block_size, root_hash(namespace))
    missing = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
    return missing * block_size


def token_completions(recording: Recording) -> list[tuple[list[int], Namespace, int]]:
    """Prompt, namespace and the tokens that the engine says it had cached, of each completion of token ids."""
    found = []
    for exchange in exchanges(recording.name):
        request, answered = exchange["request"], exchange["response"]["body"]
        if request["path"] != "/v1/completions" or not isinstance(answered, dict) or "usage" not in answered:
            continue
        prompt = request["body"]["prompt"]
        if isinstance(prompt, list):
            details: dict[str, Any] = answered["usage"]["prompt_tokens_details"] or {}
            namespace = Namespace(cache_salt=request["body"].get("cache_salt"))
            found.append((prompt, namespace, details.get("cached_tokens") or 0))
    return found


@recordings
def test_events_are_as_many_as_were_sent(recording: Recording) -> None:
    batches = [recording.decode(payload) for payload in payloads(recording.name)]
    kinds: Counter[type[EngineEvent]] = Counter()
    for event in (event for batch in batches for event in batch.events):
        # Of removals, their blocks: neighbours come as one event.
        kinds[type(event)] += len(event.engine_hashes) if isinstance(event, BlockRemoved) else 1
    skipped = sum((Counter(batch.skipped) for batch in batches), Counter[str]())
    assert kinds == {BlockStored: recording.stores, BlockRemoved: recording.removes, AllBlocksCleared: 1}
    assert skipped == recording.skipped
    assert {batch.dp_rank for batch in batches} == {0}
    assert all(1.79e9 < batch.timestamp < 1.80e9 for batch in batches)


@recordings
def test_every_parent_is_known_and_every_removal_finds_its_block(recording: Recording) -> None:
    handles = BlockHandles()
    for event in events(recording):
        if isinstance(event, BlockRemoved):
            assert len(handles.remove(event.tier, event.engine_hashes)), "removed what was never stored"
        else:
            apply(handles, [event])  # raises UnknownParent
    assert len(handles) > 0


@recordings
def test_before_any_removal_each_prompt_is_held_as_far_as_the_engine_said(recording: Recording) -> None:
    handles = BlockHandles()
    found = events(recording)
    apply(handles, found[: next(i for i, event in enumerate(found) if isinstance(event, BlockRemoved))])
    completions = token_completions(recording)
    assert any(namespace.cache_salt == "tenant-a" for _, namespace, _ in completions)
    assert any(cached > 0 for _, _, cached in completions)
    for prompt, namespace, cached in completions:
        whole_blocks = len(prompt) // recording.block_size * recording.block_size
        assert overlap(handles, prompt, recording.block_size, namespace) == whole_blocks >= cached
        assert overlap(handles, prompt, recording.block_size, Namespace(cache_salt="tenant-b")) == 0


@recordings
def test_the_last_prompt_is_held_at_the_end_and_the_salted_one_is_gone(recording: Recording) -> None:
    handles = BlockHandles()
    apply(handles, events(recording))
    prompt = token_completions(recording)[0][0]
    assert overlap(handles, prompt, recording.block_size) == 96
    assert overlap(handles, prompt, recording.block_size, Namespace(cache_salt="tenant-a")) == 0


@pytest.mark.parametrize("recording", [r for r in RECORDINGS if "mooncake" not in r.name], ids=lambda r: r.name)
def test_the_tokenized_chat_is_what_the_engine_cached(recording: Recording) -> None:
    handles = BlockHandles()
    found = events(recording)
    apply(handles, found[: next(i for i, event in enumerate(found) if isinstance(event, BlockRemoved))])
    tokens: list[int] = msgspec.json.decode(answer(recording.name, "tokenize chat").body)["tokens"]
    whole_blocks = len(tokens) // recording.block_size * recording.block_size
    assert overlap(handles, tokens, recording.block_size) == whole_blocks > 0


def test_both_sglang_encodings_of_one_run_decode_alike() -> None:
    """The two versions ran the same steps; prompt and salted blocks were stored with the same hashes."""
    older, newer = (
        [event for event in map(plain, events(recording)) if isinstance(event, BlockStored)]
        for recording in RECORDINGS[2:4]
    )
    assert older[:3] == newer[:3]
    salted = Namespace(cache_salt="tenant-a")
    assert [e for e in older if e.namespace == salted] == [e for e in newer if e.namespace == salted] != []


def test_with_eagle_each_prompt_is_held_as_far_as_sglang_found_it_or_one_page_further() -> None:
    """The two prompts part just where the fourth page ends: the engine keeps that page twice, the index once."""
    first = token_prompt(1, 100)
    second = first[:64] + token_prompt(2, 60)
    found = [engines.sglang.decode.decode(payload).events for payload in payloads("sglang-0.5.23-eagle")]
    handles = BlockHandles()
    apply(handles, chain.from_iterable(found[:3]))
    assert [overlap(handles, tokens, 16) for tokens in (first, second, first[:64], first[:65])] == [96, 112, 64, 64]
    apply(handles, found[3])  # what was of the second alone
    assert [overlap(handles, tokens, 16) for tokens in (first, second)] == [96, 64]


def token_prompt(seed: int, length: int) -> list[int]:
    return [(i * 7 + seed * 131) % 4000 + 5 for i in range(length)]
