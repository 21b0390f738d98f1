"""How a store's master is asked: over connections that are kept; and what is said when it does not answer well."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from engines.store import Segment, Stored, query
from indexer.types import Tier
from router.store import master as store_master
from router.store.master import FAILURES, StoreMaster, Unanswered
from tests.fakes.scripted_worker import Dialogue, Script, ScriptedWorker, answer, drop, never
from tests.fakes.waiting import until

KEYS = ["m@tp_rank:0@a", "m@tp_rank:0@b"]


def there(*keys: str) -> bytes:
    objects = {key: {"ok": True, "values": [{"size_": 7, "transport_endpoint_": "h:1"}]} for key in keys}
    return json.dumps({"success": True, "data": objects}).encode()


@pytest.fixture
async def fake() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker() as found:
        yield found


@pytest.fixture
async def master(fake: ScriptedWorker) -> AsyncIterator[StoreMaster]:
    async with aiohttp.ClientSession() as session:
        found = StoreMaster(fake.url, session)
        yield found
        found.close()


async def test_keys_are_asked_for_over_one_connection(fake: ScriptedWorker, master: StoreMaster) -> None:
    fake.then(answer(there(KEYS[0])), answer(there()))
    assert await master.present(KEYS) == {KEYS[0]}
    assert await master.present(KEYS) == set()
    assert [request.target for request in fake.requests] == [b"/batch_query_keys?keys=" + ",".join(KEYS).encode()] * 2
    assert fake.accepted == 1


async def test_an_address_may_have_a_path_with_escaped_characters(fake: ScriptedWorker) -> None:
    fake.then(answer(there(*KEYS)))
    async with aiohttp.ClientSession() as session:
        master = StoreMaster(fake.url + "/of%20ours", session)
        assert await master.present(KEYS) == set(KEYS)
        master.close()
    assert fake.requests[0].target.startswith(b"/of%20ours/batch_query_keys?keys=")


async def chunked(dialogue: Dialogue) -> None:
    dialogue.head()
    body = there(KEYS[1])
    dialogue.chunk(body[:9])
    dialogue.chunk(body[9:])
    dialogue.end()


async def test_an_answer_in_chunks(fake: ScriptedWorker, master: StoreMaster) -> None:
    fake.then(chunked)
    assert await master.present(KEYS) == {KEYS[1]}


async def test_many_keys_are_asked_for_in_parts(
    fake: ScriptedWorker, master: StoreMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "MOST_AT_ONCE", 1)
    fake.then(*[answer(there(key)) for key in KEYS * 2])
    assert await master.present(KEYS) == set(KEYS)
    assert set(await master.stored(KEYS)) == set(KEYS)
    assert [request.target.partition(b"=")[2].decode() for request in fake.requests] == KEYS * 2


@pytest.mark.parametrize("keys", [[], ["a,b"]], ids=["none", "with a comma"])
async def test_what_cannot_be_asked_is_not_there(fake: ScriptedWorker, master: StoreMaster, keys: list[str]) -> None:
    assert await master.present(keys) == set()
    assert await master.stored(keys) == {}
    assert not fake.requests


async def test_several_questions_are_under_way_at_a_time(fake: ScriptedWorker, master: StoreMaster) -> None:
    async def when_told(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await answer(there(*KEYS))(dialogue)

    fake.then(when_told, when_told)
    first, second = master.begin(KEYS), master.begin(KEYS)
    await until(lambda: len(fake.requests) == 2)
    fake.go_on.set()
    assert await second.present() == await first.present() == set(KEYS)


async def test_a_question_that_nobody_waits_for_keeps_its_connection(fake: ScriptedWorker, master: StoreMaster) -> None:
    fake.then(answer(there()), answer(there(KEYS[0])))
    master.begin(KEYS).drop()
    await until(lambda: master._pool._idle)
    assert await master.present(KEYS) == {KEYS[0]}
    assert fake.accepted == 1


async def test_a_connection_that_was_closed_meanwhile_is_replaced(fake: ScriptedWorker, master: StoreMaster) -> None:
    fake.then(answer(there()), drop, answer(there(KEYS[0])))
    await master.present(KEYS)
    assert await master.present(KEYS) == {KEYS[0]}
    assert fake.accepted == 2


BAD: dict[str, tuple[Script, str]] = {
    "500": (answer(b"no", 500), "500"),
    "no JSON": (answer(b"<html>"), "malformed"),
    "an error": (answer(b'{"success": false, "error": "busy"}'), "busy"),
    "closed": (drop, "closed"),
    "too much": (answer(there(*KEYS, "m@tp_rank:0@" + "c" * 200)), "more than 200 bytes"),
    "never": (never, "no answer within 0.2 s"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_wrong_is_said(
    fake: ScriptedWorker, master: StoreMaster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(store_master, "MOST_BYTES", 200)
    monkeypatch.setattr(store_master, "PATIENCE", 0.2)
    script, said = BAD[name]
    fake.then(script, script)
    with pytest.raises(Unanswered, match=said):
        await master.present(KEYS)
    assert not master._pool._open or name in {"500", "no JSON", "an error"}, "what is broken is not kept"


Ask = Callable[[StoreMaster], Awaitable[Any]]
RARE: dict[str, tuple[Ask, bytes, Any]] = {
    "stored": (lambda master: master.stored(KEYS), there(KEYS[0]), {KEYS[0]: Stored(7, Tier.CPU, ("h:1",))}),
    "segments": (
        lambda master: master.segments(),
        b'{"segments": [{"segment_name": "n:1", "te_endpoint": "h:1", "size_bytes": 9}]}',
        [Segment("n:1", "h:1", 9)],
    ),
    "keys": (lambda master: master.some_keys(), b"a\nb\ncut sho", ["a", "b"]),
    "a lease": (lambda master: master.lease(KEYS[0]), b"", True),
}


@pytest.mark.parametrize("name", RARE)
async def test_what_is_asked_rarely(fake: ScriptedWorker, master: StoreMaster, name: str) -> None:
    ask, body, told = RARE[name]
    fake.then(answer(body))
    assert await ask(master) == told


async def test_keys_that_come_in_pieces_are_all_seen(fake: ScriptedWorker, master: StoreMaster) -> None:
    """Of a few alone it would seem that the store lacks a rank's."""

    async def in_pieces(dialogue: Dialogue) -> None:
        dialogue.head(length=4)
        dialogue.send(b"a\n")
        await dialogue.go_on.wait()
        dialogue.send(b"b\n")

    fake.then(in_pieces)
    asking = asyncio.create_task(master.some_keys())
    await until(lambda: fake.dialogues and fake.dialogues[0].sent)
    await asyncio.sleep(0)
    fake.go_on.set()
    assert await asking == ["a", "b"]


async def test_who_lists_no_keys_is_no_empty_store(fake: ScriptedWorker, master: StoreMaster) -> None:
    fake.then(answer(b"not found", 404))
    with pytest.raises(Unanswered, match="it answered 404"):
        await master.some_keys()


@pytest.mark.parametrize("name", RARE)
async def test_a_master_that_never_answers(
    fake: ScriptedWorker, master: StoreMaster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(store_master, "PATIENCE", 0.05)
    fake.then(never)
    with pytest.raises(Unanswered, match=r"^it did not answer in time$"):
        await RARE[name][0](master)


@pytest.mark.parametrize("name", RARE)
async def test_a_master_that_is_away(fake: ScriptedWorker, master: StoreMaster, name: str) -> None:
    await fake.refuse()
    with pytest.raises(Unanswered, match=r"^Connection refused$"):
        await RARE[name][0](master)
    with pytest.raises(Unanswered, match=r"\w"):
        await master.present(KEYS)


async def test_the_log_tells_once_that_a_store_is_lost_and_once_that_it_is_back(
    master: StoreMaster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.store.master")

    def told() -> list[str]:
        return [record.message.partition(":")[0] for record in caplog.records]

    for _ in range(FAILURES - 1):
        master.failed(Unanswered("it hangs"), 0.0)
    master.answered()
    assert told() == [], "a store that was not given up"
    for _ in range(2 * FAILURES):
        master.failed(Unanswered("it hangs"), 0.0)
    master.answered()
    master.answered()
    assert told() == ["The store cannot be asked", "The store answers again"]
