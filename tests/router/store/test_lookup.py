"""What is asked of a store's master, and what becomes of it when that does not answer as it should."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from engines.store import VllmLayout
from indexer.hashing import Tokens, chain_hashes, pack_tokens, root_hash
from indexer.types import Namespace
from router.metrics.tallies import Histogram
from router.store import lookup as store_lookup
from router.store import master as store_master
from router.store.lookup import AT_ONCE, FIRST, LOOKUP_BOUNDS, MOST_LISTED, OUTCOMES, PART, SEEN_LIFE, StoreLookup
from router.store.master import FAILURES, PAUSE, StoreMaster
from tests.fakes.store_master import PLAIN, Master, serving
from tests.fakes.waiting import until

SIZE = 16
LAYOUT = VllmLayout(model="m", block_size=SIZE, tp=2)
PROMPT = pack_tokens(list(range(10, 10 + 10 * SIZE + 5)))


class Desk:
    def __init__(self, master: Master, asked: StoreMaster, lookup: StoreLookup) -> None:
        self.master = master
        self.asked = asked
        self.lookup = lookup
        self.now = 100.0

    async def ask(self, tokens: Tokens = PROMPT, namespace: Namespace = PLAIN) -> int:
        return await self.lookup.lookup(tokens, chain_hashes(tokens, SIZE, root_hash(namespace)), namespace)


@asynccontextmanager
async def desk(budget: float = 10.0) -> AsyncIterator[Desk]:
    async with serving(LAYOUT) as master, aiohttp.ClientSession() as session:
        seconds, asked, counts = Histogram(LOOKUP_BOUNDS), StoreMaster(master.url, session), dict.fromkeys(OUTCOMES, 0)
        found = Desk(master, asked, StoreLookup(asked, budget, LAYOUT, lambda: found.now, seconds, counts))
        try:
            yield found
        finally:
            master.go_on.set()
            await found.lookup.close()
            asked.close()


@pytest.mark.parametrize("blocks", [0, 1, 7, 10])
async def test_the_leading_blocks_that_are_there(blocks: int) -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, blocks)
        assert await asking.ask() == blocks * SIZE
        assert len(asking.master.asked) == 1
        assert len(asking.master.asked[0]) == 20, "each block has an object for each of two ranks"
        assert asking.lookup.lookups["answered"] == 1


async def test_a_block_of_which_a_rank_is_missing_ends_the_prefix() -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, 10)
        fourth = (LAYOUT.hashes(PROMPT, PLAIN) or [])[3]
        asking.master.there.remove(LAYOUT.keys(fourth)[1])
        assert await asking.ask() == 3 * SIZE


async def test_what_was_just_seen_is_not_asked_again_for_a_while() -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, 10)
        await asking.ask()
        assert await asking.ask() == 10 * SIZE
        assert len(asking.master.asked) == 1
        assert asking.lookup.lookups["known"] == 1
        longer = np.concatenate((PROMPT[: 10 * SIZE], pack_tokens([7] * 2 * SIZE)))
        assert await asking.ask(longer) == 10 * SIZE
        assert [len(keys) for keys in asking.master.asked] == [20, 4], "only what is new"
        asking.now += SEEN_LIFE + 0.1
        asking.master.there.clear()
        assert await asking.ask() == 0


async def test_as_many_blocks_are_remembered_as_seen_as_there_may_be_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lookup, "KNOWN", 15)
    async with desk() as asking:
        for first in range(5):
            prompt = pack_tokens(list(range(first, first + 10 * SIZE)))
            asking.master.put(prompt, 10)
            assert await asking.ask(prompt) == 10 * SIZE
        assert len(asking.lookup._seen) == 15
        assert await asking.ask(prompt) == 10 * SIZE
        assert asking.lookup.lookups["known"] == 1, "those seen last stay"


@pytest.mark.parametrize(
    ("there", "asked"),
    [(0, [FIRST]), (FIRST - 1, [FIRST]), (FIRST, [FIRST, 68]), (40, [FIRST, 68]), (100, [FIRST, 68])],
)
async def test_of_a_long_prompt_the_beginning_is_asked_for_first(there: int, asked: list[int]) -> None:
    """So that most prompts that are not there cost little."""
    long = pack_tokens(list(range(100 * SIZE)))
    async with desk() as asking:
        asking.master.put(long, there)
        assert await asking.ask(long) == there * SIZE
        assert [len(keys) // 2 for keys in asking.master.asked] == asked
        assert asking.lookup.lookups["answered"] == 1


@pytest.mark.parametrize("there", [FIRST + PART - 1, FIRST + PART, FIRST + 2 * PART + 5, FIRST + 6 * PART + 1])
async def test_the_rest_is_asked_for_in_parts_of_which_the_first_gap_counts(there: int) -> None:
    blocks = FIRST + 6 * PART + 1
    long = pack_tokens(list(range(blocks * SIZE)))
    async with desk() as asking:
        asking.master.put(long, blocks)
        gap = (LAYOUT.hashes(long, PLAIN) or [b""])[there] if there < blocks else b""
        asking.master.there -= set(LAYOUT.keys(gap)) if gap else set()
        assert await asking.ask(long) == there * SIZE
        sizes = [len(keys) // 2 for keys in asking.master.asked]
        assert sizes[0] == FIRST
        under_way = AT_ONCE if there < blocks else 0
        assert sum(sizes) <= there + under_way * PART + FIRST, "not all of it where it ends soon"
        assert asking.lookup.lookups["answered"] == 1


@pytest.mark.parametrize(("many", "at_once"), [(32, 3), (1, 1)])
async def test_where_much_is_asked_each_prompt_asks_one_thing_at_a_time(
    monkeypatch: pytest.MonkeyPatch, many: int, at_once: int
) -> None:
    monkeypatch.setattr(store_master, "MANY", many)
    long = pack_tokens(list(range((FIRST + 3 * PART) * SIZE)))
    async with desk(budget=60.0) as asking:
        master = asking.master

        def the_first_only() -> web.Response:
            master.go_on.clear()
            master.answer = None
            there = {"ok": True, "values": [{"size_": 1}]}
            return web.json_response({"success": True, "data": dict.fromkeys(master.asked[-1], there)})

        master.put(long, FIRST + 3 * PART)
        master.answer = the_first_only
        lookup = asyncio.ensure_future(asking.ask(long))
        await until(lambda: len(master.asked) == 1 + at_once)
        await asyncio.sleep(0.01)
        assert len(master.asked) == 1 + at_once, "the others wait for an answer"
        master.go_on.set()
        assert await lookup == len(long)


async def test_names_depend_on_the_namespace() -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, 10, Namespace(cache_salt="a"))
        assert await asking.ask() == 0
        assert await asking.ask(namespace=Namespace(cache_salt="b")) == 0
        assert await asking.ask(namespace=Namespace(cache_salt="a")) == 10 * SIZE
        asked = len(asking.master.asked)
        assert await asking.ask(namespace=Namespace("adapter")) == 0, "whose path is not known"
        assert len(asking.master.asked) == asked


async def test_a_late_answer_serves_the_next() -> None:
    async with desk(budget=0.005) as asking:
        asking.master.put(PROMPT, 10)
        asking.master.go_on.clear()
        assert await asking.ask() == 0
        assert asking.lookup.lookups["late"] == 1
        asking.master.go_on.set()
        await until(lambda: not asking.lookup._running)
        assert await asking.ask() == 10 * SIZE


@pytest.mark.parametrize("status", [200, 500])
async def test_each_prompt_has_one_outcome_whatever_comes_late(status: int) -> None:
    async with desk(budget=0.005) as asking:
        asking.master.answer = lambda: web.Response(status=status, text='{"success": true, "data": {}}')
        asking.master.go_on.clear()
        await asking.ask()
        asking.master.go_on.set()
        await until(lambda: not asking.lookup._running)
        assert {outcome: count for outcome, count in asking.lookup.lookups.items() if count} == {"late": 1}
        assert asking.asked.healthy is (status == 200)


async def test_what_is_known_by_then_counts_when_the_rest_is_late() -> None:
    long = pack_tokens(list(range(100 * SIZE)))
    async with desk(budget=0.5) as asking:
        master = asking.master

        def the_first_only() -> web.Response:
            master.go_on.clear()
            there = {"ok": True, "values": [{"size_": 1}]}
            return web.json_response({"success": True, "data": dict.fromkeys(master.asked[-1], there)})

        master.answer = the_first_only
        assert await asking.ask(long) == FIRST * SIZE
        assert (len(master.asked), asking.lookup.lookups["late"]) == (2, 1)


BAD: dict[str, Callable[[], web.Response]] = {
    "500": lambda: web.Response(status=500),
    "no JSON": lambda: web.Response(text="<html>"),
    "another answer": lambda: web.json_response([1]),
    "an error": lambda: web.Response(body=json.dumps({"success": False, "error": "busy"}).encode()),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_master_that_answers_badly_counts_as_an_empty_store(name: str) -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, 10)
        asking.master.answer = BAD[name]
        for _ in range(FAILURES):
            assert await asking.ask() == 0
        assert asking.lookup.lookups["failed"] == FAILURES
        assert not asking.asked.healthy
        assert await asking.ask() == 0, "and is left alone for a while"
        assert len(asking.master.asked) == FAILURES
        assert asking.lookup.lookups["paused"] == 1
        asking.master.answer = None
        asking.now += PAUSE + 0.1
        assert await asking.ask() == 10 * SIZE
        assert asking.asked.healthy


async def test_a_prompt_whose_names_cannot_be_known_tells_nothing_of_the_master() -> None:
    async with desk() as asking:
        asking.master.answer = BAD["500"]
        for _ in range(FAILURES):
            assert await asking.ask(namespace=Namespace("adapter")) == 0, "whose path is not known"
            assert await asking.ask() == 0
        assert not asking.asked.healthy
        assert await asking.ask() == 0
        assert {outcome: count for outcome, count in asking.lookup.lookups.items() if count} == {
            "known": FAILURES,
            "failed": FAILURES,
            "paused": 1,
        }


async def test_a_master_that_has_many_keys_is_not_kept_busy_listing_them() -> None:
    async with desk() as asking:
        asking.master.put(PROMPT, 2)
        asking.master.counts["master_key_count"] = MOST_LISTED + 1
        assert await asking.lookup.check() == (
            None,
            "The store has 100,001 keys, too many to have them listed while it serves.",
        )
        assert not asking.master.listed
        asking.master.counts["master_key_count"] = MOST_LISTED
        assert (await asking.lookup.check()).agrees


async def test_keys_of_another_model_are_found_out() -> None:
    async with desk() as asking:
        assert (await asking.lookup.check()).agrees is None, "an empty store tells nothing"
        asking.master.put(PROMPT, 2)
        assert (await asking.lookup.check()).agrees
        asking.master.there = {key.replace("m@tp", "other@tp") for key in asking.master.there}
        verdict = await asking.lookup.check()
        assert verdict.agrees is False
        assert "other" in verdict.why
